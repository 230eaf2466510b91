"""What the paper has by user, by hand: d_ref (31), (43), p_J (37). Users are access servers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from byhand import MS, PLAIN, Walk, hosting, one_bin, substitutes, world
from test_feedback import PAPER, window
from trimmoe.core.events import Receipt, Settled
from trimmoe.cost.deciding import step_costs
from trimmoe.cost.model import Accounting
from trimmoe.engine.feedback import Feedback
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.build import deploy, user_references
from trimmoe.policy.price import own_weight
from trimmoe.policy.readings import ExitRule

APART_MS = [[0, 10], [10, 0]]


@pytest.mark.parametrize(
    ("accounting", "own_ms"),
    [
        # To server 0, 1 ms there, and back, in both layers.
        (Accounting.PINNED, (1.0, 21.0)),
        # There and 1 ms in the first layer, 1 ms in the second.
        (Accounting.MIGRATE, (1.0, 6.0)),
    ],
)
def test_every_user_has_the_exact_delay_of_its_own_tokens(
    accounting: Accounting, own_ms: tuple[float, float]
) -> None:
    """All experts are on server 0."""
    made = world(hosting([[0, 1], [0, 1]], [[], []]), APART_MS)
    deployment = deploy(made.plan, made.profile, made.model, accounting)
    found = user_references(deployment, made.profile)
    np.testing.assert_allclose(found, np.array(own_ms) * MS)
    assert deployment.reference_s == pytest.approx(np.mean(own_ms) * MS), "users are as many"


def test_a_weight_over_the_mean_decides_as_the_users_own_over_its_own() -> None:
    """(31) over 9 ms at 1/2 is (31) over 1 ms at 9/10, five times as large."""
    assert own_weight(np.array([0.5]), np.array([9.0]), 1.0)[0] == pytest.approx(0.9)
    delay_s, loss, half = np.array([4.0, 0.5]) * MS, np.array([0.0, 0.25]), np.full(2, 0.5)
    own = step_costs(delay_s, loss, half, 9 * MS, 1.0)
    shared = step_costs(delay_s, loss, np.full(2, 0.9), 1 * MS, 1.0)
    np.testing.assert_allclose(shared, own * (0.9 / 0.5))
    ends = own_weight(np.array([0.0, 1.0]), np.array([9.0, 9.0]), 1.0)
    assert ends.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("by_user", [False, True])
def test_who_is_far_from_everything_counts_a_millisecond_for_less(by_user: bool) -> None:
    """What either user asks for is 2 ms away, 4 ms there and back, and has a stand-in at 4 units,
    1/16 each. Over 1 ms the 4 ms are 1/2 x 4, so that both substitute. Over the second user's own
    9 ms they are 1/2 x 4/9, less than 4/16: it goes there."""
    hosts = hosting([[0], [0]], [[1], [1]])
    made = world(hosts, [[0, 2], [2, 0]], **substitutes(2, [[0, 4], [4, 0]]))
    engine = made.engine(PLAIN)
    if by_user:
        engine = replace(engine, user_reference_s=np.array([1.0, 9.0]) * MS)
    for user in (0, 1):
        walk = Walk(engine=engine, access=user)
        walk.arrive()
        ran, _ = walk.layer(expert=1 - user)
        exact = by_user and user == 1
        assert int(ran.slot_expert[0, 0]) == (1 - user if exact else user)
        if exact:
            walk.layer(expert=1)
            # (43): 5 ms, and 1 ms at home, of two layers of 9 ms.
            assert walk.state.feedback.window.relative_delay == pytest.approx(6 / 18)


def test_the_letter_makes_engines_that_know_their_users() -> None:
    made = world(hosting([[0, 1], [0, 1]], [[], []]), APART_MS)
    for known in (False, True):
        settings = PLAIN.but(accounting=Accounting.MIGRATE, user_references=known)
        engine = make_engine(made.plan, made.profile, made.model, settings)
        if known:
            assert engine.user_reference_s is not None
            np.testing.assert_allclose(engine.user_reference_s, np.array([1.0, 6.0]) * MS)
        else:
            assert engine.user_reference_s is None


def test_each_users_threshold_follows_the_exits_of_that_user() -> None:
    """(37): 0.9 + 0.1 (0.95 - 0.9) and 0.9 + 0.1 (1 - 0.9); together 0.9 + 0.1 (0.975 - 0.9)."""
    before, own = Feedback(loss_weight=0.5), PAPER.but(user_exits=True)
    after = window(before, own, exits=(0.95, 1.0), users=(0, 3))
    assert after.exit_raise == 0.0
    assert after.raises_of(np.array([0, 3, 1])).tolist() == pytest.approx([0.005, 0.01, 0.0])
    together = window(before, PAPER, exits=(0.95, 1.0), users=(0, 3))
    assert together.raises_of(np.array([0, 3])).tolist() == pytest.approx([0.0075, 0.0075])
    # Of user 0 alone: 0.905 + 0.1 (1 - 0.905).
    again = window(after, own, exits=(1.0,), users=(0,))
    assert again.raises_of(np.array([0, 3])).tolist() == pytest.approx([0.0145, 0.01])


def test_no_users_threshold_falls_below_what_it_asked_for() -> None:
    """0.9 + 0.1 (0.7 - 0.9) would be 0.88."""
    own = PAPER.but(user_exits=True)
    after = window(Feedback(loss_weight=0.5), own, exits=(0.7,), users=(3,))
    assert after.raises_of(np.array([3, 0])).tolist() == [0.0, 0.0]


def test_an_exit_counts_for_the_user_whose_token_it_was() -> None:
    """Of two tokens of user 1 the first exits, as sure as 1: 0.9 + 0.1 (1 - 0.9)."""
    made = world(hosting([[0, 1], [0, 1]], [[0, 1], [0, 1]]), APART_MS, skip=one_bin([128.0] * 2))
    paper = {"exit_rule": ExitRule.PAPER, "exit_step": 0.1, "user_exits": True, "window_tokens": 2}
    walk = Walk(engine=made.engine(PLAIN.but(**paper)), access=1)
    told = [
        Receipt(sequence=0, budget=1.0, loss=0.0, delay_s=0.01, exit_confidence=sure)
        for sure in (1.0, None)
    ]
    walk.tell(Settled(receipts=tuple(told)))
    assert walk.state.feedback.raises_of(np.array([0, 1])).tolist() == pytest.approx([0.0, 0.01])


def test_a_users_token_sets_out_with_that_users_threshold() -> None:
    made = world(hosting([[0, 1], [0, 1]], [[0, 1], [0, 1]]), APART_MS, skip=one_bin([128.0] * 2))
    engine = made.engine(PLAIN.but(user_exits=True))
    for user, needed in ((0, 0.9), (1, 0.95)):
        walk = Walk(engine=engine, access=user)
        feedback = replace(walk.state.feedback, user_raises={1: 0.05})
        walk.state = replace(walk.state, feedback=feedback)
        walk.arrive()
        assert walk.wave.confidence_needed[0] == pytest.approx(needed)
