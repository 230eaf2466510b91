"""Properties 2 and 3 of the paper and its constraints (c.4)-(c.10), on random and hostile worlds.

Property 1 and (c.1)-(c.3) are about placement and tested there.
"""

from __future__ import annotations

from dataclasses import fields, replace

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
from synthetic import SyntheticDriver, Trajectory, Visit, hostile, random_plan
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Kind
from trimmoe.core.loss_curves import LossCurves
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.stand_ins import numbered
from trimmoe.cost.actions import NOT_FREE, ActionSpace
from trimmoe.cost.model import Accounting
from trimmoe.engine.step import Engine
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.base import Policy
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.readings import BudgetRule
from trimmoe.policy.settings import PolicySettings
from trimmoe.policy.trim import TrimPolicy

TOKENS = 6
ROUNDING = 1e-12


@st.composite
def worlds(draw: st.DrawFn) -> tuple[SyntheticDriver, Plan, float, float]:
    """A random deployment under a random policy, after some tokens of some sequences."""
    model, profile = draw(models_with_profiles(max_layers=4, max_experts=8, min_experts=1))
    cluster = draw(clusters(max_servers=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        profile = hostile(rng, profile)
    budget = draw(st.sampled_from([0.0, 1e-6, 0.02, 0.1, 1.0]))
    confidence = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0, 1.1]))
    policy = PRESETS[draw(st.sampled_from(sorted(PRESETS)))]().but(
        budget=budget,
        horizon=draw(st.sampled_from([1, 2, 3, None])),
        audit_share=draw(st.sampled_from([0.0, 0.5])),
        window_tokens=draw(st.sampled_from([1, 4])),
        exit_risk=draw(st.sampled_from([None, 0.02, 0.2])),
        importance_gate=draw(st.booleans()),
    )
    if not policy.drafts:
        policy = policy.but(exit_state=draw(st.sampled_from(ExitState)))
    plan = random_plan(
        rng,
        model,
        cluster,
        density=draw(st.sampled_from([0.0, 0.3, 1.0])),
        copied=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    engine = make_engine(plan, profile, model, policy)
    if draw(st.booleans()):
        engine = replace(engine, policy=misled(rng, engine.policy))
    driver = SyntheticDriver(engine=engine, rng=rng)
    driver.importance_scale = draw(st.sampled_from([0.01, 1.0]))
    sequences = tuple(range(draw(st.integers(1, 3))))
    for sequence in sequences:
        access = int(rng.integers(cluster.server_count))
        driver.open(sequence, access=access, budget=budget, confidence=confidence)
    for _ in range(TOKENS):
        driver.decode(sequences)
    return driver, plan, budget, confidence


def misled(rng: np.random.Generator, policy: Policy) -> Policy:
    """The same policy deciding by links and machines that are up to ten times off."""
    assert isinstance(policy, TrimPolicy)
    space = policy.lookahead.space
    cost = space.cost

    def lying(true: np.ndarray) -> np.ndarray:
        return true * 10.0 ** rng.uniform(-1.0, 1.0, true.shape)

    cost = replace(
        cost,
        transfer_s=lying(cost.transfer_s),
        expert_s=lying(cost.expert_s),
        waiting_s=rng.exponential(0.01, cost.waiting_s.shape),
    )
    space = ActionSpace(
        **{item.name: getattr(space, item.name) for item in fields(space) if item.name != "cost"},
        cost=cost,
    )
    tables = policy.tables and replace(policy.tables, space=space, _tables={})
    lookahead = replace(policy.lookahead, space=space, _menus={}, _values={})
    return replace(policy, lookahead=lookahead, tables=tables, _by_weight={})


@settings(deadline=None, max_examples=120)
@given(worlds())
def test_the_quality_budget_is_never_exceeded_at_any_prefix(world) -> None:
    """Property 2 and (c.10): at every prefix of a sequence, spent <= credited."""
    driver, _, budget, _ = world
    even = driver.engine.settings.readings.budget_rule is BudgetRule.EVEN
    spent: dict[int, float] = {}
    for count, trajectory in _by_sequence(driver):
        assert trajectory.ledger is not None
        loss = true_loss(trajectory, driver.engine.profile, driver.engine.settings)
        loss += exit_charge(trajectory, driver)
        assert loss == pytest.approx(trajectory.ledger.loss, abs=ROUNDING)
        spent[trajectory.sequence] = spent.get(trajectory.sequence, 0.0) + loss
        assert spent[trajectory.sequence] <= count * budget + ROUNDING
        if even:
            assert loss <= budget + ROUNDING


@settings(deadline=None, max_examples=120)
@given(worlds())
def test_exits_only_happen_on_sufficient_confidence_after_an_executed_layer(world) -> None:
    """Property 3, (c.5), (c.6), (c.9)."""
    driver, _, _, confidence = world
    layers = driver.engine.cost.layer_count
    for trajectory in driver.trajectories:
        assert [visit.layer for visit in trajectory.visits] == list(range(trajectory.exit_layer))
        assert 1 <= trajectory.exit_layer <= layers
        if trajectory.exit_layer < layers:
            assert driver.engine.settings.levers.exit
            last = trajectory.visits[-1]
            assert (last.slot_expert >= 0).any()
            assert last.confidence >= (driver.engine.settings.draft_confidence or confidence)
            assert confidence <= 1.0 or last.confidence >= confidence


@settings(deadline=None, max_examples=120)
@given(worlds())
def test_every_slot_runs_on_a_host_by_its_target_or_a_feasible_substitute(world) -> None:
    """(c.7), (c.8): one (server, expert) per slot that runs, deployed there and feasible; or the
    target's copy, which is where the token is."""
    driver, plan, _, _ = world
    feasible = driver.engine.profile.feasible
    bits = np.zeros_like(plan.hosts) if plan.stand_in_bits is None else plan.stand_in_bits
    copy, experts = numbered(bits), feasible.shape[1]
    for trajectory in driver.trajectories:
        for visit in trajectory.visits + trajectory.after:
            for target, expert, server in zip(
                visit.targets, visit.slot_expert, visit.slot_server, strict=True
            ):
                if expert < 0:
                    continue
                if expert >= experts:
                    assert driver.engine.settings.levers.stand_in
                    assert server == visit.server
                    assert expert == copy[server, visit.layer, target]
                    continue
                assert plan.hosts[server, visit.layer, expert]
                assert expert == target or feasible[visit.layer, target, expert]


@settings(deadline=None, max_examples=120)
@given(worlds())
def test_tokens_are_where_the_accounting_says(world) -> None:
    """(12), (13) under `migrate`; the route otherwise."""
    driver, _, _, _ = world
    engine = driver.engine
    for trajectory in driver.trajectories:
        access = driver.state.accounts[trajectory.sequence].access
        expected = access
        for visit in trajectory.visits + trajectory.after:
            if engine.cost.accounting is not Accounting.MIGRATE:
                expected = engine.routes[access, visit.layer]
            assert visit.server == expected
            if (visit.slot_expert >= 0).any():
                expected = visit.slot_server[0]


@settings(deadline=None, max_examples=120)
@given(worlds())
def test_tokens_that_exit_whole_go_on_through_all_layers_at_no_loss(world) -> None:
    driver, _, _, _ = world
    engine = driver.engine
    whole, layers = engine.settings.readings.exit_state is ExitState.WHOLE, engine.cost.layer_count
    for trajectory in driver.trajectories:
        left = range(trajectory.exit_layer, layers)
        assert [visit.layer for visit in trajectory.after] == (list(left) if whole else [])
        behind = replace(trajectory, visits=trajectory.after)
        assert true_loss(behind, engine.profile, engine.settings) <= ROUNDING
        assert trajectory.ledger is not None
        assert trajectory.ledger.tokens == 1
        if trajectory.after:
            assert trajectory.ledger.audits == 1
            if engine.cost.accounting is not Accounting.MIGRATE:
                assert trajectory.ledger.hops >= messages_of(trajectory.after, engine)


def messages_of(visits: list[Visit], engine: Engine) -> int:
    """Vectors that at least have to cross a link: to each other server of a slot."""
    return sum(
        len({*visit.slot_server[visit.slot_expert >= 0]} - {visit.server}) for visit in visits
    )


@settings(deadline=None, max_examples=60)
@given(worlds())
def test_every_token_layer_is_accounted_in_exactly_one_kind(world) -> None:
    driver, _, _, _ = world
    top_k = driver.engine.profile.top_k
    for trajectory in driver.trajectories:
        ledger = trajectory.ledger
        assert ledger is not None
        assert (ledger.kinds.sum(1) == 1).all()
        layers = ledger.kinds.shape[0]
        # What was wrong was waited for, down to the last layer.
        waited_for = layers if trajectory.was_wrong else trajectory.exit_layer
        assert ledger.kinds[:, Kind.EXITED].sum() == layers - waited_for
        skipped = ledger.kinds[:, Kind.SKIPPED].sum()
        slots = ledger.slots_run + ledger.slots_dropped
        assert slots == top_k * (waited_for - skipped)
        assert (np.diag(ledger.messages) == 0).all()
        assert (ledger.messages >= 0).all()


@settings(deadline=None, max_examples=60)
@given(worlds())
def test_replaying_the_events_gives_the_same_commands(world) -> None:
    driver, _, _, _ = world
    state = driver.engine.start()
    for event, commands in driver.log:
        state, again = driver.engine.step(state, event)
        assert repr(again) == repr(commands)


@settings(deadline=None, max_examples=60)
@given(worlds())
def test_nothing_is_left_in_flight(world) -> None:
    driver, _, _, _ = world
    assert not driver.state.waves
    assert all(trajectory.ledger is not None for trajectory in driver.trajectories)


@settings(deadline=None, max_examples=40)
@given(models_with_profiles(max_layers=4), clusters(max_servers=4), st.integers(0, 2**32 - 1))
def test_without_budget_and_exits_every_token_runs_exactly(modelled, cluster, seed) -> None:
    model, profile = modelled
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, model, cluster)
    policy = replace(PRESETS["trimmoe"](), budget=0.0)
    driver = SyntheticDriver(engine=make_engine(plan, profile, model, policy), rng=rng)
    driver.open(0, access=0, budget=0.0, confidence=2.0)
    for trajectory in [driver.decode((0,))[0] for _ in range(3)]:
        assert trajectory.exit_layer == model.layer_count
        for visit in trajectory.visits:
            assert (visit.slot_expert == visit.targets).all()


