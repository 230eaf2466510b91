"""When a token leaves early, (8), (34): the gate, what weighs against leaving, and audits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from byhand import MS, PLAIN, UNIT, Walk, hosting, one_bin, skips, world
from trimmoe.core.events import Probe
from trimmoe.core.profile import ExitState
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
    settings = replace(PLAIN, exits_weighed=True, accounting=Accounting(accounting))
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


def test_a_token_that_audits_its_exit_runs_exactly_to_full_depth() -> None:
    """Layers 1 and 2 are 10 ms away and would be skipped for 2 of 8 units each."""
    hosts = hosting([[0, 1], [], []], [[], [0, 1], [0, 1]])
    settings = replace(PLAIN, audit_share=0.5, exit_state=ExitState.FROZEN)
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
