"""Whom in a server a message concerns, and whose sequences are lost with another server."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from trimmoe.runtime.node.front.access import Desk
from trimmoe.runtime.node.front.entrance import Entrance
from trimmoe.runtime.node.mail import Mail
from trimmoe.runtime.node.records.checks import Geometry, check
from trimmoe.runtime.node.records.messages import (
    ANY_POSITION,
    Ask,
    Evicted,
    Followed,
    Granted,
    InHand,
    Lost,
    Parcel,
    Release,
    Reserve,
    Retain,
    Stranded,
    Tokens,
    Weather,
    Withdraw,
)
from trimmoe.runtime.node.records.passengers import MalformedPassengers
from trimmoe.runtime.node.schedule.floor import Floor
from trimmoe.runtime.node.watch.planner import Planner
from trimmoe.runtime.node.watch.reports import Reporter


@dataclass(frozen=True, kw_only=True, slots=True)
class Switchboard:
    """Of one server."""

    geometry: Geometry
    desk: Desk
    entrance: Entrance
    floor: Floor
    mail: Mail
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
        except MalformedPassengers as error:
            self.malformed[str(error)] += 1

    def _hand_over(self, sender: int, parcel: Parcel) -> None:
        match parcel.message:
            case Reserve() as message:
                self.entrance.admit(message, parcel.tensors)
            case Granted(sequence=sequence, ok=ok, kept=kept):
                self.desk.granted(sender, sequence, ok, kept)
            case Release(sequences=sequences):
                self._release(sequences)
            case Retain(sequences=sequences):
                self.floor.release(sequences, retained=True)
            case Evicted(sequence=sequence):
                self.desk.memory.evicted(sender, sequence)
            case Withdraw(sequence=sequence, start=start, epoch=epoch):
                self.floor.withdraw(sequence, start, epoch)
            case Tokens(tokens=tokens):
                self.desk.answers.received(sender, tokens)
            case Followed(after=after):
                self.desk.answers.followed(sender, after)
            case Lost(sequence=sequence, position=position, disputed=disputed):
                self.desk.lost(sequence, position, disputed)
            case Stranded(sequence=sequence, start=start, epoch=epoch):
                self.desk.stranded(sequence, start, epoch)
            case Ask(sequence=sequence):
                self._asked(sender, sequence)
            case InHand(sequence=sequence):
                self.desk.in_hand(sequence)
            case Weather() as message:
                self.planner.note(sender, message)
                self.reporter.kv_usage[sender] = message.kv_usage
                self.reporter.running[sender] = message.running
            case message:
                self.floor.take(sender, message, parcel.tensors, parcel.wave)

    def _asked(self, access: int, sequence: int) -> None:
        if self.entrance.keeps(sequence) or self.floor.has_in_hand(sequence, self.recent_s):
            self.mail.post(Parcel(to=access, message=InHand(sequence)))

    def _release(self, sequences: list[int]) -> None:
        self.entrance.forget(sequences)
        self.floor.release(sequences)

    def peer_down(self, server: int) -> None:
        """Everything under way between that server and this one may be lost: say whose it was."""
        self.reporter.running.pop(server, None)
        seats = self.floor.seats
        self._release([*seats.of_access(server), *self.entrance.of_access(server)])
        waiting = self.floor.gather.awaiting(server)
        for sequence, start in {*waiting, *self.mail.returned_to(server)}:
            self.mail.tell_lost(sequence, start)
        for seat in seats:
            if seat.crosses(server):
                self.mail.tell_lost(seat.sequence, ANY_POSITION)
            elif server in seat.dispatched:
                self.mail.tell_lost(seat.sequence, seat.dispatched[server])
        self.desk.server_lost(server)
