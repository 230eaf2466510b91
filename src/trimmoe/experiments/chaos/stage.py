"""What failures happen to: `trimmoe serve` and `trimmoe gateway` as processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.addresses import Endpoint
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.watching import stop_servers

START_S = 600.0
"""The first start may calibrate, plan and compile."""
BACK_S = 120.0
"""By when everything is well again, whatever was done."""
_POLL_S = 0.1
_KEEPER = "trimmoe.runtime.launch.keeper"


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What one process takes."""

    memory_mb: float
    """Resident."""
    descriptors: int
    threads: int


class Stage:
    """All processes of one run, at ports from `port` on; their logs are in `folder`."""

    def __init__(self, serve: Sequence[str], *, port: int, gateway_port: int, folder: Path) -> None:
        """`serve`: options of `trimmoe serve` but for the port."""
        self._serve = [*serve, "--port-base", str(port)]
        self._port, self._gateway_port, self._folder = port, gateway_port, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs = 0
        self.endpoints: tuple[Endpoint, ...] = ()
        self.supervisor: subprocess.Popen[bytes] | None = None
        """`trimmoe serve`, as long as nobody killed it."""
        self.client = httpx.AsyncClient(
            timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False
        )

    @property
    def gateway(self) -> str:
        return f"http://127.0.0.1:{self._gateway_port}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.endpoints)

    async def start(self) -> None:
        """Everything, until all servers take requests. Raises `UserError` if it does not start."""
        self.supervisor, log = self._started("serve", *self._serve)
        job = None
        async with asyncio.timeout(START_S):
            while job is None:
                self._require_alive(self.supervisor, log)
                await asyncio.sleep(_POLL_S)
                job = self._run.read()
            self.endpoints = job.spec.endpoints
            while not await self.all_healthy():
                self._require_alive(self.supervisor, log)
                await asyncio.sleep(_POLL_S)
        servers = [option for url in self.urls for option in ("--server", url)]
        gateway, log = self._started("gateway", "--port", str(self._gateway_port), *servers)
        while await self._status(self.gateway) != httpx.codes.OK:
            self._require_alive(gateway, log)
            await asyncio.sleep(_POLL_S)

    async def serve_again(self) -> bool:
        """`trimmoe serve` once more: whether it takes over what runs."""
        self.supervisor, log = self._started("serve", *self._serve)
        try:
            async with asyncio.timeout(BACK_S):
                while b"Ready" not in (said := log.read_bytes()):
                    self._require_alive(self.supervisor, log)
                    await asyncio.sleep(_POLL_S)
        except (TimeoutError, UserError):
            return False
        return b"taking them over" in said

    async def close(self) -> None:
        """End all processes."""
        await self.client.aclose()
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            await asyncio.to_thread(process.wait)
        if self._run.alive():
            await asyncio.to_thread(stop_servers, self._run)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{each.http_port}" for each in self.endpoints]

    async def all_healthy(self) -> bool:
        found = await asyncio.gather(*(self._status(url) for url in self.urls))
        return all(each == httpx.codes.OK for each in found)

    async def until_healthy(self) -> bool:
        """Whether all servers take requests again in time."""
        try:
            async with asyncio.timeout(BACK_S):
                while not await self.all_healthy():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return False
        return True

    def kill(self, server: int) -> None:
        """kill -9."""
        self.signal(server, signal.SIGKILL)

    def signal(self, server: int, number: signal.Signals) -> None:
        pid = self.pid(server)
        if pid is not None:
            os.kill(pid, number)

    def pid(self, server: int) -> int | None:
        return self._run.pid(server)

    def kill_supervisor(self) -> None:
        """kill -9 of `trimmoe serve`."""
        assert self.supervisor is not None
        self.supervisor.kill()
        self.supervisor.wait()
        self.supervisor = None

    async def keeper(self, but: int | None = None) -> int | None:
        """The process that servers have started in its place, another than `but`."""
        wanted = f"{_KEEPER}\0{self._run.path}\0".encode()
        try:
            async with asyncio.timeout(BACK_S):
                while True:
                    for pid in _processes_that_say(wanted):
                        if pid != but:
                            return pid
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return None

    def usage(self) -> dict[tuple[str, int], Usage]:
        """What every server's process takes, by name and process number."""
        pids = {each.name: self.pid(index) for index, each in enumerate(self.endpoints)}
        return {(name, pid): _usage(pid) for name, pid in pids.items() if pid is not None}

    async def under_way(self) -> int:
        """Requests that servers have not let go of, and servers with places taken in their
        caches."""
        count = 0
        for url in self.urls:
            text = (await self.client.get(f"{url}/metrics")).text
            for line in text.splitlines():
                if line.startswith(("trimmoe_num_requests_running{", "trimmoe_num_requests_wait")):
                    count += int(float(line.rsplit(" ", 1)[1]))
                elif line.startswith("trimmoe:kv_cache_usage_perc{"):
                    count += float(line.rsplit(" ", 1)[1]) > 0
        return count

    @property
    def _run(self) -> RunFolder:
        return RunFolder.at(self._port)

    async def _status(self, url: str) -> int | None:
        try:
            return (await self.client.get(f"{url}/health", timeout=2)).status_code
        except httpx.HTTPError:
            return None

    def _started(self, *command: str) -> tuple[subprocess.Popen[bytes], Path]:
        self._logs += 1
        path = self._folder / f"{self._logs}-{command[0]}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "trimmoe.cli", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
                # Ctrl-C is this process's to pass on.
                start_new_session=True,
            )
        self._processes.append(process)
        return process, path

    @staticmethod
    def _require_alive(process: subprocess.Popen[bytes], log: Path) -> None:
        if process.poll() is not None:
            raise UserError(f"It ended while it was starting; {log} says why.")


def _processes_that_say(wanted: bytes) -> list[int]:
    """Processes in whose command lines something occurs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if wanted in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _usage(pid: int) -> Usage:
    folder = Path("/proc") / str(pid)
    fields = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines())
    return Usage(
        memory_mb=int(fields["VmRSS"].split()[0]) / 1024,
        descriptors=len(list((folder / "fd").iterdir())),
        threads=int(fields["Threads"]),
    )
