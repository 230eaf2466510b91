"""Units of rows on one server: what is known of each, and what it still waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from trimmoe.core.specs import FloatArray
from trimmoe.core.wave import Wave, join_waves
from trimmoe.runtime.node.records.messages import NO_TOKEN
from trimmoe.runtime.node.records.packing import MalformedMessage
from trimmoe.runtime.node.records.rows import Rows, UnitName
from trimmoe.runtime.node.records.sequences import Seat
from trimmoe.runtime.seen import UNKNOWN

if TYPE_CHECKING:
    from torch import Tensor

OWN_RAW = -1
"""In place of a server: this one's slots and shared expert for rows that came raw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A partial sum of some rows of a unit."""

    offsets: tuple[int, ...]
    """Empty: all rows."""
    states: Tensor
    """[rows, d]."""
    replaces: bool = False
    """Whether it has what the unit came with in it already."""

    def fits(self, count: int) -> bool:
        """Whether it is of rows of a unit of so many."""
        if self.offsets:
            return max(self.offsets) < count
        return self.states.shape[0] == count


@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """This server's slots of one row, of the layer before the one it is about to enter; the shared
    expert runs with them."""

    experts: Tensor
    """int32 [1, k], -1 where a slot is dropped."""
    gates: Tensor
    """float32 [1, k]."""


@dataclass(eq=False, kw_only=True, slots=True)
class Unit:
    """The row of one generated token, or the rows of a chunk of a prompt."""

    seat: Seat
    layer: int
    """The layer it is about to enter, or whose results it gathers."""
    start: int
    """Position of the first row."""
    epoch: int = 0
    """How often tokens of its sequence had been withdrawn when it set out."""
    count: int = 1
    tokens: tuple[int, ...] = ()
    """Before the first layer, in place of states; of a generated token also later, where it is
    told."""
    wants: int = 0
    """As of `Rows`."""
    hidden: Tensor | None = None
    """[count, d], without `parts`."""
    parts: tuple[Part, ...] = ()
    own: Own | None = None
    """What this server still owes a row that came raw and waits for nobody else."""
    wave: Wave | None = None
    """Where the engine's row of a generated token is; None for a chunk, and after an exit."""
    row: int = 0
    """Its index in `wave`, which it may share with others."""
    probe: int = NO_TOKEN
    last: bool = False
    trailing: bool = False
    """Whether it exited and its state goes on without routed experts."""
    entering: bool = False
    """Whether its wave is about to enter the layer after the one it gathers."""
    spent: FloatArray | None = None
    """Quality loss of each row of a chunk so far, [count]; None if no stand-in has run."""

    @property
    def sequences(self) -> tuple[int, ...]:
        return (self.seat.sequence,)

    @property
    def name(self) -> UnitName:
        return UnitName(self.seat.sequence, self.start, self.epoch)

    @property
    def is_void(self) -> bool:
        """Whether it was withdrawn."""
        return self.seat.is_void(self.start, self.epoch)

    @property
    def decoding(self) -> bool:
        return self.wave is not None

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.count)

    def behind(self, layer: int, layer_count: int) -> int:
        """The layer that everything before it has to be written in until it may enter `layer`:
        that one itself, but for the last. Once it has passed that a generated token ends without
        waiting for anybody."""
        return layer_count if self.decoding and layer == layer_count - 1 else layer

    def waits_before(self, first: int, last: int, layer_count: int) -> int:
        """The first of the layers [first, last), all run here, before which it has to wait for
        tokens ahead of it; `last` if there is none."""
        for at in range(first, last):
            if not self.seat.is_next(self.behind(at, layer_count), self.start):
                return at
        return last


@dataclass(eq=False, kw_only=True, slots=True)
class _Gathering:
    """A unit on its way here, or its parts that were quicker."""

    seat: Seat
    unit: Unit | None = None
    awaited: set[int] = field(default_factory=set)
    arrived: dict[int, Part] = field(default_factory=dict)
    checks: frozenset[Check] = frozenset()
    seconds: dict[Check, Part] = field(default_factory=dict)
    """What was computed a second time."""

    @property
    def complete(self) -> bool:
        return (
            self.unit is not None
            and self.awaited <= self.arrived.keys()
            and self.checks <= self.seconds.keys()
        )


Check = tuple[int, int]
"""Who was asked, and who was asked a second time."""
Judge = Callable[["Unit", Mapping[int, Part], Mapping[Check, Part]], "dict[int, Part] | None"]
"""Gives a unit's parts with right ones in place of wrong ones; None if those are not known."""
Key = tuple[UnitName, int]
"""A unit and a layer."""


