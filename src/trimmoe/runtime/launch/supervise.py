"""Watching server processes: ready, lost, back, hung; a failure at the start ends everything."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.handles import ServerGone, ServerHandle
from trimmoe.runtime.launch.status import Phase, ServerStatus

Say = Callable[[str], None]
Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long what may take, in seconds."""

    ready_s: float = 600.0
    """Until all servers take requests."""
    look_s: float = 0.5
    """Between two looks."""
    answer_s: float = 2.0
    """For one answer."""
    hung_s: float = 120.0
    """Without any answer until a process is taken for hung and started anew."""
    ill_s: float = 10.0
    """Of answering, but taking no requests, until a server is started anew."""
    again_s: float = 5.0
    """Between two attempts to replace a server that fails."""
    stop_s: float = 8.0
    """For ending in good order."""
    drain_s: float = 900.0
    """For answers under way at a server that another one is to take the place of."""
    meet_s: float = 30.0
    """For such a one to meet the servers that the one before it knew."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Watched:
    """One server and what was last known of it."""

    handle: ServerHandle
    heard_s: float
    ill_since_s: float | None = None
    """Since when it has served, but nobody."""
    replaced_s: float = -math.inf
    here: bool = True
    seen: ServerStatus | None = None
    pids: set[int] = field(default_factory=set)


class Supervisor:
    """Watches servers until told to stop. One thread; `stopping` may be set from any."""

    def __init__(
        self,
        handles: Sequence[ServerHandle],
        *,
        say: Say,
        stopping: threading.Event,
        patience: Patience | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._say, self._stopping, self._clock = say, stopping, clock
        self._patience = patience or Patience()
        now_s = clock()
        self._watched = [_Watched(handle=handle, heard_s=now_s) for handle in handles]

    def wait_ready(self) -> bool:
        """Until all servers take requests: True; False if told to stop before.

        Raises `UserError` if one fails, ends or does not get ready in time.
        """
        begun_s = self._clock()
        while not self._stopping.is_set():
            for watched in self._watched:
                self._look_at_start(watched)
            unready = [each for each in self._watched if not (each.seen and each.seen.ready)]
            if not unready:
                return True
            if self._clock() - begun_s > self._patience.ready_s:
                raise UserError(self._late(unready[0]))
            self._stopping.wait(self._patience.look_s)
        return False

    def watch(self) -> None:
        """Say who is lost and who is back, and replace what hangs, until told to stop."""
        while not self._stopping.wait(self._patience.look_s):
            for watched in self._watched:
                self._look(watched)

    def renew(self, version: str) -> None:
        """Have servers of that version take the place of all others, one after another, each once
        it has answered what it was at; until told to stop, or until one does not start."""
        for watched in self._watched:
            if watched.seen is not None and watched.seen.version != version:
                self._say(f"Server {watched.handle.name} moves to TrimMoE {version}.")
                if not self._renewed(watched, watched.seen):
                    return

    def _renewed(self, watched: _Watched, before: ServerStatus) -> bool:
        """Whether a server has ended and the next one in its place is there."""
        handle = watched.handle
        handle.drain()
        self._meanwhile(watched, lambda: self._is_drained(watched), self._patience.drain_s)
        if self._stopping.is_set():
            return False
        handle.stop(self._patience.stop_s)
        end_s = self._clock() + self._patience.stop_s
        found: list[ServerStatus] = []

        def is_there() -> bool:
            with contextlib.suppress(ServerGone):
                status = handle.status(self._patience.answer_s)
                if status is not None and status.pid != before.pid:
                    found[:] = [status]
                    return status.ready or status.phase in (Phase.FAILED, Phase.STOPPED)
                if self._clock() > end_s:
                    handle.restart()
            return False

        def has_met() -> bool:
            return is_there() and set(found[0].peers_up) >= set(before.peers_up)

        self._meanwhile(watched, is_there, self._patience.ready_s)
        if found and found[0].ready:
            self._meanwhile(watched, has_met, self._patience.meet_s)
        if not found or not found[0].ready:
            why = found[0].error if found else "it was not ready in time"
            if not self._stopping.is_set():
                self._say(f"Server {handle.name} does not start ({why}); the others stay.")
            return False
        watched.seen, watched.heard_s = found[0], self._clock()
        return True

    def _meanwhile(self, watched: _Watched, done: Callable[[], bool], patience_s: float) -> None:
        """Look after the other servers until something is done, or told to stop, or so long."""
        end_s = self._clock() + patience_s
        while not done() and self._clock() < end_s:
            if self._stopping.wait(self._patience.look_s):
                return
            for other in self._watched:
                if other is not watched:
                    self._look(other)

    def stop(self) -> None:
        """End all servers, in good order as far as there is time."""
        for watched in self._watched:
            watched.handle.stop(self._patience.stop_s)
        end_s = self._clock() + self._patience.stop_s
        for watched in self._watched:
            watched.handle.kill(max(end_s - self._clock(), 0.0))

    def retire(self, patience_s: float) -> None:
        """Have all servers answer what they are at and nothing more; until they have, or until told
        to stop, or so long. Those that die meanwhile stay dead."""
        for watched in self._watched:
            watched.handle.drain()
        end_s = self._clock() + patience_s
        left = list(self._watched)
        while left and self._clock() < end_s and not self._stopping.wait(self._patience.look_s):
            left = [watched for watched in left if not self._is_drained(watched)]

    def _is_drained(self, watched: _Watched) -> bool:
        try:
            status = watched.handle.status(self._patience.answer_s)
        except ServerGone:
            return True
        return status is not None and status.phase in (Phase.DRAINED, Phase.STOPPED, Phase.FAILED)

    @property
    def statuses(self) -> dict[str, ServerStatus | None]:
        """What was last known, by name."""
        lost = ServerStatus(phase=Phase.LOST, pid=0)
        return {each.handle.name: each.seen if each.here else lost for each in self._watched}

    def _look_at_start(self, watched: _Watched) -> None:
        name = watched.handle.name
        try:
            status = watched.handle.status(self._patience.answer_s)
        except ServerGone as error:
            raise UserError(
                f"The process of server {name} ended while it was starting ({error}); see its log, "
                "and that there is enough memory."
            ) from error
        if status is None:
            return
        watched.pids.add(status.pid)
        if len(watched.pids) > 1:
            raise UserError(
                f"The process of server {name} ended while it was starting; see its log, and that "
                "there is enough memory."
            )
        if status.phase in (Phase.FAILED, Phase.STOPPED):
            raise UserError(status.error or f"Server {name} stopped while it was starting.")
        watched.seen, watched.heard_s = status, self._clock()

    def _late(self, watched: _Watched) -> str:
        seen = watched.seen
        state = "does not answer" if seen is None else seen.reason or f"is {seen.phase}"
        return (
            f"Server {watched.handle.name} was not ready after {self._patience.ready_s:.0f} s "
            f"({state}); see its log, or allow more time."
        )

    def _look(self, watched: _Watched) -> None:
        name = watched.handle.name
        try:
            status = watched.handle.status(self._patience.answer_s)
        except ServerGone:
            self._lost(watched, f"Server {name} is lost and is being started again.")
            watched.heard_s = self._clock()
            return
        if status is None:
            if self._clock() - watched.heard_s > self._patience.hung_s:
                self._replace(watched, f"Server {name} does not answer and is replaced.")
            return
        watched.heard_s = self._clock()
        if status.warning and (watched.seen is None or watched.seen.warning != status.warning):
            self._say(status.warning)
        if status.phase in (Phase.FAILED, Phase.STOPPED):
            self._replace(watched, f"{status.error or f'Server {name} stopped.'} Trying again.")
            return
        if watched.seen is not None and status.pid != watched.seen.pid:
            # It died and was started again between two looks.
            self._lost(watched, f"Server {name} was lost and is being started again.")
        watched.seen = status
        if self._ill_too_long(watched, status):
            self._replace(watched, f"Server {name} takes no requests and is replaced.")
        if status.ready and not watched.here:
            watched.here = True
            self._say(f"Server {name} is back.")

    def _ill_too_long(self, watched: _Watched, status: ServerStatus) -> bool:
        """Its process lives, but something in it has failed for good."""
        if status.phase is not Phase.SERVING or status.healthy:
            watched.ill_since_s = None
            return False
        if watched.ill_since_s is None:
            watched.ill_since_s = self._clock()
        return self._clock() - watched.ill_since_s > self._patience.ill_s

    def _replace(self, watched: _Watched, why: str) -> None:
        self._lost(watched, why)
        now_s = self._clock()
        if now_s - watched.replaced_s >= self._patience.again_s:
            watched.heard_s = watched.replaced_s = now_s
            watched.ill_since_s = None
            watched.handle.restart()

    def _lost(self, watched: _Watched, why: str) -> None:
        if watched.here:
            watched.here = False
            self._say(why)
