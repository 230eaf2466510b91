"""No policy beats the clairvoyant, and the clairvoyant's bound is reached where it can be."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimmoe.cost.actions import ActionSpace, as_batch
from trimmoe.cost.clairvoyant import Exits, clairvoyant_bound
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.trim import TrimPolicy
from trimmoe.simulator.replay import replay
from worlds import SmallWorld, small_world


def space_of(world: SmallWorld, **changes) -> tuple[ActionSpace, np.ndarray]:
    settings = PRESETS["trimmoe"]().but(**changes)
    engine = make_engine(world.plan, world.profile, world.model, settings)
    assert isinstance(engine.policy, TrimPolicy)
    return engine.policy.lookahead.space, engine.routes


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.02, 0.1, 1.0]),
    st.sampled_from([0.6, 0.95, 1.1]),
    st.sampled_from([1, 3, None]),
    st.booleans(),
)
def test_no_policy_is_faster_than_the_bound(seed, budget, confidence, horizon, charged) -> None:
    world = small_world(seed)
    access = np.random.default_rng(seed).integers(3, size=3)
    policy = PRESETS["trimmoe"]().but(
        budget=budget,
        confidence=confidence,
        horizon=horizon,
        exit_risk=None,
        exits_charged=charged,
        audit_share=0.0,
    )
    engine = make_engine(world.plan, world.profile, world.model, policy)
    assert isinstance(engine.policy, TrimPolicy)
    ledgers = replay(engine, world.trace, access, budget=budget, confidence=confidence)
    needed, charge = engine.exit_terms(confidence)
    bound = clairvoyant_bound(
        engine.policy.lookahead.space,
        world.trace,
        engine.routes,
        access,
        budget=budget,
        exits=Exits(threshold=needed, loss=charge),
    )
    reached = sum(ledger.delay_s for ledger in ledgers) / len(ledgers)
    assert bound.delay_s <= reached * (1 + 1e-9)


def test_without_a_budget_and_exits_the_bound_is_exact_execution() -> None:
    world = small_world(3)
    space, routes = space_of(world)
    access = np.array([0, 1, 2])
    exact = make_engine(world.plan, world.profile, world.model, PRESETS["exact"]())
    ledgers = replay(exact, world.trace, access, budget=0.0, confidence=2.0)
    bound = clairvoyant_bound(
        space, world.trace, routes, access, budget=0.0, exits=Exits(threshold=2.0, loss=0.0)
    )
    # A slot's fastest exact host alone need not be the fastest together, so the bound may differ
    # by what a faster combination of lossless hosts would save: here there is none.
    assert bound.delay_s == pytest.approx(sum(one.delay_s for one in ledgers) / len(ledgers))


def test_the_bound_is_the_cheapest_path_when_quality_is_free() -> None:
    """Every action affordable: brute force over all paths of one token."""
    world = small_world(5, layers=3, sequences=1, length=1)
    space, routes = space_of(world)
    trace, access = world.trace, np.array([1])
    exits = Exits(threshold=0.7, loss=0.0)
    bound = clairvoyant_bound(space, trace, routes, access, budget=1e9, exits=exits)
    assert bound.delay_s == pytest.approx(cheapest_path(space, trace, routes[1], 1, exits))


def cheapest_path(space, trace, route, access, exits) -> float:
    cost, layers = space.cost, trace.layer_count
    per_layer = []
    for layer in range(layers):
        after = route[min(layer + 1, layers - 1)]
        batch = as_batch(
            trace.experts[:1, layer],
            trace.masses[:1, layer],
            trace.importance[:1, layer],
            trace.steadiness[:1, layer],
            route[[layer]],
            np.array([after]),
        )
        actions = space.enumerate(layer, batch)
        columns = np.flatnonzero(np.isfinite(actions.delay_s[0]))
        skip = actions.delay_s.shape[1] - 1
        per_layer.append([(actions.delay_s[0, c], c == skip) for c in columns])
    least = np.inf
    for path in product(*per_layer):
        total = cost.token_transfer_s[access, route[0]]
        for layer, (delay_s, skipped) in enumerate(path):
            total += cost.dense_s[route[layer], layer] + delay_s
            place = route[min(layer + 1, layers - 1)]
            last = layer == layers - 1
            exit_here = not skipped and trace.confidence[0, layer] >= exits.threshold
            if last or exit_here:
                least = min(least, total + cost.token_transfer_s[place, access])
    return float(least)


def test_the_replay_spends_no_more_than_its_budget_and_keeps_the_order_of_tokens() -> None:
    world = small_world(11)
    policy = PRESETS["trimmoe"]().but(budget=0.1, exit_risk=None)
    engine = make_engine(world.plan, world.profile, world.model, policy)
    ledgers = replay(engine, world.trace, np.zeros(3, dtype=int), budget=0.1, confidence=0.9)
    for sequence in range(3):
        own = ledgers[sequence * 6 : sequence * 6 + 6]
        spent = np.cumsum([ledger.loss for ledger in own])
        assert (spent <= 0.1 * np.arange(1, 7) + 1e-12).all()
    assert all(ledger.tokens == 1 for ledger in ledgers)
