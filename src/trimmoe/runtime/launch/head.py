"""A cluster of several machines as its head sees it: what is served, and moving to another plan."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.addresses import Endpoint
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.deployment import (
    Deployment,
    deployed_endpoints,
    deployment_of,
    report_of,
    same_settings,
)
from trimmoe.runtime.launch.handles import ServerGone
from trimmoe.runtime.launch.machine import Machine
from trimmoe.runtime.launch.member import keep
from trimmoe.runtime.launch.members import Members
from trimmoe.runtime.launch.signals import Stop
from trimmoe.runtime.launch.status import Phase, ServerStatus
from trimmoe.runtime.launch.supervise import Patience, Supervisor
from trimmoe.runtime.machine_report import MachineReport

Say = Callable[[str], None]
_LOOK_S = 0.5


class Head:
    """Used by one thread."""

    def __init__(
        self,
        config: ServeConfig,
        members: Members,
        machine: Machine,
        kept: Path,
        stop: Stop,
        say: Say,
    ) -> None:
        """`machine` is the head's own; what is served is kept in the folder `kept`."""
        self._config, self._members, self._machine = config, members, machine
        self._kept, self._stop, self._say = kept, stop, say
        self.current: Deployment | None = None
        """What is served."""

    def move(self, artifacts: Artifacts, machines: dict[str, str], *, beside: bool = True) -> bool:
        """Serve that instead of what is served, without losing an answer; False if told to stop.

        Its servers start `beside` those that serve, or else when these have ended, and nobody is
        let in meanwhile. Raises `UserError` if they do not start; what was served is served on.
        """
        before = self.current
        turn = 0 if before is None else 1 - before.turn
        after = deployment_of(self._config, artifacts, machines, turn)
        if before is None or beside:
            return self.take_up(after)
        if not self._left(before):
            return False
        self.current = None
        try:
            return self.take_up(after)
        except UserError:
            self.current = before
            self._want(before)
            raise

    def _left(self, deployment: Deployment) -> bool:
        """Have its servers end once their answers are complete, and wait for that; False if told to
        stop."""
        while not self._stop.is_set():
            self._want()
            joined = self._members.joined().values()
            runs = {*self._machine.runs, *(run for each in joined for run in each.runs)}
            if deployment.identity not in runs:
                return True
            self._stop.wait(_LOOK_S)
        return False

    def may_take_up(self, deployment: Deployment) -> bool:
        """Whether it is of the settings in force."""
        return same_settings(deployment, self._config)

    def take_up(self, deployment: Deployment) -> bool:
        """Likewise of a deployment, which may be served already."""
        before = self.current
        self._want(*([] if before is None else [before]), deployment)
        supervisor = Supervisor(
            [self.view(deployment.identity, name) for name in deployment.machines],
            say=self._say,
            stopping=self._stop,
            patience=Patience(ready_s=self._config.ready_s),
        )
        try:
            if not supervisor.wait_ready():
                return False
        except UserError:
            if before is not None:
                self._want(before)
            raise
        self.current = deployment
        keep(deployment, self._kept)
        self._want(deployment)
        return True

    def watch(self, leaving: threading.Event) -> None:
        """Say what becomes of the servers elsewhere until then; those here speak for themselves."""
        assert self.current is not None
        identity, own = self.current.identity, self._machine.servers
        views = [self.view(identity, name) for name in self.current.machines if name not in own]
        Supervisor(views, say=self._say, stopping=leaving).watch()

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where the servers that serve listen."""
        assert self.current is not None
        machines = self.current.machines
        return deployed_endpoints(self._config, tuple(machines), machines, self.current.turn)

    def view(self, identity: str, name: str) -> ServerView:
        """One server of a deployment."""
        return ServerView(name, identity, self._members, self._machine)

    def _want(self, *deployments: Deployment) -> None:
        wanted = {each.identity: each for each in deployments}
        self._members.want(wanted)
        self._machine.want(wanted, wanted)


class ServerView:
    """`ServerHandle` of a server that its own machine's supervisor looks after."""

    def __init__(self, name: str, identity: str, members: Members, machine: Machine) -> None:
        self.name, self._identity = name, identity
        self._members, self._machine = members, machine
        self._is_own = name in machine.servers
        self._number, self._was_ready = 0, False

    def status(self, patience_s: float) -> ServerStatus | None:
        try:
            found = self._status()
        except ServerGone:
            # Before it was there, it is only late: who looks after it starts it again.
            if self._was_ready:
                raise
            return None
        self._was_ready = self._was_ready or (found is not None and found.ready)
        return found

    def _status(self) -> ServerStatus | None:
        if self._is_own:
            found = self._machine.status_of(self._identity, self.name)
        else:
            found = self._members.status_of(self._identity, self.name)
        if found is not None and found.phase is Phase.LOST:
            raise ServerGone("its process has ended")
        # Which process it is matters to its own supervisor only.
        return None if found is None else replace(found, pid=0)

    def begin_measuring(self) -> None:
        """Have it time itself."""
        if self._is_own:
            if (handle := self._machine.handle(self._identity, self.name)) is not None:
                handle.begin_measuring()
        else:
            self._number = self._members.begin_measuring(self._identity, self.name)

    def measured(self, patience_s: float) -> MachineReport | None:
        """What that gave; None if it failed or is not through in time."""
        if self._is_own:
            handle = self._machine.handle(self._identity, self.name)
            return None if handle is None else handle.measured(patience_s)
        timed = self._members.measured(self._number, patience_s)
        return None if timed is None else report_of(timed)

    def restart(self) -> None:
        """Its machine sees to that."""

    def drain(self) -> None:
        """Likewise."""

    def stop(self, patience_s: float) -> None:
        """Likewise."""

    def kill(self, patience_s: float) -> None:
        """Likewise."""
