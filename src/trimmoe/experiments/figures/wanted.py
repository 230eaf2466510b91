"""What the command line asked figures of: checked, and made into a world and a bench."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from trimmoe.core.cluster_file import load_cluster
from trimmoe.core.errors import UserError
from trimmoe.core.plan import load_plan
from trimmoe.core.profile import load_profile
from trimmoe.core.trace import load_trace
from trimmoe.experiments.figures.bench import Bench, Execute
from trimmoe.experiments.figures.models import MODELS
from trimmoe.experiments.figures.world import (
    Announce,
    Effort,
    World,
    generated_world,
    made_world,
    quick,
)
from trimmoe.experiments.method_engines import require_fitting
from trimmoe.experiments.random_clusters import paper_cluster
from trimmoe.experiments.simulation import model_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
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

    @property
    def effort(self) -> Effort:
        return quick() if self.quick else Effort()


def make_world(wanted: Wanted, announce: Announce) -> World:
    """The world asked for; plans are made where none is given. Raises `UserError`."""
    effort = wanted.effort
    plan = None if wanted.plan is None else load_plan(wanted.plan)
    if wanted.cluster is not None:
        cluster = load_cluster(wanted.cluster)
    else:
        cluster = paper_cluster(wanted.seed) if plan is None else plan.cluster
    if wanted.profile is None or wanted.trace is None:
        return generated_world(wanted.model, cluster, effort, seed=wanted.seed, announce=announce)
    profile, trace = load_profile(wanted.profile), load_trace(wanted.trace)
    spec = model_of(wanted.model)
    profile.require_model(spec)
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


def make_bench(wanted: Wanted, world: World, announce: Announce) -> Bench:
    """Its bench, with the model opened where figures are to execute it. Raises `UserError`."""
    return Bench(
        world=world,
        effort=wanted.effort,
        seed=wanted.seed,
        announce=announce,
        geometries=MODELS,
        execute=_executor(wanted, world) if wanted.measure else None,
    )


def _executor(wanted: Wanted, world: World) -> Execute:
    """What runs contenders on the real model."""
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
    return executor(view, world.profile, ids, settings, seed=wanted.seed)
