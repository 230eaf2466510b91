"""Whom in a server a message concerns, and whose sequences are lost with another server."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from trimmoe.runtime.node.front.admission import Admission
from trimmoe.runtime.node.front.front_end import FrontEnd
from trimmoe.runtime.node.outbox import Outbox
from trimmoe.runtime.node.records.checks import Geometry, check
from trimmoe.runtime.node.records.messages import (
    ANY_POSITION,
    Ask,
    Evicted,
    Followed,
    Granted,
    InHand,
    LoadReport,
    Lost,
    Parcel,
    Release,
    Reserve,
    Retain,
    Running,
    Stranded,
    Tokens,
    Withdraw,
)
from trimmoe.runtime.node.records.packing import MalformedMessage
from trimmoe.runtime.node.schedule.intake import Intake
from trimmoe.runtime.node.watch.planner import Planner
from trimmoe.runtime.node.watch.reports import Reporter


@dataclass(frozen=True, kw_only=True, slots=True)
class Inbox:
    """Of one server."""

    geometry: Geometry
    front_end: FrontEnd
    admission: Admission
    intake: Intake
    outbox: Outbox
    planner: Planner
    reporter: Reporter
    recent_s: float
    """Who worked at a sequence no longer ago has it in hand."""
    malformed: Counter[str]
    """How often nonsense of each kind came."""

    def deliver(self, sender: int, parcel: Parcel) -> None:
        """Hand a message to whom it concerns; nonsense is counted and dropped."""
        try:
            check(self.geometry, sender, parcel.message, parcel.tensors)
            self._hand_over(sender, parcel)
        except MalformedMessage as error:
            self.malformed[str(error)] += 1

    def _hand_over(self, sender: int, parcel: Parcel) -> None:
        match parcel.message:
            case Reserve() as message:
                self.admission.admit(message, parcel.tensors)
            case Granted(sequence=sequence, ok=ok, kept=kept):
                self.front_end.granted(sender, sequence, ok, kept)
            case Release(sequences=sequences):
                self._release(sequences)
            case Retain(sequences=sequences):
                self._release(sequences, retained=True)
            case Evicted(sequence=sequence):
                self.front_end.memory.evicted(sender, sequence)
            case Withdraw(sequence=sequence, start=start, epoch=epoch):
                self.intake.withdraw(sequence, start, epoch)
            case Tokens(tokens=tokens):
                self.front_end.answers.received(sender, tokens)
            case Followed(after=after):
                self.front_end.answers.followed(sender, after)
            case Lost(sequence=sequence, position=position, disputed=disputed):
                self.front_end.lost(sequence, position, disputed)
            case Stranded(sequence=sequence, start=start, epoch=epoch):
                self.front_end.stranded(sequence, start, epoch)
            case Ask(sequence=sequence):
                self._asked(sender, sequence)
            case InHand(sequence=sequence):
                self.front_end.in_hand(sequence)
            case LoadReport() as message:
                self.planner.note(sender, message)
                self.reporter.kv_usage[sender] = message.kv_usage
                self._runs(sender, message.running)
            case Running(count=count):
                self._runs(sender, count)
            case message if self.admission.is_early(message):
                self.intake.inspect(message, parcel.wave)
                self.admission.hold(sender, parcel)
            case message:
                self.intake.take(sender, message, parcel.tensors, parcel.wave)

    def _runs(self, server: int, answers: int) -> None:
        """So many are under way to another server's users."""
        if self.reporter.running.get(server) != answers:
            self.reporter.running[server] = answers
            self.front_end.load_changed()

    def _asked(self, access: int, sequence: int) -> None:
        if self.admission.keeps(sequence) or self.intake.has_in_hand(sequence, self.recent_s):
            self.outbox.post(Parcel(to=access, message=InHand(sequence)))

    def _release(self, sequences: list[int], *, retained: bool = False) -> None:
        # Of whoever still waits for a place there is nothing to retain.
        self.admission.forget(sequences)
        self.intake.release(sequences, retained=retained)

    def peer_down(self, server: int) -> None:
        """Everything under way between that server and this one may be lost: say whose it was."""
        self.reporter.running.pop(server, None)
        seats = self.intake.seats
        self._release([*seats.of_access(server), *self.admission.of_access(server)])
        self.admission.peer_down(server)
        waiting = self.intake.gather.awaiting(server)
        for sequence, start in {*waiting, *self.outbox.returned_to(server)}:
            self.outbox.tell_lost(sequence, start)
        for seat in seats:
            if seat.crosses(server):
                self.outbox.tell_lost(seat.sequence, ANY_POSITION)
            elif server in seat.dispatched:
                self.outbox.tell_lost(seat.sequence, seat.dispatched[server])
        self.front_end.server_lost(server)
