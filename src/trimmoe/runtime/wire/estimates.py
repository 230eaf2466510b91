"""What a link is like, learnt from what it carries: round trips and bandwidth.

Pure: times are passed in. Round trips come from heartbeats, which say what they echo and how long
it was held; bandwidth from messages that were sent close together and arrived further apart.

A heartbeat that finds a process busy is read late. That is no property of the link, or every link
of a busy server would seem long; so a link's delay is the least of late, while what exceeds it is
the wait for the process that reads. A queue that stays on a link raises the least as well.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from trimmoe.runtime.wire.base import LinkEstimate

LONGEST_ROUND_TRIP_S = 60.0
"""Longer samples are a peer's nonsense, not a measurement."""
LEAST_OF_S = 10.0
"""Samples this old no longer bound a delay from above: routes and queues change."""


@dataclass(kw_only=True, slots=True)
class RunningAverage:
    """Exponentially weighted mean whose weights halve every `half_life_s`, however samples come."""

    half_life_s: float
    _total: float = 0.0
    _weight: float = 0.0
    _updated_s: float = -math.inf

    def add(self, value: float, now_s: float) -> None:
        """Count `value`; samples of the same moment count alike."""
        fade = 0.5 ** (max(now_s - self._updated_s, 0.0) / self.half_life_s)
        self._total = self._total * fade + value
        self._weight = self._weight * fade + 1.0
        self._updated_s = now_s

    @property
    def mean(self) -> float | None:
        """None before the first sample."""
        return self._total / self._weight if self._weight else None


@dataclass(kw_only=True, slots=True)
class RecentLeast:
    """The least of the samples of the last `window_s`, and of the last one however old."""

    window_s: float = LEAST_OF_S
    _rising: deque[tuple[float, float]] = field(default_factory=deque)
    """Times and values of those that may yet be the least."""

    def add(self, value: float, now_s: float) -> None:
        """Count `value`; times never fall."""
        while self._rising and self._rising[-1][1] >= value:
            self._rising.pop()
        self._rising.append((now_s, value))
        while self._rising[0][0] < now_s - self.window_s:
            self._rising.popleft()

    @property
    def least(self) -> float | None:
        """None before the first sample."""
        return self._rising[0][1] if self._rising else None


@dataclass(kw_only=True, slots=True)
class LatenessMeter:
    """How much longer one peer's heartbeats take than they must, until they are read.

    The two clocks are not synchronised, but what they differ by hardly changes within seconds: the
    least difference between reading and sending is that and the way, and all beyond it is waiting.
    """

    half_life_s: float = 5.0
    _least: RecentLeast = field(default_factory=RecentLeast)
    _late: RunningAverage = field(init=False)

    def __post_init__(self) -> None:
        self._late = RunningAverage(half_life_s=self.half_life_s)

    def read(self, *, sent_s: float, now_s: float) -> None:
        """A heartbeat sent at `sent_s` (the sender's clock) was read at `now_s` (ours)."""
        took_s = now_s - sent_s
        if not math.isfinite(took_s):
            return
        self._least.add(took_s, now_s)
        assert self._least.least is not None
        self._late.add(min(took_s - self._least.least, LONGEST_ROUND_TRIP_S), now_s)

    @property
    def mean_s(self) -> float | None:
        """None before the first heartbeat."""
        return self._late.mean


@dataclass(kw_only=True, slots=True)
class TrainMeter:
    """Bandwidth of an incoming link, from the gaps between consecutive messages.

    If a message of s bytes was sent less than half as long after its predecessor as it arrived
    after it, the link was the bottleneck and s bytes took the gap to arrive. The median of the
    latest such rates stands up to the moments when this side was late to look.
    """

    smallest_bytes: int = 16 << 10
    """The gaps of smaller messages measure the scheduler, not the link."""
    count: int = 0
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=15))
    _last: tuple[float, float] | None = None

    def arrived(self, *, size_bytes: int, sent_s: float, now_s: float) -> None:
        """A message arrived at `now_s` (our clock) that was sent at `sent_s` (the sender's)."""
        last, self._last = self._last, (sent_s, now_s)
        if last is None or size_bytes < self.smallest_bytes:
            return
        sent_gap_s, gap_s = sent_s - last[0], now_s - last[1]
        if gap_s > 0 and 0 <= sent_gap_s < 0.5 * gap_s:
            self._rates.append(size_bytes / gap_s)
            self.count += 1

    @property
    def rate_bytes_per_s(self) -> float:
        """0 until measured."""
        return median(self._rates) if self._rates else 0.0


@dataclass(kw_only=True, slots=True)
class LinkEstimator:
    """Running averages of one outgoing link."""

    peer: str
    half_life_s: float = 2.0
    samples: int = 0
    _round_trip: RunningAverage = field(init=False)
    _least: RecentLeast = field(default_factory=RecentLeast)
    _bandwidth: RunningAverage = field(init=False)
    _trains: int = 0

    def __post_init__(self) -> None:
        self._round_trip = RunningAverage(half_life_s=self.half_life_s)
        self._bandwidth = RunningAverage(half_life_s=self.half_life_s)

    def round_trip(self, round_trip_s: float, now_s: float) -> None:
        """One measured round trip; nonsense (negative, endless, not a number) is ignored."""
        if 0.0 <= round_trip_s <= LONGEST_ROUND_TRIP_S:
            self._round_trip.add(round_trip_s, now_s)
            self._least.add(round_trip_s, now_s)
            self.samples += 1

    def bandwidth(self, rate_bytes_per_s: float, train_count: int, now_s: float) -> None:
        """What the peer measured; counts only if it has measured anew since the last report."""
        if train_count != self._trains and 0.0 < rate_bytes_per_s < math.inf:
            self._trains = train_count
            self._bandwidth.add(rate_bytes_per_s, now_s)

    def estimate(self) -> LinkEstimate:
        """The averages as they stand."""
        least_s = self._least.least
        return LinkEstimate(
            peer=self.peer,
            round_trip_s=self._round_trip.mean,
            delay_s=None if least_s is None else least_s / 2,
            bandwidth_bytes_per_s=self._bandwidth.mean,
            samples=self.samples,
        )
