"""Which servers of the cluster count as lost to this one, and that something changed about it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Set

from trimmoe.core.specs import BoolArray
from trimmoe.runtime.node.peers import Peers
from trimmoe.runtime.node.watch.hold_down import HoldDown
from trimmoe.runtime.wire.base import PeerChange, PeerDown


class Liveness:
    """Of one server, about the others; used by the event loop only.

    A server counts as lost that cannot be reached, that is `left_out` because it gave wrong
    results, or that comes and goes (`HoldDown`; `hosts` [M, N, E] are the plan's). `changed` is
    told of every change, with the server that was lost just now, if one was; while this server
    `serves`, also of those that are held down no longer.
    """

    def __init__(
        self,
        peers: Peers,
        hosts: BoolArray,
        *,
        left_out: Callable[[], Set[int]],
        serves: Callable[[], bool],
        changed: Callable[[int | None], None],
    ) -> None:
        self._peers, self._left_out = peers, left_out
        self._serves, self._changed = serves, changed
        self._hold_down = HoldDown(hosts, time.monotonic)

    def lost(self) -> frozenset[int]:
        """Those that count as lost now."""
        lost = self._peers.down().union(self._left_out())
        return lost | self._hold_down.held(lost)

    def peer_changed(self, change: PeerChange) -> None:
        """A server can be reached no longer, or again."""
        server = self._peers.index[change.peer]
        if isinstance(change, PeerDown):
            self._hold_down.went(server)
            self._changed(server)
            return
        if hold_s := self._hold_down.came(server):
            asyncio.get_running_loop().call_later(hold_s, self._held_no_longer)
        self._changed(None)

    def leave_out(self, server: int) -> None:
        """A server gave wrong results: it is as if it were lost."""
        # Not at once: whoever found out is in the middle of something.
        asyncio.get_running_loop().call_soon(self._changed, server)

    def _held_no_longer(self) -> None:
        if self._serves():
            self._changed(None)
