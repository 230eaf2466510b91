"""What is expected still to come, (36), (38), (39), by hand; at any horizon and to full depth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from byhand import BUDGET, PLAIN, UNIT, Walk, decided, hosting, one_bin, skips, substitutes, world
from trimmoe.cost.exits import certain, never
from trimmoe.cost.lookahead import Place, TokenKind, typical_tokens
from trimmoe.cost.model import Accounting
from trimmoe.cost.values import build_tables
from trimmoe.policy.settings import PolicySettings
from trimmoe.policy.trim import TrimPolicy

PAIR_MS = [[0, 10], [10, 0]]
LEVELS = UNIT * np.arange(17, dtype=np.float64)
"""Allowances of 0 to 16 units."""
FULL: PolicySettings = replace(PLAIN, horizon=None)
TWO: PolicySettings = replace(PLAIN, horizon=2)
WAYS = [FULL, TWO, replace(TWO, literal_lookahead=True)]


def to_go(policy: TrimPolicy, units: int) -> list[list[float]]:
    """Phi after layer 0 on the first user's route, by pattern, as the literal recursion and the
    tables have it."""
    look = policy.lookahead
    route = tuple(policy.routes[0].tolist())
    kind = TokenKind(steadiness=0, exit_row=0)
    literal = look.to_go(0, Place(route=route), units * UNIT, 1, kind)
    shared = look.space, look.profile, look.weights, look.exits, policy.routes
    tables = build_tables(*shared, LEVELS)
    return [literal.tolist(), tables.after[0][0, 0, :, 0, units].tolist()]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[0.75, 0.25], [0.25, 0.75]], [0.75 * 0.5 + 0.25 * 10.5, 0.25 * 0.5 + 0.75 * 10.5]),
        ([[1.0, 0.0], [0.0, 1.0]], [0.5, 10.5]),
        ([[0.0, 1.0], [1.0, 0.0]], [10.5, 0.5]),
        ([[0.5, 0.5], [0.5, 0.5]], [5.5, 5.5]),
    ],
)
def test_what_follows_is_weighed_by_the_calibrated_transitions(
    rows: list[list[float]], expected: list[float]
) -> None:
    """(38), (39): in layer 1 expert 0 is here, 1/2 x 1 ms, and expert 1 is 10 ms away, 1/2 x 21."""
    made = world(
        hosting([[0, 1], [0]], [[0, 1], [1]]), PAIR_MS, pattern_transitions=np.array([rows])
    )
    for found in to_go(made.policy(FULL), 0):
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("units", "first"),
    [(8, 0.5 + 0.375), (6, 0.5 + 0.375), (5, 0.125), (1, 10.5)],
)
def test_layers_to_come_are_not_skipped_where_an_expert_here_will_do(
    units: int, first: float
) -> None:
    """(35) within (39): in layer 1 expert 0 is 10 ms away; expert 1 stands in for it here at
    6 units, 1/2 x 1 + 1/2 x 6/8, and a skip costs 2, 1/2 x 2/8, where that is too much. Expert 1
    itself is here and runs, 1/2 x 1. The pattern stays what it was."""
    made = world(
        hosting([[0, 1], [1]], [[0, 1], [0]]),
        PAIR_MS,
        skip=one_bin([2, 2]),
        pattern_transitions=np.eye(2)[None],
        **substitutes(2, [[0, 6], [6, 0]]),
    )
    for found in to_go(made.policy(FULL), units):
        assert found == pytest.approx([first, 0.5])


@pytest.mark.parametrize("settings", WAYS)
@pytest.mark.parametrize(("expert", "goes_to"), [(0, 1), (1, 2)])
def test_a_token_moves_to_where_it_is_likely_to_be_needed_next(
    settings: PolicySettings, expert: int, goes_to: int
) -> None:
    """Migrating from server 0, both of whose neighbours, 10 ms away, hold layer 0. Of layer 1
    expert 0 is on server 1 and expert 1 on server 2, 10 ms apart.

    After expert 0 comes expert 0 with 3/4: on server 1 that is 3/4 x 1 + 1/4 x 11 = 3.5 ms, on
    server 2 1/4 x 1 + 3/4 x 11 = 8.5. After expert 1 it is the other way round. With transitions
    that say nothing both are 6 ms, and the first server is as good.
    """
    made = world(
        hosting([[], []], [[0, 1], [0]], [[0, 1], [1]]),
        [[0, 10, 10], [10, 0, 10], [10, 10, 0]],
        pattern_transitions=np.array([[[0.75, 0.25], [0.25, 0.75]]]),
    )
    policy = made.policy(replace(settings, accounting=Accounting.MIGRATE))
    assert decided(policy, [expert], units=0.0).destination.tolist() == [goes_to]


@pytest.mark.parametrize("settings", WAYS)
@pytest.mark.parametrize(("away_ms", "skipped"), [(8, True), (30, False)])
def test_a_skip_is_weighed_from_where_it_leaves_the_token(
    settings: PolicySettings, away_ms: float, skipped: bool
) -> None:
    """Migrating from server 0; layer 0 is on server 1, 10 ms away, layer 1 on server 2, 5 ms from
    server 1 and `away_ms` from server 0. A skip of layer 0 for 4 of 8 units is 1/2 x 4/8 = 0.25.

    Going by server 1 is 11 + 6 = 17 ms, a step of 8.5. Skipping leaves the way from server 0: with
    8 ms 0.25 + 1/2 x 9 = 4.75, with 30 ms 0.25 + 1/2 x 31 = 15.75.
    """
    links_ms = [[0, 10, away_ms], [10, 0, 5], [away_ms, 5, 0]]
    made = world(hosting([[], []], [[0, 1], []], [[], [0, 1]]), links_ms, skip=one_bin([4, 128]))
    policy = made.policy(replace(settings, accounting=Accounting.MIGRATE))
    assert skips(decided(policy, [0])) == skipped


@pytest.mark.parametrize("accounting", [Accounting.PINNED, Accounting.MIGRATE])
@pytest.mark.parametrize("settings", WAYS)
@pytest.mark.parametrize(("exit_at", "skipped"), [(1, False), (2, True), (3, True)])
def test_a_token_that_is_to_be_done_after_a_layer_does_not_skip_it(
    settings: PolicySettings, accounting: Accounting, exit_at: int, skipped: bool
) -> None:
    """(36) within (39): layers 0 and 1 are 10 ms away, 1/2 x 21 = 10.5 each. Skipping layer 0 for
    4 units is 0.25, but only who executes it can exit after it, (9).

    Predicted to exit after layer 0, executing it costs 10.5 in all and a skip 0.25 + 10.5. If only
    after layer 1, executing costs 10.5 + 10.5. Layer 2 is here and costs as much either way.

    Migrating, a way is 1/2 x 11 = 5.5, and who has gone runs layer 1 there for 0.5: 5.5 against
    0.25 + 5.5 where the token is done after layer 0, else 5.5 + 0.5 against 0.25 + 5.5.
    """
    made = world(
        hosting([[], [], [0, 1]], [[0, 1], [0, 1], []]), PAIR_MS, skip=one_bin([4, 128, 128])
    )
    decision = decided(made.policy(replace(settings, accounting=accounting)), [0], exit_at=exit_at)
    assert skips(decision) == skipped


@pytest.mark.parametrize(
    ("accounting", "away"), [(Accounting.PINNED, 10.5), (Accounting.MIGRATE, 5.5)]
)
@pytest.mark.parametrize(("exit_at", "follows"), [(2, 0.0), (3, 0.25)])
def test_no_token_is_expected_to_end_in_a_layer_that_it_is_expected_to_skip(
    accounting: Accounting, away: float, exit_at: int, follows: float
) -> None:
    """(9) within (39): of three layers the first is here, the others are `away`, and either may be
    skipped for 4 units, 0.25. Predicted to exit after layer 1, a token that skips it goes on, so
    that two skips of 0.25 follow; one that runs it is done. At a budget for one skip it takes the
    way of layer 1, or skips that and takes the way of layer 2: the former is cheaper by a skip."""
    made = world(
        hosting([[0, 1], [], []], [[], [0, 1], [0, 1]]), PAIR_MS, skip=one_bin([128, 4, 4])
    )
    policy = made.policy(replace(FULL, accounting=accounting))
    look, place = policy.lookahead, Place(route=None, server=0)
    if accounting is Accounting.PINNED:
        place = Place(route=(0, 0, 0))
    row = int(look.exits.rows(np.array([exit_at]))[0])
    shared = look.space, look.profile, look.weights, look.exits, policy.routes
    tables = build_tables(*shared, LEVELS)
    for units, expected in ((8, 0.25 + 0.25), (4, away + follows)):
        literal = look.to_go(0, place, units * UNIT, 2, TokenKind(steadiness=0, exit_row=row))
        tabled = tables.after[0][tables.place_of[0, 0], 0, :, row, units]
        for found in (literal, tabled):
            assert found == pytest.approx(expected), units


@pytest.mark.parametrize(("exit_at", "skipped"), [(2, False), (3, True)])
def test_a_token_is_decided_by_what_was_predicted_of_it_after_the_layer_before(
    exit_at: int, skipped: bool
) -> None:
    """(36): layer 0 is here, layers 1 and 2 are 10 ms away, 10.5 each, and layer 1 may be skipped
    for 4 units, 0.25. Said to exit after layer 1, running that is all there is, 10.5 against
    0.25 + 10.5; said to go on, it is 10.5 + 10.5 against that."""
    made = world(
        hosting([[0, 1], [], []], [[], [0, 1], [0, 1]]), PAIR_MS, skip=one_bin([128, 4, 128])
    )
    walk = Walk(engine=made.engine(FULL))
    walk.arrive()
    walk.layer(exit_at=exit_at)
    ran, _ = walk.layer()
    assert skips(ran) == skipped


@pytest.mark.parametrize("settings", WAYS)
def test_before_the_first_layer_no_token_is_predicted_to_exit(settings: PolicySettings) -> None:
    """(36): both layers are 10 ms away, 10.5 each, and the first may be skipped for 4 units, 0.25.
    Who was thought to be done after it would run it, 10.5 against 0.25 + 10.5; to go on is 10.5
    more either way. What was said of a token is not said of the next one."""
    made = world(hosting([[], []], [[0, 1], [0, 1]]), PAIR_MS, skip=one_bin([4, 128]))
    walk = Walk(engine=made.engine(settings))
    for _ in range(2):
        walk.arrive()
        ran, _ = walk.layer(exit_at=1)
        assert skips(ran)
        walk.layer(exit_at=1)


def test_who_is_predicted_to_exit_after_a_layer_passes_all_before_it() -> None:
    """(36): of 3 layers; predictions count layers from 1. A prediction of 0 does not occur."""
    forecast = certain(3)
    goes_on = forecast.goes_on[forecast.rows(np.array([1, 2, 3]))]
    assert goes_on.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]


def test_where_nothing_exits_all_pass_all_layers_but_the_last() -> None:
    forecast = never(3)
    assert forecast.goes_on[forecast.rows(np.array([1, 2, 3]))].tolist() == [[1, 1, 0]] * 3


def test_a_horizon_counts_the_layer_that_is_decided() -> None:
    """(40): layer 1 is 10 ms away, a step of 1/2 x 21. H = 1 sees none of it at layer 0, H = 2 all;
    nobody sees anything behind the last layer."""
    made = world(hosting([[0, 1], []], [[], [0, 1]]), PAIR_MS)
    for horizon, after in ((1, 0.0), (2, 10.5), (None, 10.5)):
        policy = made.policy(replace(PLAIN, horizon=horizon, budget=BUDGET))
        assert policy.tables is not None
        tables = policy.tables.of(0.5)
        np.testing.assert_allclose(tables.after[0][0], after)
        np.testing.assert_array_equal(tables.after[1], 0.0)


def test_a_layer_to_come_has_the_second_fifth_or_eighth_decile_of_its_patterns_importance() -> None:
    deciles = np.linspace([0.0, 0.5], [1.0, 1.0], 11).T[None]
    made = world(hosting([[0, 1]]), [[0]], pattern_importance=deciles)
    typical = typical_tokens(made.profile, 0, 0)
    assert typical["importance"].tolist() == pytest.approx([0.2, 0.6, 0.5, 0.75, 0.8, 0.9])
    assert typical["experts"].tolist() == [[0], [1]] * 3
