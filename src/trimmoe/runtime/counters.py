"""Counting which experts ran where, from the events and commands of a driver."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from threading import Lock

import numpy as np

from trimmoe.core.events import Attend, Command, Event, Execute, Routed, SegmentRan
from trimmoe.core.specs import IntArray
from trimmoe.core.stand_ins import expert_of


class ExpertUse(IntEnum):
    """What became of one activated expert; remote is off the server that the token was on."""

    LOCAL_EXACT = 0
    LOCAL_SUBSTITUTE = 1
    REMOTE_EXACT = 2
    REMOTE_SUBSTITUTE = 3
    DROPPED = 4
    LOCAL_STAND_IN = 5


KEPT = 1024
"""Segments that are counted together at the latest."""


class ExpertCounter:
    """Sums of `ExpertUse` by layer and activated expert."""

    def __init__(self, layer_count: int, expert_count: int) -> None:
        shape = (layer_count, expert_count, len(ExpertUse))
        self._counts: IntArray = np.zeros(shape, dtype=np.int64)
        self._catching_up = Lock()
        """Whoever reads may be another thread than the one that works."""
        self._uncounted: list[tuple[SegmentRan, tuple[Command, ...]]] = []
        self._attending: dict[int, Attend] = {}
        """The last `Attend` of each wave."""

    @property
    def counts(self) -> IntArray:
        """[N, E, uses]."""
        self._catch_up()
        return self._counts

    def _catch_up(self) -> None:
        with self._catching_up:
            uncounted, self._uncounted = self._uncounted, []
            for segment, commands in uncounted:
                self._count_segment(segment, commands)

    def absorb(self, log: Iterable[tuple[Event, tuple[Command, ...]]]) -> None:
        """Count what a driver's log says was executed."""
        for event, commands in log:
            if isinstance(event, SegmentRan):
                # Later: a token waits for this.
                self._uncounted.append((event, commands))
                if len(self._uncounted) >= KEPT:
                    self._catch_up()
                continue
            for command in commands:
                if isinstance(command, Attend):
                    self._attending[command.wave] = command
                elif isinstance(command, Execute) and isinstance(event, Routed):
                    attend = self._attending.pop(command.wave)
                    self._count(attend.rows, attend.server, event.experts, command)

    def _count_segment(self, ran: SegmentRan, commands: tuple[Command, ...]) -> None:
        first, rows = ran.tokens.layer, np.arange(ran.experts.shape[0])
        layers = first + np.arange(ran.settled)
        settled = layers[:, None], ran.experts[:, : ran.settled]
        np.add.at(self._counts[..., ExpertUse.LOCAL_EXACT], settled, 1)
        for command in commands:
            if isinstance(command, Execute):
                self._count(rows, ran.tokens.server, ran.experts[:, -1], command)

    def _count(self, rows: IntArray, server: IntArray, experts: IntArray, execute: Execute) -> None:
        # Rows that nobody can serve were given up in between.
        if execute.rows.size < rows.size:
            kept = np.isin(rows, execute.rows)
            experts, server = experts[kept], server[kept]
        ran, count = execute.slot_expert, self._counts.shape[1]
        substitute = expert_of(ran, count) != experts
        remote = execute.slot_server != server[:, None]
        use = np.where(ran >= 0, substitute + 2 * remote, int(ExpertUse.DROPPED))
        use = np.where(ran >= count, int(ExpertUse.LOCAL_STAND_IN), use)
        np.add.at(self._counts[execute.layer], (experts, use), 1)
