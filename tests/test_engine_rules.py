"""What a skip and the end of a token do to its state: (9), (12), (13), (33), by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from byhand import BUDGET, MS, PLAIN, UNIT, Walk, decided, hosting, one_bin, skips, world
from trimmoe.core.events import Receipt, Settled
from trimmoe.cost.model import Accounting
from trimmoe.policy.base import Observation
from trimmoe.policy.baselines import MixtureOfDepths
from trimmoe.policy.readings import BudgetRule

PAIR_MS = [[0, 10], [10, 0]]
TRIO_MS = [[0, 10, 10], [10, 0, 10], [10, 10, 0]]
MIGRATING = replace(PLAIN, accounting=Accounting.MIGRATE)


@pytest.mark.parametrize("accounting", [Accounting.PINNED, Accounting.MIGRATE])
def test_a_skipped_layer_has_no_confidence_and_ends_no_token(accounting: Accounting) -> None:
    """(9): both experts of layer 1 are 10 ms away, so that a token of server 0 skips it: 2 units
    are a step of 1/2 2/8 = 0.125, going there is one of at least 1/2 (10 + 1) = 5.5. A head that is
    sure there is not heard; one as sure after layer 2, which runs, ends the token."""
    here, away = [0, 1], []
    hosts = hosting([here, away, here, here], [away, here, away, away])
    walk = Walk(
        engine=world(hosts, PAIR_MS, skip=one_bin([2] * 4)).engine(
            replace(PLAIN, accounting=accounting)
        )
    )
    walk.arrive()
    ran, end = walk.layer(confidence=0.5)
    assert not skips(ran)
    assert end is None
    assert walk.wave.confidence.tolist() == [0.5]
    ran, end = walk.layer(confidence=0.99)
    assert skips(ran)
    assert end is None
    assert walk.wave.confidence.tolist() == [-np.inf], "nor is what it had before"
    ran, end = walk.layer(confidence=0.99)
    assert not skips(ran)
    assert end is not None
    assert end.layer == 3


def test_a_migrating_token_stays_where_it_skips() -> None:
    """(12), (13): from server 1, layer 0's experts are on server 0, layer 1's on server 2, layer
    2's on server 0 again. Layers 0 and 2 may be skipped for 2 units, layer 1 at no affordable loss.

    So the token is on 1, on 1, on 2, and ends on 2: one message, 10 + 1 ms, and 10 ms back.
    """
    both = [0, 1]
    hosts = hosting([both, [], both], [[], [], []], [[], both, []])
    made = world(hosts, TRIO_MS, skip=one_bin([2, 128, 2]))
    walk = Walk(engine=made.engine(MIGRATING), access=1)
    walk.arrive()
    ran = [walk.layer() for _ in range(3)]
    assert [skips(execute) for execute, _ in ran] == [True, False, True]
    assert [execute.destination.tolist() for execute, _ in ran] == [[1], [2], [2]]
    assert walk.visited == [1, 1, 2]
    end = ran[-1][1]
    assert end is not None
    assert end.server.tolist() == [2]
    sent = np.zeros((3, 3))
    sent[1, 2] = 1
    np.testing.assert_array_equal(end.ledgers[0].messages, sent)
    assert end.ledgers[0].delay_s == pytest.approx((10 + 1 + 10) * MS)
    assert end.ledgers[0].loss == 4 * UNIT


@pytest.mark.parametrize(
    ("accounting", "first", "way_ms"), [("migrate", 1, 0), ("home", 1, 0), ("pinned", 2, 10)]
)
def test_a_token_sets_out_from_its_user_or_where_its_route_begins(
    accounting: str, first: int, way_ms: float
) -> None:
    """(12), and kappa(0) where tokens are pinned: the user is at server 1, the route 2, 0."""
    made = world(hosting(*[[[0, 1]] * 2] * 3), TRIO_MS, routes=[[0, 0], [2, 0], [2, 2]])
    walk = Walk(engine=made.engine(replace(PLAIN, accounting=Accounting(accounting))), access=1)
    walk.arrive()
    assert walk.visited == [first]
    assert walk.wave.delay_s.tolist() == pytest.approx([way_ms * MS])


def test_each_of_many_tokens_skips_where_it_is_itself() -> None:
    """Nobody on servers 1 and 2 has the experts of server 0, and everybody may skip."""
    hosts = hosting([[0, 1]], [[]], [[]])
    space = world(hosts, TRIO_MS, skip=one_bin([2])).policy(MIGRATING).lookahead.space
    menu = space.candidates(
        0,
        np.array([2, 1, 2]),
        None,
        experts=np.array([[0], [1], [1]]),
        masses=np.full((3, 1), 0.5),
        importance=np.full(3, 0.5),
        steadiness=np.zeros(3, dtype=np.int64),
    )
    assert menu.skips.sum(1).tolist() == [1, 1, 1]
    assert menu.destination[menu.skips].tolist() == [2, 1, 2]
    assert menu.delay_s[menu.skips].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("looking", [{}, {"literal_lookahead": True}])
def test_each_of_many_tokens_is_decided_by_its_own_weight(looking: dict) -> None:
    """(31): 1 ms away an expert costs 3 (1 - w), a skip of 4 units 4/8 w: it pays below 6/7."""
    made = world(hosting([[]], [[0, 1]]), [[0, 1], [1, 0]], skip=one_bin([4]))
    weights = [0.9, 0.5, 0.9, 0.25]
    decision = made.policy(replace(PLAIN, **looking)).decide(
        Observation(
            layer=0,
            route=np.zeros(4, dtype=np.int64),
            server=np.zeros(4, dtype=np.int64),
            experts=np.array([[0], [1], [1], [0]]),
            masses=np.full((4, 1), 0.5),
            importance=np.full(4, 0.5),
            steadiness=np.zeros(4, dtype=np.int64),
            allowance=np.full(4, BUDGET),
            exit_at=np.ones(4, dtype=np.int64),
            loss_weight=np.array(weights),
        )
    )
    assert decision.slot_expert.tolist() == [[0], [-1], [1], [-1]]
    assert decision.loss.tolist() == [0.0, 4 * UNIT, 0.0, 4 * UNIT]
    assert decision.delay_s.tolist() == pytest.approx([3 * MS, 0.0, 3 * MS, 0.0])


@pytest.mark.parametrize("looking", [{}, {"literal_lookahead": True}])
@pytest.mark.parametrize(("units", "skipped"), [(4, True), (3, False)])
def test_who_nobody_can_serve_does_not_skip_beyond_its_budget(
    looking: dict, units: float, skipped: bool
) -> None:
    """Nobody holds expert 1; a skip loses 4 units. Without them the token is stranded, for free."""
    made = world(hosting([[0]]), [[0]], skip=one_bin([4]))
    decision = decided(made.policy(replace(PLAIN, **looking)), [1], units=units)
    assert np.isfinite(decision.delay_s).tolist() == [skipped]
    assert decision.loss.tolist() == [4 * UNIT if skipped else 0.0]


def test_a_pinned_token_goes_on_along_its_route_when_it_skips() -> None:
    """kappa = 0, 1, 1: a skip of layer 0 still takes the link to server 1, 10 ms."""
    hosts = hosting([[], [0, 1], [0, 1]], [[], [0, 1], [0, 1]], [[0, 1], [], []])
    routes = [[0, 1, 1], [1, 1, 1], [2, 2, 2]]
    made = world(hosts, TRIO_MS, routes=routes, skip=one_bin([2] * 3))
    walk = Walk(engine=made.engine(PLAIN))
    walk.arrive()
    ran, _ = walk.layer()
    assert skips(ran)
    assert ran.destination.tolist() == [1]
    assert walk.visited == [0, 1]
    assert walk.wave.delay_s.tolist() == pytest.approx([10 * MS])
    assert walk.wave.messages[0].sum() == walk.wave.messages[0, 0, 1] == 1


@pytest.mark.parametrize(("accounting", "ends"), [("migrate", 2), ("pinned", 1)])
def test_mixture_of_depths_skips_where_the_token_is(accounting: str, ends: int) -> None:
    """A token on server 2, whose route goes on to server 1; importance 0.5 is below 0.6."""
    hosts = hosting([[0, 1], [0, 1]], [[], []], [[], []])
    made = world(hosts, TRIO_MS, routes=[[0, 0], [1, 1], [2, 1]], skip=one_bin([2, 2]))
    engine = made.engine(replace(PLAIN, accounting=Accounting(accounting)))
    space = made.policy(engine.settings).lookahead.space
    policy = MixtureOfDepths(space=space, routes=engine.routes, below=np.array([0.6, 0.6]))
    decision = policy.decide(
        Observation(
            layer=0,
            route=np.array([2]),
            server=np.array([2]),
            experts=np.array([[0]]),
            masses=np.array([[0.5]]),
            importance=np.array([0.5]),
            steadiness=np.array([0]),
            allowance=np.array([BUDGET]),
            exit_at=np.array([2]),
            loss_weight=np.array([0.5]),
        )
    )
    assert skips(decision)
    assert decision.destination.tolist() == [ends]
    assert decision.loss.tolist() == [2 * UNIT]


@pytest.mark.parametrize(
    ("rule", "skipped", "left_units"),
    [
        (BudgetRule.EVEN, [False, False, False, False], [0, 0, 0, 0]),
        (BudgetRule.BUCKET, [False, True, True, False], [8, 4, 0, 8]),
    ],
)
def test_an_even_budget_keeps_nothing_for_the_next_token(
    rule: BudgetRule, skipped: list[bool], left_units: list[float]
) -> None:
    """(33): every token is credited 8 units and a skip, which saves 20 ms, costs 12.

    Evenly, nobody can ever pay that. From a bucket the first cannot, and leaves 8; the second has
    16 and leaves 4, the third has 12 and leaves 0, the fourth has 8 and leaves them.
    """
    made = world(hosting([[]], [[0, 1]]), PAIR_MS, skip=one_bin([12]))
    walk = Walk(engine=made.engine(PLAIN.but(budget_rule=rule)))
    found, left = [], []
    for _ in skipped:
        walk.arrive()
        found.append(skips(walk.layer()[0]))
        left.append(walk.balance_units)
    assert found == skipped
    assert left == left_units


@pytest.mark.parametrize(("rule", "left_units"), [(BudgetRule.EVEN, 0), (BudgetRule.BUCKET, 11)])
def test_nor_does_it_keep_what_tokens_left_that_ended_elsewhere(
    rule: BudgetRule, left_units: float
) -> None:
    """Two receipts of 8 units, of which 5 and none were spent."""
    walk = Walk(
        engine=world(hosting([[0, 1]]), [[0]]).engine(PLAIN.but(budget_rule=rule)),
    )
    spent = (5 * UNIT, 0.0)
    walk.tell(
        Settled(
            receipts=tuple(
                Receipt(sequence=0, budget=BUDGET, loss=loss, delay_s=0.0, exit_confidence=None)
                for loss in spent
            )
        )
    )
    assert walk.balance_units == left_units
