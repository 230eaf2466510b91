"""The command that plans: who holds which experts, and the routes.

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from trimmoe.cli.options import (
    CLUSTER_HELP,
    ModelOption,
    Quantise,
    console,
    require_folder,
    show_dry_run,
)
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.experiments.opening import profile_path, resolved
from trimmoe.placement.seed_names import SeedName

if TYPE_CHECKING:
    from trimmoe.placement.planner import PlanSettings

SeedPlan = Literal["best", SeedName]


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
        SeedPlan | None,
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
    from trimmoe.experiments.explain import explain_plan
    from trimmoe.experiments.planning import Countdown, optimise_for, search_settings
    from trimmoe.models.load import model_spec
    from trimmoe.placement import make
    from trimmoe.placement.survive import surviving

    require_folder(output)
    wanted = {"objective": objective, "budget": budget, "iterations": iterations, "seed": seed}
    given = {name: value for name, value in wanted.items() if value is not None}
    searched = bool(given) or seconds is not None
    _must_go_together(
        optimise=optimise, searched=searched, preset=preset, seed_plan=seed_plan, grow=grow,
        survive=survive,
    )  # fmt: skip
    cluster = cluster_path(cluster)
    calibrated = load_profile(profile)
    # What is measured, and what is quantised, runs in float32.
    single = machines is not None or quantise is not Precision.NONE
    dtype = torch.float32 if single else None
    spec = model_spec(resolved(model), dtype=dtype, hashed=True, quantise=quantise)
    known = load_cluster(cluster)
    if machines is not None:
        known = load_machines(machines).applied(known, spec, quantise)
    settings = _settings(preset, seed_plan, grow=grow, stand_ins=stand_ins)
    inputs, hashed = (calibrated, spec, known), file_hash(cluster)
    if optimise:
        given.setdefault("objective", "guessed")
        search = search_settings(given, seconds=seconds)
        made = optimise_for(seconds, *inputs, search, settings, cluster_hash=hashed)
    else:
        made = make.make_plan(*inputs, settings, cluster_hash=hashed)
    if survive:
        made = surviving(made, calibrated, spec, settings, survive)
    made.save(output)
    console.print(f"Wrote {escape(str(output))} ({made.hash[:12]}).")
    if picture is not None:
        from trimmoe.experiments.plots import plot_plan

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


def _must_go_together(
    *,
    optimise: bool,
    searched: bool,
    preset: str,
    seed_plan: str | None,
    grow: bool,
    survive: int,
) -> None:
    """Raise `UserError` where options contradict one another; `searched`: whether any option of a
    search was given."""
    if not optimise and searched:
        raise UserError("Searching is asked for with --optimise; add it or leave its options out.")
    if optimise and (preset == "paper" or seed_plan is not None):
        raise UserError("--optimise starts from every seed; leave out --preset and --seed-plan.")
    if grow and seed_plan is None:
        raise UserError("--grow adds to a seed plan; name one with --seed-plan.")
    if survive and (preset == "paper" or (seed_plan not in (None, "best") and not grow)):
        raise UserError("--survive adds hosts of ours; leave out --preset, or add --grow.")


def _settings(
    preset: str, seed_plan: SeedPlan | None, *, grow: bool, stand_ins: float | None
) -> PlanSettings:
    """How experts are placed, by these options."""
    from trimmoe.placement import make

    settings = make.paper() if preset == "paper" else make.default()
    if stand_ins is not None:
        settings = replace(settings, stand_in_share=stand_ins)
    if seed_plan is None:
        return settings
    if grow or preset == "paper" or seed_plan == "best":
        return replace(settings, seed_plan=seed_plan)
    return make.as_published(seed_plan)
