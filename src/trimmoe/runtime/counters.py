"""Counting which experts ran where, from the events and commands of a driver."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np

from trimmoe.core.events import Attend, Command, Event, Execute, Routed, SegmentRan
from trimmoe.core.specs import IntArray


class ExpertUse(IntEnum):
    """What became of one activated expert; remote is off the server that the token was on."""

    LOCAL_EXACT = 0
    LOCAL_SUBSTITUTE = 1
    REMOTE_EXACT = 2
    REMOTE_SUBSTITUTE = 3
    DROPPED = 4


class ExpertCounter:
    """Sums of `ExpertUse` by layer and activated expert."""

    def __init__(self, layer_count: int, expert_count: int) -> None:
        self.counts: IntArray = np.zeros(
            (layer_count, expert_count, len(ExpertUse)), dtype=np.int64
        )
        self._attending: dict[int, Attend] = {}
        """The last `Attend` of each wave."""

    def absorb(self, log: Iterable[tuple[Event, tuple[Command, ...]]]) -> None:
        """Count what a driver's log says was executed."""
        for event, commands in log:
            if isinstance(event, SegmentRan):
                self._count_segment(self._attending.pop(event.wave), event)
            for command in commands:
                if isinstance(command, Attend):
                    self._attending[command.wave] = command
                elif isinstance(command, Execute) and isinstance(event, Routed):
                    self._count(self._attending.pop(command.wave), event, command)

    def _count_segment(self, attend: Attend, ran: SegmentRan) -> None:
        layers = attend.layer + np.arange(ran.experts.shape[1])
        np.add.at(self.counts[..., ExpertUse.LOCAL_EXACT], (layers[:, None], ran.experts), 1)

    def _count(self, attend: Attend, routed: Routed, execute: Execute) -> None:
        # Rows that nobody can serve were given up in between.
        kept = np.isin(attend.rows, execute.rows)
        experts, server = routed.experts[kept], attend.server[kept]
        runs = execute.slot_expert >= 0
        substitute = execute.slot_expert != experts
        remote = execute.slot_server != server[:, None]
        use = np.where(runs, substitute + 2 * remote, int(ExpertUse.DROPPED))
        np.add.at(self.counts[execute.layer], (experts, use), 1)
