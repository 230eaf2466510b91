"""Commands that prepare: fetch, calibrate, probe, tune; `plan` is in `planning.py`.

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from trimmoe.cli.options import (
    CLUSTER_HELP,
    Budget,
    Confidence,
    Device,
    Dtype,
    Model,
    ModelOption,
    Output,
    PlanOption,
    ProfileOption,
    Quantise,
    ScoringOption,
    Texts,
    console,
    require_folder,
    say,
)
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.experiments.opening import (
    open_to_calibrate,
    open_view,
    profile_path,
    resolved,
)


def fetch() -> None:
    """Fetch and materialise the embedded model; prints its folder."""
    print(resolved("embedded"))


def calibrate(
    model: Model,
    output: Output,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            help="UTF-8 text or .jsonl[.gz] with a `text` field; repeatable; default: the prose "
            "of `trimmoe sample-text`.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Calibration tokens.")] = 20_000,
    budget: Budget = 0.02,
    confidence: Annotated[float, typer.Option(help="Exit confidence p_J.")] = 0.9,
    importance: Annotated[
        Literal["softmax_mass", "gates"],
        typer.Option(help="Importance (4); `gates` is the paper's letter."),
    ] = "softmax_mass",
    exit_heads: Annotated[
        Literal["direction", "state"],
        typer.Option(help="What exit heads (7) read; `state` is the paper's letter."),
    ] = "direction",
    exit_risk: Annotated[
        float,
        typer.Option(
            help="Share of all tokens that exits may flip: exit layers and what follows from them "
            "are measured at p_J raised to where that holds; 1: at p_J itself, the paper's letter."
        ),
    ] = 0.01,
    seed: int = 0,
    streamed: Annotated[
        bool | None,
        typer.Option(
            "--streamed/--whole",
            help="Read each layer's experts from disk when they are needed, or hold all; default: "
            "whether the weights fit. The profile is the same but for rounding.",
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Measure a model on text: what its layers and experts are worth (Algorithm 1, lines 1-8)."""
    from trimmoe.calibrate.run import calibrate as run
    from trimmoe.calibrate.settings import CalibrationSettings
    from trimmoe.calibrate.text import read_texts
    from trimmoe.experiments.sample_text import sample_text as prose
    from trimmoe.models.load import load_tokenizer

    require_folder(output)
    settings = CalibrationSettings(
        tokens=tokens,
        budget=budget,
        confidence=confidence,
        importance=importance,
        exit_heads=exit_heads,
        exit_risk=exit_risk,
        seed=seed,
    )
    texts = read_texts(text) if text else [prose("calibration")]
    path = resolved(model)
    view, settings = open_to_calibrate(path, dtype, device, settings, say, streamed=streamed)
    settings = replace(settings, window=min(settings.window, view.spec.context_length))
    profile = run(view, load_tokenizer(path), texts, settings)
    profile.save(output)
    console.print(f"Wrote {escape(str(output))} ({profile.hash[:12]}).")


def probe(
    cluster: Annotated[Path, typer.Argument(help=CLUSTER_HELP)],
    output: Output,
    model: ModelOption = "embedded",
    profile: Annotated[
        Path | None, typer.Option(help="Made by `trimmoe calibrate`; without it, made and kept.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="What servers hold meanwhile; default: made now and kept.")
    ] = None,
    quantise: Quantise = Precision.NONE,
    threads: Annotated[
        int | None, typer.Option(help="Threads of each server; default: its share of the cores.")
    ] = None,
    port_base: Annotated[int, typer.Option(help="HTTP port of the first server.")] = 8000,
    emulate_links: Annotated[
        bool, typer.Option("--emulate-links/--no-emulate-links", help="As the cluster file says.")
    ] = True,
    emulate_machines: Annotated[
        bool,
        typer.Option("--emulate-machines/--no-emulate-machines", help="Likewise; default: no."),
    ] = False,
) -> None:
    """Measure what the servers of a cluster and their links can do; for `plan` and `serve`."""
    from trimmoe.runtime.launch.fork_server import begin_early

    begin_early()
    from trimmoe.experiments import probing
    from trimmoe.runtime.launch.config import serve_config

    require_folder(output)
    given = {
        "cluster": cluster, "model": model, "profile": profile, "plan": plan,
        "quantise": quantise, "threads": threads, "port_base": port_base,
        "emulate_links": emulate_links, "emulate_machines": emulate_machines,
    }  # fmt: skip
    found = probing.probe(serve_config(None, given), say)
    if found is None:
        raise UserError("Nothing was measured, since the servers were stopped; try again.")
    found.save(output)
    for table in probing.machines_tables(found):
        console.print(table)
    say(probing.overhead_line(found))
    console.print(f"Wrote {escape(str(output))} ({found.hash[:12]}).")


def tune(
    text: Texts,
    plan: PlanOption,
    output: Output,
    profile: ProfileOption = None,
    model: ModelOption = "embedded",
    budget: Annotated[
        list[float] | None,
        typer.Option(min=0.0, max=1.0, help="Repeatable."),
    ] = None,
    confidence: Confidence = 0.9,
    passages: Annotated[int, typer.Option(min=1)] = 32,
    context: Annotated[int, typer.Option(min=1)] = 64,
    steps: Annotated[int, typer.Option(min=1)] = 32,
    seed: int = 0,
    scoring: ScoringOption = "layers",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    quantise: Quantise = Precision.NONE,
) -> None:
    """Measure how much more approximations flip together than alone; notes it in the plan."""
    from trimmoe.calibrate.text import read_texts
    from trimmoe.core.plan import load_plan
    from trimmoe.core.profile import load_profile
    from trimmoe.evaluate.scoring import Scoring
    from trimmoe.experiments.method_engines import require_fitting
    from trimmoe.experiments.tune import tune as run
    from trimmoe.models.load import load_tokenizer

    require_folder(output)
    calibrated = load_profile(profile_path(profile, model, dtype))
    placed, texts = load_plan(plan), read_texts(text)
    path = resolved(model)
    view = open_view(path, dtype, device, quantise=quantise)
    require_fitting(calibrated, placed, view.spec)
    tuned, scores = run(
        view,
        calibrated,
        placed,
        load_tokenizer(path)("\n\n".join(texts), verbose=False)["input_ids"],
        budgets=budget or (0.01, 0.02, 0.03),
        confidence=confidence,
        passages=passages,
        context=context,
        steps=steps,
        seed=seed,
        scoring=Scoring(scoring),
    )
    tuned.save(output)
    for each, score in scores.items():
        console.print(
            f"budget {each:g}: charged {score.ledger.loss / score.tokens:.2%}, flipped "
            f"{score.flips / score.tokens:.2%} of {score.tokens} tokens, gamma "
            f"{tuned.inflation(each):.2f}"
        )
    console.print(f"Wrote {escape(str(output))} ({tuned.hash[:12]}).")
