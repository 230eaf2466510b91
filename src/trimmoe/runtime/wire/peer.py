"""What a transport keeps for one peer: its link, what heartbeats tell of it, and what was counted.

Reads no clock and sends nothing: the transport says what time it is, and posts what `beat` gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trimmoe.runtime.wire.base import Frame, Traffic
from trimmoe.runtime.wire.estimates import LatenessMeter, LinkEstimator, TrainMeter
from trimmoe.runtime.wire.link import Link, LinkSettings
from trimmoe.runtime.wire.protocol import Beat, Envelope, pack

RECONNECT_SILENCES = 4
"""A peer that is down is connected to anew after so many times `silence_s`."""


@dataclass(kw_only=True, slots=True)
class Peer:
    """See the module's docstring. Times are the transport's clock, unless said otherwise."""

    link: Link
    estimator: LinkEstimator
    meter: TrainMeter = field(default_factory=TrainMeter)
    lateness: LatenessMeter = field(default_factory=LatenessMeter)
    last_beat: tuple[float, float] | None = None
    """When the peer's last beat was sent (its clock) and came (ours)."""
    probed_s: float = -math.inf
    connected_s: float = -math.inf
    sent: Traffic = field(default_factory=Traffic)
    received: Traffic = field(default_factory=Traffic)

    def beat(self, now_s: float, padding_bytes: int = 0) -> list[Frame]:
        """The frames of a heartbeat; with padding, of a probe."""
        echo_s, came_s = self.last_beat or (0.0, now_s)
        beat = Beat(
            echo_s=echo_s,
            held_s=now_s - came_s,
            rate_bytes_per_s=self.meter.rate_bytes_per_s,
            train_count=self.meter.count,
        )
        frames: list[Frame] = [pack(self.link.beat(now_s)), pack(beat)]
        if padding_bytes:
            frames.append(bytes(padding_bytes))
        return frames

    def take_beat(self, envelope: Envelope, beat: Beat, now_s: float, *, probe: bool) -> None:
        """Learn from a heartbeat of the peer's."""
        if beat.echo_s > 0:
            self.estimator.round_trip(now_s - beat.echo_s - beat.held_s, now_s)
        self.estimator.bandwidth(beat.rate_bytes_per_s, beat.train_count, now_s)
        if not probe:  # a probe takes longer, which is its purpose
            self.last_beat = (envelope.sent_s, now_s)
            self.lateness.read(sent_s=envelope.sent_s, now_s=now_s)

    def forget_clock(self) -> None:
        """After a cut: the peer's clock may be another one."""
        self.last_beat = None
        self.lateness = LatenessMeter()

    def is_stuck(self, now_s: float, settings: LinkSettings) -> bool:
        """Whether a connection has been silent so long that a new one may fare better.

        It also keeps heartbeats from piling up for a peer that is gone.
        """
        patience_s = RECONNECT_SILENCES * settings.silence_s
        return now_s - self.connected_s > patience_s and self.link.silent_s(now_s) > patience_s

    def count_sent(self, size_bytes: int) -> None:
        self.link.sent(size_bytes)
        self.sent = _add(self.sent, size_bytes)

    def count_received(self, size_bytes: int) -> None:
        self.received = _add(self.received, size_bytes)


def size_of(frames: Sequence[Frame]) -> int:
    """In bytes."""
    return sum(len(frame) for frame in frames)


def _add(traffic: Traffic, size_bytes: int) -> Traffic:
    return Traffic(messages=traffic.messages + 1, size_bytes=traffic.size_bytes + size_bytes)
