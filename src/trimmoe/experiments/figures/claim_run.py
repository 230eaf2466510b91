"""The worlds that the claims are judged on, and the run over all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trimmoe
from trimmoe.core.profile import load_profile
from trimmoe.core.trace import load_trace
from trimmoe.experiments.figures.bench import Bench
from trimmoe.experiments.figures.claim_facts import facts_of
from trimmoe.experiments.figures.claim_list import Facts
from trimmoe.experiments.figures.claim_page import Assumed
from trimmoe.experiments.figures.world import (
    Announce,
    Effort,
    World,
    generated_world,
    made_world,
)
from trimmoe.experiments.random_clusters import paper_cluster
from trimmoe.experiments.simulation import model_of
from trimmoe.simulator.generate import Parameters

IMPORTANCES = ((0.45, 0.65), (0.55, 0.55), (0.65, 0.45))
"""Of the first and the last layer: the generator's own, one that depth does not change, and its
reverse."""
SIZES = {
    "tiny": (1, Effort(seeds=(0,), sequences=4, length=4, load_tokens=20, output_tokens=3,
                       horizon_tokens=4, search_iterations=5, profile_tokens=512)),
    "small": (2, Effort(seeds=(0,), sequences=12, length=8, load_tokens=60, output_tokens=8,
                        horizon_tokens=12, search_iterations=40, profile_tokens=2048)),
    "default": (3, Effort(seeds=(0,), sequences=24, length=12, load_tokens=150, output_tokens=20,
                          horizon_tokens=24, search_iterations=100, profile_tokens=4096)),
}  # fmt: skip
"""Worlds of each kind, and what is run on each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimed:
    """What a run found."""

    worlds: dict[str, list[Facts]]
    assumed: list[Assumed]
    inputs: dict[str, dict[str, str]]
    """Hashes, by world."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A real model's profile and trace."""

    model: str
    profile: Path
    trace: Path


def run_claims(
    geometry: str, recorded: Recorded | None, size: str, *, seed: int, announce: Announce
) -> Claimed:
    """Every claim on as many worlds as the size says: another cluster each, and other tokens where
    these are generated. Raises `UserError`."""
    count, effort = SIZES[size]
    worlds: dict[str, list[Facts]] = {"letter, generated": []}
    if recorded is not None:
        worlds["letter, embedded"] = []
    worlds["pinned"] = []
    inputs: dict[str, dict[str, str]] = {}
    for each in range(seed, seed + count):
        world = generated_world(geometry, paper_cluster(each), effort, seed=each, announce=announce)
        bench = Bench(world=world, effort=effort, seed=each, announce=announce)
        worlds["letter, generated"].append(facts_of(bench, "letter", load=True))
        if recorded is not None:
            inputs[f"generated {each}"] = world.inputs
            world = _real_world(recorded, effort, each, announce)
            bench = Bench(world=world, effort=effort, seed=each, announce=announce)
            worlds["letter, embedded"].append(facts_of(bench, "letter", load=True))
        inputs[f"{world.name} {each}"] = world.inputs
        worlds["pinned"].append(facts_of(bench, "pinned", load=True))
    assumed = [_assumed(geometry, each, effort, seed, announce) for each in IMPORTANCES]
    return Claimed(worlds=worlds, assumed=assumed, inputs=inputs)


def _real_world(recorded: Recorded, effort: Effort, seed: int, announce: Announce) -> World:
    """As much of the real tokens as the effort has."""
    spec = model_of(recorded.model)
    profile, trace = load_profile(recorded.profile), load_trace(recorded.trace)
    profile.require_model(spec.model_hash, spec.name)
    return made_world(
        spec.name, "recorded", spec, profile, trace, paper_cluster(seed), effort, seed=seed,
        announce=announce,
    )  # fmt: skip


def _assumed(
    geometry: str, importance: tuple[float, float], effort: Effort, seed: int, announce: Announce
) -> Assumed:
    """Fig. 7(b) by the letter where importance does that with depth."""
    world = generated_world(
        geometry, paper_cluster(seed), replace(effort, search_iterations=1), seed=seed,
        parameters=Parameters(importance=importance), announce=announce,
    )  # fmt: skip
    bench = Bench(world=world, effort=effort, seed=seed, announce=announce)
    facts = facts_of(bench, "letter", load=False, depth_only=True)
    return Assumed(importance=importance, deeper_skips=facts.get("trimmoe.deeper_skips"))


def claims_json(claimed: Claimed, *, size: str, seed: int, geometry: str) -> dict[str, Any]:
    """All facts, with all that is needed to repeat them."""
    return {
        "trimmoe_version": trimmoe.__version__,
        "configuration": {"size": size, "geometry": geometry},
        "seed": seed,
        "input_hashes": claimed.inputs,
        "worlds": {name: [dict(each) for each in facts] for name, facts in claimed.worlds.items()},
        "assumed": [
            {"importance": each.importance, "deeper_skips": each.deeper_skips}
            for each in claimed.assumed
        ],
    }
