"""The two feedback rules, (37) and (43), by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from byhand import BUDGET, PLAIN, Walk, hosting, one_bin, world
from trimmoe.core.events import SequenceOpened, TokensArrived
from trimmoe.engine.feedback import Feedback, Window, observe, observe_audits
from trimmoe.policy.readings import ExitRule, WeightRule
from trimmoe.policy.settings import PolicySettings

PAPER: PolicySettings = PLAIN.but(
    weight_rule=WeightRule.PAPER,
    exit_rule=ExitRule.PAPER,
    loss_weight_range=(0.0, 1.0),
    weight_step=0.05,
    exit_step=0.1,
    window_tokens=2,
)
"""kappa = 0.05, eta = 0.1, p_J = 0.9, windows of two tokens."""


def window(
    feedback: Feedback,
    settings: PolicySettings = PAPER,
    *,
    use: tuple[float, float] = (0.9, 0.9),
    delay: tuple[float, float] = (0.9, 0.9),
    exits: tuple[float, ...] = (),
    routes: tuple[int, int] = (0, 0),
    users: tuple[int, ...] | None = None,
) -> Feedback:
    """What is learnt from two tokens; `exits` are the confidences of those that exited, of
    `users`."""
    return observe(
        feedback,
        settings,
        route=np.array(routes),
        budget_use=np.array(use),
        relative_delay=np.array(delay),
        exit_confidence=np.array(exits),
        exit_user=np.zeros(len(exits), dtype=np.int64) if users is None else np.array(users),
    )


@pytest.mark.parametrize(
    ("use", "delay", "weight"),
    [
        # D = 0.8 and T = 0.6: 0.5 + 0.05 (0.8 - 0.6)
        ((1.0, 0.6), (0.5, 0.7), 0.51),
        # D = 0.2 and T = 1.4: 0.5 + 0.05 (0.2 - 1.4)
        ((0.4, 0.0), (1.0, 1.8), 0.44),
        # In balance.
        ((0.5, 0.7), (0.6, 0.6), 0.5),
        # Projected onto [0, 1]: 0.5 + 0.05 (20 - 1) = 1.45 and 0.5 + 0.05 (0 - 12) = -0.1
        ((30.0, 10.0), (1.0, 1.0), 1.0),
        ((0.0, 0.0), (4.0, 20.0), 0.0),
    ],
)
def test_quality_weighs_more_where_budgets_are_used_more_than_time(
    use: tuple[float, float], delay: tuple[float, float], weight: float
) -> None:
    """(43): omega_D <- omega_D + kappa (D - T), means over the window."""
    after = window(Feedback(loss_weight=0.5), use=use, delay=delay)
    assert after.loss_weight == pytest.approx(weight)


def test_weights_move_once_a_window_is_full_and_it_begins_anew() -> None:
    """Two tokens are half a window of four; after the others D = 4/4 and T = 2/4."""
    rule = replace(PAPER, window_tokens=4)
    half = window(Feedback(loss_weight=0.5), rule, use=(1.0, 1.0), delay=(0.5, 0.5))
    assert half.loss_weight == 0.5
    assert half.window.tokens == 2
    full = window(half, rule, use=(1.0, 1.0), delay=(0.5, 0.5))
    assert full.loss_weight == pytest.approx(0.5 + 0.05 * (1.0 - 0.5))
    assert full.window == Window()


@pytest.mark.parametrize(
    ("use", "weight"),
    # Means of 1.0 and 0.5 against the 0.9 aimed at.
    [((1.2, 0.8), 0.5 + 0.05 * 0.1), ((0.8, 0.2), 0.5 - 0.05 * 0.4)],
)
def test_steered_the_weight_follows_the_use_of_the_budget_whatever_time_it_takes(
    use: tuple[float, float], weight: float
) -> None:
    steered = PAPER.but(weight_rule=WeightRule.STEER)
    after = window(Feedback(loss_weight=0.5), steered, use=use, delay=(7.0, 9.0))
    assert after.loss_weight == pytest.approx(weight)


def test_every_route_is_steered_by_its_own_tokens() -> None:
    """Log odds, here 0 and ln 3, move by 4 x (use - 0.9) x the route's half of the window: by
    4 (1.4 - 0.9) / 2 = 1 and 4 (0.4 - 0.9) / 2 = -1. A route without tokens stays where it is."""
    steered = PAPER.but(weight_rule=WeightRule.STEER)
    before = Feedback(loss_weight=0.5, route_weights=(0.5, 0.75, 0.25))
    after = window(before, steered, use=(1.4, 0.4), routes=(0, 1))
    up, down = 1 / (1 + np.exp(-1.0)), 1 / (1 + np.exp(-(np.log(3.0) - 1.0)))
    assert after.route_weights == pytest.approx((up, down, 0.25))
    assert after.loss_weight == 0.5
    assert after.weights_of(np.array([2, 0])) == pytest.approx([0.25, up])


@pytest.mark.parametrize(
    ("above", "exits", "after"),
    [
        # The mean of 0.97 and 0.93 is 0.05 above p = 0.9: p rises by 0.1 of that.
        (0.0, (0.97, 0.93), 0.005),
        # One exit at 0.93, 0.02 above p = 0.91.
        (0.01, (0.93,), 0.012),
        # And 0.03 below p = 0.95: p falls.
        (0.05, (0.92,), 0.047),
        # Not below what the request asks for: 0.001 + 0.1 (0.8 - 0.901) is negative.
        (0.001, (0.8,), 0.0),
        # Nothing exited, nothing is known.
        (0.05, (), 0.05),
    ],
)
def test_the_exit_threshold_follows_the_mean_confidence_at_exit(
    above: float, exits: tuple[float, ...], after: float
) -> None:
    """(37): p <- p + eta (xi - p), where p is the 0.9 asked for plus what was added to it."""
    before = Feedback(loss_weight=0.5, exit_raise=above)
    assert window(before, exits=exits).exit_raise == pytest.approx(after)


@pytest.mark.parametrize(
    ("tokens", "exits", "agrees", "after"),
    [
        # Of four tokens one exited and two would have: 3/4 were due, half of them are taken to be
        # wrong. So 0.375 flip against the 0.3 tolerated: 0.1 x 0.075 more.
        (4, (0.95,), (True, False), 0.1075),
        # None was wrong: 0.1 x 0.3 less.
        (4, (0.95,), (True, True), 0.07),
        # Two exits and no audit: nothing is known.
        (4, (0.95, 0.95), (), 0.1),
        # Nothing was due, so nothing flipped: too high a threshold comes down again.
        (4, (), (), 0.07),
    ],
)
def test_audited_the_threshold_follows_the_share_of_tokens_that_exits_flip(
    tokens: int, exits: tuple[float, ...], agrees: tuple[bool, ...], after: float
) -> None:
    rule = PAPER.but(exit_rule=ExitRule.AUDITED, exit_risk=0.3, window_tokens=tokens)
    before = Feedback(loss_weight=0.5, exit_raise=0.1)
    before = observe_audits(before, np.array(agrees, dtype=bool))
    assert (before.audits, before.false_exits) == (len(agrees), agrees.count(False))
    half = window(before, rule, exits=exits)
    assert half.exit_raise == 0.1
    assert window(half, rule).exit_raise == pytest.approx(after)


def test_audits_add_up() -> None:
    """Two of the first three exits were false, and the next two: 4 of 5."""
    once = observe_audits(Feedback(loss_weight=0.5), np.array([False, True, False]))
    twice = observe_audits(once, np.array([False, False]))
    for counts in (twice, twice.window):
        assert (counts.audits, counts.false_exits) == (5, 4)


@pytest.mark.parametrize(
    ("agrees", "after"),
    # A fifth may be wrong; half of what is above that is added: 0.1 + 0.5 (0.5 - 0.2), or
    # 0.1 + 0.5 (0 - 0.2) = 0.
    [((True, False), 0.25), ((True, True), 0.0), ((), 0.0)],
)
def test_no_more_drafts_are_wrong_than_their_confidence_promises(
    agrees: tuple[bool, ...], after: float
) -> None:
    rule = replace(PAPER, draft_confidence=0.8)
    before = observe_audits(Feedback(loss_weight=0.5, exit_raise=0.1), np.array(agrees, dtype=bool))
    assert window(before, rule).exit_raise == pytest.approx(after)


def test_fixed_rules_change_nothing() -> None:
    before = Feedback(loss_weight=0.3, route_weights=(0.2, 0.7), exit_raise=0.04)
    fixed = PAPER.but(weight_rule=WeightRule.FIXED, exit_rule=ExitRule.FIXED)
    after = window(before, fixed, use=(9.0, 9.0), exits=(0.99,))
    assert after == before


def test_the_engine_carries_both_rules_to_the_tokens_that_follow() -> None:
    """All is local, an exact layer takes 1 ms, the token's way none, and nothing is lost: D = 0.

    The first token exits after one of two layers, at 0.96: T = 1 / 2. The second, at 0.5, does not:
    T = 1. So omega_D = 0.5 + 0.05 (0 - 0.75) = 0.4625 and p = 0.9 + 0.1 (0.96 - 0.9) = 0.906.
    """
    walk = Walk(engine=world(hosting([[0, 1], [0, 1]]), [[0]]).engine(PAPER))
    walk.arrive()
    assert walk.wave.confidence_needed.tolist() == [0.9]
    end = walk.layer(confidence=0.96)[1]
    assert end is not None
    assert end.layer == 1
    walk.arrive()
    for _ in range(2):
        end = walk.layer(confidence=0.5)[1]
    assert end is not None
    assert end.layer == 2
    walk.arrive()
    assert walk.wave.loss_weight.tolist() == pytest.approx([0.4625])
    assert walk.wave.confidence_needed.tolist() == pytest.approx([0.906])


def test_the_engine_tells_how_much_of_its_budget_a_token_used() -> None:
    """Both experts are 10 ms away and skipping them costs 2 of 8 units: D = 1/4, T = 0, twice:
    omega_D = 0.5 + 0.05 (0.25 - 0)."""
    engine = world(hosting([[]], [[0, 1]]), [[0, 10], [10, 0]], skip=one_bin([2])).engine(PAPER)
    walk = Walk(engine=engine)
    for _ in range(2):
        walk.arrive()
        end = walk.layer()[1]
        assert end is not None
        assert end.ledgers[0].loss == BUDGET / 4
    assert walk.state.feedback.loss_weight == pytest.approx(0.5125)


def test_routes_that_are_added_begin_with_their_own_weight_and_keep_what_others_have_learnt() -> (
    None
):
    """Route 0 began at 0.2 and has come to 0.3; route 1 is added to begin at 0.7."""
    made = world(hosting([[0, 1]]), [[0]]).engine(PLAIN)
    walk = Walk(engine=replace(made, route_weights=(0.2,)))
    learnt = replace(walk.state.feedback, route_weights=(0.3,))
    walk.state = replace(walk.state, feedback=learnt)
    walk.engine = replace(made, routes=np.array([[0], [0]]), route_weights=(0.2, 0.7))
    walk.tell(SequenceOpened(sequence=1, access=0, route=1, budget=0.0, confidence=0.9))
    walk.tell(TokensArrived(wave=1, sequences=(0, 1), draws=np.zeros(2)))
    assert walk.wave.loss_weight.tolist() == [0.3, 0.7]
    assert walk.state.feedback.route_weights == (0.3, 0.7)