@pytest.mark.parametrize("field", ["loss_weight", "exit_raise"])
def test_feedback_moves_and_stays_in_its_range(field: str) -> None:
    model, profile = _example_world(3)
    rng = np.random.default_rng(5)
    cluster = _example_cluster(4)
    plan = random_plan(rng, model, cluster, density=0.0)
    policy: PolicySettings = PRESETS["final-exits"]().but(
        window_tokens=2, audit_share=0.5, exit_risk=0.3
    )
    driver = SyntheticDriver(engine=make_engine(plan, profile, model, policy), rng=rng)
    driver.open(0, access=0, budget=0.02, confidence=0.9)
    seen = []
    for _ in range(200):
        driver.decode((0,))
        feedback = driver.state.feedback
        seen.append(feedback.exit_raise if field == "exit_raise" else feedback.route_weights[0])
    assert len(set(seen)) > 3
    low = policy.readings.loss_weight_range[0] if field == "loss_weight" else 0.0
    assert low <= min(seen)
    assert max(seen) <= 1.0


def test_a_token_only_exits_where_going_on_would_cost_more_than_the_exit_is_charged() -> None:
    """Every expert everywhere, a route that crosses one slow link after its third layer: an exit
    before it saves the way there and back, behind it next to nothing."""
    model, profile = _example_world(3)
    bounds = np.full(profile.exit_grid.size, 0.05)
    profile = replace(profile, exit_error_upper=bounds, exit_echo=np.zeros(2))
    policy = PRESETS["final-exits"]().but(budget=0.02, exit_risk=None, audit_share=0.0)
    left: dict[bool, set[int]] = {}
    for weighed in (True, False):
        rng = np.random.default_rng(5)
        plan = random_plan(rng, model, _example_cluster(2), density=1.0)
        slow = replace(plan.cluster, delay_s=np.where(np.eye(2) > 0, 0.0, 10.0))
        plan = replace(plan, cluster=slow, routes=np.tile([0, 0, 0, 1, 1, 1], (2, 1)))
        settled = policy.but(exits_weighed=weighed)
        driver = SyntheticDriver(engine=make_engine(plan, profile, model, settled), rng=rng)
        driver.open(0, access=0, budget=1.0, confidence=0.9)
        left[weighed] = {driver.decode((0,))[0].exit_layer for _ in range(60)}
    assert left[True] <= {1, 2, model.layer_count}
    assert left[True] & {1, 2}
    assert left[False] & {3, 4, 5}


