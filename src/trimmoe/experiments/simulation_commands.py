"""`trimmoe record` and `trimmoe simulate`.

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision

console = Console()

ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="Made by `trimmoe calibrate`; default: what comes with the embedded model.",
    ),
]


def record(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, a hub id, or `embedded`.")],
    text: Annotated[
        list[Path],
        typer.Option("--text", help="UTF-8 text or .jsonl[.gz] with a `text` field; repeatable."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the trace.")],
    profile: ProfileOption = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Also what its servers would guess by themselves, for `speculative`."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to record.")] = 4096,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each sequence.")] = 128,
    answers: Annotated[
        int,
        typer.Option(
            min=0, help="Of these, the last ones that are the model's answer to those before."
        ),
    ] = 0,
    seed: int = 0,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option()] = "auto",
    quantise: Annotated[Precision, typer.Option(help="As servers hold weights.")] = Precision.NONE,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
) -> None:
    """Record what tokens of a text do at every layer, to replay and simulate."""
    from trimmoe.calibrate.text import read_texts
    from trimmoe.calibrate.trace import TraceSettings
    from trimmoe.core.plan import load_plan
    from trimmoe.core.profile import load_profile
    from trimmoe.experiments.method_engines import require_fitting
    from trimmoe.experiments.opening import open_view, profile_path, resolved
    from trimmoe.experiments.recording import record_with_bar
    from trimmoe.models.draft_head_file import open_draft_head
    from trimmoe.models.load import load_tokenizer

    _require_folder(output)
    calibrated = load_profile(profile_path(profile, model, dtype))
    texts = read_texts(text)
    path = resolved(model)
    view = open_view(path, dtype, device, quantise=quantise)
    if answers:
        open_draft_head(view, Path(path))
    settings = TraceSettings(
        tokens=tokens, length=length, answers=answers, seed=seed, quantise=quantise
    )
    placed = None if plan is None else load_plan(plan)
    if placed is not None:
        require_fitting(calibrated, placed, view.spec)
    trace = record_with_bar(view, load_tokenizer(path), texts, calibrated, settings, placed)
    trace.save(output)
    console.print(
        f"Wrote {escape(str(output))} ({trace.hash[:12]}): {trace.sequence_count} sequences of "
        f"{trace.length} tokens."
    )


def simulate(
    plan: Annotated[Path, typer.Argument(help="Made by `trimmoe plan`.")],
    trace: Annotated[Path, typer.Option("--trace", help="Made by `trimmoe record`.")],
    profile: ProfileOption = None,
    model: Annotated[
        str,
        typer.Option(
            help="A checkpoint folder, a hub id, `embedded`, or a geometry such as mixtral-8x7b."
        ),
    ] = "embedded",
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; default: the four that compare fairly.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second (open loop); default: 1.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests running at all times (closed loop) instead.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Squared variation of the gaps; 1 is Poisson, above it bursts.")
    ] = 1.0,
    prompt_tokens: Annotated[float, typer.Option(help="Mean length of prompts.")] = 64.0,
    output_tokens: Annotated[float, typer.Option(help="Mean length of answers.")] = 64.0,
    fixed_lengths: Annotated[
        bool, typer.Option("--fixed-lengths", help="All alike; otherwise geometric.")
    ] = False,
    prefill: Annotated[
        Literal["chunked", "excluded"],
        typer.Option(help="`chunked`: prompts run exactly; `excluded`: they cost nothing."),
    ] = "chunked",
    accounting: Annotated[
        Literal["pinned", "home", "migrate"] | None,
        typer.Option(help="Where tokens live; default: the method's. `migrate` is not physical."),
    ] = None,
    budget: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.02,
    confidence: Annotated[float, typer.Option(min=0.0)] = 0.9,
    warm_up: Annotated[float, typer.Option(help="Virtual seconds left out.")] = 5.0,
    duration: Annotated[float, typer.Option(help="Virtual seconds measured.")] = 30.0,
    seeds: Annotated[int, typer.Option(min=1, help="Independent runs.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the first run.")] = 0,
    batch_share: Annotated[
        float | None,
        typer.Option(
            help="Share of a token's time that a batch needs only once; default: as measured, or "
            "0.9."
        ),
    ] = None,
    waiting_feedback: Annotated[
        bool, typer.Option("--waiting-feedback", help="Policies learn measured waiting times.")
    ] = False,
    outage_every: Annotated[
        float | None,
        typer.Option(help="A server stands still this often, in virtual seconds; default: none."),
    ] = None,
    outage: Annotated[float, typer.Option(help="For so long.")] = 10.0,
    sla_ms: Annotated[float, typer.Option(help="Time per token that is good service.")] = 200.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures.")] = None,
) -> None:
    """Play methods under load on a virtual clock: latency, throughput, queues, traffic."""
    from trimmoe.core.plan import load_plan
    from trimmoe.core.profile import load_profile
    from trimmoe.core.trace import load_trace
    from trimmoe.cost.model import Accounting
    from trimmoe.experiments.compare import write_json
    from trimmoe.experiments.method_engines import possible_methods, require_fitting
    from trimmoe.experiments.methods import find_method
    from trimmoe.experiments.opening import profile_path
    from trimmoe.experiments.simulation import (
        model_of,
        simulate_with_bar,
        simulation_json,
        simulation_table,
    )
    from trimmoe.simulator.settings import Load, Prefill, SimulationSettings

    if json_path is not None:
        _require_folder(json_path)
    for name in method or ():
        find_method(name)
    settings = SimulationSettings(
        load=Load(
            rate_per_s=1.0 if rate is None and concurrency is None else rate,
            concurrency=concurrency,
            burstiness=burstiness,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            fixed_lengths=fixed_lengths,
            prefill=Prefill(prefill),
        ),
        budget=budget,
        confidence=confidence,
        warm_up_s=warm_up,
        duration_s=duration,
        seeds=tuple(range(seed, seed + seeds)),
        batch_share=batch_share,
        waiting_feedback=waiting_feedback,
        sla_s=sla_ms / 1e3,
        outage_every_s=outage_every,
        outage_s=outage,
    )
    calibrated = load_profile(profile_path(profile, model))
    placed, recorded = load_plan(plan), load_trace(trace)
    spec = model_of(model)
    require_fitting(calibrated, placed, spec)
    methods = tuple(method) if method else possible_methods(placed, calibrated, spec)
    outcomes = simulate_with_bar(
        placed,
        calibrated,
        spec,
        recorded,
        methods,
        settings,
        accounting=None if accounting is None else Accounting(accounting),
    )
    content = simulation_json(placed, calibrated, recorded, settings, outcomes)
    console.print(simulation_table(content))
    if json_path is not None:
        write_json(json_path, content)


def _require_folder(path: Path) -> None:
    """Refuse before the work what could not be written after it."""
    if not path.parent.is_dir():
        raise UserError(f"The folder {path.parent} does not exist; create it or write elsewhere.")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file to write.")
