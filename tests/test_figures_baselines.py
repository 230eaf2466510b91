"""Baselines where tokens move, and the routers' output that they ask for."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from trimmoe.core.ledger import Kind, Ledger
from trimmoe.cost.model import Accounting
from trimmoe.experiments.figures.contenders import ARENAS, letter, pinned_best, pinned_own
from trimmoe.experiments.method_engines import make_engine
from trimmoe.experiments.methods import METHODS, configured
from trimmoe.policy.base import Observation
from trimmoe.policy.baselines import exact_decision
from trimmoe.policy.settings import PolicySettings
from trimmoe.policy.trim import TrimPolicy
from trimmoe.simulator.probabilities import complete_probabilities
from trimmoe.simulator.replay import replay
from worlds import SmallWorld, small_world


def whole_world(seed: int, *, top_k: int = 2) -> SmallWorld:
    made = small_world(seed, servers=4, sequences=4, length=5, top_k=top_k)
    experts, masses = made.trace.experts, made.trace.masses
    rng = np.random.default_rng(seed)
    whole = complete_probabilities(rng, experts, masses, made.model.expert_count)
    return replace(made, trace=replace(made.trace, probabilities=whole))


def run(world: SmallWorld, name: str, accounting: Accounting) -> Ledger:
    method = METHODS[name]
    policy = configured(method, budget=0.02, confidence=0.9)
    policy = replace(policy, accounting=accounting)
    engine = make_engine(world.plan, world.profile, world.model, policy, method.policy)
    access = np.arange(world.trace.sequence_count) % world.plan.cluster.server_count
    ledgers = replay(
        engine, world.trace, access, budget=policy.budget, confidence=policy.confidence
    )
    return sum(ledgers[1:], ledgers[0])


@pytest.mark.parametrize("seed", range(5))
def test_completed_probabilities_agree_with_the_activated_set(seed: int) -> None:
    trace = whole_world(seed).trace
    whole = trace.probabilities
    assert whole is not None
    assert (whole >= 0).all()
    there = np.take_along_axis(whole, trace.experts, axis=2)
    np.testing.assert_array_equal(there, trace.masses.astype(np.float16))
    others = whole.copy()
    np.put_along_axis(others, trace.experts, np.float16(-1), axis=2)
    assert (others.max(2) < there.min(2)).all()


@pytest.mark.parametrize("name", ["mixture-of-depths", "local-prior", "moe2"])
@pytest.mark.parametrize("seed", range(3))
def test_with_one_slot_a_moving_token_crosses_a_link_once_where_one_at_home_returns(
    name: str, seed: int
) -> None:
    world = whole_world(seed, top_k=1)
    remote = [Kind.REMOTE_EXACT, Kind.REMOTE_SUBSTITUTE]
    moved = run(world, name, Accounting.MIGRATE)
    home = run(world, name, Accounting.HOME)
    assert home.kinds[:, remote].sum() > 0
    assert moved.hops == moved.kinds[:, remote].sum()
    assert home.hops == 2 * home.kinds[:, remote].sum()


def test_a_moving_baseline_goes_where_its_first_expert_is_fastest() -> None:
    world = whole_world(1)
    policy = replace(METHODS["exact"].settings(), accounting=Accounting.MIGRATE)
    engine = make_engine(world.plan, world.profile, world.model, policy)
    assert isinstance(engine.policy, TrimPolicy)
    space = engine.policy.lookahead.space
    trace, layer, here = world.trace, 2, 3
    experts = trace.experts[:, layer]
    count = experts.shape[0]
    seen = Observation(
        layer=layer,
        route=np.zeros(count, dtype=int),
        server=np.full(count, here),
        experts=experts,
        masses=trace.masses[:, layer].astype(float),
        importance=trace.importance[:, layer].astype(float),
        steadiness=trace.steadiness[:, layer],
        allowance=np.zeros(count),
        exit_at=trace.exit_at[:, layer],
        loss_weight=np.full(count, 0.5),
    )
    decision = exact_decision(space, engine.routes, seen)
    for row in range(count):
        first = experts[row, 0]
        hosts = np.flatnonzero(space.hosts[:, layer, first])
        alone = space.cost.transfer_s[here, hosts] + space.cost.expert_s[hosts, layer, first]
        assert decision.destination[row] == hosts[alone.argmin()]
        assert decision.slot_server[row, 0] == decision.destination[row]
        assert space.hosts[decision.slot_server[row], layer, experts[row]].all()


def test_by_the_letter_the_predecessor_differs_from_ours_in_what_the_paper_adds_only() -> None:
    settings = {one.of: one.change(one.method.settings()) for one in letter()}
    ours, theirs = settings["trimmoe"], settings["substitute-only"]
    added = {"name", "horizon", "levers"}
    for item in fields(ours):
        if item.name not in added:
            assert getattr(theirs, item.name) == getattr(ours, item.name), item.name
    assert theirs.horizon == 1
    assert theirs.levers == replace(ours.levers, skip=False, exit=False)


def test_by_the_letter_whoever_trims_prompts_is_everybody_who_trims() -> None:
    trims = {one.of: one.change(one.method.settings()).readings.prompts_trimmed for one in letter()}
    assert {of for of, whole in trims.items() if whole} >= {"trimmoe", "substitute-only"}
    assert trims["mod"]
    assert trims["moe2"]
    assert not any(
        one.change(one.method.settings()).readings.prompts_trimmed
        for one in (*pinned_own(), *pinned_best())
    )


def test_one_key_is_one_policy() -> None:
    found: dict[str, PolicySettings] = {}
    for arena in ARENAS.values():
        for one in arena():
            policy = one.change(one.method.settings())
            assert found.setdefault(one.key, policy) == policy, one.key


def test_where_ours_moves_edgeshard_returns_nowhere_and_its_own_form_stands_beside_it() -> None:
    rows = {one.of: one for one in letter()}
    assert rows["edgeshard"].change(METHODS["exact"].settings()).accounting is Accounting.MIGRATE
    assert not rows["edgeshard-native"].method.home
    assert rows["edgeshard-native"].method.seed == rows["edgeshard"].method.seed
    native = {one.of: one for one in pinned_own()}["edgeshard"]
    assert native.key == rows["edgeshard-native"].key


def test_where_our_letter_knows_no_echoes_the_predecessor_beside_it_is_charged_none() -> None:
    budgeted = [one for one in letter() if one.method.policy is None and not one.lossless]
    assert [one.of for one in budgeted] == ["substitute-only", "trimmoe"]
    for one in budgeted:
        policy = one.change(one.method.settings())
        assert not policy.readings.echoes_charged
        assert policy.accounting is Accounting.MIGRATE
    physical = (*pinned_own(), *pinned_best())
    for one in (row for row in physical if not row.method.matched):
        assert one.change(one.method.settings()).readings.echoes_charged
