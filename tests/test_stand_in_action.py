"""A slot may run its own expert's stand-in, a copy in few bits where the token is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from byhand import PLAIN, UNIT, decided, hosting, one_bin, world
from factories import random_cluster, random_model_spec, random_profile
from synthetic import SyntheticDriver, random_plan, with_copies
from trimmoe.core.ledger import Kind, layer_kinds
from trimmoe.core.loss_curves import Rung
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.core.stand_ins import ASCENDING, RUNGS, expert_of, number_of, numbered
from trimmoe.cost.actions import DROPPED, ActionSpace, Levers
from trimmoe.cost.model import Accounting, rung_shares
from trimmoe.engine.step import Engine
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.base import Observation
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.settings import PolicySettings
from trimmoe.policy.trim import TrimPolicy

EXPERTS, TOP_K = 5, 2
ONLY = Levers(
    substitute=False, stand_in=True, drop_slots=False, skip=False, exit=False,
    skip_needs_transmission=False,
)  # fmt: skip


def parts(seed: int, *, copied: float = 1.0) -> tuple[ModelSpec, Profile, Plan]:
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng, layers=3, experts=EXPERTS, top_k=TOP_K)
    profile = random_profile(rng, model)
    plan = random_plan(rng, model, random_cluster(rng, servers=3), copied=copied)
    return model, profile, plan


def policy(**changes: object) -> PolicySettings:
    plain = PRESETS["final-exits"]().but(levers=ONLY, budget=0.05, inflate=False)
    return plain.but(**changes)


def space_of(engine: Engine) -> ActionSpace:
    assert isinstance(engine.policy, TrimPolicy)
    return engine.policy.lookahead.space


def observation(rng: np.random.Generator, engine: Engine, count: int, layer: int) -> Observation:
    route = rng.integers(engine.routes.shape[0], size=count)
    experts = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(count)])
    masses = np.sort(rng.dirichlet(np.ones(TOP_K + 1), count)[:, :TOP_K])[:, ::-1].copy()
    return Observation(
        layer=layer,
        route=route,
        server=engine.routes[route, layer],
        experts=experts,
        masses=masses,
        importance=masses.sum(1),
        steadiness=rng.integers(2, size=count),
        allowance=rng.choice([0.0, 0.01, 0.1, 1.0], count),
        exit_at=np.full(count, engine.cost.layer_count),
        loss_weight=np.full(count, 0.5),
    )


def test_what_runs_has_a_number() -> None:
    bits = np.array([[0, 2, 4], [8, 0, 2]])
    assert numbered(bits).tolist() == [[-1, 4, 8], [9, -1, 5]]
    assert number_of(1, 2, 3) == 4
    assert expert_of(np.array([-1, 2, 4, 9]), 3).tolist() == [-1, 2, 1, 0]


@given(seed=st.integers(0, 10**6))
def test_a_stand_in_is_offered_where_the_token_is_at_the_loss_of_its_mass(seed: int) -> None:
    model, profile, plan = parts(seed, copied=0.5)
    engine = make_engine(plan, profile, model, policy())
    space, rng = space_of(engine), np.random.default_rng(seed)
    layer, source, to = 1, 0, 1
    seen = observation(rng, engine, 6, layer)
    found = space.candidates(
        layer, source, to, experts=seen.experts, masses=seen.masses,
        importance=seen.importance, steadiness=seen.steadiness,
    )  # fmt: skip
    assert plan.stand_in_bits is not None
    copy = numbered(plan.stand_in_bits)[source, layer]
    allowed = engine.settings.budget, profile.class_share, profile.top_k
    rungs = {rung.bits: rung.within(*allowed) for rung in profile.rungs}
    for row, column in np.argwhere(np.isfinite(found.delay_s)):
        loss, work, away = 0.0, 0.0, False
        slots = zip(found.slot_expert[row, column], seen.experts[row], strict=True)
        for slot, (ran, target) in enumerate(slots):
            server = found.slot_server[row, column, slot]
            away |= bool(server != source)
            if ran == target:
                assert plan.hosts[server, layer, target]
                continue
            assert server == source
            assert ran == copy[target]
            bits = int(plan.stand_in_bits[source, layer, target])
            curves = rungs[bits]
            at = int(np.searchsorted(curves.edges[layer, 0], seen.masses[row, slot]))
            loss += curves.upper[layer, seen.steadiness[row], min(at, curves.edges.shape[2] - 1)]
            share = rung_shares(model)[RUNGS.index(bits), layer, target]
            work += engine.cost.expert_s[source, layer, target] * share
        assert found.loss[row, column] == pytest.approx(loss, abs=1e-15)
        if not away and (found.slot_expert[row, column] >= EXPERTS).all():
            moved = engine.cost.transfer_s[source, to]
            assert found.delay_s[row, column] == pytest.approx(moved + work, rel=1e-12)


@pytest.mark.parametrize(
    ("expert", "units", "runs", "loss_units"),
    [
        (0, 8.0, DROPPED, 2),
        (1, 8.0, number_of(1, 4, 2), 3),
        (1, 3.0, number_of(1, 4, 2), 3),
        (1, 2.0, DROPPED, 2),
    ],
)
def test_a_skip_is_suppressed_by_the_targets_own_copy_here_as_long_as_that_is_affordable(
    expert: int, units: float, runs: int, loss_units: int
) -> None:
    """(35) of copies: both experts are 10 ms away, and of expert 1 there is a copy here, which
    loses 3 units. A skip loses 2, and so costs less: it is admitted only where the copy is another
    expert's or loses more than may be lost."""
    copies = Rung(bits=4, curves=one_bin([3]))
    made = world(hosting([[]], [[0, 1]]), [[0, 10], [10, 0]], skip=one_bin([2]), rungs=(copies,))
    made = replace(made, plan=replace(made.plan, stand_in_bits=np.array([[[0, 4]], [[0, 0]]])))
    by_hand = made.policy(replace(PLAIN, levers=Levers(stand_in=True)))
    decision = decided(by_hand, [expert], units=units)
    assert decision.slot_expert.tolist() == [[runs]]
    assert decision.loss.tolist() == [loss_units * UNIT]


