"""What a server is made of, for those who only look at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from trimmoe.core.specs import ClusterSpec
from trimmoe.runtime.node.compute.worker import Worker
from trimmoe.runtime.node.front.front_end import FrontEnd
from trimmoe.runtime.node.front.guess_prices import GuessPrices
from trimmoe.runtime.node.schedule.batch_loop import BatchLoop
from trimmoe.runtime.node.schedule.intake import Intake
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
    worker: Worker
    intake: Intake
    batch_loop: BatchLoop
    front_end: FrontEnd
    planner: Planner
    reporter: Reporter
    jury: Jury
    malformed: Counter[str]
    """Messages that made no sense, by type."""
    health: Callable[[], Health]
    prices: GuessPrices
