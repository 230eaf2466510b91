"""A server that is lost again and again is left out for a while although it is back.

Each loss ends every attempt that crosses the server, and its return puts it back on routes. One
that comes and goes faster than a prompt is read would have requests begin anew until they are given
up, so each return within a short time is believed later than the one before (as routers damp links
that flap). Where nobody else has what the server has, it is used at once all the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from trimmoe.core.specs import BoolArray
from trimmoe.placement.live import live_hosts

RECENT_S = 60.0
"""Losses that are older are forgotten."""
FREE_LOSSES = 1
"""Whoever was lost no more often is believed at once."""
FIRST_HOLD_S, LONGEST_HOLD_S = 0.5, 8.0


class HoldDown:
    """Of one server, about the others. `hosts` [M, N, E] are the plan's; `now` is a clock in
    seconds."""

    def __init__(self, hosts: BoolArray, now: Callable[[], float]) -> None:
        self._hosts, self._now = hosts, now
        self._losses_s: dict[int, list[float]] = defaultdict(list)
        self._until_s: dict[int, float] = {}

    def went(self, server: int) -> None:
        """A server was lost."""
        now_s = self._now()
        recent = [lost_s for lost_s in self._losses_s[server] if now_s - lost_s < RECENT_S]
        self._losses_s[server] = [*recent, now_s]

    def came(self, server: int) -> float:
        """A server is there, perhaps again; for how long it is left out, s."""
        now_s = self._now()
        losses = sum(now_s - lost_s < RECENT_S for lost_s in self._losses_s[server])
        if losses <= FREE_LOSSES:
            return 0.0
        hold_s = min(FIRST_HOLD_S * 2 ** (losses - FREE_LOSSES - 1), LONGEST_HOLD_S)
        self._until_s[server] = now_s + hold_s
        return hold_s

    def held(self, lost: frozenset[int]) -> frozenset[int]:
        """Those to leave out besides those that are `lost`."""
        now_s, out = self._now(), lost
        fresh = [server for server, until_s in self._until_s.items() if now_s < until_s]
        if not fresh:
            # Asked with every load report, and hardly ever with anybody to leave out.
            return frozenset()
        hosted = live_hosts(self._hosts, lost).any(axis=0)
        for server in fresh:
            without = out | {server}
            if (live_hosts(self._hosts, without).any(axis=0) >= hosted).all():
                out = without
        return out - lost
