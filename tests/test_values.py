"""Value tables equal the literal recursion, and never promise what a budget does not hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import clusters, models_with_profiles
from synthetic import random_plan
from trimmoe.core.loss_curves import LossCurves
from trimmoe.core.profile import Profile
from trimmoe.cost.actions import Levers
from trimmoe.cost.lookahead import LookAhead, Place, TokenKind
from trimmoe.cost.model import Accounting
from trimmoe.cost.values import allowance_levels, build_tables
from trimmoe.engine.step import Engine
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.base import Decision, Observation
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.trim import TrimPolicy

UNIT = 2.0**-7
"""Losses and levels are multiples of this power of two, so that budget arithmetic is exact."""
LEVELS = UNIT * np.arange(41, dtype=np.float64)


def in_units(profile: Profile) -> Profile:
    """The profile with every loss rounded to a multiple of UNIT, echoes up: some are to be left."""

    def rounded(losses: np.ndarray) -> np.ndarray:
        return np.round(losses / UNIT) * UNIT

    def curves(old: LossCurves) -> LossCurves:
        return replace(old, upper=rounded(old.upper))

    return replace(
        profile,
        skip=curves(profile.skip),
        drop=curves(profile.drop),
        substitution_loss=rounded(profile.substitution_loss),
        change_echo=np.ceil(profile.change_echo / UNIT) * UNIT,
        rungs=tuple(replace(rung, curves=curves(rung.curves)) for rung in profile.rungs),
    )


@st.composite
def engines(draw: st.DrawFn, *, presets: tuple[str, ...]) -> tuple[Engine, np.random.Generator]:
    """An engine on a small random world whose losses are multiples of UNIT."""
    model, profile = draw(models_with_profiles(max_layers=4, max_experts=4))
    cluster = draw(clusters(max_servers=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    policy = PRESETS[draw(st.sampled_from(presets))]().but(
        budget=draw(st.sampled_from([0.02, 0.1])),
        horizon=None,
        exit_risk=None,
        hazards=draw(st.booleans()),
        steadiness=draw(st.booleans()),
        levers=Levers(skip_needs_transmission=draw(st.booleans()), stand_in=draw(st.booleans())),
    )
    profile = in_units(profile)
    if not policy.readings.steadiness:  # pooling would break the units
        profile = replace(profile, class_share=np.eye(profile.class_count)[[0] * model.layer_count])
    plan = random_plan(rng, model, cluster, copied=0.5)
    return make_engine(plan, profile, model, policy), rng


def parts(engine: Engine) -> tuple[TrimPolicy, LookAhead]:
    policy = engine.policy
    assert isinstance(policy, TrimPolicy)
    assert policy.tables is not None
    return policy, replace(policy.lookahead, allowance_step=None, _values={})


@settings(max_examples=50)
@given(engines(presets=("trimmoe", "paper")))
def test_tables_equal_the_literal_recursion_to_any_depth(world) -> None:
    """H of (40) counts the layer that is decided, so that H - 1 follow it."""
    engine, rng = world
    policy, look = parts(engine)
    layers, servers = engine.cost.layer_count, engine.cost.server_count
    horizon = None if rng.random() < 0.5 else int(rng.integers(1, layers + 1))
    tables = build_tables(
        look.space,
        look.profile,
        look.weights,
        look.exits,
        policy.routes,
        LEVELS,
        horizon=horizon,
    )
    ahead = layers if horizon is None else horizon - 1
    migrates = engine.cost.accounting is Accounting.MIGRATE
    for _ in range(6):
        layer, where = int(rng.integers(layers)), int(rng.integers(servers))
        level = int(rng.integers(21))
        kind = TokenKind(
            steadiness=int(rng.integers(look.space.class_count)),
            exit_row=int(rng.integers(look.exits.goes_on.shape[0])),
        )
        route = None if migrates else tuple(policy.routes[where].tolist())
        literal = look.to_go(layer, Place(route=route, server=where), LEVELS[level], ahead, kind)
        place = tables.place_of[layer, where]
        tabled = tables.after[layer][place, kind.steadiness, :, kind.exit_row, level]
        np.testing.assert_allclose(tabled, literal, rtol=1e-9, atol=1e-12)


@settings(max_examples=50)
@given(engines(presets=("trimmoe", "paper")))
def test_the_compiled_choice_is_that_of_the_literal_recursion(world) -> None:
    """Same cost and same loss at any horizon; ties may be broken by another equal action."""
    engine, rng = world
    policy, look = parts(engine)
    assert policy.tables is not None
    layers = engine.cost.layer_count
    horizon = None if rng.random() < 0.5 else int(rng.integers(1, layers + 1))
    bank = replace(policy.tables, levels=LEVELS, horizon=horizon, _tables={})
    quick = replace(policy, tables=bank, horizon=horizon)
    slow = replace(policy, tables=None, horizon=horizon or layers, lookahead=look, _by_weight={})
    seen = random_observation(rng, engine)
    mine, theirs = quick.decide(seen), slow.decide(seen)
    weights = look.weights
    assert (mine.loss <= seen.allowance).all()
    for row in range(seen.experts.shape[0]):
        ours = total_cost(slow, seen, mine, row)
        assert ours == pytest.approx(total_cost(slow, seen, theirs, row), rel=1e-9, abs=1e-12)
    assert weights.budget == engine.settings.budget


def random_observation(rng: np.random.Generator, engine: Engine, count: int = 5) -> Observation:
    """Tokens with typical masses, importances and allowances, at a random layer."""
    profile = engine.profile
    layer = int(rng.integers(profile.layer_count))
    access = rng.integers(engine.cost.server_count, size=count)
    migrates = engine.cost.accounting is Accounting.MIGRATE
    masses = np.sort(rng.dirichlet(np.ones(profile.top_k), count), axis=1)[:, ::-1] * 0.8
    experts = np.stack(
        [rng.permutation(profile.expert_count)[: profile.top_k] for _ in range(count)]
    )
    return Observation(
        layer=layer,
        route=access,
        server=access if migrates else engine.routes[access, layer],
        experts=experts,
        masses=masses,
        importance=masses.sum(1),
        steadiness=rng.integers(profile.class_count, size=count),
        allowance=LEVELS[rng.integers(20, size=count)],
        exit_at=rng.integers(1, profile.layer_count + 1, size=count),
        loss_weight=np.full(count, 0.5),
    )


def total_cost(policy: TrimPolicy, seen: Observation, decision: Decision, row: int) -> float:
    """Step cost plus literal cost to go of what was decided for one token."""
    look = policy._lookahead(0.5)
    steadiness = min(int(seen.steadiness[row]), look.space.class_count - 1)
    step = look.weights.step_cost(decision.delay_s[[row]], decision.loss[[row]])[0]
    exit_row = int(look.exits.rows(seen.exit_at)[row])
    skipped = (decision.slot_expert[row] < 0).all()
    goes_on = 1.0 if skipped else look.exits.goes_on[exit_row, seen.layer]
    place = policy._place(seen, row).moved_to(int(decision.destination[row]))
    ahead = look.to_go(
        seen.layer,
        place,
        max(seen.allowance[row] - decision.loss[row], 0.0),
        look.space.cost.layer_count,
        TokenKind(steadiness=steadiness, exit_row=exit_row),
    )
    pattern = policy.patterns.lookup(seen.layer, seen.experts[[row]])[0]
    return float(step + goes_on * ahead[pattern])


@settings(max_examples=30)
@given(engines(presets=("trimmoe",)), st.integers(1, 6))
def test_coarser_levels_only_make_tables_more_cautious(world, per_budget) -> None:
    """Without the gate (35), which lets a larger allowance forbid a skip."""
    engine, rng = world
    policy, look = parts(engine)
    space = replace(look.space, levers=replace(look.space.levers, skip_needs_transmission=False))
    coarse = allowance_levels(engine.settings.budget, per_budget)
    shared = (look.profile, look.weights, look.exits, policy.routes)
    cautious = build_tables(space, *shared, coarse)
    exact = build_tables(space, *shared, UNIT * np.arange(200, dtype=np.float64))
    layer = int(rng.integers(engine.cost.layer_count))
    for level, allowance in enumerate(coarse):
        fine = int(exact.level_of(np.array([allowance]))[0])
        below = cautious.after[layer][..., level] - exact.after[layer][..., fine]
        # Rounded down to a unit, the exact table may lose up to what the coarse one has above it.
        if abs(allowance - UNIT * fine) < 1e-12:
            assert (below >= -1e-9).all()


def test_a_bank_that_may_not_compute_takes_the_nearest_weight() -> None:
    from factories import random_cluster, random_model_spec, random_profile

    rng = np.random.default_rng(0)
    model = random_model_spec(rng)
    profile = random_profile(rng, model)
    plan = random_plan(rng, model, random_cluster(rng, servers=3))
    policy, _ = parts(make_engine(plan, profile, model, PRESETS["trimmoe"]()))
    bank = policy.tables
    assert bank is not None
    bank.prepare([0.3, 0.8])
    bank.on_demand = False
    assert bank.of(0.35).weights.loss_weight == 0.3
    assert bank.of(0.7).weights.loss_weight == 0.8
