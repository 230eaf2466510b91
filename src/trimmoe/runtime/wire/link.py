"""One link as a state machine: who hears whom, what was sent, what was consumed.

Pure: envelopes and times come in, envelopes and changes come out.

Each side numbers its *session* towards the other and takes a new, larger number whenever the link
is cut. An envelope says which session of the receiver its sender hears; the link is up while both
hear each other's present session. Messages are numbered within a session, so that a loss is
noticed by the next envelope, and a message written for an earlier session is recognised as stale.
A cut on one side therefore cuts the other side, and both begin anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from trimmoe.runtime.wire.base import PeerChange, PeerDown, PeerUnreachable, PeerUp
from trimmoe.runtime.wire.protocol import WIRE_VERSION, Envelope, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSettings:
    """How a transport keeps its links; the same on all servers of a cluster."""

    beat_s: float = 0.25
    """Time between heartbeats."""
    silence_s: float = 2.0
    """A peer unheard for so long is down; longer than the largest message on the slowest link."""
    window_messages: int = 1024
    """Messages a peer may leave unconsumed before `send` refuses more."""
    window_bytes: int = 128 << 20
    """Likewise in bytes; one message is allowed whatever its size."""
    probe_s: float = 5.0
    """Time between bandwidth probes of each link; infinite for none."""
    probe_bytes: int = 128 << 10

    def __post_init__(self) -> None:
        assert 0 < self.beat_s < self.silence_s
        assert self.window_messages > 0
        assert self.window_bytes > 0
        assert self.probe_s > 0


@dataclass(kw_only=True, slots=True)
class Link:
    """Both directions between this server and one peer."""

    name: str
    peer: str
    settings: LinkSettings
    new_session: Callable[[int], int]
    """A number larger than its argument, and larger after a restart of this server."""
    changes: list[PeerChange] = field(default_factory=list)
    """What to report; the owner takes them out."""
    up: bool = False
    answer_due: bool = False
    """Whether the peer should learn of our state before the next beat is due."""
    version: Version | None = None
    """What the peer speaks, once it was heard."""
    session: int = field(init=False)
    _sequence: int = 0
    _unconsumed: deque[int] = field(default_factory=deque)
    """Sizes of the messages the peer has not consumed, oldest first."""
    _unconsumed_bytes: int = 0
    _heard: int = 0
    _heard_at_s: float = -math.inf
    _arrived: int = 0
    _consumed: int = 0
    _waiting_bytes: int = 0
    """Arrived and not consumed."""
    _told: int = 0
    """Messages the peer knows to be consumed."""
    _untold_bytes: int = 0

    def __post_init__(self) -> None:
        self.session = self.new_session(0)

    def check_room(self, size_bytes: int) -> None:
        """Raise `PeerUnreachable` if a message of this size cannot be sent now."""
        if not self.up:
            raise PeerUnreachable(self.peer, "not up")
        if not self._fits(len(self._unconsumed), self._unconsumed_bytes, size_bytes):
            raise PeerUnreachable(self.peer, "its queue is full")

    def message(self, now_s: float) -> Envelope:
        """The envelope of the next message; call `sent` once the carrier has taken it."""
        return self._envelope(self._sequence + 1, is_beat=False, now_s=now_s)

    def sent(self, size_bytes: int) -> None:
        """The carrier took the message."""
        self._sequence += 1
        self._unconsumed.append(size_bytes)
        self._unconsumed_bytes += size_bytes
        self._tell()

    def beat(self, now_s: float) -> Envelope:
        """The envelope of a heartbeat."""
        self._tell()
        return self._envelope(self._sequence, is_beat=True, now_s=now_s)

    def hear(self, envelope: Envelope, size_bytes: int, now_s: float) -> bool:
        """Take note of an envelope; False if what it carries is stale or beyond a loss."""
        if envelope.session < self._heard:
            return False
        if envelope.session > self._heard:
            self._adopt(envelope.session, now_s)
        self._heard_at_s = max(self._heard_at_s, now_s)
        self.version = Version(envelope.version, envelope.minor)
        if envelope.heard != self.session:
            self.cut("it no longer hears this server")
            return envelope.is_beat
        if not self.up:
            self.up = self.answer_due = True
            self.changes.append(PeerUp(peer=self.peer))
        return self._acknowledge(envelope.received) and self._count(envelope, size_bytes)

    def consume(self, size_bytes: int) -> None:
        """The oldest message that arrived was taken by the layer above."""
        self._consumed += 1
        self._waiting_bytes -= size_bytes
        self._untold_bytes += size_bytes
        untold = self._consumed - self._told
        if (
            untold * 4 >= self.settings.window_messages
            or self._untold_bytes * 4 >= self.settings.window_bytes
        ):
            self.answer_due = True

    def tick(self, now_s: float) -> None:
        """Notice silence."""
        if self._heard and now_s - self._heard_at_s > self.settings.silence_s:
            self.cut(f"silent for {self.settings.silence_s:g} s")
            # A peer that restarted with an earlier clock must not be taken for its own past.
            self._heard = 0

    def silent_s(self, now_s: float) -> float:
        """How long nothing has come from the peer."""
        return now_s - self._heard_at_s

    def excuse(self, late_s: float) -> None:
        """This server did not listen for so long; that is not the peer's silence."""
        self._heard_at_s += late_s

    def cut(self, reason: str) -> None:
        """Void what is under way in both directions and begin anew; nothing if already down."""
        if not self.up:
            return
        lost = len(self._unconsumed)
        self.changes.append(PeerDown(peer=self.peer, reason=reason, lost_messages=lost))
        self.up = False
        self.session = self.new_session(self.session)
        self._sequence = 0
        self._unconsumed.clear()
        self._unconsumed_bytes = 0
        self.answer_due = True

    def _adopt(self, session: int, now_s: float) -> None:
        self.cut("it began a new session")
        self._heard, self._heard_at_s = session, now_s
        self._arrived = self._consumed = self._told = 0
        self._waiting_bytes = self._untold_bytes = 0
        self.answer_due = True

    def _fits(self, messages: int, held_bytes: int, size_bytes: int) -> bool:
        settings = self.settings
        return messages < settings.window_messages and (
            messages == 0 or held_bytes + size_bytes <= settings.window_bytes
        )

    def _acknowledge(self, received: int) -> bool:
        """Messages 1..`received` were consumed; False, and a cut, if so many were never sent."""
        consumed = received - (self._sequence - len(self._unconsumed))
        if consumed > len(self._unconsumed):
            self.cut("it acknowledges what was never sent")
            return False
        for _ in range(consumed):
            self._unconsumed_bytes -= self._unconsumed.popleft()
        return True

    def _count(self, envelope: Envelope, size_bytes: int) -> bool:
        expected = self._arrived if envelope.is_beat else self._arrived + 1
        if envelope.sequence > expected:
            self.cut("messages were lost on the way")
            return False
        if envelope.is_beat:
            return True
        if envelope.sequence < expected:
            return False
        waiting = self._arrived - self._consumed
        if not self._fits(waiting, self._waiting_bytes, size_bytes):
            self.cut("it sends more than its window")
            return False
        self._arrived += 1
        self._waiting_bytes += size_bytes
        return True

    def _envelope(self, sequence: int, *, is_beat: bool, now_s: float) -> Envelope:
        return Envelope(
            version=WIRE_VERSION.major,
            sender=self.name,
            receiver=self.peer,
            session=self.session,
            sequence=sequence,
            heard=self._heard,
            received=self._consumed,
            sent_s=now_s,
            is_beat=is_beat,
            minor=WIRE_VERSION.minor,
        )

    def _tell(self) -> None:
        self._told, self._untold_bytes, self.answer_due = self._consumed, 0, False
