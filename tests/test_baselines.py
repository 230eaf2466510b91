"""Baseline policies against cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import byhand
from trimmoe.core.ledger import Kind
from trimmoe.core.loss_curves import LossCurves
from trimmoe.cost.actions import DROPPED, ActionSpace
from trimmoe.experiments.method_engines import load_replicated, make_engine, method_engine, plan_for
from trimmoe.experiments.methods import METHODS, UNLIMITED, configured
from trimmoe.policy.base import Observation
from trimmoe.policy.baselines import (
    LocalPrior,
    MaskedGating,
    MixtureOfDepths,
    admitted_servers,
    exact_decision,
    expected_mask_loss,
    matched_servers,
    matched_skip_rate,
    skip_thresholds,
)
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.trim import TrimPolicy
from trimmoe.simulator.probabilities import complete_probabilities
from trimmoe.simulator.replay import replay
from worlds import SmallWorld, small_world


@pytest.fixture(scope="module")
def world() -> SmallWorld:
    """Two servers; in layer 1 server 0 holds experts 0-2, server 1 experts 2-4."""
    made = small_world(7, layers=3, experts=5, servers=2)
    hosts = np.ones_like(made.plan.hosts)
    hosts[0, 1, 3:] = False
    hosts[1, 1, :2] = False
    routes = np.array([[0, 0, 0], [1, 1, 1]])
    return replace(made, plan=replace(made.plan, hosts=hosts, routes=routes))


def space_of(world: SmallWorld) -> tuple[ActionSpace, np.ndarray]:
    engine = make_engine(world.plan, world.profile, world.model, PRESETS["exact"]())
    assert isinstance(engine.policy, TrimPolicy)
    return engine.policy.lookahead.space, engine.routes


def seen(probabilities: list[float], *, layer: int = 1, allowance: float = 1e6) -> Observation:
    """One token at server 0 whose router gave these probabilities to experts 0..4."""
    whole = np.array([probabilities])
    experts = np.argsort(-whole, axis=1)[:, :2]
    return Observation(
        layer=layer,
        route=np.array([0]),
        server=np.array([0]),
        experts=experts,
        masses=np.take_along_axis(whole, experts, axis=1),
        importance=np.take_along_axis(whole, experts, axis=1).sum(1),
        steadiness=np.array([0]),
        allowance=np.array([allowance]),
        exit_at=np.array([3]),
        loss_weight=np.array([0.5]),
        probabilities=whole,
    )


def test_mixture_of_depths_skips_below_its_threshold_wherever_the_layer_runs(world) -> None:
    space, routes = space_of(world)
    policy = MixtureOfDepths(space=space, routes=routes, below=np.array([0.0, 0.6, 0.0]))
    low = policy.decide(seen([0.3, 0.2, 0.19, 0.16, 0.15]))
    assert (low.slot_expert == DROPPED).all()
    assert low.delay_s[0] == 0.0
    assert low.loss[0] > 0
    high = policy.decide(seen([0.5, 0.3, 0.1, 0.05, 0.05]))
    assert high.slot_expert.tolist() == [[0, 1]]
    assert high.loss[0] == 0.0


def test_skip_rates_are_matched_on_the_calibrated_importance() -> None:
    quantiles = np.tile(np.linspace(0.2, 1.0, 101), (2, 1))
    assert skip_thresholds(quantiles, 0.25) == pytest.approx([0.4, 0.4])
    assert skip_thresholds(quantiles, 0.0).tolist() == [0.0, 0.0]


def test_local_prior_prefers_local_experts_by_its_bias_only(world) -> None:
    """Experts 3 and 4 are remote from server 0."""
    space, routes = space_of(world)
    token = seen([0.05, 0.22, 0.2, 0.28, 0.25])
    assert token.experts.tolist() == [[3, 4]]
    biased = LocalPrior(space=space, routes=routes, bias=0.04).decide(token)
    # 1: 0.26, 2: 0.24 against 3: 0.28, 4: 0.25 -> experts 3 and 1; 1 takes the slot of 4.
    assert biased.slot_expert.tolist() == [[3, 1]]
    assert biased.slot_server[0, 1] == 0
    assert biased.loss[0] == pytest.approx(world.profile.echoing().substitution_loss[1, 0, 1, 4, 1])
    strong = LocalPrior(space=space, routes=routes, bias=1.0).decide(token)
    assert strong.slot_expert.tolist() == [[1, 2]]
    assert LocalPrior(space=space, routes=routes, bias=0.0).decide(token).slot_expert.tolist() == [
        [3, 4]
    ]


def test_masked_gating_runs_the_best_experts_of_admitted_servers(world) -> None:
    space, routes = space_of(world)
    token = seen([0.1, 0.15, 0.05, 0.4, 0.3])
    near = MaskedGating(space=space, routes=routes, admitted=np.array([True, False]))
    assert near.decide(token).slot_expert.tolist() == [[1, 0]]
    everyone = MaskedGating(space=space, routes=routes, admitted=np.array([True, True]))
    exact = exact_decision(space, routes, token)
    assert everyone.decide(token).slot_expert.tolist() == exact.slot_expert.tolist() == [[3, 4]]


def test_the_subset_of_servers_grows_until_half_of_every_layer_is_there(world) -> None:
    space, routes = space_of(world)
    home = np.array([[0, 0, 0], [0, 0, 0]])
    assert admitted_servers(space.cost, home, world.plan.hosts).tolist() == [True, False]
    few = world.plan.hosts.copy()
    few[0, 1, 2] = False
    assert admitted_servers(space.cost, home, few).tolist() == [True, True]
    assert routes.shape == (2, 3)


def test_the_skip_rate_is_matched_to_what_skips_are_charged() -> None:
    """Skips of 1/128 and 3/128 in two layers: a rate of 1/4 is charged 1/128 a token. Where the
    upper half of the masses is charged 5/128, a rate of 3/4 costs 1/2 * 1/128 + 1/4 * 5/128."""
    made = byhand.world(byhand.hosting([[0], [0]], [[1], [1]]), [[0, 1], [1, 0]])
    settings = replace(byhand.PLAIN, budget=UNLIMITED)

    def rate(skip: LossCurves, budget_units: float) -> float:
        profile = replace(made.profile, skip=skip)
        space = replace(made, profile=profile).policy(settings).lookahead.space
        return matched_skip_rate(space, profile, budget_units * byhand.UNIT)

    flat = byhand.one_bin([1.0, 3.0])
    assert rate(flat, 1.0) == pytest.approx(0.25)
    assert rate(flat, 100.0) == 1.0
    assert rate(flat, 0.0) == 0.0
    steps = byhand.curves([0.5, 1.0], [[1.0, 5.0], [0.0, 0.0]])
    assert rate(steps, 0.5) == pytest.approx(0.5)
    assert rate(steps, 1.75) == pytest.approx(0.75)


def test_servers_join_until_masking_the_gate_is_charged_no_more_than_the_budget() -> None:
    """Every layer activates expert 0 for three of four tokens. Server 0 holds expert 0 alone, the
    nearer server 1 expert 1: masking costs 2 units for every fourth token, in two layers 1 unit."""
    hosts = byhand.hosting([[0], [0]], [[1], [1]])
    losses = byhand.substitutes(2, [[0.0, 4.0], [2.0, 0.0]])
    found: dict[str, Any] = losses | {"activated": np.array([[0.75, 0.25]] * 2)}
    made = byhand.world(hosts, [[0, 1], [1, 0]], routes=[[0, 0], [0, 0]], **found)
    space = made.policy(byhand.PLAIN).lookahead.space
    one = np.array([[True, False]] * 2)
    assert expected_mask_loss(space, made.profile, one) == pytest.approx(byhand.UNIT)
    assert expected_mask_loss(space, made.profile, ~one) == pytest.approx(6 * byhand.UNIT)
    for units, wanted in ((1.0, [True, False]), (0.5, [True, True])):
        budget = units * byhand.UNIT * (1 + 1e-9)
        admitted = matched_servers(space, made.plan.routes, made.profile, budget)
        assert admitted.tolist() == wanted


@pytest.mark.parametrize(
    ("name", "budget_units", "admitted", "runs"),
    [
        ("moe2", 2.0, [True, False, False], 1),
        ("moe2-matched", 3.0, [True, False, False], 1),
        ("moe2-matched", 2.0, [True, True, False], 2),
        ("moe2-matched", 0.5, [True, True, True], 3),
    ],
)
def test_within_the_budget_the_gate_is_masked_to_the_matched_subset(
    name: str, budget_units: float, admitted: list[bool], runs: int
) -> None:
    """Server 0 has half of the experts, 0 and 1; 2 is 10 ms and 3 is 20 ms away. They are activated
    by 4, 3, 2 and 1 of ten tokens, and whoever is masked loses 8 units: 0.3 x 8 = 2.4 a token
    with server 0 alone, 0.1 x 8 = 0.8 with server 1 too, then none. The token's router prefers
    them from the last to the first."""
    losses = byhand.substitutes(1, (8 - 8 * np.eye(4)).tolist())
    made = byhand.world(
        byhand.hosting([[0, 1]], [[2]], [[3]], experts=4),
        [[0, 10, 20], [10, 0, 10], [20, 10, 0]],
        routes=[[0], [0], [0]],
        activated=np.array([[0.4, 0.3, 0.2, 0.1]]),
        **losses,
    )
    method = METHODS[name]
    settings = configured(method, budget=budget_units * byhand.UNIT, confidence=0.9)
    engine = method_engine(method, made.plan, made.profile, made.model, settings)
    assert isinstance(engine.policy, MaskedGating)
    assert engine.policy.admitted.tolist() == admitted
    token = replace(
        seen([0.1, 0.2, 0.3, 0.4], layer=0), experts=np.array([[3]]), masses=np.array([[0.4]])
    )
    assert engine.policy.decide(token).slot_expert.tolist() == [[runs]]


def test_experts_that_are_never_activated_take_a_masked_ones_place_alike() -> None:
    """All tokens activate expert 0, which is not there; 1 and 2 lose 2 and 4 units: 3, twice."""
    losses = byhand.substitutes(2, [[0.0, 2.0, 4.0]] * 3)
    found: dict[str, Any] = losses | {"activated": np.array([[1.0, 0.0, 0.0]] * 2)}
    hosts = byhand.hosting([[0, 1, 2]] * 2, experts=3)
    made = byhand.world(hosts, [[0]], **found)
    space = made.policy(byhand.PLAIN).lookahead.space
    there = np.array([[False, True, True]] * 2)
    assert expected_mask_loss(space, made.profile, there) == pytest.approx(6 * byhand.UNIT)


@pytest.mark.parametrize("name", ["mixture-of-depths-matched", "moe2-matched"])
def test_matched_baselines_keep_to_the_budget_at_every_prefix(name: str, world: SmallWorld) -> None:
    whole = complete_probabilities(
        np.random.default_rng(0), world.trace.experts, world.trace.masses, 5
    )
    trace = replace(world.trace, probabilities=whole)
    for budget in (0.02, 0.3):
        method = METHODS[name]
        policy = configured(method, budget=budget, confidence=0.9)
        engine = method_engine(method, world.plan, world.profile, world.model, policy)
        access = np.zeros(trace.sequence_count, dtype=int)
        ledgers = replay(engine, trace, access, budget=budget, confidence=0.9)
        assert sum(one.loss for one in ledgers) <= budget * len(ledgers) + 1e-12
    assert sum(one.loss for one in ledgers) > 0


def test_nothing_is_approximated_beyond_the_allowance(world) -> None:
    space, routes = space_of(world)
    broke = seen([0.05, 0.22, 0.2, 0.28, 0.25], allowance=0.0)
    decided = LocalPrior(space=space, routes=routes, bias=1.0).decide(broke)
    assert decided.slot_expert.tolist() == [[3, 4]]
    assert decided.loss[0] == 0.0


REPLAYABLE = sorted(name for name, method in METHODS.items() if not method.reroutes)
"""The others need the whole router output, which a trace does not hold."""


@pytest.mark.parametrize("name", REPLAYABLE)
def test_every_method_runs_in_the_same_engine(name: str, world: SmallWorld) -> None:
    method = METHODS[name]
    policy = configured(method, budget=0.1, confidence=0.9)
    engine = method_engine(method, world.plan, world.profile, world.model, policy)
    access = np.array([0, 1, 0])
    ledgers = replay(engine, world.trace, access, budget=policy.budget, confidence=0.9)
    assert sum(ledger.tokens for ledger in ledgers) == world.trace.token_count
    if policy.levers.lossless and method.policy is None:
        total = sum(ledgers[1:], ledgers[0])
        assert total.loss == 0.0
        left_out = total.share(Kind.EXITED)
        assert bool(left_out) == policy.levers.exit, "of drafts that were right"
        assert total.share(Kind.LOCAL_EXACT, Kind.REMOTE_EXACT) == pytest.approx(1.0 - left_out)


def test_without_redundancy_routes_and_one_copy_stay_and_replicas_go_by_load_alone(
    world: SmallWorld,
) -> None:
    """Beside one copy of each expert server 0 has memory for one more: of those that it does not
    hold, the one with most activations."""
    plan, model = world.plan, world.model
    model = replace(model, expert_bytes=np.full_like(model.expert_bytes, 10))
    bare = replace(plan, expert_capacity_bytes=np.zeros(2, int))
    once = load_replicated(bare, world.profile, model)
    assert (once.hosts.sum(axis=0) == 1).all()
    assert (once.hosts <= plan.hosts).all()
    room = 10 * once.hosts.sum(axis=(1, 2)) + [10, 0]
    found = load_replicated(replace(plan, expert_capacity_bytes=room), world.profile, model)
    np.testing.assert_array_equal(found.routes, plan.routes)
    ((server, layer, expert),) = np.argwhere(found.hosts != once.hosts)
    assert (server, found.hosts[server, layer, expert]) == (0, True)
    lacking = np.where(once.hosts[0], -np.inf, world.profile.activated)
    assert (layer, expert) == np.unravel_index(lacking.argmax(), lacking.shape)


def test_the_method_without_redundancy_runs_on_the_plan_without(world: SmallWorld) -> None:
    method, given = METHODS["no-redundancy"], (world.plan, world.profile, world.model)
    runs_on = plan_for(method, *given)
    assert not np.array_equal(runs_on.hosts, world.plan.hosts)
    np.testing.assert_array_equal(
        runs_on.hosts, load_replicated(world.plan, world.profile, world.model).hosts
    )
    np.testing.assert_array_equal(plan_for(METHODS["trimmoe"], *given).hosts, world.plan.hosts)
