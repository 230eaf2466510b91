"""Links of a given delay and bandwidth around any carrier, to rehearse a cluster on one machine.

Each directed link is a queue: a message leaves it when the bytes before it and its own have passed
at the link's bandwidth, and arrives a fixed delay later. Everything the carrier sends passes,
heartbeats too, so that whoever measures the link measures what is emulated.

The queue is at its end: a message is sent at once, with the time, and is held back where it comes
to. If whoever sends it held it back, it would wait until that server has computed what it is at,
which no link does.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trimmoe.core.specs import ClusterSpec
from trimmoe.runtime.wire.alarm import Alarm
from trimmoe.runtime.wire.base import Arrived, Carrier, Dropped, Frame

UNSTAMPED = "not from an emulated link"
_SENT_S = struct.Struct("<d")
_ONE_CLOCK_S = 60.0
"""What was sent longer ago, or is yet to be, was sent by another machine's clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedLink:
    """One direction between two servers."""

    delay_s: float
    """tau of (14)."""
    bandwidth_bytes_per_s: float
    """B of (14); infinite for none."""
    jitter_share: float = 0.0
    """Each message takes up to this share of the delay longer, drawn evenly."""

    def __post_init__(self) -> None:
        assert self.delay_s >= 0
        assert self.bandwidth_bytes_per_s > 0
        assert self.jitter_share >= 0


def links_of(
    cluster: ClusterSpec, server_name: str, jitter_share: float = 0.0
) -> dict[str, EmulatedLink]:
    """The links to a server by the peer's name."""
    destination = cluster.server_index(server_name)
    return {
        peer: EmulatedLink(
            delay_s=float(cluster.delay_s[index, destination]),
            bandwidth_bytes_per_s=float(cluster.bandwidth_bytes_per_s[index, destination]),
            jitter_share=jitter_share,
        )
        for index, peer in enumerate(cluster.server_names)
        if index != destination
    }


@dataclass(kw_only=True, slots=True)
class LinkQueue:
    """What is under way on one link; pure, times are passed in."""

    link: EmulatedLink
    rng: np.random.Generator
    _free_s: float = -math.inf
    """When the last byte accepted so far will have left."""
    _stalled_until_s: float = -math.inf
    _under_way: deque[tuple[float, Sequence[Frame]]] = field(default_factory=deque)
    """Arrival times and frames; one that is due waits for those before it."""

    def __len__(self) -> int:
        return len(self._under_way)

    def put(self, frames: Sequence[Frame], sent_s: float) -> None:
        """Accept a message."""
        size_bytes = sum(len(frame) for frame in frames)
        self._free_s = max(self._free_s, sent_s) + size_bytes / self.link.bandwidth_bytes_per_s
        longer = self.link.jitter_share and self.link.jitter_share * self.rng.uniform()
        due_s = self._free_s + self.link.delay_s * (1.0 + longer)
        self._under_way.append((due_s, frames))

    def due_s(self) -> float:
        """When the next message arrives; infinite if none is under way."""
        if not self._under_way:
            return math.inf
        return max(self._under_way[0][0], self._stalled_until_s)

    def take(self, now_s: float) -> Sequence[Frame] | None:
        """The next message if it has arrived."""
        return self._under_way.popleft()[1] if self.due_s() <= now_s else None

    def stall(self, until_s: float) -> None:
        """Let nothing arrive before then."""
        self._stalled_until_s = max(self._stalled_until_s, until_s)

    def clear(self) -> None:
        """Lose what is under way."""
        self._under_way.clear()
        self._free_s = -math.inf


class EmulatedCarrier:
    """Another carrier at the end of emulated links, from the peers of `links`; what others send
    comes directly. All of a cluster are such carriers.

    The jitter of each link is drawn from `seed` and the two names.
    """

    def __init__(self, inner: Carrier, links: Mapping[str, EmulatedLink], *, seed: int = 0) -> None:
        self._inner = inner
        self._queues = {
            peer: LinkQueue(link=link, rng=_generator(seed, peer, inner.name))
            for peer, link in links.items()
        }
        self._proven: set[str] = set()
        """Peers that the carrier knows to be those that they say they are."""

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def address(self) -> str:
        return self._inner.address

    async def start(self, arrived: Arrived, dropped: Dropped) -> None:
        self._alarm = Alarm(self._hand_over)
        self._arrived, self._dropped = arrived, dropped
        await self._inner.start(self._came, dropped)

    def connect(self, peer: str, address: str) -> None:
        self._inner.connect(peer, address)

    def post(self, peer: str, frames: Sequence[Frame]) -> bool:
        stamp = _SENT_S.pack(time.monotonic()) + self.name.encode()
        return self._inner.post(peer, [stamp, *frames])

    def reset(self, peer: str) -> None:
        self._inner.reset(peer)

    async def close(self) -> None:
        self._alarm.close()
        await self._inner.close()

    def stall(self, peer: str, duration_s: float) -> None:
        """Hold everything from `peer` for a while; it then arrives in order."""
        self._queues[peer].stall(time.monotonic() + duration_s)

    def lose(self, peer: str) -> None:
        """Lose what is under way from `peer`, as when a cable is pulled and put back."""
        self._queues[peer].clear()

    def _came(self, origin: str | None, frames: Sequence[Frame]) -> None:
        """Something is at the end of the link as it is."""
        stamp = bytes(frames[0])
        if len(stamp) <= _SENT_S.size or len(frames) < 2:
            self._dropped(UNSTAMPED)
            return
        if origin is not None:
            self._proven.add(origin)
        queue = self._queues.get(origin or stamp[_SENT_S.size :].decode(errors="replace"))
        if queue is None:
            self._arrived(origin, frames[1:])
            return
        (sent_s,), now_s = _SENT_S.unpack_from(stamp), time.monotonic()
        queue.put(frames[1:], sent_s if 0.0 <= now_s - sent_s <= _ONE_CLOCK_S else now_s)
        self._hand_over()

    def _hand_over(self) -> None:
        """What is due."""
        for peer, queue in self._queues.items():
            while (frames := queue.take(time.monotonic())) is not None:
                self._arrived(peer if peer in self._proven else None, frames)
        self._alarm.set(min((queue.due_s() for queue in self._queues.values()), default=math.inf))


def _generator(seed: int, source: str, destination: str) -> np.random.Generator:
    words = [*source.encode(), 0, *destination.encode()]
    return np.random.default_rng([seed, *words])
