"""The optimised plan: never worse than any seed, valid, reproducible, and off far servers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import (
    clusters,
    models_with_profiles,
    random_cluster,
    random_model_spec,
    random_profile,
)
from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, ModelSpec
from trimmoe.cost.expected import best_hosts, expected_layer_delay_s
from trimmoe.cost.model import cost_model
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.guessed import GuessedObjective
from trimmoe.placement.intervals import groupings
from trimmoe.placement.landscape import ExactObjective, Landscape, Objective
from trimmoe.placement.make import default, make_plan, make_planner
from trimmoe.placement.mutate import Mutator
from trimmoe.placement.optimise import SearchSettings, optimise_plan
from trimmoe.placement.routes import best_routes, route_delay_s
from trimmoe.placement.search import Climber
from trimmoe.placement.seeds import SEEDS, seed_placement
from trimmoe.placement.trimmed import EachUserObjective, TrimmedObjective

BRIEF = SearchSettings(iterations=300, trimmed_iterations=5)


def small(seed: int = 0, *, servers: int = 4) -> tuple[Profile, ModelSpec, ClusterSpec]:
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng, layers=5, experts=5, top_k=2)
    return random_profile(rng, model), model, random_cluster(rng, servers=servers)


def assert_valid(plan: Plan, model: ModelSpec) -> None:
    assert (used_bytes(plan.hosts, model) <= plan.expert_capacity_bytes).all()
    assert plan.hosts.any(axis=0).all()
    assert plan.routes.shape == (plan.cluster.server_count, model.layer_count)
    assert 0 <= plan.routes.min() <= plan.routes.max() < plan.cluster.server_count


@settings(max_examples=25)
@given(
    known=models_with_profiles(max_experts=6),
    cluster=clusters(max_servers=4),
    objective=st.sampled_from(["exact", "guessed", "trimmed"]),
    seed=st.integers(0, 9),
)
def test_never_worse_than_any_seed(
    known: tuple[ModelSpec, Profile], cluster: ClusterSpec, objective: str, seed: int
) -> None:
    model, profile = known
    wanted = replace(BRIEF, objective=objective, seed=seed)
    try:
        plan = optimise_plan(profile, model, cluster, wanted, cluster_hash="c")
    except UserError:
        return
    assert_valid(plan, model)
    planner = make_planner(profile, model, cluster, default())
    measure: Objective = ExactObjective(
        cost=planner.cost, profile=profile, access_share=cluster.access_share
    )
    if objective == "guessed":
        measure = GuessedObjective(
            cost=planner.cost,
            profile=profile,
            access_share=cluster.access_share,
            copies=planner.stand_in_bits,
        )
    if objective == "trimmed":
        whole = TrimmedObjective(
            cost=planner.cost,
            profile=profile.echoing(),
            access_share=cluster.access_share,
            budget=wanted.budget,
            copies=planner.stand_in_bits,
        )
        measure = EachUserObjective(whole=whole)
    value_s = measure.value_s(plan.hosts, plan.routes)
    assert value_s == pytest.approx(plan.header.settings["value_s"])
    for name in SEEDS:
        seed_found = seed_placement(name, planner)
        recorded = plan.header.settings["seeds"][name]
        if seed_found is None:
            assert recorded is None
            continue
        seed_s = measure.value_s(seed_found.hosts, seed_found.routes)
        assert recorded["seed_s"] == pytest.approx(seed_s)
        assert value_s <= seed_s * (1 + 1e-9), name


def test_never_worse_than_the_plan_without_search() -> None:
    for seed in range(4):
        profile, model, cluster = small(seed)
        plain = make_plan(profile, model, cluster, cluster_hash="c")
        plan = optimise_plan(profile, model, cluster, BRIEF, cluster_hash="c")
        assert plan.header.settings["value_s"] <= plain.header.settings["expected_s"] * (1 + 1e-9)


def test_never_worse_than_the_best_single_server() -> None:
    profile, model, cluster = small()
    cluster = replace(cluster, memory_ratio=None, memory_bytes=np.array([10**13, 10**13, 0, 0]))
    for objective in ("exact", "guessed", "trimmed"):
        wanted = replace(BRIEF, objective=objective)
        plan = optimise_plan(profile, model, cluster, wanted, cluster_hash="c")
        seeds = plan.header.settings["seeds"]
        assert seeds["single_server"] is not None
        assert plan.header.settings["value_s"] <= seeds["single_server"]["seed_s"] * (1 + 1e-9)


@pytest.mark.parametrize("objective", ["exact", "trimmed"])
def test_the_same_seed_gives_the_same_plan(objective: str) -> None:
    profile, model, cluster = small(3)
    wanted = replace(BRIEF, objective=objective, seed=5)
    first, second = (
        optimise_plan(profile, model, cluster, wanted, cluster_hash="c") for _ in range(2)
    )
    assert first.hash == second.hash
    assert first.header.settings["iterations"] == BRIEF.iterations
    assert first.header.seed == 5


def test_a_deadline_ends_it_with_a_valid_plan() -> None:
    profile, model, cluster = small()
    left = iter(range(40))
    plan = optimise_plan(
        profile, model, cluster, cluster_hash="c", keep_going=lambda share: next(left, 99) < 30
    )
    assert plan.header.settings["iterations"] < 40
    assert_valid(plan, model)
    none = optimise_plan(profile, model, cluster, cluster_hash="c", keep_going=lambda share: False)
    assert none.header.settings["iterations"] == 0
    assert none.header.settings["value_s"] <= min(
        seed["seed_s"] for seed in none.header.settings["seeds"].values() if seed
    )


def test_a_terribly_far_server_is_left_out() -> None:
    profile, model, cluster = small()
    delay_s = np.full((4, 4), 1e-3)
    delay_s[3, :] = delay_s[:, 3] = 10.0
    np.fill_diagonal(delay_s, 0.0)
    share = np.array([0.4, 0.3, 0.3, 0.0])
    memory = np.array([20, 20, 20, 60]) * 10**9
    cluster = replace(
        cluster, delay_s=delay_s, access_share=share, memory_bytes=memory, memory_ratio=2.2
    )
    for objective in ("exact", "guessed", "trimmed"):
        wanted = replace(BRIEF, objective=objective)
        plan = optimise_plan(profile, model, cluster, wanted, cluster_hash="c")
        assert plan.header.settings["value_s"] < 1.0
        users = np.flatnonzero(share > 0)
        assert (plan.routes[users] != 3).all()
        cost = cost_model(model, cluster)
        for layer in range(model.layer_count):
            for access in users:
                ends = plan.routes[access, layer], plan.routes[access, min(layer + 1, 4)]
                assert (best_hosts(cost, plan.hosts, layer, *ends) != 3).all()


def test_search_finds_what_greedy_growth_does_not() -> None:
    better = 0
    for seed in range(6):
        profile, model, cluster = small(seed, servers=5)
        plan = optimise_plan(
            profile, model, cluster, SearchSettings(iterations=6000), cluster_hash="c"
        )
        grown = [s["plan_s"] for s in plan.header.settings["seeds"].values() if s]
        better += plan.header.settings["value_s"] < min(grown) * 0.999
    assert better >= 3


@given(known=models_with_profiles(), cluster=clusters(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_neighbours_keep_memory_and_coverage(
    known: tuple[ModelSpec, Profile], cluster: ClusterSpec, seed: int
) -> None:
    model, profile = known
    try:
        planner = make_planner(profile, model, cluster, default())
        start = seed_placement("dispersed", planner)
    except UserError:
        return
    assert start is not None
    rng = np.random.default_rng(seed)
    mutator = Mutator(model=model, capacity=planner.capacity)
    hosts = start.hosts
    for _ in range(20):
        before = hosts.copy()
        neighbour = mutator.neighbour(hosts, rng)
        np.testing.assert_array_equal(hosts, before)
        if neighbour is None:
            continue
        assert (used_bytes(neighbour, model) <= planner.capacity).all()
        assert neighbour.any(axis=0).all()
        hosts = neighbour


def test_climbing_never_loses_the_best_and_drops_only_what_no_route_needs() -> None:
    profile, model, cluster = small(1)
    planner = make_planner(profile, model, cluster, default())
    objective = ExactObjective(
        cost=planner.cost, profile=profile, access_share=cluster.access_share
    )
    landscape = Landscape(cost=planner.cost, access_share=cluster.access_share, objective=objective)
    start = seed_placement("load_balanced", planner)
    assert start is not None
    climber = Climber(
        name="x",
        landscape=landscape,
        mutator=Mutator(model=model, capacity=planner.capacity),
        hosts=start.hosts,
        rng=np.random.default_rng(0),
    )
    assert climber.hosts.any(axis=0).all()
    assert landscape.value_s(climber.hosts) == pytest.approx(landscape.value_s(start.hosts))
    last_s = climber.best_s
    for _ in range(500):
        climber.step()
        assert climber.best_s <= last_s
        last_s = climber.best_s
    assert climber.best_s == pytest.approx(landscape.value_s(climber.best_hosts))
    assert last_s < landscape.value_s(start.hosts)


@given(known=models_with_profiles(), cluster=clusters(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_compiled_routes_are_the_best_routes(
    known: tuple[ModelSpec, Profile], cluster: ClusterSpec, seed: int
) -> None:
    model, profile = known
    rng = np.random.default_rng(seed)
    hosts = rng.random((cluster.server_count, *model.expert_bytes.shape)) < 0.5
    hosts[0] = True
    cost = cost_model(model, cluster)
    objective = ExactObjective(cost=cost, profile=profile, access_share=cluster.access_share)
    landscape = Landscape(cost=cost, access_share=cluster.access_share, objective=objective)
    value_s, routes = landscape.best(landscape.tables(hosts), hosts)
    tables = expected_layer_delay_s(cost, hosts, profile)
    delays = route_delay_s(cost, tables, best_routes(cost, tables))
    assert value_s == pytest.approx(cluster.access_share @ delays)
    users = np.flatnonzero(cluster.access_share > 0)
    whole = np.repeat(np.arange(cluster.server_count)[:, None], model.layer_count, axis=1)
    whole[users] = routes
    np.testing.assert_allclose(route_delay_s(cost, tables, whole)[users], delays[users])


def test_groups_follow_the_links() -> None:
    _, model, cluster = small()
    delay_s = np.full((4, 4), 20e-3)
    delay_s[0, 2] = delay_s[2, 0] = delay_s[1, 3] = delay_s[3, 1] = 1e-3
    np.fill_diagonal(delay_s, 0.0)
    fast = np.full((4, 4), 1e12)
    cost = cost_model(model, replace(cluster, delay_s=delay_s, bandwidth_bytes_per_s=fast))
    found = [[set(np.flatnonzero(cut == g).tolist()) for g in set(cut)] for cut in groupings(cost)]
    assert any(sorted(map(sorted, cut)) == [[0, 2], [1, 3]] for cut in found)


def test_a_senseless_budget_is_refused() -> None:
    profile, model, cluster = small()
    with pytest.raises(UserError, match="budget"):
        optimise_plan(profile, model, cluster, replace(BRIEF, budget=2.0), cluster_hash="c")
