"""What a server is made of, for those who only look at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from trimmoe.core.specs import ClusterSpec
from trimmoe.runtime.node.compute.executor import Executor
from trimmoe.runtime.node.front.access import Desk
from trimmoe.runtime.node.schedule.floor import Floor
from trimmoe.runtime.node.schedule.pump import Pump
from trimmoe.runtime.node.watch.jury import Jury
from trimmoe.runtime.node.watch.planner import Planner
from trimmoe.runtime.node.watch.reports import Reporter
from trimmoe.runtime.picture import Layout
from trimmoe.runtime.service import Health
from trimmoe.runtime.wire.base import Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Those of one server that serves."""

    server: int
    cluster: ClusterSpec
    """As planned."""
    layout: Layout
    transport: Transport
    executor: Executor
    floor: Floor
    pump: Pump
    desk: Desk
    planner: Planner
    reporter: Reporter
    jury: Jury
    malformed: Counter[str]
    """Messages that made no sense, by type."""
    health: Callable[[], Health]
    guesses_now: Callable[[], bool]
    """Whether it guesses ahead for those who ask it now."""
