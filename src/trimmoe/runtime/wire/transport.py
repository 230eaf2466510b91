"""`LinkTransport`: the rules of `Transport` on top of any carrier."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from types import TracebackType

import msgspec
from torch import Tensor

from trimmoe.runtime.wire.base import (
    Carrier,
    Counters,
    Frame,
    LinkEstimate,
    PeerChange,
    PeerDown,
    PeerUnreachable,
    Received,
    TransportClosed,
)
from trimmoe.runtime.wire.codec import (
    DEFAULT_LIMITS,
    Limits,
    MalformedFrame,
    MessageTypes,
    decode,
    encode,
)
from trimmoe.runtime.wire.estimates import LinkEstimator
from trimmoe.runtime.wire.link import Link, LinkSettings
from trimmoe.runtime.wire.peer import Peer, size_of
from trimmoe.runtime.wire.protocol import (
    Envelope,
    OtherVersion,
    Version,
    open_beat,
    open_envelope,
    pack,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A message in the inbox."""

    peer: Peer
    size_bytes: int
    received: Received


class LinkTransport:
    """Typed messages over a carrier. One event loop; use as `async with`, or `start` and `close`.

    `message_types` are the tagged `msgspec.Struct`s that `receive` may return; anything else that
    arrives is dropped and counted.
    """

    def __init__(
        self,
        carrier: Carrier,
        message_types: MessageTypes,
        *,
        settings: LinkSettings | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.carrier = carrier
        self._types = message_types
        self._settings = settings or LinkSettings()
        self._limits = limits
        self._peers: dict[str, Peer] = {}
        self._dropped: Counter[str] = Counter()
        self._strangers: dict[str, str] = {}
        self._inbox: deque[_Waiting] = deque()
        self._news = asyncio.Event()
        """Something arrived, changed or closed since the last look."""
        self._changed = asyncio.Event()
        self._callbacks: list[Callable[[PeerChange], None]] = []
        self._listener: Callable[[Received], None] | None = None
        self._ended: asyncio.Future[None]
        """Of who listens."""
        self._beating: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def name(self) -> str:
        return self.carrier.name

    @property
    def address(self) -> str:
        """Where others reach this server."""
        return self.carrier.address

    async def __aenter__(self) -> LinkTransport:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen, and send heartbeats to every connected peer."""
        await self.carrier.start(self._arrived, self._drop)
        self._beating = asyncio.create_task(self._beat_for_ever(), name=f"beats of {self.name}")

    def connect(self, peer: str, address: str = "") -> None:
        """Add a peer, or move it to another address; `PeerUp` follows when it answers."""
        assert peer != self.name, "a server has no link to itself"
        self.carrier.connect(peer, address)
        if peer not in self._peers:
            link = Link(
                name=self.name, peer=peer, settings=self._settings, new_session=_new_session
            )
            self._peers[peer] = Peer(link=link, estimator=LinkEstimator(peer=peer))
        self._peers[peer].connected_s = self._now()
        self._beat(self._peers[peer])

    def post(self, peer: str, message: msgspec.Struct, tensors: Sequence[Tensor] = ()) -> None:
        if self._closed:
            raise TransportClosed
        to = self._peers[peer]
        frames = encode(message, tensors, self._limits)
        size_bytes = size_of(frames)
        try:
            to.link.check_room(size_bytes)
            envelope = pack(to.link.message(self._now()))
            if not self.carrier.post(peer, [envelope, *frames]):
                raise PeerUnreachable(peer, "its connection is broken")
        except PeerUnreachable as error:
            self._dropped[f"not sent: {error.reason}"] += 1
            raise
        to.count_sent(size_bytes)

    async def send(
        self, peer: str, message: msgspec.Struct, tensors: Sequence[Tensor] = ()
    ) -> None:
        self.post(peer, message, tensors)

    async def receive(self) -> Received:
        while True:
            if self._closed:
                raise TransportClosed
            if self._inbox:
                waiting = self._inbox.popleft()
                waiting.peer.link.consume(waiting.size_bytes)
                self._settle(waiting.peer)
                return waiting.received
            self._news.clear()
            await self._news.wait()

    async def hand_to(self, listener: Callable[[Received], None]) -> None:
        assert self._listener is None, "somebody listens already"
        self._ended = asyncio.get_running_loop().create_future()
        self._listener = listener
        try:
            while self._inbox and not self._closed:
                self._hand_over(self._inbox.popleft(), listener)
            if self._closed:
                raise TransportClosed
            await self._ended
        finally:
            self._listener = None

    def _hand_over(self, waiting: _Waiting, listener: Callable[[Received], None]) -> None:
        waiting.peer.link.consume(waiting.size_bytes)
        try:
            listener(waiting.received)
        except Exception as error:
            # The carrier that calls is not to blame.
            self._listener = None
            if not self._ended.done():
                self._ended.set_exception(error)

    def peers_up(self) -> frozenset[str]:
        return frozenset(name for name, peer in self._peers.items() if peer.link.up)

    def version_of(self, peer: str) -> Version | None:
        return self._peers[peer].link.version

    def strangers(self) -> dict[str, str]:
        return dict(self._strangers)

    async def wait_up(self, *peers: str) -> None:
        while not self.peers_up().issuperset(peers):
            if self._closed:
                raise TransportClosed
            self._changed.clear()
            await self._changed.wait()

    def on_peer_change(self, callback: Callable[[PeerChange], None]) -> None:
        self._callbacks.append(callback)

    @property
    def counters(self) -> Counters:
        return Counters(
            sent={name: peer.sent for name, peer in self._peers.items()},
            received={name: peer.received for name, peer in self._peers.items()},
            dropped=dict(self._dropped),
        )

    def link_estimates(self) -> dict[str, LinkEstimate]:
        return {name: peer.estimator.estimate() for name, peer in self._peers.items()}

    def reading_wait_s(self) -> float:
        # A process that is late is so for all its peers; of one alone it is the link.
        measured = [peer.lateness.mean_s for peer in self._peers.values()]
        return median([late_s for late_s in measured if late_s is not None] or [0.0])

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating
        await self.carrier.close()
        self._inbox.clear()
        if self._listener is not None and not self._ended.done():
            self._ended.set_exception(TransportClosed())
        self._news.set()
        self._changed.set()

    def _arrived(self, origin: str | None, frames: Sequence[Frame]) -> None:
        """What the carrier calls; raises nothing, whatever the frames are."""
        if self._closed:
            return
        now_s = self._now()
        try:
            envelope, peer = self._open(origin, frames)
        except MalformedFrame as error:
            self._drop(str(error))
            return
        if peer.link.hear(envelope, size_of(frames[1:]), now_s):
            try:
                self._take(peer, envelope, frames, now_s)
            except MalformedFrame:
                # The sender counts on it; a silent gap in its messages would be worse.
                self._drop("malformed message")
                peer.link.cut("it sent a malformed message")
        else:
            self._drop("stale or after a loss")
        self._settle(peer)

    def _open(self, origin: str | None, frames: Sequence[Frame]) -> tuple[Envelope, Peer]:
        """Check the envelope; `MalformedFrame` names the reason it is refused for."""
        try:
            envelope = open_envelope(frames, self.name, origin)
        except OtherVersion as error:
            if origin in (None, error.sender):
                self._note(error)
            raise
        peer = self._peers.get(envelope.sender)
        if peer is None:
            raise MalformedFrame("unknown sender")
        if self._strangers:
            self._strangers.pop(envelope.sender, None)
        return envelope, peer

    def _note(self, met: OtherVersion) -> None:
        """Say once what a peer speaks that is not understood here."""
        said = met.sentence(self.name)
        if met.sender in self._peers and self._strangers.get(met.sender) != said:
            self._strangers[met.sender] = said
            _log.error("%s", said)

    def _take(self, peer: Peer, envelope: Envelope, frames: Sequence[Frame], now_s: float) -> None:
        size_bytes = size_of(frames[1:])
        if envelope.is_beat:
            peer.take_beat(envelope, open_beat(frames[1]), now_s, probe=len(frames) > 2)
        else:
            message, tensors = decode(frames[1:], self._types, self._limits)
            received = Received(peer=envelope.sender, message=message, tensors=tensors)
            peer.count_received(size_bytes)
            waiting = _Waiting(peer, size_bytes, received)
            if self._listener is not None:
                self._hand_over(waiting, self._listener)
            else:
                self._inbox.append(waiting)
                self._news.set()
        peer.meter.arrived(size_bytes=size_bytes, sent_s=envelope.sent_s, now_s=now_s)

    def _settle(self, peer: Peer) -> None:
        """Report what changed and tell the peer if it should know."""
        changes = peer.link.changes[:]
        peer.link.changes.clear()
        if any(isinstance(change, PeerDown) for change in changes):
            self._begin_anew(peer)
        if peer.link.answer_due and not self._closed:
            self._beat(peer)
        for change in changes:
            self._changed.set()
            for callback in self._callbacks:
                # Not from here: what a callback raises must not end the heartbeats.
                asyncio.get_running_loop().call_soon(callback, change)

    def _begin_anew(self, peer: Peer) -> None:
        """After a cut: nothing queued in either direction is delivered."""
        self._reconnect(peer)
        peer.forget_clock()
        kept = [waiting for waiting in self._inbox if waiting.peer is not peer]
        self._dropped["void after a cut"] += len(self._inbox) - len(kept)
        self._inbox = deque(kept)

    def _reconnect(self, peer: Peer) -> None:
        peer.connected_s = self._now()
        self.carrier.reset(peer.link.peer)

    def _beat(self, peer: Peer, padding_bytes: int = 0) -> None:
        if not self.carrier.post(peer.link.peer, peer.beat(self._now(), padding_bytes)):
            self._drop("beat not sent")

    async def _beat_for_ever(self) -> None:
        due_s = self._now()
        while True:
            due_s += self._settings.beat_s
            await asyncio.sleep(max(due_s - self._now(), 0.0))
            late_s = self._now() - due_s
            if late_s > self._settings.beat_s:
                due_s = self._now()
            for peer in list(self._peers.values()):
                if late_s > self._settings.beat_s:
                    peer.link.excuse(late_s)
                peer.link.tick(self._now())
                if peer.is_stuck(self._now(), self._settings):
                    self._reconnect(peer)
                self._beat(peer)
                self._probe(peer)
                self._settle(peer)

    def _probe(self, peer: Peer) -> None:
        """Follow a beat with a large one now and then: the gap on arrival is the bandwidth."""
        now_s = self._now()
        if peer.link.up and now_s - peer.probed_s >= self._settings.probe_s:
            peer.probed_s = now_s
            self._beat(peer, self._settings.probe_bytes)

    def _drop(self, reason: str) -> None:
        self._dropped[reason] += 1

    @staticmethod
    def _now() -> float:
        return time.monotonic()


def _new_session(previous: int) -> int:
    """Larger than before and, unless the clock went back, larger than before a restart."""
    return max(time.time_ns(), previous + 1)
