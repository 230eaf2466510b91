"""Where rows wait: what comes in from other servers becomes work, in the order it can be done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trimmoe.core.wave import Wave
from trimmoe.runtime.node.records.checks import Geometry
from trimmoe.runtime.node.records.messages import (
    NOBODY,
    Dispatch,
    Message,
    Onward,
    Partial,
    Prompt,
    Propagate,
    Start,
)
from trimmoe.runtime.node.records.output import Arrival, BatchOutput
from trimmoe.runtime.node.records.packing import MalformedMessage, unpack_wave
from trimmoe.runtime.node.records.readings import Reading
from trimmoe.runtime.node.records.rows import Rows
from trimmoe.runtime.node.records.sequences import Seat, Seats
from trimmoe.runtime.node.records.slots import Slots
from trimmoe.runtime.node.records.sums import joined
from trimmoe.runtime.node.records.units import OWN_RAW, Gather, Judge, Own, Part, Unit
from trimmoe.runtime.node.records.work import Step, Work
from trimmoe.runtime.node.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from torch import Tensor


class Intake:
    """Turns messages about rows into scheduled work; used by the event loop only.

    Rows of sequences without a seat here are dropped: their request is over. So are those that were
    withdrawn, of which `withdrawn` is told. `chains`: whether tokens of one sequence may pass a
    layer together, see `MoEView.chains`; `ends_together`: whether they may the last one too.
    """

    def __init__(
        self,
        geometry: Geometry,
        seats: Seats,
        scheduler: Scheduler,
        *,
        server: int,
        chunk: int,
        chains: bool,
        ends_together: Callable[[], bool],
        withdrawn: Callable[[Sequence[Unit]], None],
        judge: Judge,
    ) -> None:
        self._withdrawn = withdrawn
        self.seats, self.scheduler = seats, scheduler
        self.gather = Gather(judge)
        self._geometry, self._server, self._chunk = geometry, server, chunk
        self._chains, self._ends_together = chains, ends_together
        self._take: dict[type, Callable[..., None]] = {
            Prompt: self._prompt,
            Start: self._start,
            Dispatch: self._dispatch,
            Partial: self._partial,
            Onward: self._onward,
            Propagate: self._propagate,
        }

    def take(
        self, sender: int, message: Message, tensors: Sequence[Tensor], wave: Wave | None = None
    ) -> None:
        """A message came that `checks.check` lets pass; raises `MalformedMessage` if it makes
        no sense all the same."""
        self._take[type(message)](sender, message, tuple(tensors), wave)

    def inspect(self, message: Message, wave: Wave | None) -> None:
        """Raise `MalformedMessage` if what a message tells of its tokens makes no sense, whether or
        not they have a place."""
        if wave is None and isinstance(message, Start):
            self._unpacked(message.wave, 0, message.rows)
        elif wave is None and isinstance(message, Onward) and message.decoding:
            self._unpacked(message.wave, message.layer + message.entering, message.rows)

    def absorb(self, result: BatchOutput) -> None:
        """A batch ran: more may be ready now."""
        for unit, layers in result.written:
            seat = unit.seat
            if unit.is_void:
                continue
            for layer in layers:
                seat.written[layer].mark(unit.start, unit.count)
                if seat.parked:
                    self._wake(seat, layer)
        for unit in result.ready:
            self.enter(unit)

    def worked(self, work: Work) -> None:
        """These were computed just now."""
        for item in work.items:
            for sequence in item.sequences:
                if (seat := self.seats.get(sequence)) is not None:
                    seat.worked_s = self.scheduler.now()

    def has_in_hand(self, sequence: int, recent_s: float) -> bool:
        """Whether this server has work of a sequence to do, has it wait for a place, or worked at
        it less than `recent_s` ago: its rows may be on their way."""
        if self.seats.is_waiting(sequence) or self.scheduler.any(
            lambda item: sequence in item.sequences
        ):
            return True
        seat = self.seats.get(sequence)
        return seat is not None and self.scheduler.now() - seat.worked_s < recent_s

    def enter(self, unit: Unit) -> None:
        """A unit is about to enter a layer; it waits for the states that it attends to."""
        seat, layer = unit.seat, unit.layer
        if not seat.open or self._ends_here(unit):
            return
        if layer not in seat.written:
            raise MalformedMessage("a layer of another server")
        behind, step = unit.behind(layer, self._geometry.layer_count), self._step(unit)
        written = seat.written[behind]
        # Tokens of one sequence pass a layer in one batch, or in this order; but the last layer,
        # after which each ends as soon as all of its slots have run, unless these all run here.
        together = self._chains and step is Step.ATTEND
        together = together and (behind == layer or self._ends_together())
        if unit.start != (written.due if together else written.length):
            seat.parked.setdefault(behind, []).append(unit)
            return
        self.scheduler.put(step, layer, unit, rows=unit.count)
        if together:
            written.due = unit.start + 1
            self._wake(seat, behind)

    def _step(self, unit: Unit) -> Step:
        if unit.trailing:
            return Step.TRAIL
        if unit.layer == self._geometry.layer_count:
            return Step.CHUNK_END
        return Step.ATTEND if unit.decoding else Step.CHUNK

    def read_on(self, readings: Iterable[Reading]) -> None:
        """This server's own readings of its users' sequences pass further layers."""
        for one in readings:
            if not one.void:
                one.seat = self.seats.get(one.sequence)
                self.scheduler.put(Step.GUESS, one.layer, one, rows=len(one.rows))

    def release(self, sequences: Iterable[int], *, retained: bool = False) -> None:
        """These sequences are over: free their places, unless they are to be retained, and forget
        their work."""
        gone = set(sequences)
        if retained:
            self.seats.retain(gone)
        else:
            self.seats.release(gone)
        self.gather.drop(gone)
        self.scheduler.drop(lambda item: gone.issuperset(item.sequences))

    def withdraw(self, sequence: int, start: int, epoch: int) -> None:
        """Tokens of a sequence from position `start` on are void, unless they set out after this
        `epoch`-th time that any were."""
        seat = self.seats.get(sequence)
        if seat is not None and not seat.withdraw(start, epoch):
            return

        def void(item: Any) -> bool:
            if isinstance(item, Arrival):
                return item.sequence == sequence and item.epoch < epoch
            return isinstance(item, Unit) and item.seat is seat and item.is_void

        dropped = [item for item in self.scheduler.drop(void) if isinstance(item, Unit)]
        if seat is not None:
            for layer, units in seat.parked.items():
                dropped += [unit for unit in units if unit.is_void]
                seat.parked[layer] = [unit for unit in units if not unit.is_void]
        self._withdrawn(dropped)

    def _ends_here(self, unit: Unit) -> bool:
        """Whether a unit was withdrawn, of which word is given if so."""
        if unit.is_void:
            self._withdrawn([unit])
        return unit.is_void

    def _wake(self, seat: Seat, layer: int) -> None:
        parked = seat.parked.pop(layer, [])
        for unit in sorted(parked, key=lambda each: each.start):
            self.enter(unit)

    def _prompt(self, sender: int, message: Prompt, tensors: tuple[Tensor], wave: None) -> None:
        seat = self.seats.get(message.sequence)
        if seat is None:
            return
        ids = tensors[0].tolist()
        if message.epoch:
            self.withdraw(message.sequence, message.start, message.epoch)
        for start in range(0, len(ids), self._chunk):
            tokens = tuple(ids[start : start + self._chunk])
            self.enter(
                Unit(
                    seat=seat,
                    layer=0,
                    start=message.start + start,
                    epoch=message.epoch,
                    count=len(tokens),
                    tokens=tokens,
                    last=start + len(tokens) == len(ids),
                    wants=message.wants,
                )
            )

    def _start(self, sender: int, message: Start, tensors: tuple, wave: Wave | None) -> None:
        wave = wave or self._unpacked(message.wave, 0, message.rows)
        for row, ((sequence, start, epoch), _) in enumerate(message.rows.split()):
            if (seat := self.seats.get(sequence)) is not None:
                self.withdraw(sequence, start, epoch)
                seat.note(start, epoch, message.tokens[row])
                self.enter(
                    Unit(
                        seat=seat,
                        layer=0,
                        start=start,
                        epoch=epoch,
                        tokens=(message.tokens[row],),
                        wants=message.rows.wanted(row),
                        wave=wave,
                        row=row,
                    )
                )

    def _dispatch(self, sender: int, message: Dispatch, tensors: tuple, wave: None) -> None:
        hidden, experts, gates = tensors
        self._put_slots(
            message.layer,
            Slots(
                rows=message.rows,
                destinations=tuple(message.destinations),
                hidden=hidden,
                experts=experts,
                gates=gates,
                raw=False,
                decoding=message.decoding,
                checks=message.checks,
            ),
        )

    def _put_slots(self, layer: int, slots: Slots) -> None:
        step = Step.SLOTS if slots.decoding else Step.CHUNK_SLOTS
        self.scheduler.put(step, layer, slots, rows=slots.rows.total)

    def _partial(
        self, sender: int, message: Partial, tensors: tuple[Tensor, ...], wave: None
    ) -> None:
        rows, server = message.rows, OWN_RAW if message.raw else sender
        states = joined(tensors[0], tensors[1] if message.wide else None, message.wide)
        for name, where in rows.split():
            seat = self.seats.get(name.sequence)
            if seat is not None:
                self._require_gathers(seat, message.layer)
                part = Part(
                    offsets=tuple(rows.offsets[where]), states=states[where], replaces=message.raw
                )
                if message.checks == NOBODY:
                    done = self.gather.add(seat, name, message.layer, server, part)
                else:
                    check = (message.checks, sender)
                    done = self.gather.add_second(seat, name, message.layer, check, part)
                self._gathered(done)

    def _onward(
        self, sender: int, message: Onward, tensors: tuple[Tensor, ...], wave: Wave | None
    ) -> None:
        rows = message.rows
        if message.decoding and wave is None:
            wave = self._unpacked(message.wave, message.layer + message.entering, rows)
        hidden = joined(tensors[0], tensors[1] if message.wide else None, message.wide)
        slots = tensors[1 + bool(message.wide) :]
        raw = {row: at for at, row in enumerate(message.raw)}
        owed: list[int] = []
        for index, ((sequence, start, epoch), where) in enumerate(rows.split()):
            seat = self.seats.get(sequence)
            if seat is None:
                continue
            self._require_gathers(seat, message.layer, sender)
            self.withdraw(sequence, rows.cut(index), epoch)
            seat.note(start, epoch, rows.token(index))
            unit = Unit(
                seat=seat,
                layer=message.layer,
                start=start,
                epoch=epoch,
                count=rows.counts[index],
                tokens=(rows.token(index),) if message.decoding and rows.tokens else (),
                wants=rows.wanted(index),
                hidden=hidden[where],
                wave=wave,
                row=index,
                probe=message.probes[index],
                last=message.last,
                entering=message.entering,
                spent=np.array(message.spent[where]) if message.spent else None,
            )
            mine = [row for row in range(where.start, where.stop) if row in raw]
            awaited = message.awaited[index]
            checks = message.checked[index] if message.checked else ()
            if mine and message.entering and not awaited:
                # Nobody else is waited for: it runs its slots on its way into the next layer.
                at = slice(raw[mine[0]], raw[mine[0]] + 1)
                unit.own = Own(experts=slots[0][at], gates=slots[1][at])
                self._gathered(unit)
                continue
            owed += mine
            own = {OWN_RAW} if mine else set()
            self._gathered(self.gather.expect(unit, own.union(awaited), checks))
        if owed:
            at = [raw[row] for row in owed]
            owing = (each[at] for each in slots)
            self._put_slots(message.layer, self._raw_slots(message, owed, hidden, *owing))

    def _raw_slots(
        self, message: Onward, raw: list[int], hidden: Tensor, experts: Tensor, gates: Tensor
    ) -> Slots:
        rows, which = message.rows, np.array(raw)
        unit_of = np.repeat(np.arange(len(rows.counts)), rows.counts)[which]
        first = np.cumsum([0, *rows.counts])[unit_of]
        units, counts = np.unique(unit_of, return_counts=True)
        whole = message.decoding or which.size == rows.total
        return Slots(
            rows=rows.chosen(
                units.tolist(), counts.tolist(), [] if whole else (which - first).tolist()
            ),
            destinations=(self._server,) * units.size,
            hidden=hidden[raw],
            experts=experts,
            gates=gates,
            raw=True,
            decoding=message.decoding,
        )

    def _propagate(self, sender: int, message: Propagate, tensors: tuple, wave: None) -> None:
        for index, ((sequence, start, epoch), where) in enumerate(message.rows.split()):
            if (seat := self.seats.get(sequence)) is not None:
                if sender not in seat.route:
                    raise MalformedMessage("rows of a server that they do not pass")
                seat.note(start, epoch, message.rows.token(index))
                unit = Unit(
                    seat=seat,
                    layer=message.layer,
                    start=start,
                    hidden=tensors[0][where],
                    trailing=not message.frozen,
                )
                if message.frozen:
                    self.scheduler.put(Step.PROPAGATE, message.layer, unit)
                else:
                    self.enter(unit)

    def _require_gathers(self, seat: Seat, layer: int, sender: int | None = None) -> None:
        """Raise `MalformedMessage` unless a layer of a sequence gathers here, and `sender`, if
        that is said, is where it began."""
        after = seat.route[min(layer + 1, len(seat.route) - 1)]
        if after != self._server or sender not in (None, seat.route[layer]):
            raise MalformedMessage("rows of a server that they do not pass")

    def _gathered(self, unit: Unit | None) -> None:
        if unit is None or self._ends_here(unit):
            return
        if unit.decoding and not unit.entering:
            self.scheduler.put(Step.FINISH, unit.layer, unit)
        else:
            unit.layer, unit.entering = unit.layer + 1, False
            self.enter(unit)

    def _unpacked(self, packed: bytes, layer: int, rows: Rows) -> Wave:
        return unpack_wave(
            packed,
            layer=layer,
            sequences=rows.sequences,
            layer_count=self._geometry.layer_count,
            server_count=self._geometry.server_count,
        )
