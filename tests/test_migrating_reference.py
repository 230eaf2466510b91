"""d_ref where tokens move: what exact execution costs that moves them, not trips from home."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import random_model_spec, random_profile
from test_cost_model import three_servers
from trimmoe.core.profile import Profile
from trimmoe.cost.expected import expected_layer_delay_s, reference_layer_delay_s
from trimmoe.cost.lookahead import first_expert_first
from trimmoe.cost.migrating import fastest_moves, migrating_reference_s
from trimmoe.cost.model import Accounting, CostModel
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.build import deploy
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.trim import TrimPolicy
from trimmoe.simulator.replay import replay
from worlds import small_world

AT_HOME = np.array([1.0, 0.0, 0.0])
"""All users are at server 0."""


def two_layers() -> CostModel:
    """Servers 0 and 1 are 1 ms apart, server 2 is 10 ms from both; an expert takes 2, 1, 4 ms."""
    one = three_servers(Accounting.MIGRATE)
    twice = {name: np.repeat(getattr(one, name), 2, axis=1) for name in ("expert_s", "dense_s")}
    return replace(one, **twice)


def walking(patterns: list[list[int]], share: list[float]) -> Profile:
    """Tokens whose activated set is the same in both layers, first expert first."""
    rng = np.random.default_rng(0)
    top_k = len(patterns[0])
    profile = random_profile(rng, random_model_spec(rng, layers=2, experts=4, top_k=top_k))
    mass = np.arange(top_k, 0, -1) / 10.0
    return replace(
        profile,
        patterns=np.array([patterns] * 2),
        pattern_share=np.array([share] * 2),
        pattern_mass=np.tile(mass, (2, len(patterns), 1)),
        pattern_transitions=np.eye(len(patterns))[None],
    )


def held(by_server: list[list[int]]) -> np.ndarray:
    """The same experts in both layers."""
    hosts = np.zeros((3, 2, 4), dtype=bool)
    for server, experts in enumerate(by_server):
        hosts[server, :, experts] = True
    return hosts


def test_a_token_pays_for_its_move_once_and_then_is_there() -> None:
    """Expert 0 is at server 1: 1 + 1 ms, then 1 ms there. Expert 1 is at home: 2 ms, twice."""
    profile, hosts = walking([[0], [1]], [0.25, 0.75]), held([[1], [0], []])
    cost = two_layers()
    wanted_ms = (0.25 * (2.0 + 1.0) + 0.75 * (2.0 + 2.0)) / 2
    assert 1e3 * migrating_reference_s(cost, hosts, profile, AT_HOME) == pytest.approx(wanted_ms)
    home = np.zeros((3, 2), dtype=int)
    trips_s = reference_layer_delay_s(expected_layer_delay_s(cost, hosts, profile), home, AT_HOME)
    assert 1e3 * trips_s == pytest.approx((0.25 * (3.0 + 3.0) + 0.75 * (2.0 + 2.0)) / 2)


def test_the_first_slot_moves_the_token_and_the_others_are_fetched() -> None:
    """Expert 0, of largest mass, is at server 1 and expert 1 at server 0. The way there takes 1 ms:
    expert 0 is done after 2, expert 1 after 2 + 1. From server 1 expert 1 takes 1 + 2 + 1."""
    profile, hosts = walking([[0, 1]], [1.0]), held([[1], [0], []])
    reference_s = migrating_reference_s(two_layers(), hosts, profile, AT_HOME)
    assert 1e3 * reference_s == pytest.approx((3.0 + 4.0) / 2)


def test_patterns_nobody_meets_may_have_no_host() -> None:
    profile, hosts = walking([[0], [3]], [1.0, 0.0]), held([[], [0], []])
    assert 1e3 * migrating_reference_s(two_layers(), hosts, profile, AT_HOME) == pytest.approx(1.5)


@pytest.mark.parametrize("pattern", [[3, 0], [0, 3]])
def test_an_expert_without_a_host_takes_forever_in_whichever_slot(pattern: list[int]) -> None:
    """Nobody holds expert 3; all three servers hold expert 0."""
    profile, hosts = walking([[0, 1], pattern], [0.5, 0.5]), held([[0, 1], [0, 1], [0, 1]])
    delay_s, _ = fastest_moves(two_layers(), hosts, profile, 0)
    assert np.isfinite(delay_s).tolist() == [[True, False]] * 3
    assert np.isinf(expected_layer_delay_s(two_layers(), hosts, profile)).all()
    unused = replace(profile, pattern_share=np.array([[1.0, 0.0]] * 2))
    assert np.isfinite(expected_layer_delay_s(two_layers(), hosts, unused)).all()


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), top_k=st.integers(1, 3))
def test_moves_are_the_fastest_exact_actions_of_the_policy(seed: int, top_k: int) -> None:
    world = small_world(seed, layers=3, experts=5, top_k=top_k)
    engine = make_engine(world.plan, world.profile, world.model, PRESETS["paper"]())
    assert isinstance(engine.policy, TrimPolicy)
    profile, layer = world.profile, 1
    delay_s, to = fastest_moves(engine.cost, world.plan.hosts, profile, layer)
    experts, masses = first_expert_first(profile.patterns[layer], profile.pattern_mass[layer])
    count = experts.shape[0]
    for source in range(engine.cost.server_count):
        menu = engine.policy.lookahead.space.candidates(
            layer,
            source,
            None,
            experts=experts,
            masses=masses,
            importance=np.full(count, 0.5),
            steadiness=np.zeros(count, dtype=int),
        )
        np.testing.assert_allclose(delay_s[source], menu.delay_s[:, 0], rtol=1e-12)
        np.testing.assert_array_equal(to[source], menu.destination[:, 0])


def test_exact_execution_that_moves_takes_as_long_as_the_reference_says() -> None:
    """On tokens that walk the profile's patterns, up to chance; trips from home take longer."""
    world = small_world(5, layers=6, top_k=1, sequences=60, length=10)
    policy = replace(PRESETS["exact"](), accounting=Accounting.MIGRATE)
    engine = make_engine(world.plan, world.profile, world.model, policy)
    # The way of a token's id to and from its user is in the books, but no part of a layer.
    ids_s = np.zeros_like(engine.cost.token_transfer_s)
    engine = replace(engine, cost=replace(engine.cost, token_transfer_s=ids_s))
    share = world.plan.cluster.access_share
    access = np.random.default_rng(0).choice(share.size, size=60, p=share)
    ledgers = replay(engine, world.trace, access, budget=0.0, confidence=2.0)
    mean_s = float(np.mean([ledger.delay_s for ledger in ledgers])) / world.model.layer_count
    assert engine.reference_s == pytest.approx(mean_s, rel=0.05)
    home = deploy(world.plan, world.profile, world.model, Accounting.HOME)
    assert engine.reference_s < 0.8 * home.reference_s


@pytest.mark.parametrize("accounting", [Accounting.PINNED, Accounting.HOME])
def test_where_tokens_stay_the_reference_is_that_of_their_routes(accounting: Accounting) -> None:
    world = small_world(3)
    made = deploy(world.plan, world.profile, world.model, accounting)
    delays = expected_layer_delay_s(made.cost, world.plan.hosts, world.profile)
    share = world.plan.cluster.access_share
    assert made.reference_s == reference_layer_delay_s(delays, made.routes, share)
