"""A server as a Ray actor: placed on its machine, started again when it dies."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from trimmoe.runtime.launch.handles import ServerGone
from trimmoe.runtime.launch.process import ServerProcess, log_to_file
from trimmoe.runtime.launch.raylet import server_resource
from trimmoe.runtime.launch.server import ServerSpec
from trimmoe.runtime.launch.status import Phase, ServerStatus
from trimmoe.runtime.probe import MachineReport

_CALLS = 4
"""Calls an actor answers at once: a look that hangs must not hold up the order to stop."""


class ServerActor:
    """What Ray runs; all work is `ServerProcess`'s.

    Empty until it is told what to be, also after Ray has started it again.
    """

    def __init__(self) -> None:
        self._process: ServerProcess | None = None
        self._told = threading.Lock()

    def begin(self, cluster: ServerSpec, index: int) -> None:
        """Become server `index` of the cluster that any server's spec describes."""
        # Calls run in threads of their own, and may be repeated.
        with self._told:
            if self._process is None:
                # Arrays in Ray's store are read-only, which compiled code takes for another type.
                spec = replace(deepcopy(cluster), index=index)
                log_to_file(spec)
                self._process = ServerProcess(spec)

    def status(self) -> ServerStatus:
        if self._process is None:
            return ServerStatus(phase=Phase.EMPTY, pid=os.getpid())
        return self._process.status()

    def measure(self) -> MachineReport | None:
        """None if it has not begun."""
        return None if self._process is None else self._process.measure()

    def stop(self, patience_s: float) -> None:
        if self._process is not None:
            self._process.stop(patience_s)


def start_actors(specs: Sequence[ServerSpec], *, pinned: bool) -> list[RayHandle]:
    """An actor per server: anywhere, or, `pinned`, each on the machine that offers its server."""
    # Kept once for all servers and every restart; profile and plan are the bulk of it.
    cluster = ray.put(specs[0])
    return [RayHandle(spec.name, cluster, spec.index, pinned=pinned) for spec in specs]


class RayHandle:
    """`ServerHandle` of an actor."""

    def __init__(self, name: str, cluster: ray.ObjectRef, index: int, *, pinned: bool) -> None:
        self.name = name
        self._cluster, self._index = cluster, index
        self._actor: Any = (
            ray.remote(ServerActor)
            .options(
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=_CALLS,
                resources={server_resource(name): 1} if pinned else None,
            )
            .remote()
        )
        self._told_pid = 0
        """The process that was last told what to be."""
        self._asked: Any = None
        self._stopped: Any = None
        self._measured: Any = None

    def status(self, patience_s: float) -> ServerStatus | None:
        # One question at a time: a server that hangs is not asked again and again.
        if self._asked is None:
            self._asked = self._actor.status.remote()
        done, _ = ray.wait([self._asked], timeout=patience_s)
        if not done:
            return None
        asked, self._asked = self._asked, None
        try:
            status: ServerStatus = ray.get(asked)
        except (RayActorError, RayTaskError) as error:
            raise ServerGone(_first_line(error)) from error
        if status.phase is Phase.EMPTY and status.pid != self._told_pid:
            self._told_pid = status.pid
            self._actor.begin.remote(self._cluster, self._index)
        return status

    def begin_measuring(self) -> None:
        """Have it time itself."""
        self._measured = self._actor.measure.remote()

    def measured(self, patience_s: float) -> MachineReport | None:
        """What that gave; None if it failed or is not through in time."""
        try:
            return ray.get(self._measured, timeout=patience_s)
        except (RayActorError, RayTaskError, GetTimeoutError):
            return None

    def restart(self) -> None:
        self._asked = None
        ray.kill(self._actor, no_restart=False)

    def stop(self, patience_s: float) -> None:
        self._stopped = self._actor.stop.remote(patience_s)

    def kill(self, patience_s: float) -> None:
        if self._stopped is not None:
            with contextlib.suppress(Exception):  # It may be gone already, which is the aim.
                ray.get(self._stopped, timeout=patience_s)
        ray.kill(self._actor, no_restart=True)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else type(error).__name__
