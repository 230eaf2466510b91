"""When a token leaves early, (8), (34): the gate, what weighs against leaving, and audits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from byhand import MS, PLAIN, UNIT, Walk, decided, hosting, one_bin, skips, world
from trimmoe.core.events import Probe
from trimmoe.core.exit_states import ExitState
from trimmoe.core.loss_curves import Rung
from trimmoe.cost.actions import Levers
from trimmoe.cost.model import Accounting

PAIR_MS = [[0, 10], [10, 0]]
EVERYWHERE = hosting(*[[[0, 1]] * 3] * 2)


@pytest.mark.parametrize(
    ("confidence", "levers", "leaves"),
    [(0.9, Levers(), True), (0.8999, Levers(), False), (1.0, Levers(exit=False), False)],
)
def test_a_token_leaves_at_the_confidence_asked_for_where_exits_are_on(
    confidence: float, levers: Levers, leaves: bool
) -> None:
    """(8), (c.9): at 0.9 and not below."""
    walk = Walk(engine=world(EVERYWHERE, PAIR_MS).engine(replace(PLAIN, levers=levers)))
    walk.arrive()
    assert (walk.layer(confidence=confidence)[1] is not None) == leaves


@pytest.mark.parametrize(("raised", "needed"), [(0.05, 0.95), (0.4, 1.0)])
def test_what_feedback_adds_raises_it_to_no_more_than_certainty(
    raised: float, needed: float
) -> None:
    """(37) projects onto [p, 1]; of 0.9 asked for."""
    walk = Walk(engine=world(EVERYWHERE, PAIR_MS).engine(PLAIN))
    walk.state = replace(walk.state, feedback=replace(walk.state.feedback, exit_raise=raised))
    walk.arrive()
    assert walk.wave.confidence_needed.tolist() == pytest.approx([needed])


@pytest.mark.parametrize(
    ("route", "accounting", "dense_ms", "limit"),
    [
        # After layer 0 the token is on server 0, with its user; the last layer is 10 ms away from
        # them, so that leaving saves that way back: 1 + 1/2 x 10 = 6 = 1/2 x 96/8.
        ([0, 0, 1], "pinned", 0, 96),
        # It is there already, and has that way back whether it leaves or not: 1 = 1/2 x 16/8.
        ([0, 1, 1], "pinned", 0, 16),
        # Attention of the two layers left, 2 ms each: 1 + 1/2 x 4 = 3 = 1/2 x 48/8.
        ([0, 0, 0], "pinned", 2, 48),
        # It leaves from elsewhere, and would have come home: 21 - 1/2 x 10 = 16 = 1/2 x 256/8.
        ([1, 1, 0], "pinned", 0, 256),
        # Who migrates ends where it is, and attention is in nobody's way.
        ([0, 0, 1], "migrate", 2, 16),
    ],
)
def test_a_token_only_leaves_where_going_on_costs_more_than_the_exit(
    route: list[int], accounting: str, dense_ms: float, limit: int
) -> None:
    """What is to come costs 1 (21 in the row that says so) besides; an exit that is charged `limit`
    units costs as much as going on, and one that is charged a unit less is taken."""
    settings = PLAIN.but(exits_weighed=True, accounting=Accounting(accounting))
    made = world(EVERYWHERE, PAIR_MS, routes=[route, route])
    engine = made.engine(settings)
    engine = replace(engine, cost=replace(engine.cost, dense_s=np.full((2, 3), dense_ms * MS)))
    walk = Walk(engine=engine)
    walk.arrive()
    place = np.array(route[1])
    to_come = 21.0 if limit == 256 else 1.0
    for units, leaves in ((limit - 1, True), (limit, False)):
        wave = replace(walk.wave, layer=1).at(
            walk.wave.alive,
            server=place,
            confidence=1.0,
            ahead=to_come,
            exit_loss=units * UNIT,
            allowance=1000 * UNIT,
        )
        assert engine.exits.due(wave, wave.alive).tolist() == [leaves]
        broke = wave.at(wave.alive, allowance=(limit - 2) * UNIT)
        assert engine.exits.due(broke, wave.alive).tolist() == [False], "nor beyond what is left"


@pytest.mark.parametrize(
    ("needed", "whole", "frozen"),
    [
        # Below the grid nothing is known: all that an exit may flip, at least itself.
        (0.4999, 1.0, 1.75),
        (0.5, 0.25, 1.75),
        (0.8999, 0.25, 1.75),
        (0.9, 0.125, 0.375),
        (1.0, 0.125, 0.375),
    ],
)
def test_an_exit_is_charged_the_bound_of_the_laxer_threshold_of_the_grid(
    needed: float, whole: float, frozen: float
) -> None:
    """At 0.5 it errs by 0.25 at most and a frozen state flips 1.5 later tokens, at 0.9 by 0.125 and
    0.25; every loss counts twice where approximations act together so."""
    made = world(
        EVERYWHERE,
        PAIR_MS,
        exit_grid=np.array([0.5, 0.9]),
        exit_error_upper=np.array([0.25, 0.125]),
        exit_echo=np.array([[0.0, 0.0], [1.5, 0.25]]),
        exit_rate=np.ones(2),
    )
    charged = PLAIN.but(exits_charged=True)
    for state, loss in ((ExitState.WHOLE, whole), (ExitState.FROZEN, frozen)):
        for inflation in (1.0, 2.0):
            settings = charged.but(exit_state=state, inflation=inflation)
            found = made.engine(settings).exits.charge(np.array([needed]))
            assert found.tolist() == [loss * inflation]
    free = made.engine(PLAIN).exits.charge(np.array([needed]))
    assert free.tolist() == [0.0]


@pytest.mark.parametrize("copies", [True, False])
def test_drafts_are_weighed_by_full_depth_only_where_copies_make_that_slower(copies: bool) -> None:
    """Layer 0 is here, 1 ms, the others are 10 ms away, 21 each; full depth runs no copies."""
    made = world(
        hosting([[0, 1], [], []], [[], [0, 1], [0, 1]]),
        PAIR_MS,
        routes=[[0, 0, 0], [0, 0, 0]],
        rungs=(Rung(bits=4, curves=one_bin([1] * 3)),),
    )
    bits = np.zeros((2, 3, 2), dtype=np.int64)
    bits[0, 1:] = 4
    made = replace(made, plan=replace(made.plan, stand_in_bits=bits))
    policy = made.policy(replace(PLAIN, levers=Levers(stand_in=copies)))
    if not copies:
        assert policy.exact_to_go_s is None
        return
    assert policy.exact_to_go_s is not None
    np.testing.assert_allclose(policy.exact_to_go_s, [[43 * MS, 42 * MS, 21 * MS]] * 2)


@pytest.mark.parametrize(("exits", "ahead"), [(True, 10.5), (False, np.inf)])
def test_where_nothing_but_exits_is_chosen_what_is_to_come_is_known_to_weigh_them(
    exits: bool, ahead: float
) -> None:
    """Layer 1 is 10 ms away, 1/2 x 21, and nothing is approximated. Where no token exits either,
    nobody asks."""
    levers = Levers(substitute=False, drop_slots=False, skip=False, exit=exits)
    made = world(hosting([[0, 1], []], [[], [0, 1]]), PAIR_MS)
    decision = decided(made.policy(replace(PLAIN, horizon=None, levers=levers)), [0])
    assert decision.ahead.tolist() == pytest.approx([ahead])


def test_a_token_that_audits_its_exit_runs_exactly_to_full_depth() -> None:
    """Layers 1 and 2 are 10 ms away and would be skipped for 2 of 8 units each."""
    hosts = hosting([[0, 1], [], []], [[], [0, 1], [0, 1]])
    settings = PLAIN.but(audit_share=0.5, exit_state=ExitState.FROZEN)
    walk = Walk(engine=world(hosts, PAIR_MS, skip=one_bin([2] * 3)).engine(settings))
    walk.arrive()
    (probe,) = _probes(walk, confidence=0.95)
    assert (probe.layer, probe.rows.tolist()) == (0, [0])
    ran, end = walk.layer(confidence=0.99)
    assert not skips(ran)
    assert end is None, "it is audited already"
    ran, end = walk.layer()
    assert not skips(ran)
    assert end is not None
    assert (end.layer, end.ledgers[0].loss, end.ledgers[0].audits) == (3, 0.0, 1)


def _probes(walk: Walk, confidence: float) -> list[Probe]:
    walk.layer(confidence=confidence)
    return [one for one in walk.told if isinstance(one, Probe)]
