"""The experiments' arithmetic, on small worlds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trimmoe.core.ledger import Ledger
from trimmoe.core.plan import load_plan
from trimmoe.evaluate.teacher import Score
from trimmoe.experiments.method_engines import make_engine
from trimmoe.experiments.random_clusters import paper_cluster
from trimmoe.experiments.readings import Point, delay_at, joint_inflation
from trimmoe.experiments.regret import (
    RegretSettings,
    Tokens,
    measure_cluster,
    policies,
    regret_json,
)
from trimmoe.experiments.variants import VARIANTS, base_policy, find_variants
from trimmoe.policy.build import inflated
from trimmoe.simulator.replay import replay
from worlds import small_world


def scored(*, tokens: int, flips: int, loss: float = 0.0, delay_s: float = 0.0) -> Score:
    ledger = replace(Ledger.empty(2, 2, 8), tokens=tokens, loss=loss, delay_s=delay_s)
    return Score(ledger=ledger, tokens=tokens, flips=flips, nll=1.0)


def test_inflation_is_the_bound_of_the_joint_flip_rate_over_what_was_charged() -> None:
    # 20 flips of 1000: the one-sided 95 % Clopper-Pearson bound is 2.89 %.
    assert joint_inflation(scored(tokens=1000, flips=20, loss=10.0)) == pytest.approx(
        2.89, abs=0.01
    )
    assert joint_inflation(scored(tokens=1000, flips=0, loss=100.0)) == 1.0
    assert joint_inflation(scored(tokens=1000, flips=5)) == 1.0


def test_delays_are_compared_at_equal_flips_from_exact_execution_on() -> None:
    points = [
        Point(variant="v", budget=0.02, score=scored(tokens=100, flips=2, delay_s=0.8)),
        Point(variant="v", budget=0.04, score=scored(tokens=100, flips=4, delay_s=0.5)),
    ]
    assert delay_at(points, 0.02, exact_ms=10.0) == pytest.approx(8.0)
    assert delay_at(points, 0.01, exact_ms=10.0) == pytest.approx(9.0)
    assert delay_at(points, 0.03, exact_ms=10.0) == pytest.approx(6.5)
    assert delay_at(points, 0.2, exact_ms=10.0) == pytest.approx(5.0)


def test_a_slower_point_with_more_flips_does_not_count_against_a_variant() -> None:
    worse = Point(variant="v", budget=0.1, score=scored(tokens=100, flips=10, delay_s=2.0))
    assert delay_at([worse], 0.1, exact_ms=10.0) == pytest.approx(10.0)


def test_every_variant_changes_something_and_only_the_default_nothing() -> None:
    base = base_policy(budget=0.02, confidence=0.9)
    for variant in VARIANTS:
        assert (variant.change(base) == base) == (variant.name == "default")
        assert variant.change(base).budget == base.budget
    assert [variant.name for variant in find_variants(["theta", "even"])] == ["theta", "even"]


def test_random_clusters_stay_in_the_papers_ranges() -> None:
    for seed in range(20):
        cluster = paper_cluster(seed)
        off = ~np.eye(10, dtype=bool)
        assert ((cluster.delay_s[off] >= 0.3e-3) & (cluster.delay_s[off] <= 22e-3)).all()
        gbps = cluster.bandwidth_bytes_per_s[off] * 8 / 1e9
        assert ((gbps >= 0.8) & (gbps <= 10)).all()
        np.testing.assert_array_equal(cluster.delay_s, cluster.delay_s.T)
        assert cluster.access_share.sum() == pytest.approx(1.0)


def test_regret_is_never_negative_and_the_gap_is_closed_by_no_more_than_all_of_it() -> None:
    world = small_world(2, servers=3, sequences=4, length=8)
    tokens = Tokens(profile=world.profile, model=world.model, trace=world.trace)
    settings = RegretSettings(budget=0.2)
    outcome = measure_cluster(world.plan, tokens, settings, seed=0)
    content = regret_json(settings, [outcome], {})
    assert set(outcome.delay_s) == set(policies(settings))
    for name, regrets in content["regret"].items():
        assert regrets[0] >= -1e-9, name
        assert content["mean_captured"][name] <= 1 + 1e-9
    assert outcome.spent["exact"] == 0.0
    assert content["regret"]["ours, full depth"] <= content["regret"]["exact"]


def test_a_plan_remembers_the_inflation_measured_for_the_nearest_budget(tmp_path) -> None:
    plan = small_world(1).plan
    assert plan.inflation(0.02) == 1.0
    tuned = plan.with_inflation({0.01: 1.5, 0.03: 2.0})
    tuned.save(tmp_path / "plan.trim")
    loaded = load_plan(tmp_path / "plan.trim")
    assert (loaded.inflation(0.012), loaded.inflation(0.5), loaded.inflation(0.0)) == (
        1.5,
        2.0,
        1.0,
    )


def test_inflated_losses_are_charged_and_held_to_the_same_budget() -> None:
    world = small_world(4)
    access = np.zeros(3, dtype=int)
    spent = {}
    for gamma in (1.0, 3.0):
        policy = replace(base_policy(budget=0.2, confidence=0.9), inflation=gamma)
        engine = make_engine(world.plan, world.profile, world.model, policy)
        ledgers = replay(engine, world.trace, access, budget=0.2, confidence=0.9)
        spent[gamma] = sum(ledger.loss for ledger in ledgers) / len(ledgers)
        assert spent[gamma] <= 0.2
        assert engine.settings.inflation == gamma


def test_a_policy_takes_the_plans_inflation_unless_it_names_its_own_or_wants_none() -> None:
    plan = small_world(1).plan.with_inflation({0.02: 1.5})
    ours = base_policy(budget=0.02, confidence=0.9)
    assert inflated(plan, ours).inflation == 1.5
    assert inflated(plan, replace(ours, inflation=3.0)).inflation == 3.0
    assert inflated(plan, ours.but(inflate=False)).inflation == 1.0
