"""Links of a given delay and bandwidth around any carrier, to rehearse a cluster on one machine.

Each directed link is a queue: a message leaves it when the bytes before it and its own have passed
at the link's bandwidth, and arrives a fixed delay later. Everything the carrier sends passes,
heartbeats too, so that whoever measures the link measures what is emulated.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trimmoe.core.specs import ClusterSpec
from trimmoe.runtime.wire.alarm import Alarm
from trimmoe.runtime.wire.base import Arrived, Carrier, Dropped, Frame


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
    """The outgoing links of a server by the peer's name."""
    source = cluster.server_index(server_name)
    return {
        peer: EmulatedLink(
            delay_s=float(cluster.delay_s[source, index]),
            bandwidth_bytes_per_s=float(cluster.bandwidth_bytes_per_s[source, index]),
            jitter_share=jitter_share,
        )
        for index, peer in enumerate(cluster.server_names)
        if index != source
    }


@dataclass(kw_only=True, slots=True)
class LinkQueue:
    """What is under way on one link; pure, times are passed in."""

    link: EmulatedLink
    rng: np.random.Generator
    _free_s: float = -math.inf
    """When the last byte accepted so far will have left."""
    _stalled_until_s: float = -math.inf
    _under_way: deque[tuple[float, list[bytes]]] = field(default_factory=deque)
    """Arrival times and frames; one that is due waits for those before it."""

    def __len__(self) -> int:
        return len(self._under_way)

    def put(self, frames: Sequence[Frame], now_s: float) -> None:
        """Accept a message, which is copied."""
        size_bytes = sum(len(frame) for frame in frames)
        self._free_s = max(self._free_s, now_s) + size_bytes / self.link.bandwidth_bytes_per_s
        longer = self.link.jitter_share and self.link.jitter_share * self.rng.uniform()
        due_s = self._free_s + self.link.delay_s * (1.0 + longer)
        self._under_way.append((due_s, [bytes(frame) for frame in frames]))

    def due_s(self) -> float:
        """When the next message arrives; infinite if none is under way."""
        if not self._under_way:
            return math.inf
        return max(self._under_way[0][0], self._stalled_until_s)

    def take(self, now_s: float) -> list[bytes] | None:
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
    """Another carrier behind emulated links; peers without a link are reached directly.

    The jitter of each link is drawn from `seed` and the two names.
    """

    def __init__(
        self,
        inner: Carrier,
        links: Mapping[str, EmulatedLink],
        *,
        seed: int = 0,
        longest_queue: int = 4096,
    ) -> None:
        self._inner = inner
        self._longest_queue = longest_queue
        self._queues = {
            peer: LinkQueue(link=link, rng=_generator(seed, inner.name, peer))
            for peer, link in links.items()
        }

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def address(self) -> str:
        return self._inner.address

    async def start(self, arrived: Arrived, dropped: Dropped) -> None:
        self._alarm = Alarm(self._release)
        self._dropped = dropped
        await self._inner.start(arrived, dropped)

    def connect(self, peer: str, address: str) -> None:
        self._inner.connect(peer, address)

    def post(self, peer: str, frames: Sequence[Frame]) -> bool:
        queue = self._queues.get(peer)
        if queue is None:
            return self._inner.post(peer, frames)
        if len(queue) >= self._longest_queue:
            return False
        queue.put(frames, time.monotonic())
        self._alarm.set(min(self._alarm.due_s, queue.due_s()))
        return True

    def reset(self, peer: str) -> None:
        if peer in self._queues:
            self._queues[peer].clear()
        self._inner.reset(peer)

    async def close(self) -> None:
        self._alarm.close()
        await self._inner.close()

    def stall(self, peer: str, duration_s: float) -> None:
        """Hold everything to `peer` for a while; it then arrives in order."""
        self._queues[peer].stall(time.monotonic() + duration_s)

    def drop_connection(self, peer: str) -> None:
        """Lose what is under way to `peer` and connect anew, as a cable pulled and put back."""
        self.reset(peer)

    def _release(self) -> None:
        for peer, queue in self._queues.items():
            while (frames := queue.take(time.monotonic())) is not None:
                if not self._inner.post(peer, frames):
                    self._dropped("lost below an emulated link")
        self._alarm.set(min((queue.due_s() for queue in self._queues.values()), default=math.inf))


def _generator(seed: int, source: str, destination: str) -> np.random.Generator:
    words = [*source.encode(), 0, *destination.encode()]
    return np.random.default_rng([seed, *words])
