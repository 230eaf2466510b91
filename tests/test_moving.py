"""When a cluster moves to another plan: for what lasts and is worth it, never for noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import random_cluster, random_model_spec
from trimmoe.cost.model import cost_model
from trimmoe.placement.moving import Look, MoveRules, Standing, has_drifted

RULES = MoveRules()
BETTER = Look(now_s=0.1, other_s=0.05, moving_s=30.0)
WORSE = replace(BETTER, other_s=0.11)


def _moves_after(looks: list[Look | None]) -> list[bool]:
    standing, found = Standing(), []
    for look in looks:
        standing = standing.after(look, RULES)
        found.append(standing.moves(RULES))
    return found


def test_what_lasts_and_pays_is_moved_to_on_the_third_look() -> None:
    assert _moves_after([BETTER, BETTER, BETTER]) == [False, False, True]


@pytest.mark.parametrize("between", [None, WORSE])
def test_two_looks_and_one_that_says_otherwise_move_nothing(between: Look | None) -> None:
    assert not any(_moves_after([BETTER, BETTER, between, BETTER, BETTER]))


@pytest.mark.parametrize(
    "look",
    [
        replace(BETTER, other_s=0.095),
        replace(BETTER, spread=0.6),
        replace(BETTER, moving_s=0.51 * RULES.horizon_s),
        replace(BETTER, other_s=float("nan")),
        replace(BETTER, now_s=float("inf")),
        replace(BETTER, other_s=0.0),
    ],
    ids=["little", "noise", "dear", "nonsense", "endless", "free"],
)
def test_what_is_not_worth_it_is_not_moved_to(look: Look) -> None:
    assert not look.pays(RULES)


@given(st.lists(st.floats(0.9, 1.1), min_size=1, max_size=40))
def test_noise_never_moves_it(noise: list[float]) -> None:
    """Two plans that are equal but for a tenth of noise either way on what one of them is said to
    take: within the spread that the figures have."""
    looks: list[Look | None] = [
        Look(now_s=0.1, other_s=0.1 * each, moving_s=0.0, spread=0.1001) for each in noise
    ]
    assert not any(_moves_after(looks))


def test_nobody_moves_back_and_forth() -> None:
    """After a move, figures that come back halfway leave the cluster where it is."""
    halfway = Look(now_s=0.0775, other_s=0.075, moving_s=30.0)
    assert BETTER.pays(RULES)
    assert not any(_moves_after([halfway] * 10))


def test_drift_is_a_figure_that_differs_by_more_than_noise() -> None:
    rng = np.random.default_rng(3)
    model = random_model_spec(rng, layers=3, experts=4, top_k=2)
    cluster = random_cluster(rng, servers=3)
    before = cost_model(model, cluster)

    def seen(factor: float) -> bool:
        speeds = cluster.flops_per_s.copy()
        speeds[1] *= factor
        after = cost_model(model, replace(cluster, flops_per_s=speeds))
        return has_drifted(before, after, RULES)

    assert not seen(1.0)
    assert not seen(1.1)
    assert seen(0.5)
    assert seen(2.0)
    slow = replace(cluster, delay_s=cluster.delay_s * 4)
    assert has_drifted(before, cost_model(model, slow), RULES)