class Gather:
    """Units whose partial sums are still to come."""

    def __init__(self, judge: Judge) -> None:
        self._under_way: dict[Key, _Gathering] = {}
        self._judge = judge

    def __len__(self) -> int:
        return len(self._under_way)

    def expect(
        self, unit: Unit, awaited: Iterable[int], checks: Iterable[Check] = ()
    ) -> Unit | None:
        """The unit came; it is given back once nothing is awaited any more."""
        key = (unit.name, unit.layer)
        gathering = self._under_way.setdefault(key, _Gathering(seat=unit.seat))
        gathering.unit, gathering.awaited = unit, set(awaited)
        gathering.checks = frozenset((first, second) for first, second in checks)
        return self._done(key, gathering)

    def add(self, seat: Seat, name: UnitName, layer: int, server: int, part: Part) -> Unit | None:
        """A server's partial sum came; the unit if it was the last that was awaited."""
        key = (name, layer)
        gathering = self._under_way.setdefault(key, _Gathering(seat=seat))
        gathering.arrived[server] = part
        return self._done(key, gathering)

    def add_second(
        self, seat: Seat, name: UnitName, layer: int, check: Check, part: Part
    ) -> Unit | None:
        """Likewise, of what was computed a second time."""
        key = (name, layer)
        gathering = self._under_way.setdefault(key, _Gathering(seat=seat))
        gathering.seconds[check] = part
        return self._done(key, gathering)

    def drop(self, sequences: Iterable[int]) -> None:
        """Forget all of these sequences."""
        gone = set(sequences)
        self._under_way = {k: v for k, v in self._under_way.items() if k[0].sequence not in gone}

    def awaiting(self, server: int) -> list[tuple[int, int]]:
        """(sequence, start) of what cannot complete without a server."""
        return [
            (name.sequence, name.start)
            for (name, _), gathering in self._under_way.items()
            if (server in gathering.awaited and server not in gathering.arrived)
            or any(by == server for _, by in gathering.checks - gathering.seconds.keys())
        ]

    def _done(self, key: Key, gathering: _Gathering) -> Unit | None:
        if not gathering.complete:
            return None
        del self._under_way[key]
        unit = gathering.unit
        assert unit is not None
        # What replaces states comes first; else the order makes no difference (`models.sums`). Of
        # those alone that were asked.
        came = {server: gathering.arrived[server] for server in sorted(gathering.awaited)}
        seconds = {check: gathering.seconds[check] for check in sorted(gathering.checks)}
        if not all(part.fits(unit.count) for part in (*came.values(), *seconds.values())):
            raise MalformedMessage("a partial sum of other rows")
        if seconds:
            judged = self._judge(unit, came, seconds)
            if judged is None:
                return None
            came = judged
        unit.parts = tuple(came.values())
        return unit


def foremost(units: Sequence[Unit]) -> list[Unit]:
    """The first unit of each sequence in a batch; the others follow it in turn."""
    found: dict[int, Unit] = {}
    for unit in units:
        first = found.setdefault(unit.seat.sequence, unit)
        if unit.start < first.start:
            found[unit.seat.sequence] = unit
    return list(found.values())


def boarded(units: Sequence[Unit]) -> tuple[list[Unit], Wave]:
    """One wave of all units, and the units in the order of its rows."""
    groups: dict[int, list[Unit]] = {}
    for unit in units:
        groups.setdefault(id(unit.wave), []).append(unit)
    waves, ordered = [], []
    for group in groups.values():
        wave = group[0].wave
        assert wave is not None
        waves.append(wave.take(np.array([unit.row for unit in group])))
        ordered += group
    return ordered, join_waves(waves)


def rows_of(
    units: Sequence[Unit],
    counts: list[int] | None = None,
    offsets: list[int] | None = None,
    *,
    moving: bool = True,
) -> Rows:
    """All rows of these units, or so many of each, which have these offsets there; with what is
    told of their sequences if they are `moving` on."""
    return Rows(
        [unit.seat.sequence for unit in units],
        [unit.start for unit in units],
        [unit.count for unit in units] if counts is None else counts,
        offsets or [],
        told_unless_zero([unit.epoch for unit in units]),
        _tokens_of(units) if moving else [],
        told_unless_zero([unit.wants for unit in units]) if moving else [],
        told_unless_zero([unit.seat.cut_at(unit.epoch) for unit in units]) if moving else [],
    )


def _tokens_of(units: Sequence[Unit]) -> list[int]:
    """As in `Rows`."""
    tokens = [
        UNKNOWN if unit.seat.seen is None or unit.count > 1 else unit.seat.seen.at(unit.start)
        for unit in units
    ]
    return tokens if max(tokens) > UNKNOWN else []


def told_unless_zero(values: list[int]) -> list[int]:
    """As epochs, wants and cuts in `Rows`: none where there are none but zeros."""
    return values if any(values) else []
