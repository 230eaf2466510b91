"""The servers of one plan on this machine, from their start to their end.

A cluster moves to another plan by having two generations for a while: the next one starts beside
the one that serves, both listen for users, then the older one answers what it is at and ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import trimmoe
from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.job import Job
from trimmoe.runtime.launch.processes import ProcessHandle, start_processes
from trimmoe.runtime.launch.signals import Stop
from trimmoe.runtime.launch.status import ServerStatus
from trimmoe.runtime.launch.supervise import Patience, Supervisor
from trimmoe.runtime.launch.watching import supervising

Say = Callable[[str], None]
_LOOK_S = 0.2


class Generation:
    """Runs in a thread of its own from when it is made."""

    def __init__(
        self,
        folder: RunFolder,
        job: Job,
        say: Say,
        *,
        ready_s: float,
        after: Generation | None = None,
    ) -> None:
        """`after` has the folder still, and is let end first."""
        self.folder, self._job, self._say, self._after = folder, job, say, after
        self._patience = Patience(ready_s=ready_s)
        self._stop, self._leaving = Stop(), threading.Event()
        self._stop.also(self._leaving)
        self._retiring = False
        self._supervisor: Supervisor | None = None
        self._handles: Sequence[ProcessHandle] = ()
        self.error = ""
        """Why it did not start, in a sentence."""
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._job.spec_of(index).name for index in self._job.here)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def statuses(self) -> dict[str, ServerStatus | None]:
        """What was last known of its servers, by name."""
        return {} if self._supervisor is None else self._supervisor.statuses

    def handle(self, name: str) -> ProcessHandle | None:
        """One of its servers, once they were started."""
        return next((each for each in self._handles if each.name == name), None)

    def retire(self) -> None:
        """End once all answers under way are complete; returns at once."""
        self._retiring = True
        self._leaving.set()

    def end(self) -> None:
        """End now; returns at once."""
        self._stop.set()

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def _run(self) -> None:
        while self._after is not None and not self._after.is_over:
            if self._leaving.wait(_LOOK_S):
                return
        self._after = None
        try:
            with supervising(self.folder, self._job, self._stop, self._say) as (folder, job):
                self._handles = start_processes(folder, job)
                self._supervised()
        except UserError as error:
            self.error = str(error)
            self._say(self.error)

    def _supervised(self) -> None:
        supervisor = self._supervisor = Supervisor(
            self._handles, say=self._say, stopping=self._leaving, patience=self._patience
        )
        try:
            if supervisor.wait_ready():
                supervisor.renew(trimmoe.__version__)
                supervisor.watch()
            if self._retiring and not self._stop.is_set():
                drainer = Supervisor(
                    self._handles, say=self._say, stopping=self._stop, patience=self._patience
                )
                drainer.retire(self._patience.drain_s)
        finally:
            supervisor.stop()
