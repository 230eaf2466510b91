"""What admits a skip at run time, by hand: the importance threshold (24) and Gamma > 0 (35)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from byhand import (
    MS,
    PLAIN,
    UNIT,
    HandWorld,
    curves,
    decided,
    hosting,
    one_bin,
    skips,
    substitutes,
    world,
)
from trimmoe.cost.actions import Levers
from trimmoe.cost.model import Accounting
from trimmoe.policy.settings import PolicySettings

PAIR_MS = [[0, 10], [10, 0]]
GATED = PLAIN.but(importance_gate=True)
LITERAL = {"literal_lookahead": True}
ACCOUNTINGS = [Accounting.PINNED, Accounting.MIGRATE]


def far_away(edges: Sequence[float], units: Sequence[float]) -> HandWorld:
    """Two layers whose experts are all on server 1. Importances are evenly spread over [0, 1], so
    that a hundredth of tokens more has one at most 0.01 larger."""
    skip = curves(edges, [units, units])
    return world(hosting([[], []], [[0, 1], [0, 1]]), PAIR_MS, skip=skip)


def theta_world() -> HandWorld:
    """Skips cost 2 units up to an importance of 0.25, 6 up to 0.5, all 128 above.

    A tolerance of 2 units is theta = 0.25. 26 % of the tokens are within it (rounded up to the next
    percentile), so that in two layers 2 x 0.26 are skipped and 2 x 0.52 = 1.04 units lost. One of 6
    is theta = 0.5 and loses 6 x 2 x 0.51 = 6.12: too much for a budget of 6 units, not for 8.
    """
    return far_away([0.25, 0.5, 1.0], [2, 6, 128])


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
@pytest.mark.parametrize("looking", [{}, LITERAL])
@pytest.mark.parametrize(
    ("budget_units", "importance", "skipped"),
    [(6, 0.25, True), (6, 0.26, False), (8, 0.5, True), (8, 0.51, False)],
)
def test_a_layer_above_its_threshold_is_not_skipped_however_cheap_that_is(
    accounting: Accounting,
    looking: dict,
    budget_units: float,
    importance: float,
    skipped: bool,
) -> None:
    """(24), (25) at run time. The token has 1024 units to spend and the layer is far away."""
    settings = replace(GATED, accounting=accounting, budget=budget_units * UNIT, **looking)
    token = {"masses": [importance], "units": 1024.0}
    assert skips(decided(theta_world().policy(settings), [0], **token)) == skipped


def test_without_the_gate_the_budget_and_the_price_decide_alone() -> None:
    """At omega_D = 1/2 a step costs 1/2 21 = 10.5 there and back, a skip of 6 units 1/2 6/6 and of
    128 units 1/2 128/6 = 10.7."""
    policy = theta_world().policy(GATED.but(importance_gate=False, budget=6 * UNIT))
    for importance, skipped in ((0.25, True), (0.26, True), (0.5, True), (0.51, False)):
        token = {"masses": [importance], "units": 1024.0}
        assert skips(decided(policy, [0], **token)) == skipped


@pytest.mark.parametrize(("mass", "dropped"), [(0.125, True), (0.13, False)])
def test_a_slot_above_its_threshold_is_not_dropped(mass: float, dropped: bool) -> None:
    """With 6 units the tolerance is just below 6, at which point a skip would be admitted up to
    0.5, see `theta_world`; a drop costs 4 up to a mass of 0.125 and 7 above, which is affordable
    but beyond it. Its layer, of importance 0.625 and more, is not skipped."""
    unit_curves: dict[str, Any] = {
        "skip": curves([0.25, 0.5, 1.0], [[2, 6, 128]] * 2),
        "drop": curves([0.125, 1.0], [[4, 7]] * 2),
    }
    made = world(hosting([[0], [0]], [[1], [1]]), PAIR_MS, top_k=2, **unit_curves)
    settings = replace(GATED, budget=6 * UNIT)
    decision = decided(made.policy(settings), [0, 1], masses=[0.5, mass], units=1024.0)
    assert decision.slot_expert.tolist() == [[0, -1 if dropped else 1]]
    assert decision.delay_s.tolist() == pytest.approx([(1 if dropped else 21) * MS])
    ungated = made.policy(settings.but(importance_gate=False))
    assert decided(ungated, [0, 1], masses=[0.5, mass], units=1024.0).slot_expert[0, 1] == -1


@pytest.mark.parametrize(("importance", "delay_s"), [(0.5, 0.0), (0.5001, np.inf)])
def test_there_is_no_skip_above_theta_among_the_actions(importance: float, delay_s: float) -> None:
    space = far_away([1.0], [2]).policy(PLAIN).lookahead.space
    space = replace(space, theta=np.array([0.5, 1.0]))
    menu = space.candidates(
        0, 0, 0,
        experts=np.array([[0]]),
        masses=np.array([[importance]]),
        importance=np.array([importance]),
        steadiness=np.array([0]),
    )  # fmt: skip
    assert menu.delay_s[menu.skips].tolist() == [delay_s]


def stood_in() -> HandWorld:
    """Expert 0 is 10 ms away, expert 1 is here and stands in for it at 6 units; a skip costs 2."""
    return world(
        hosting([[1]], [[0]]),
        PAIR_MS,
        skip=curves([1.0], [[2]]),
        **substitutes(1, [[0, 6], [6, 0]]),
    )


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
@pytest.mark.parametrize("looking", [{}, LITERAL])
@pytest.mark.parametrize(
    ("units", "expert", "loss_units"),
    [(8, 1, 6), (6, 1, 6), (5, -1, 2), (1, 0, 0)],
)
def test_no_layer_is_skipped_that_an_affordable_expert_here_can_serve(
    accounting: Accounting, looking: dict, units: float, expert: int, loss_units: float
) -> None:
    """(35): a skip, of 1/2 2/8 = 0.125, beats the substitute, of 1/2 1 + 1/2 6/8 = 0.875, but is
    suppressed while that is affordable: Gamma = 0. It is admitted once it is not, and with 1 unit
    neither is: the target runs where it is."""
    policy = stood_in().policy(replace(PLAIN, accounting=accounting, **looking))
    decision = decided(policy, [0], units=units)
    assert decision.slot_expert.tolist() == [[expert]]
    assert decision.loss.tolist() == [loss_units * UNIT]


@pytest.mark.parametrize(
    ("levers", "expert"),
    [
        (Levers(skip_needs_transmission=False), -1),
        # What is not feasible for this policy is no local action either.
        (Levers(substitute=False), -1),
        (Levers(skip=False), 1),
    ],
)
def test_it_is_skipped_where_nothing_says_no(levers: Levers, expert: int) -> None:
    policy = stood_in().policy(replace(PLAIN, levers=levers))
    assert decided(policy, [0]).slot_expert.tolist() == [[expert]]


@pytest.mark.parametrize("looking", [{}, LITERAL])
def test_a_target_that_is_here_is_never_skipped(looking: dict) -> None:
    """Even with nothing to spend and a skip that loses nothing."""
    made = world(hosting([[0, 1]], [[]]), PAIR_MS, skip=curves([1.0], [[0]]))
    settings: PolicySettings = replace(PLAIN, **looking)
    assert not skips(decided(made.policy(settings), [0], units=0.0))


@pytest.mark.parametrize(
    ("route", "local", "skipped"),
    [
        ([0, 0], True, True),
        ([0, 0], False, False),
        # It leaves its server, to a later or to an earlier one.
        ([0, 1], False, True),
        ([1, 0], False, True),
    ],
)
def test_what_runs_where_a_token_stays_can_be_left_without_another_action(
    route: list[int], local: bool, skipped: bool
) -> None:
    """All experts are everywhere, and skips need no transmission: one of 2 units, 1/2 2/8 = 0.125,
    beats 1 ms of an expert, 1/2 1 = 0.5; on the way to another server both take 10 ms more."""
    levers = Levers(local=local, skip_needs_transmission=False, exit=False)
    made = world(hosting(*[[[0, 1]] * 2] * 2), PAIR_MS, routes=[route, route], skip=one_bin([2, 2]))
    policy = made.policy(replace(PLAIN, levers=levers))
    decision = decided(policy, [0], server=route[0])
    assert skips(decision) == skipped


def test_an_activated_expert_stands_in_for_no_other() -> None:
    """Of expert 0, 10 ms away, expert 1 would lose 2 units and expert 2 loses 4; expert 1 runs in
    its own slot. The way costs 1/2 21, expert 2 1/2 2 + 1/2 4/8."""
    loss = [[0, 2, 4], [2, 0, 2], [4, 2, 0]]
    made = world(hosting([[1, 2]], [[0]], experts=3), PAIR_MS, top_k=2, **substitutes(1, loss))
    decision = decided(made.policy(PLAIN), [0, 1], masses=[0.25, 0.25])
    assert decision.slot_expert.tolist() == [[2, 1]]
    assert decision.loss.tolist() == [4 * UNIT]


def test_dropping_all_slots_is_no_action() -> None:
    """Expert 0 is 10 ms away and expert 1 20; a drop loses 1 unit and a skip more than there is.
    Expert 0 alone costs 1/2 21 + 1/2 1/8, nothing at all would cost 1/2 2/8."""
    hosts = hosting([[]], [[0]], [[1]])
    links_ms = [[0, 10, 20], [10, 0, 20], [20, 20, 0]]
    made = world(hosts, links_ms, top_k=2, drop=one_bin([1]))
    decision = decided(made.policy(PLAIN), [0, 1], masses=[0.25, 0.25])
    assert decision.slot_expert.tolist() == [[0, -1]]
    assert decision.loss.tolist() == [UNIT]
