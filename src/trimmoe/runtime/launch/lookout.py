"""Whether the machines of a cluster that serves are still what its plan was made for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.handles import ServerGone
from trimmoe.runtime.launch.status import ServerStatus
from trimmoe.runtime.machine_report import LinkReport, MachineReport

LOOK_S = 20.0
"""Between two looks."""
TIMED_EVERY = 30
"""So many looks apart servers time themselves, if nobody waits for an answer then."""
_STATUS_S = 2.0
_TIMING_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Glance:
    """What one server tells while it serves."""

    links: tuple[LinkReport, ...] = ()
    report: MachineReport | None = None
    """None: it did not time itself."""


class Told(Protocol):
    """A server that can be looked at and timed."""

    def status(self, patience_s: float) -> ServerStatus | None: ...

    def begin_measuring(self) -> None: ...

    def measured(self, patience_s: float) -> MachineReport | None: ...


class Judge(Protocol):
    """Says what to move to."""

    def drifted(self, now: Artifacts, told: Sequence[Glance], moving_s: float) -> Artifacts | None:
        """What to serve by instead, None to stay; a move takes `moving_s`. Raises `UserError`."""
        ...

    @property
    def wavers(self) -> bool:
        """Whether another look soon would settle it."""
        ...


class Lookout:
    """Looks until `leaving`, and sets that with `found` once another plan is to be served."""

    def __init__(
        self,
        servers: Sequence[Told],
        judge: Judge,
        now: Artifacts,
        moving_s: float,
        leaving: threading.Event,
        say: Callable[[str], None],
    ) -> None:
        self._servers, self._judge, self._now = servers, judge, now
        self._moving_s, self._leaving, self._say = moving_s, leaving, say
        # Looks are counted, so that no clock can jump.
        self._untimed = 0
        self.found: Artifacts | None = None

    def begin(self) -> None:
        """In a thread of its own."""
        threading.Thread(target=self._run, name="looking for drift", daemon=True).start()

    def look(self) -> None:
        """Once."""
        told = self._told()
        if told is None:
            return
        found = self._judge.drifted(self._now, told, self._moving_s)
        if found is not None:
            self.found = found
            self._leaving.set()

    def _run(self) -> None:
        while not self._leaving.wait(LOOK_S):
            try:
                self.look()
            except UserError as error:
                self._say(f"The plan stays as it is: {error}")

    def _told(self) -> list[Glance] | None:
        """What all servers tell; None while one is away or silent."""
        statuses = []
        for server in self._servers:
            try:
                status = server.status(_STATUS_S)
            except ServerGone:
                return None
            if status is None or not status.ready:
                return None
            statuses.append(status)
        self._untimed += 1
        links = [status.links for status in statuses]
        quiet = not any(status.running + status.waiting for status in statuses)
        if not quiet or (self._untimed < TIMED_EVERY and not self._judge.wavers):
            return [Glance(links=each) for each in links]
        self._untimed = 0
        reports = []
        for server in self._servers:
            server.begin_measuring()
            reports.append(server.measured(_TIMING_S))
        return [
            Glance(links=each, report=report) for each, report in zip(links, reports, strict=True)
        ]
