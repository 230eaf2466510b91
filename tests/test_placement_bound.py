"""The integer program against brute force, and the search against the program."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from factories import random_cluster, random_model_spec, random_profile
from trimmoe.placement.bound import exact_bound
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.make import Planner, default, make_planner
from trimmoe.placement.optimise import SearchSettings, optimise_plan


def instance(
    seed: int, *, layers: int, experts: int, servers: int, top_k: int = 2, ratio: float = 1.5
) -> Planner:
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng, layers=layers, experts=experts, top_k=top_k)
    # Slow experts, so that it matters which of them share a server.
    model = replace(model, expert_flops=model.expert_flops * 30)
    cluster = random_cluster(rng, servers=servers, memory_ratio=ratio, symmetric=seed % 2 == 0)
    profile = random_profile(rng, model, patterns=4)
    return make_planner(profile, model, cluster, default())


def brute_force_s(planner: Planner) -> float:
    """The least expected delay over all placements, each with its best routes."""
    shape = (planner.cost.server_count, *planner.model.expert_bytes.shape)
    best = np.inf
    for bits in product((False, True), repeat=int(np.prod(shape))):
        hosts = np.array(bits).reshape(shape)
        fits = (used_bytes(hosts, planner.model) <= planner.capacity).all()
        if fits and hosts.any(axis=0).all():
            best = min(best, planner.placement(hosts, None).expected_s)
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_program_finds_the_optimum_of_brute_force(seed: int) -> None:
    planner = instance(seed, layers=2, experts=2, servers=2, ratio=1.6)
    bound = exact_bound(planner, time_limit_s=60.0)
    assert bound is not None
    assert bound.optimal
    assert bound.lower_s == pytest.approx(brute_force_s(planner), rel=1e-5)
    assert bound.hosts is not None
    there = planner.placement(bound.hosts, None).expected_s
    assert there == pytest.approx(bound.lower_s, rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_search_comes_near_the_optimum(seed: int) -> None:
    planner = instance(seed, layers=2, experts=3, servers=3)
    bound = exact_bound(planner, time_limit_s=60.0)
    assert bound is not None
    plan = optimise_plan(
        planner.profile,
        planner.model,
        planner.cluster,
        SearchSettings(iterations=4000),
        cluster_hash="c",
    )
    value_s = plan.header.settings["value_s"]
    assert bound.lower_s <= value_s * (1 + 1e-5)
    assert bound.gap(value_s) <= 0.05 or not bound.optimal


def test_large_instances_are_not_tried() -> None:
    assert exact_bound(instance(0, layers=30, experts=8, servers=10), time_limit_s=1.0) is None
