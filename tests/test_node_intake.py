"""Rows become work in the order in which they may be computed, whatever order they come in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from test_node_seats import SAMPLING, small_cache
from trimmoe.runtime.node.compute.passing import in_turn
from trimmoe.runtime.node.records.messages import NO_TOKEN, Onward, Reserve, first_sequence
from trimmoe.runtime.node.records.output import BatchOutput
from trimmoe.runtime.node.records.rows import Rows
from trimmoe.runtime.node.records.sequences import Seats
from trimmoe.runtime.node.records.units import Unit, rows_of
from trimmoe.runtime.node.schedule.intake import Intake
from trimmoe.runtime.node.schedule.scheduler import Scheduler

OURS, ROUTE = first_sequence(0, 5), [0, 1, 1, 1]
READ = 6
"""Positions that every layer has."""


class Second:
    """Rooms of the second server on a route, which has layers 1 to 3, or those that the route says,
    and one sequence there."""

    def __init__(self, route: list[int] = ROUTE) -> None:
        self.first, self.ends_together = route.index(1), False
        self.seats = Seats(small_cache(1, context_limit=32), server=1)
        asked = Reserve(OURS, route, SAMPLING, 0.0, False)
        self.seats.reserve(asked, lambda ok: None)
        seat = self.seats.get(OURS)
        assert seat is not None
        self.seat = seat
        for written in seat.written.values():
            written.mark(0, READ)
        self.scheduler = Scheduler(max_rows=64, now=lambda: 0.0, waited=lambda _: None)
        geometry: Any = SimpleNamespace(layer_count=len(ROUTE), server_count=2)
        self.intake = Intake(
            geometry,
            self.seats,
            self.scheduler,
            server=1,
            chunk=8,
            chains=True,
            ends_together=lambda: self.ends_together,
            withdrawn=lambda _: None,
            judge=None,  # type: ignore[arg-type]
        )

    def comes(self, start: int, *, epoch: int = 0, cut: int = 0) -> None:
        """A generated token's row comes from the first server, about to enter the first layer."""
        tell = [[start], [1], [], [epoch] if epoch else [], [], [], [cut] if cut else []]
        onward = Onward(
            layer=self.first - 1,
            rows=Rows([OURS], *tell),
            awaited=[[]],
            raw=[],
            probes=[NO_TOKEN],
            decoding=True,
            last=False,
            entering=True,
        )
        wave: Any = SimpleNamespace()
        self.intake.take(0, onward, (torch.zeros(1, 4),), wave)

    def taken(self) -> list[int]:
        """Positions of the next batch, which is computed."""
        work = self.scheduler.next()
        if work is None:
            return []
        units: list[Unit] = list(work.items)
        layers = range(self.first, len(ROUTE) + 1)
        self.intake.absorb(BatchOutput(written=[(unit, layers) for unit in units]))
        return [unit.start for unit in units]


def test_a_row_waits_for_those_before_it() -> None:
    second = Second()
    second.comes(READ + 1)
    assert second.taken() == []
    second.comes(READ)
    assert second.taken() == [READ, READ + 1]


@pytest.mark.parametrize("together", [True, False])
def test_rows_enter_the_last_layer_together_where_all_of_it_runs_here(together: bool) -> None:
    """Else one ends before another enters."""
    second = Second([0, 0, 0, 1])
    second.ends_together = together
    second.comes(READ + 1)
    assert second.taken() == []
    second.comes(READ)
    assert second.taken() == ([READ, READ + 1] if together else [READ])
    assert second.taken() == ([] if together else [READ + 1])


def test_rows_that_were_to_end_together_do_so_one_by_one_if_the_last_layer_is_left_elsewhere() -> (
    None
):
    """By another engine, which came when they were ready."""
    second = Second([0, 0, 0, 1])
    second.ends_together = True
    for start in (READ, READ + 1):
        second.comes(start)
    work = second.scheduler.next()
    assert work is not None
    second.ends_together = False
    spec = SimpleNamespace(layer_count=len(ROUTE))
    worker: Any = SimpleNamespace(
        view=SimpleNamespace(spec=spec), segments=SimpleNamespace(end_here=False)
    )
    ahead, later = in_turn(worker, 3, work.items)
    assert [unit.start for unit in ahead] == [READ]
    second.intake.absorb(BatchOutput(ready=list(later)))
    assert second.scheduler.next() is None
    second.intake.absorb(BatchOutput(written=[(unit, range(3, 5)) for unit in ahead]))
    assert second.taken() == [READ + 1]
    worker.segments.end_here = True
    assert in_turn(worker, 3, work.items) == (work.items, ())


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_a_row_behind_withdrawn_ones_waits_for_what_takes_their_place(behind: int) -> None:
    """Of the wrong token's states none is attended to, though those of what follows come first."""
    second = Second()
    wrong = READ - 1
    second.comes(wrong + behind, epoch=1, cut=wrong)
    assert second.taken() == []
    assert second.seat.written[1].length == wrong
    for start in range(wrong, wrong + behind):
        second.comes(start, epoch=1, cut=wrong)
    assert second.taken() == [*range(wrong, wrong + behind + 1)]


def test_rows_tell_from_where_on_tokens_were_withdrawn() -> None:
    second = Second()
    second.comes(READ, epoch=1, cut=READ - 2)
    seat = second.seat
    assert rows_of([Unit(seat=seat, layer=2, start=READ, epoch=1)]).cut(0) == READ - 2
    assert rows_of([Unit(seat=seat, layer=2, start=READ)]).cuts == []


def test_a_peer_that_does_not_tell_is_taken_to_begin_there() -> None:
    second = Second()
    second.comes(READ - 1, epoch=1)
    assert second.taken() == [READ - 1]


def test_nothing_is_withdrawn_behind_what_sets_out() -> None:
    rows = Rows([OURS], [5], [1], [], [1], [], [], [6])
    assert not rows.well_formed()
    assert Rows([OURS], [5], [1], [], [1], [], [], [5]).well_formed()
