"""`trimmoe experiment figure` and `trimmoe experiment all`.

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from trimmoe.experiments.figures.base import Content
    from trimmoe.experiments.figures.wanted import Wanted

FolderOption = Annotated[Path, typer.Option("--output", "-o", help="A folder; made if need be.")]
ModelOption = Annotated[
    str,
    typer.Option(
        help="A geometry such as mixtral-8x7b, with generated tokens; or, with --profile and "
        "--trace, a checkpoint folder, a hub id or `embedded`."
    ),
]
ProfileOption = Annotated[Path | None, typer.Option(help="Made by `trimmoe calibrate`.")]
TraceOption = Annotated[Path | None, typer.Option(help="Made by `trimmoe record`.")]
PlanOption = Annotated[Path | None, typer.Option(help="Ours, made by `trimmoe plan`.")]
ClusterOption = Annotated[
    Path | None, typer.Option(help="Default: a random one in the ranges of the paper's testbed.")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Seconds; the figures are noise.")]
MeasureOption = Annotated[
    bool, typer.Option("--measure", help="Execute the model on --text to measure quality.")
]
TextOption = Annotated[list[Path] | None, typer.Option(help="Held out; for --measure.")]
PassagesOption = Annotated[int, typer.Option(min=1, help="Passages executed with --measure.")]
ProcessesOption = Annotated[
    int | None,
    typer.Option(min=1, help="Figures at a time, 2 GB of memory each. Default: one per core."),
]


def figure(
    numbers: Annotated[
        list[str],
        typer.Argument(help="4 to 11; E: equal-quality curves; S: generator's sensitivity."),
    ],
    output: FolderOption,
    model: ModelOption = "mixtral-8x7b",
    profile: ProfileOption = None,
    trace: TraceOption = None,
    plan: PlanOption = None,
    cluster: ClusterOption = None,
    quick: QuickOption = False,
    measure: MeasureOption = False,
    text: TextOption = None,
    passages: PassagesOption = 16,
    processes: ProcessesOption = None,
    seed: int = 0,
) -> None:
    """Figures of the paper's evaluation: a JSON and a picture each."""
    from trimmoe.experiments.figures.suite import find_figures
    from trimmoe.experiments.figures.wanted import Wanted

    find_figures(numbers)
    wanted = Wanted(
        model=model,
        profile=profile,
        trace=trace,
        plan=plan,
        cluster=cluster,
        quick=quick,
        measure=measure,
        text=text or [],
        passages=passages,
        seed=seed,
    )
    _run(wanted, numbers, output, processes)


def all_figures(
    output: FolderOption,
    model: ModelOption = "mixtral-8x7b",
    profile: ProfileOption = None,
    trace: TraceOption = None,
    plan: PlanOption = None,
    cluster: ClusterOption = None,
    quick: QuickOption = False,
    measure: MeasureOption = False,
    text: TextOption = None,
    passages: PassagesOption = 16,
    processes: ProcessesOption = None,
    seed: int = 0,
) -> None:
    """Every figure of the paper's evaluation, and one report over them (Markdown and HTML)."""
    from rich.console import Console

    from trimmoe.experiments.figures.report import write_report
    from trimmoe.experiments.figures.wanted import Wanted

    wanted = Wanted(
        model=model,
        profile=profile,
        trace=trace,
        plan=plan,
        cluster=cluster,
        quick=quick,
        measure=measure,
        text=text or [],
        passages=passages,
        seed=seed,
    )
    contents = _run(wanted, (), output, processes)
    for path in write_report(contents, output):
        Console().print(f"Wrote {path}", markup=False)


def claims(
    output: Annotated[Path, typer.Option("--output", "-o", help="A Markdown file.")],
    geometry: Annotated[str, typer.Option(help="Of the generated tokens.")] = "mixtral-8x7b",
    model: Annotated[str, typer.Option(help="Of --profile and --trace.")] = "embedded",
    profile: ProfileOption = None,
    trace: TraceOption = None,
    letter_profile: Annotated[
        Path | None,
        typer.Option(
            help="For the column by the letter, if not --profile: made with "
            "`--exit-heads state --exit-risk 1`."
        ),
    ] = None,
    letter_trace: Annotated[Path | None, typer.Option(help="Of --letter-profile.")] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Held out; the model is executed on it.")
    ] = None,
    size: Annotated[
        Literal["tiny", "small", "default"],
        typer.Option(help="Of the run; tiny only shows that it works."),
    ] = "default",
    worlds: Annotated[
        int | None,
        typer.Option(min=1, help="Clusters to judge on; by default as many as the size has."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the facts.")] = None,
    seed: int = 0,
) -> None:
    """Every number of the paper's evaluation beside ours: which come out, and why not."""
    from rich.console import Console

    from trimmoe.core.artifact import written_whole
    from trimmoe.core.errors import UserError
    from trimmoe.experiments.compare import write_json
    from trimmoe.experiments.figures.claim_report import claims_json, claims_report
    from trimmoe.experiments.figures.claim_run import Asked, Recorded, run_claims

    if (profile is None) != (trace is None):
        raise UserError("Give --profile and --trace together: a trace is of one profile.")
    if (letter_profile is None) != (letter_trace is None):
        raise UserError("Give --letter-profile and --letter-trace together.")
    if letter_profile is not None and profile is None:
        raise UserError("--letter-profile stands beside --profile: give that and --trace too.")
    if text and profile is None:
        raise UserError("--text is for executing a model: give --profile and --trace too.")
    recorded = None
    if profile is not None and trace is not None:
        recorded = Recorded(
            model=model,
            profile=profile,
            trace=trace,
            text=tuple(text or ()),
            letter_profile=letter_profile,
            letter_trace=letter_trace,
        )
    console, asked = Console(stderr=True), Asked(geometry, recorded, size, seed, worlds)
    claimed = run_claims(asked, announce=lambda what: console.print(what, markup=False))
    page = claims_report(claimed, asked)
    with written_whole(output) as temporary:
        temporary.write_text(page, encoding="utf-8")
    if json_file is not None:
        write_json(json_file, claims_json(claimed, asked))


def _run(
    wanted: Wanted, numbers: Sequence[str], output: Path, processes: int | None
) -> dict[str, Content]:
    from functools import partial

    from trimmoe.core.cores import available_cores
    from trimmoe.experiments.figures.side_by_side import run_side_by_side
    from trimmoe.experiments.figures.suite import find_figures
    from trimmoe.experiments.figures.wanted import make_bench, make_world
    from trimmoe.progress import bars_around

    with bars_around() as progress:
        bar = progress.add_task("Figures", total=len(find_figures(numbers)))
        # What is going on has no end that is known; it shows that something is.
        step = progress.add_task("", total=None)

        def announce(what: str) -> None:
            progress.reset(step, total=None, description=what[:40])

        return run_side_by_side(
            partial(make_bench, wanted, make_world(wanted, announce)),
            numbers,
            output,
            processes=processes or available_cores(),
            announce=announce,
            done=lambda _: progress.advance(bar),
        )