def test_a_copy_takes_the_time_of_its_bytes() -> None:
    model, profile, plan = parts(0)
    cost = make_engine(plan, profile, model, policy()).cost
    whole = cost.form_s.reshape(3, 3, 1 + len(RUNGS), EXPERTS)
    np.testing.assert_array_equal(whole[:, :, 0], cost.expert_s)
    sizes = model.expert_flops / 2 * 2.5 / 8 / model.expert_bytes  # two bits, and half a scale's
    np.testing.assert_allclose(whole[:, :, 1], cost.expert_s * np.minimum(sizes, 1.0))
    by_bits = whole[:, :, [1 + RUNGS.index(bits) for bits in ASCENDING]]
    assert (np.diff(by_bits, axis=2) >= 0).all()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_only_what_trims_knows_of_stand_ins(name: str) -> None:
    model, profile, plan = parts(3)
    engine = make_engine(plan, profile, model, PRESETS[name]())
    trims = name in {"trimmoe", "trimming", "final-exits", "guessing"}
    assert (space_of(engine).stand_ins is not None) == trims
    assert (engine.copied_bits is not None) == trims


def test_where_tokens_move_nothing_stands_in() -> None:
    model, profile, plan = parts(3)
    moving = replace(PRESETS["final-exits"](), accounting=Accounting.MIGRATE)
    assert space_of(make_engine(plan, profile, model, moving)).stand_ins is None


LESS = {
    "a plan without copies": lambda profile, plan: (profile, replace(plan, stand_in_bits=None)),
    "a profile from before": lambda profile, plan: (replace(profile, rungs=()), plan),
    "other rungs": lambda profile, plan: (
        replace(profile, rungs=profile.rungs[:1]),
        replace(plan, stand_in_bits=np.where(plan.stand_in_bits > 0, 4, 0)),
    ),
}


@pytest.mark.parametrize("less", sorted(LESS))
def test_without_copies_or_their_losses_decisions_are_what_they_were(less: str) -> None:
    model, profile, plan = parts(5)
    settings = replace(PRESETS["trimmoe"](), budget=1.0)
    before = replace(settings, levers=replace(settings.levers, stand_in=False))
    bare, without = LESS[less](profile, plan)
    one = make_engine(without, bare, model, settings)
    other = make_engine(plan, profile, model, before)
    able = make_engine(plan, profile, model, settings).without_copies()
    rng = np.random.default_rng(1)
    for layer in range(3):
        seen = observation(rng, one, 40, layer)
        first, *rest = [each.policy.decide(seen) for each in (one, other, able)]
        assert first.loss.any()
        for each in rest:
            for name in ("slot_expert", "slot_server", "delay_s", "loss", "ahead"):
                np.testing.assert_array_equal(getattr(first, name), getattr(each, name))


