"""The seam between a server and its network: typed messages and tensors to named peers.

`Transport` is what a server sees; sockets, in-process queues and emulated links are
interchangeable below it (`Carrier`). The rules are the same everywhere:

- A peer is *up* while both sides hear each other. Messages to a peer that is up arrive in order
  and at most once, or the link is cut: both sides report `PeerDown`, and nothing that was sent
  before the cut is delivered after it. `PeerDown.lost_messages` counts those that may not have
  arrived.
- Every server bounds what it keeps for a peer: what the peer has not consumed counts against a
  window of messages and bytes, and `send` refuses what would exceed it.
- Everything runs in one event loop. A loop that is blocked for seconds sends no heartbeats, so
  long computations belong into a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from torch import Tensor

from trimmoe.runtime.wire.version import Version

Frame = bytes | bytearray | memoryview


class PeerUnreachable(Exception):
    """A message was refused: it was not and will not be sent."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


class TransportClosed(Exception):
    """The transport was closed while it was waited for, or before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """One message as it arrived."""

    peer: str
    message: msgspec.Struct
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerUp:
    """The peer and this server hear each other."""

    peer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerDown:
    """The link to the peer was cut; `PeerUp` follows when both hear each other again."""

    peer: str
    reason: str
    lost_messages: int
    """Messages sent since the last `PeerUp` that the peer is not known to have consumed."""


PeerChange = PeerUp | PeerDown


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Messages of the layer above (no heartbeats), with their size on the wire."""

    messages: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What went through a transport since it was made."""

    sent: Mapping[str, Traffic]
    """By peer."""
    received: Mapping[str, Traffic]
    """By peer; counted on arrival."""
    dropped: Mapping[str, int]
    """By reason: what arrived and was not delivered, connections refused, messages not sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEstimate:
    """What is measured of the link to one peer; None until measured."""

    peer: str
    round_trip_s: float | None
    """Running average, with what both processes took to notice."""
    delay_s: float | None
    """Half the least round trip of late, which is what the link itself takes: clocks are not
    synchronised, so the two directions share it evenly."""
    bandwidth_bytes_per_s: float | None
    """Running average, from this server to the peer."""
    samples: int
    """Round trips measured."""


class Transport(Protocol):
    """Typed messages and tensors to and from named peers."""

    @property
    def name(self) -> str:
        """Name of this server."""
        ...

    def post(self, peer: str, message: msgspec.Struct, tensors: Sequence[Tensor] = ()) -> None:
        """Hand a message to the link; never waits for the network.

        The tensors are copied before it returns. Raises `PeerUnreachable` if the peer is not up
        or its window is full, `ValueError` if the message is beyond the limits of the wire,
        `KeyError` for a peer never connected and `TransportClosed`.
        """
        ...

    async def send(
        self, peer: str, message: msgspec.Struct, tensors: Sequence[Tensor] = ()
    ) -> None:
        """The same, where one waits for what comes next anyway."""
        ...

    async def receive(self) -> Received:
        """The next message of any peer, in order per peer; raises `TransportClosed`."""
        ...

    async def hand_to(self, listener: Callable[[Received], None]) -> None:
        """Hand every message to `listener` as it arrives, in the event loop, instead of keeping it
        for `receive`, which takes turns of the loop. Ends by what the listener raises, or by
        `TransportClosed`; when it is cancelled nobody listens any more."""
        ...

    def peers_up(self) -> frozenset[str]:
        """Peers that can be sent to now."""
        ...

    def version_of(self, peer: str) -> Version | None:
        """The version of the protocol that a peer speaks, None before it was heard. What is new
        since must not be sent to it."""
        ...

    def strangers(self) -> dict[str, str]:
        """Peers of another major version, with a sentence about each; their messages are dropped
        unread."""
        ...

    async def wait_up(self, *peers: str) -> None:
        """Return once all of these are up at the same time."""
        ...

    def on_peer_change(self, callback: Callable[[PeerChange], None]) -> None:
        """Call back on every later change, in the event loop, in order."""
        ...

    @property
    def counters(self) -> Counters:
        """Totals so far."""
        ...

    def link_estimates(self) -> dict[str, LinkEstimate]:
        """By peer."""
        ...

    def reading_wait_s(self) -> float:
        """How long what has arrived waits to be read, running average; 0 until measured."""
        ...

    async def close(self) -> None:
        """Release everything; messages still queued are given up."""
        ...


Arrived = Callable[[str | None, Sequence[Frame]], None]
"""Called with the authenticated origin, None where nothing authenticates, and the frames."""
Dropped = Callable[[str], None]
"""Called with the reason why something was refused below the messages."""


class Carrier(Protocol):
    """Moves frames between named servers, in order per link; may lose them when a link breaks.

    What a transport is built on: ZeroMQ between machines (`ZmqCarrier`), Unix sockets on one
    (`SocketCarrier`), queues (`MemoryCarrier`), any of them behind emulated links
    (`EmulatedCarrier`).
    """

    @property
    def name(self) -> str:
        """Name of this server."""
        ...

    @property
    def address(self) -> str:
        """Where others reach this server; known once started."""
        ...

    async def start(self, arrived: Arrived, dropped: Dropped) -> None:
        """Begin to listen."""
        ...

    def connect(self, peer: str, address: str) -> None:
        """Add a peer, or move it to another address."""
        ...

    def post(self, peer: str, frames: Sequence[Frame]) -> bool:
        """Send frames, which are copied before it returns; False if they cannot be sent now."""
        ...

    def reset(self, peer: str) -> None:
        """Forget what is queued for a peer and connect to it anew."""
        ...

    async def close(self) -> None:
        """Stop listening and release everything."""
        ...