def exit_charge(trajectory: Trajectory, driver: SyntheticDriver) -> float:
    """What an exit was charged: the calibrated bound of a threshold that its confidence met; below
    all of them nothing is known, and it is the largest bound, of itself at least."""
    settings, profile = driver.engine.settings, driver.engine.profile
    assert trajectory.ledger is not None
    readings = settings.readings
    if trajectory.exit_layer == driver.engine.cost.layer_count or not readings.exits_charged:
        return 0.0
    if settings.drafts:
        return 0.0
    charged = trajectory.ledger.loss - true_loss(trajectory, profile, settings)
    met = profile.exit_grid <= trajectory.visits[-1].confidence
    bounds = profile.exit_bound(readings.exit_state)
    known = [max(1.0, *bounds), *bounds[met]]
    assert min(abs(charged - each) for each in known) < ROUNDING
    return charged


def true_loss(trajectory: Trajectory, profile: Profile, policy: PolicySettings) -> float:
    """The proxy degradation (17) of what really ran, recomputed slot by slot."""
    readings = policy.readings
    profile = profile.averaged() if readings.mean_losses else profile
    profile = profile.echoing() if readings.echoes_charged else profile
    skip, drop, substitution = profile.skip, profile.drop, profile.substitution_loss
    if not readings.steadiness:
        share = profile.class_share
        skip, drop = skip.pooled(share), drop.pooled(share)
        substitution = (share[:, :, None, None, None] * substitution).sum(1, keepdims=True)
    if not readings.slot_ranks:
        substitution = profile.slots_alike(substitution)
    loss = 0.0
    for visit in trajectory.visits:
        at = visit.layer, visit.steadiness if readings.steadiness else 0
        if (visit.slot_expert < 0).all():
            gate = float(visit.masses[0])
            loss += _curve_at(skip, at, gate if readings.target_importance else visit.importance)
            continue
        slots = zip(visit.targets, visit.slot_expert, visit.masses, strict=True)
        for slot, (target, expert, mass) in enumerate(slots):
            if readings.one_expert and slot > 0:
                assert expert < 0, "(10): one expert per layer"
            elif expert < 0:
                loss += _curve_at(drop, at, mass)
            elif expert >= profile.expert_count:
                rung = profile.rungs[expert // profile.expert_count - 1].curves
                more = _fewer_flip_more_by_each(rung, profile, policy.budget)
                rung = rung if readings.steadiness else rung.pooled(profile.class_share)
                loss += max(more * _curve_at(rung, at, mass), NOT_FREE)
            elif expert != target:
                rank = min(slot, substitution.shape[2] - 1)
                loss += float(substitution[at][rank, target, expert])
    return loss


def _fewer_flip_more_by_each(rung: LossCurves, profile: Profile, budget: float) -> float:
    """How many times what a copy flips among those in half of all slots it flips where so few run
    that all together flip the budget, see `Rung.within`."""
    in_half = 0.0
    for layer, shares in enumerate(profile.class_share):
        for steadiness, share in enumerate(shares):
            in_half += profile.top_k / 2 * share * rung.upper[layer, steadiness].mean()
    return max(1.0, in_half / budget) if budget > 0 else 1.0


def _curve_at(curves: LossCurves, at: tuple[int, int], mass: float) -> float:
    """The bound of the first bin whose upper edge is not below the mass."""
    for edge, bound in zip(curves.edges[at], curves.upper[at], strict=True):
        if mass <= edge:
            return float(bound)
    return float(curves.upper[at][-1])


def _by_sequence(driver: SyntheticDriver):
    counts: dict[int, int] = {}
    for trajectory in driver.trajectories:
        counts[trajectory.sequence] = counts.get(trajectory.sequence, 0) + 1
        yield counts[trajectory.sequence], trajectory


def _example_world(seed: int):
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng, layers=6, experts=6, top_k=2)
    return model, random_profile(rng, model)


def _example_cluster(servers: int):
    return random_cluster(np.random.default_rng(9), servers=servers)
