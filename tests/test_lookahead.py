"""The look-ahead against a recursion written straight from (39), and its budget rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import clusters, models_with_profiles
from synthetic import random_plan
from trimmoe.cost.actions import Levers
from trimmoe.cost.lookahead import (
    IMPORTANCE_DECILES,
    LookAhead,
    Place,
    TokenKind,
    first_expert_first,
)
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.trim import TrimPolicy


def literal(
    look: LookAhead,
    layer: int,
    place: Place,
    pattern: int,
    allowance: float,
    horizon: int,
    token: TokenKind,
) -> float:
    """Phi^(h)_l of (39) for one pattern: no memo, no vectors, exact allowances."""
    profile, last = look.profile, look.space.cost.layer_count - 1
    if horizon == 0 or layer == last:
        return 0.0
    ahead, total = layer + 1, 0.0
    for following, probability in enumerate(profile.pattern_transitions[layer][pattern]):
        if probability == 0.0:
            continue
        least = []
        for decile in IMPORTANCE_DECILES:
            importance = profile.pattern_importance[ahead][following, decile]
            least.append(
                _least(look, ahead, place, following, importance, allowance, horizon, token)
            )
        total += probability * float(np.mean(least))
    return total


def _least(look, layer, place, pattern, importance, allowance, horizon, token) -> float:
    profile = look.profile
    experts, masses = first_expert_first(
        profile.patterns[layer][[pattern]], profile.pattern_mass[layer][[pattern]]
    )
    menu = look.space.candidates(
        layer,
        place.source(layer),
        place.destination(layer),
        experts=experts,
        masses=masses,
        importance=np.array([importance]),
        steadiness=np.array([token.steadiness]),
    )
    best = np.inf
    for action in np.flatnonzero(menu.allowed(np.array([allowance]))[0]):
        delay, loss = menu.delay_s[0, action], menu.loss[0, action]
        step = float(look.weights.step_cost(np.array([delay]), np.array([loss]))[0])
        goes_on = 1.0 if menu.skips[0, action] else look.exits.goes_on[token.exit_row, layer]
        after = 0.0
        if goes_on > 0:
            moved = place.moved_to(int(menu.destination[0, action]))
            after = literal(look, layer, moved, pattern, allowance - loss, horizon - 1, token)
        best = min(best, step + goes_on * after)
    return best


def _random_kind(rng: np.random.Generator, look: LookAhead) -> TokenKind:
    return TokenKind(
        steadiness=int(rng.integers(look.space.class_count)),
        exit_row=int(rng.integers(look.exits.goes_on.shape[0])),
    )


@settings(deadline=None, max_examples=40)
@given(
    models_with_profiles(max_layers=4, max_experts=4),
    clusters(max_servers=3),
    st.sampled_from(["trimmoe", "paper", "substitute-only"]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.integers(1, 2),
    st.integers(0, 2**32 - 1),
)
def test_memo_and_vectors_change_nothing(modelled, cluster, preset, budget, horizon, seed) -> None:
    model, profile = modelled
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, model, cluster)
    engine = make_engine(plan, profile, model, replace(PRESETS[preset](), budget=budget))
    assert isinstance(engine.policy, TrimPolicy)
    look = replace(engine.policy.lookahead, allowance_step=None, _values={})
    access = int(rng.integers(cluster.server_count))
    migrates = engine.cost.accounting == "migrate"
    route = None if migrates else tuple(engine.routes[access].tolist())
    place = Place(route=route, server=access)
    token = _random_kind(rng, look)
    fast = look.to_go(0, place, budget, horizon, token)
    pattern = int(rng.integers(look.profile.patterns.shape[1]))
    slow = literal(look, 0, place, pattern, budget, horizon, token)
    assert fast[pattern] == pytest.approx(slow, rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(
    models_with_profiles(max_layers=4, max_experts=4),
    clusters(max_servers=3),
    st.floats(0.001, 0.2),
    st.integers(0, 2**32 - 1),
)
def test_rounded_allowances_never_promise_a_lower_cost(modelled, cluster, budget, seed) -> None:
    """Rounded down, the look-ahead can only be too cautious.

    Without the gate of (35): it forbids a skip where a local action is affordable, so with it a
    larger allowance may leave fewer actions and cost more, rounded or not.
    """
    model, profile = modelled
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, model, cluster)
    policy = replace(
        PRESETS["trimmoe"](), budget=budget, levers=Levers(skip_needs_transmission=False)
    )
    engine = make_engine(plan, profile, model, policy)
    assert isinstance(engine.policy, TrimPolicy)
    coarse = engine.policy.lookahead
    exact = replace(coarse, allowance_step=None, _values={})
    place = Place(route=tuple(engine.routes[0].tolist()))
    spendable = float(rng.uniform(0, 2 * budget))
    token = _random_kind(rng, exact)
    for horizon in (1, 2, 3):
        cautious = coarse.to_go(0, place, spendable, horizon, token)
        sharp = exact.to_go(0, place, spendable, horizon, token)
        assert (cautious >= sharp - 1e-9).all()
