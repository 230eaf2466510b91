"""Commands that prepare: fetch, calibrate, plan, probe, tune.

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
    show_dry_run,
)
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.experiments.opening import must_stream, open_view, profile_path, resolved


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
    if streamed is None and (why := must_stream(path, dtype, device)):
        console.print(escape(why))
        streamed = True
    view = open_view(path, dtype, device, streamed=bool(streamed))
    settings = replace(settings, window=min(settings.window, view.spec.context_length))
    profile = run(view, load_tokenizer(path), texts, settings)
    profile.save(output)
    console.print(f"Wrote {escape(str(output))} ({profile.hash[:12]}).")


def plan(
    profile: Annotated[
        Path,
        typer.Argument(
            help="Made by `trimmoe calibrate`; left out with --dry-run, and for the embedded "
            "model, which brings one."
        ),
    ],
    cluster: Annotated[Path | None, typer.Argument(help=CLUSTER_HELP, show_default=False)] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the result.")
    ] = None,
    model: ModelOption = "embedded",
    machines: Annotated[
        Path | None, typer.Option(help="Made by `trimmoe probe`; without it, nominal figures.")
    ] = None,
    quantise: Quantise = Precision.NONE,
    preset: Annotated[
        Literal["default", "paper"],
        typer.Option(help="`paper`: Algorithm 1 to the letter, everything starts at home."),
    ] = "default",
    seed_plan: Annotated[
        Literal[
            "best",
            "dispersed",
            "pipeline",
            "compact_pipeline",
            "edgeshard_latency",
            "edgeshard_throughput",
            "activation_aware",
            "load_balanced",
            "slim_caching",
            "single_server",
        ]
        | None,
        typer.Option(
            help="A published placement with nothing of ours added; `best`: the best "
            "of ours that start from `dispersed` and both pipelines."
        ),
    ] = None,
    grow: Annotated[
        bool, typer.Option("--grow", help="Add routes and replicas of ours to --seed-plan.")
    ] = False,
    optimise: Annotated[
        bool, typer.Option("--optimise", help="Search from every seed for the least value.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="How long to search; default: 60.")
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="End the search after this many steps, so that every run gives the same plan.",
        ),
    ] = None,
    objective: Annotated[
        Literal["exact", "guessed", "trimmed"] | None,
        typer.Option(
            help="Least time per token where servers guess ahead (default, and what `serve` plans "
            "for), of exact execution, or within the budget."
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Flip rate of `--objective trimmed`; default: 0.02."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the search; default: 0.")] = None,
    stand_ins: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Memory on each server for copies in few bits of other experts, to guess with, "
            "as a share of what all experts take; default: 0.12.",
        ),
    ] = None,
    survive: Annotated[
        int,
        typer.Option(min=0, help="This many servers may fail, and every expert still has a host."),
    ] = 0,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Show hosts and routes, why, what more memory saves and what a lost server costs.",
        ),
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Write a heat map as PNG.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only say what fits where and what to expect, based on --config."
        ),
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="A model's config.json, for --dry-run CLUSTER.")
    ] = None,
) -> None:
    """Place the experts and choose the routes (Algorithm 1, lines 9-14)."""
    if dry_run or config is not None:
        show_dry_run(config if dry_run else None, profile, cluster, quantise)
        return
    if output is None:
        raise UserError("Say where to write the plan with --output; see `trimmoe plan --help`.")
    if cluster is None:
        profile, cluster = _shipped_for(model), profile
    import torch

    from trimmoe.core.artifact import file_hash
    from trimmoe.core.cluster_file import load_cluster
    from trimmoe.core.machines import load_machines
    from trimmoe.core.profile import load_profile
    from trimmoe.core.sample_clusters import cluster_path
    from trimmoe.experiments.explain import explain_plan, plot_plan
    from trimmoe.experiments.planning import Countdown, optimise_for, search_settings
    from trimmoe.models.load import model_spec
    from trimmoe.placement import make
    from trimmoe.placement.survive import surviving

    require_folder(output)
    wanted = {"objective": objective, "budget": budget, "iterations": iterations, "seed": seed}
    given = {name: value for name, value in wanted.items() if value is not None}
    if not optimise and (given or seconds is not None):
        raise UserError("Searching is asked for with --optimise; add it or leave its options out.")
    if optimise:
        given.setdefault("objective", "guessed")
    if optimise and (preset == "paper" or seed_plan is not None):
        raise UserError("--optimise starts from every seed; leave out --preset and --seed-plan.")
    if grow and seed_plan is None:
        raise UserError("--grow adds to a seed plan; name one with --seed-plan.")
    if survive and (preset == "paper" or (seed_plan not in (None, "best") and not grow)):
        raise UserError("--survive adds hosts of ours; leave out --preset, or add --grow.")
    cluster = cluster_path(cluster)
    calibrated = load_profile(profile)
    # What is measured, and what is quantised, runs in float32.
    single = machines is not None or quantise is not Precision.NONE
    dtype = torch.float32 if single else None
    spec = model_spec(resolved(model), dtype=dtype, hashed=True, quantise=quantise)
    known = load_cluster(cluster)
    if machines is not None:
        known = load_machines(machines).applied(known, spec, quantise)
    settings = make.paper() if preset == "paper" else make.default()
    if stand_ins is not None:
        settings = replace(settings, stand_in_share=stand_ins)
    if seed_plan is not None and (grow or preset == "paper" or seed_plan == "best"):
        settings = replace(settings, seed_plan=seed_plan)
    elif seed_plan is not None:
        settings = make.as_published(seed_plan)
    inputs, hashed = (calibrated, spec, known), file_hash(cluster)
    if optimise:
        search = search_settings(given, seconds=seconds)
        made = optimise_for(seconds, *inputs, search, settings, cluster_hash=hashed)
    else:
        made = make.make_plan(*inputs, settings, cluster_hash=hashed)
    if survive:
        made = surviving(made, calibrated, spec, settings, survive)
    made.save(output)
    console.print(f"Wrote {escape(str(output))} ({made.hash[:12]}).")
    if picture is not None:
        plot_plan(made, picture)
    if explain:
        with Countdown(20.0, None) as countdown:
            explain_plan(made, calibrated, spec, console, countdown.keep_going)


def _shipped_for(model: str) -> Path:
    """The profile where `plan` is given one argument, a cluster. Raises `UserError`."""
    if model != "embedded":
        raise UserError(
            "Give a profile and a cluster file: only the embedded model brings a profile."
        )
    return profile_path(None, model)


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