def test_stand_ins_save_ways_and_are_in_the_books() -> None:
    model, profile, plan = parts(7)
    runs = []
    for levers in (ONLY, replace(ONLY, stand_in=False, substitute=True)):
        engine = make_engine(plan, profile, model, policy(levers=levers))
        driver = SyntheticDriver(engine=engine, rng=np.random.default_rng(0))
        driver.open(0, access=0, budget=0.05, confidence=1.1)
        for _ in range(40):
            driver.decode((0,))
        runs.append(driver)
    ours, theirs = (
        [trajectory.ledger for trajectory in driver.trajectories if trajectory.ledger]
        for driver in runs
    )
    stood_in = sum(ledger.kinds[:, [Kind.LOCAL_STAND_IN, Kind.REMOTE_STAND_IN]] for ledger in ours)
    assert np.sum(stood_in) > 0
    exactly = make_engine(plan, profile, model, policy(budget=0.0))
    assert sum(one.hops for one in ours) < 40 * _hops(exactly)
    assert not sum(np.sum(one.kinds[:, Kind.LOCAL_STAND_IN]) for one in theirs)
    for ledger in ours:
        assert (ledger.loss > 0) == bool(ledger.kinds[:, Kind.LOCAL_STAND_IN :].any())


def _hops(engine: Engine) -> float:
    driver = SyntheticDriver(engine=engine, rng=np.random.default_rng(0))
    driver.open(0, access=0, budget=0.0, confidence=1.1)
    for _ in range(40):
        driver.decode((0,))
    return sum(t.ledger.hops for t in driver.trajectories if t.ledger) / 40


def test_a_lost_expert_is_stood_in_for_if_there_is_a_budget() -> None:
    model, profile, plan = parts(9)
    lost, layer, here = 0, 1, int(plan.routes[0, 1])
    hosts, bits = plan.hosts.copy(), np.zeros(plan.hosts.shape, dtype=np.int64)
    hosts[:, layer, lost], bits[here, layer, lost] = False, 8
    before = hosts.copy()
    before[(here + 1) % 3, layer, lost] = True
    plan = replace(plan, hosts=before, stand_in_bits=bits)
    engine = make_engine(plan, profile, model, policy(budget=1.0))
    # As after a failure: what is to come is valued with what there was, see `watch.deployments`.
    whole = engine.policy
    assert isinstance(whole, TrimPolicy)
    left = replace(whole.lookahead, space=replace(whole.lookahead.space, hosts=hosts))
    seen = replace(
        observation(np.random.default_rng(2), engine, 30, layer),
        route=np.zeros(30, dtype=np.int64),
        server=np.full(30, here),
        experts=np.tile([lost, 1], (30, 1)),
        allowance=np.where(np.arange(30) < 15, 1.0, 0.0),
    )
    decided = replace(whole, lookahead=left).decide(seen)
    assert np.isfinite(decided.delay_s[:15]).all()
    assert (decided.slot_expert[:15, 0] == number_of(lost, 8, EXPERTS)).all()
    assert (decided.loss[:15] > 0).all()
    assert np.isinf(decided.delay_s[15:]).all(), "without a budget it waits"


def test_kinds_tell_stand_ins_from_substitutes() -> None:
    ran = np.array([[0, 1], [5, 1], [5, 2], [2, 1], [-1, 6], [-1, -1]])
    target = np.tile([0, 1], (6, 1))
    server = np.zeros(6, dtype=int)
    where = np.zeros((6, 2), dtype=int)
    where[1, 1] = 1
    kinds = layer_kinds(ran, where, target, server, expert_count=EXPERTS)
    assert kinds.tolist() == [
        Kind.LOCAL_EXACT,
        Kind.REMOTE_STAND_IN,
        Kind.LOCAL_SUBSTITUTE,
        Kind.LOCAL_SUBSTITUTE,
        Kind.LOCAL_STAND_IN,
        Kind.SKIPPED,
    ]


def test_copies_are_drawn_where_nothing_is_held() -> None:
    _, _, plan = parts(11, copied=0.0)
    made = with_copies(np.random.default_rng(0), plan, 1.0)
    assert made.stand_in_bits is not None
    np.testing.assert_array_equal(made.stand_in_bits > 0, ~plan.hosts)
