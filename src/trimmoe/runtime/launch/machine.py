"""What one machine of several runs: the generations that the head wants, and no others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimmoe.core.errors import UserError
from trimmoe.models.compiled.aside import compile_aside
from trimmoe.runtime.launch.addresses import require_free
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.deployment import Deployment, Report, open_deployment
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.fork_server import importable
from trimmoe.runtime.launch.generation import Generation, Say
from trimmoe.runtime.launch.job import Job, Pieces, server_spec
from trimmoe.runtime.launch.kernels import compile_decisions
from trimmoe.runtime.launch.processes import ProcessHandle
from trimmoe.runtime.launch.status import ServerStatus
from trimmoe.runtime.launch.tls import Tls

Assemble = Callable[[ServeConfig], Pieces]
"""What comes from the layers above, for settings."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A deployment that could not even be begun here."""

    error: str


class Machine:
    """Used by one thread; `reports` may be asked by any."""

    def __init__(
        self,
        servers: Sequence[str],
        token: str,
        kept: Path,
        say: Say,
        assemble: Assemble,
        tls: Tls | None = None,
    ) -> None:
        """`servers` and `tls` are this machine's; what deployments bring is kept in the folder
        `kept`."""
        self.servers = tuple(servers)
        self._token, self._kept, self._say, self._assemble = token, kept, say, assemble
        self._tls = tls
        self._running: dict[str, Generation | _Failed] = {}

    @property
    def runs(self) -> tuple[str, ...]:
        """The deployments that were begun and not ended."""
        return tuple(self._running)

    def want(self, deployments: Mapping[str, Deployment], wanted: Collection[str]) -> None:
        """Begin those by their identities that are wanted and new, and have those retire that
        nobody wants any more."""
        for identity, each in list(self._running.items()):
            if isinstance(each, _Failed) or each.is_over:
                if identity not in wanted:
                    del self._running[identity]
            elif identity not in wanted:
                each.retire()
        for identity, deployment in deployments.items():
            if identity in wanted and identity not in self._running:
                self._begin(identity, deployment)

    def reports(self) -> tuple[Report, ...]:
        """How all its servers are."""
        found: list[Report] = []
        for identity, each in list(self._running.items()):
            if isinstance(each, _Failed):
                found += [Report.failed(identity, name, each.error) for name in self.servers]
            elif each.error:
                found += [Report.failed(identity, name, each.error) for name in each.names]
            else:
                found += [
                    Report.of(identity, name, status)
                    for name, status in each.statuses().items()
                    if status is not None
                ]
        return tuple(found)

    def status_of(self, identity: str, name: str) -> ServerStatus | None:
        """How one of them is; None if nothing is known yet."""
        for report in self.reports():
            if (report.deployment, report.name) == (identity, name):
                return report.status
        return None

    def handle(self, identity: str, name: str) -> ProcessHandle | None:
        """The process of one of them, once it was started."""
        found = self._running.get(identity)
        return found.handle(name) if isinstance(found, Generation) else None

    def end(self) -> None:
        """End all there is."""
        running = [each for each in self._running.values() if isinstance(each, Generation)]
        for each in running:
            each.end()
        for each in running:
            each.join()

    def _begin(self, identity: str, deployment: Deployment) -> None:
        here = [name for name in deployment.machines if name in self.servers]
        if not here:
            return
        try:
            self._running[identity] = self._begun(deployment, here)
        except UserError as error:
            self._say(str(error))
            self._running[identity] = _Failed(str(error))

    def _begun(self, deployment: Deployment, here: Sequence[str]) -> Generation:
        opened = open_deployment(deployment, self._kept / str(deployment.turn))
        if opened.config.tls != (self._tls is not None):
            what = "HTTPS" if opened.config.tls else "plain HTTP"
            raise UserError(
                f"The head has all servers serve {what}; give --tls-certificate and --tls-key on "
                "all machines or on none."
            )
        pieces = self._assemble(opened.config)
        spec = server_spec(
            opened.config,
            opened.artifacts,
            pieces,
            opened.endpoints,
            one_machine=False,
            tls=self._tls,
        )
        if opened.config.device in (None, "auto", "cpu"):
            compile_aside()
        compile_decisions(opened.artifacts, pieces.policy, pieces.maker)
        mine = [each for each in opened.endpoints if each.name in here]
        port = min(each.http_port for each in mine)
        folder = RunFolder.at(port, deployment.turn)
        if not any(RunFolder.at(port, turn).alive() for turn in (0, 1)):
            require_free(mine)
        names = [each.name for each in opened.endpoints]
        job = Job(
            spec=spec,
            here=tuple(names.index(name) for name in here),
            token=self._token,
            import_path=importable(),
            spare=opened.config.spare,
        )
        return Generation(
            folder,
            job,
            self._say,
            ready_s=opened.config.ready_s,
            after=self._in_its_place(folder),
        )

    def _in_its_place(self, folder: RunFolder) -> Generation | None:
        """Who has a folder still: a head that has forgotten what it wanted before may
        begin with the turn of what a machine started without it."""
        for each in reversed(self._running.values()):
            if isinstance(each, Generation) and each.folder == folder and not each.is_over:
                return each
        return None
