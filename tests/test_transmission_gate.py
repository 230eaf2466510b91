"""Gamma (35): a skip is admitted only where no affordable action is local, of those there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimmoe.core.profile import Profile
from trimmoe.cost.actions import DROPPED, ActionSpace, Levers
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.base import Observation
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.trim import TrimPolicy
from worlds import SmallWorld, small_world

BUDGET, SUBSTITUTE, SKIP = 1.0, 0.001, 0.002
LAYER = 1


def one_substitute() -> SmallWorld:
    """Two servers; in layer 1 server 0 holds experts 0-2, and only expert 0 stands in for 3."""
    made = small_world(7, layers=3, experts=5, servers=2)
    hosts = np.ones_like(made.plan.hosts)
    hosts[0, LAYER, 3:] = False
    hosts[1, LAYER, :2] = False
    plan = replace(made.plan, hosts=hosts, routes=np.zeros((2, 3), dtype=int))
    return replace(made, plan=plan, profile=losing_little(made.profile))


def losing_little(profile: Profile) -> Profile:
    feasible = np.zeros_like(profile.feasible)
    feasible[:, np.arange(5), np.arange(5)] = True
    feasible[LAYER, 3, 0] = True
    losses = np.full_like(profile.substitution_loss, SUBSTITUTE)
    losses[..., np.arange(5), np.arange(5)] = 0.0
    skip = replace(profile.skip, upper=np.full_like(profile.skip.upper, SKIP))
    return replace(profile, feasible=feasible, substitution_loss=losses, skip=skip)


def policy_of(world: SmallWorld, *, tables: bool) -> TrimPolicy:
    chosen = PRESETS["trimmoe"]().but(
        budget=BUDGET,
        levers=Levers(drop_slots=False, exit=False),
        draft_confidence=None,
        echoes_charged=False,
    )
    policy = make_engine(world.plan, world.profile, world.model, chosen).policy
    assert isinstance(policy, TrimPolicy)
    return policy if tables else replace(policy, tables=None, horizon=3)


def seen(experts: list[int], allowance: float = BUDGET) -> Observation:
    """One token on server 0."""
    return Observation(
        layer=LAYER,
        route=np.array([0]),
        server=np.array([0]),
        experts=np.array([experts]),
        masses=np.array([[0.5, 0.3]]),
        importance=np.array([0.8]),
        steadiness=np.array([0]),
        allowance=np.array([allowance]),
        exit_at=np.array([3]),
        loss_weight=np.array([0.5]),
    )


@pytest.mark.parametrize("tables", [True, False], ids=["tables", "literal"])
def test_what_another_slot_runs_stands_in_for_nobody(tables: bool) -> None:
    """Expert 3 is elsewhere. Where 0 is free it stands in here, and a skip has nothing to save;
    where the other slot has activated it, nothing is local and the skip saves the trip."""
    policy = policy_of(one_substitute(), tables=tables)
    free = policy.decide(seen([3, 1]))
    assert free.slot_expert.tolist() == [[0, 1]]
    assert free.loss.tolist() == [SUBSTITUTE]
    taken = policy.decide(seen([3, 0]))
    assert taken.slot_expert.tolist() == [[DROPPED, DROPPED]]
    assert taken.loss.tolist() == [SKIP]


def test_local_losses_by_hand() -> None:
    space = policy_of(one_substitute(), tables=True).lookahead.space
    sets = np.array([[0, 1], [3, 1], [3, 0], [1, 3], [4, 1]])
    local = space.served_locally(LAYER, 0, sets, np.full(sets.shape, 0.2), np.zeros(5, dtype=int))
    assert local.tolist() == [0.0, SUBSTITUTE, np.inf, SUBSTITUTE, np.inf]
    exactly = replace(space, levers=replace(space.levers, substitute=False))
    local = exactly.served_locally(LAYER, 0, sets, np.full(sets.shape, 0.2), np.zeros(5, dtype=int))
    assert local.tolist() == [0.0, np.inf, np.inf, np.inf, np.inf]


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), top_k=st.integers(1, 3))
def test_a_local_loss_is_that_of_the_best_slots_one_by_one(seed: int, top_k: int) -> None:
    world = small_world(seed, layers=2, experts=5, top_k=top_k, servers=3)
    space = policy_of(world, tables=True).lookahead.space
    rng = np.random.default_rng(seed)
    sets = np.stack([rng.permutation(5)[:top_k] for _ in range(8)])
    steadiness = rng.integers(space.class_count, size=8)
    source = rng.integers(3, size=8)
    found = space.served_locally(LAYER, source, sets, np.full(sets.shape, 0.2), steadiness)
    for row in range(8):
        here, steady = int(source[row]), int(steadiness[row])
        wanted = sum(least_here(space, here, steady, sets[row], slot) for slot in range(top_k))
        assert found[row] == pytest.approx(wanted, abs=1e-15)


def least_here(space: ActionSpace, here: int, steady: int, experts: np.ndarray, slot: int) -> float:
    """Least loss of running a slot on server `here` by its target or by who may stand in."""
    target = int(experts[slot])
    rank = min(slot, space.substitution_loss.shape[2] - 1)
    choices = [0.0] if space.hosts[here, LAYER, target] else []
    for expert in set(range(5)) - set(experts.tolist()):
        if space.hosts[here, LAYER, expert] and space.feasible[LAYER, target, expert]:
            choices.append(float(space.substitution_loss[LAYER, steady, rank, target, expert]))
    return min(choices, default=np.inf)
