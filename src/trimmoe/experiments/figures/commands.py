"""`trimmoe experiment figure` and `trimmoe experiment all`.

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimmoe.core.errors import UserError

if TYPE_CHECKING:
    from trimmoe.experiments.figures.base import Content
    from trimmoe.experiments.figures.bench import Bench
    from trimmoe.experiments.figures.world import Effort, World

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
    seed: int = 0,
) -> None:
    """Figures of the paper's evaluation: a JSON and a picture each."""
    from trimmoe.experiments.figures.suite import find_figures

    find_figures(numbers)
    wanted = _Wanted(
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
    _run(wanted, numbers, output)


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
    seed: int = 0,
) -> None:
    """Every figure of the paper's evaluation, and one report over them (Markdown and HTML)."""
    from rich.console import Console

    from trimmoe.experiments.report import write_report

    wanted = _Wanted(
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
    contents = _run(wanted, (), output)
    for path in write_report(contents, output):
        Console().print(f"Wrote {path}", markup=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """What the command line asked for, checked."""

    model: str
    profile: Path | None
    trace: Path | None
    plan: Path | None
    cluster: Path | None
    quick: bool
    measure: bool
    text: list[Path]
    passages: int
    seed: int

    def __post_init__(self) -> None:
        if (self.profile is None) != (self.trace is None):
            raise UserError("Give --profile and --trace together: a trace is of one profile.")
        if self.plan is not None and self.profile is None:
            raise UserError("--plan needs the --profile that it was made from, and a --trace.")
        if self.measure and (self.profile is None or not self.text):
            raise UserError("--measure executes a model: give --model, --profile, --trace, --text.")


def _run(wanted: _Wanted, numbers: Sequence[str], output: Path) -> dict[str, Content]:
    from rich.console import Console
    from rich.progress import Progress

    from trimmoe.experiments.figures.bench import Bench
    from trimmoe.experiments.figures.suite import find_figures, run_figures
    from trimmoe.experiments.figures.world import Effort, generated_world, quick

    effort = quick() if wanted.quick else Effort()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("Figures", total=len(find_figures(numbers)))

        def announce(what: str) -> None:
            progress.update(bar, description=what[:40])

        world = _world(wanted, effort, announce)
        bench = Bench(world=world, effort=effort, seed=wanted.seed, announce=announce)
        if wanted.measure:
            _give_model(bench, wanted)

        def bench_of(geometry: str) -> Bench:
            cluster = world.plan.cluster
            other = generated_world(geometry, cluster, effort, seed=wanted.seed, announce=announce)
            return Bench(world=other, effort=effort, seed=wanted.seed, announce=announce)

        return run_figures(
            bench,
            numbers,
            output,
            bench_of=bench_of,
            done=lambda _: progress.advance(bar),
        )


def _world(wanted: _Wanted, effort: Effort, announce: Callable[[str], None]) -> World:
    from trimmoe.core.cluster_file import load_cluster
    from trimmoe.core.plan import load_plan
    from trimmoe.core.profile import load_profile
    from trimmoe.core.trace import load_trace
    from trimmoe.experiments.figures.world import generated_world, made_world
    from trimmoe.experiments.methods import require_fitting
    from trimmoe.experiments.random_clusters import paper_cluster
    from trimmoe.experiments.simulation import model_of

    plan = None if wanted.plan is None else load_plan(wanted.plan)
    if wanted.cluster is not None:
        cluster = load_cluster(wanted.cluster)
    else:
        cluster = paper_cluster(wanted.seed) if plan is None else plan.cluster
    if wanted.profile is None or wanted.trace is None:
        return generated_world(wanted.model, cluster, effort, seed=wanted.seed, announce=announce)
    profile, trace = load_profile(wanted.profile), load_trace(wanted.trace)
    spec = model_of(wanted.model)
    profile.require_model(spec.model_hash, spec.name)
    if plan is not None:
        require_fitting(profile, plan, spec)
    return made_world(
        spec.name,
        "generated" if "generator" in trace.header.settings else "recorded",
        spec,
        profile,
        trace,
        cluster,
        effort,
        seed=wanted.seed,
        plan=plan,
        announce=announce,
    )


def _give_model(bench: Bench, wanted: _Wanted) -> None:
    """Let the bench execute contenders on the real model."""
    from dataclasses import replace

    from trimmoe.calibrate.text import read_texts
    from trimmoe.experiments.figures.executed import PassageSettings, executor
    from trimmoe.experiments.opening import open_view, resolved
    from trimmoe.models.load import load_tokenizer

    path = resolved(wanted.model)
    view = open_view(path, "auto", "cpu")
    texts = "\n\n".join(read_texts(wanted.text))
    ids = load_tokenizer(path)(texts, verbose=False)["input_ids"]
    settings = PassageSettings(count=2 if wanted.quick else wanted.passages)
    if wanted.quick:
        settings = replace(settings, context=8, steps=4)
    bench.execute = executor(view, bench.world.profile, ids, settings, seed=wanted.seed)
