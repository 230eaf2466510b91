"""What a server measures and says about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trimmoe.runtime.node.records.messages import LoadReport, Vitals
from trimmoe.runtime.wire.base import Transport
from trimmoe.runtime.wire.estimates import RunningAverage

WAITING_HALF_LIFE_S = 5.0
BUSY_HALF_LIFE_S = 1.5
"""Short: what guesses cost others shows at once."""
PROMPTS_HALF_LIFE_S = 5.0
"""Longer: prompts come in bursts, and what is generated has to make room for those to come."""
LEAST_S = 0.1
"""In less time a server's load is not measured: how busy it was then says nothing."""


@dataclass(kw_only=True, slots=True)
class _Waits:
    average: RunningAverage
    since_last: int = 0


class Reporter:
    """Measurements of one server."""

    def __init__(
        self, transport: Transport, names: tuple[str, ...], now: Callable[[], float]
    ) -> None:
        self._transport, self._names, self._now = transport, names, now
        self._waits = _Waits(average=RunningAverage(half_life_s=WAITING_HALF_LIFE_S))
        self._busy = RunningAverage(half_life_s=BUSY_HALF_LIFE_S)
        self._prompts = RunningAverage(half_life_s=PROMPTS_HALF_LIFE_S)
        self._shown = RunningAverage(half_life_s=PROMPTS_HALF_LIFE_S)
        self._due = RunningAverage(half_life_s=PROMPTS_HALF_LIFE_S)
        self._tokens, self._due_tokens = 0, 0.0
        """That users had been shown by then, and those of answers that had begun."""
        self._worked_s, self._read_s, self._told_s = 0.0, 0.0, now()
        self._since_s = self._told_s
        self.kv_usage: dict[int, float] = {}
        """Of the other servers."""
        self.running: dict[int, int] = {}
        """Answers under way to the users of the other servers."""

    def worked(self, seconds: float, reads: bool) -> None:
        """The worker was busy for so long, with a prompt or with what is generated."""
        self._worked_s += seconds
        self._read_s += seconds * reads

    def waited(self, waited_s: float) -> None:
        """Slots of generated tokens waited so long after they were read before they were begun."""
        self._waits.average.add(waited_s, self._now())
        self._waits.since_last += 1

    @property
    def waiting_s(self) -> float:
        """Mean time from the arrival of slots of generated tokens until they are begun."""
        return self._transport.reading_wait_s() + (self._waits.average.mean or 0.0)

    def load_report(
        self,
        kv_usage: float,
        lost: frozenset[int],
        loss_weights: list[float],
        running: int,
        vitals: Vitals | None = None,
        due_tokens: float = 0.0,
    ) -> LoadReport:
        """What to tell the others; answers that have begun come to `due_tokens`."""
        now_s = self._now()
        if now_s - self._told_s >= LEAST_S:
            if not self._waits.since_last:
                # Nobody came, so nobody would have waited: otherwise a bad name would last for
                # ever.
                self._waits.average.add(0.0, now_s)
            self._waits.since_last = 0
            since_s = now_s - self._told_s
            self._busy.add(min(self._worked_s / since_s, 1.0), now_s)
            self._prompts.add(min(self._read_s / since_s, 1.0), now_s)
            if vitals is not None:
                self._shown.add((vitals.tokens - self._tokens) / since_s, now_s)
                self._due.add((due_tokens - self._due_tokens) / since_s, now_s)
                self._tokens, self._due_tokens = vitals.tokens, due_tokens
            self._worked_s, self._read_s, self._told_s = 0.0, 0.0, now_s
        links = self._transport.link_estimates()
        estimates = [links.get(name) for name in self._names]
        return LoadReport(
            delay_s=[None if one is None else one.delay_s for one in estimates],
            bandwidth_bytes_per_s=[
                None if one is None else one.bandwidth_bytes_per_s for one in estimates
            ],
            waiting_s=self.waiting_s,
            kv_usage=kv_usage,
            unreachable=sorted(lost),
            busy=self._busy.mean or 0.0,
            loss_weights=loss_weights,
            running=running,
            vitals=vitals,
            prompts=self._prompts.mean or 0.0,
            tokens_per_s=max(self._shown.mean or 0.0, self._due.mean or 0.0),
        )

    def vitals(self, *, queued: int, tokens: int, memory_bytes: int) -> Vitals:
        """What people may look at."""
        sent = self._transport.counters.sent
        return Vitals(
            queued=queued,
            tokens=tokens,
            memory_bytes=memory_bytes,
            uptime_s=self._now() - self._since_s,
            sent_bytes=[sent[name].size_bytes if name in sent else 0 for name in self._names],
        )
