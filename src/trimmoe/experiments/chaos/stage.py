"""What failures happen to: `trimmoe serve` and `trimmoe gateway` as processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from trimmoe.core.errors import UserError
from trimmoe.experiments.chaos.lan import Lan
from trimmoe.runtime.launch.addresses import Endpoint
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.watching import stop_servers

START_S = 600.0
"""The first start may calibrate, plan and compile."""
BACK_S = 120.0
"""By when everything is well again, whatever was done."""
_POLL_S = 0.1
_READY = b"Ready"
_TRIMMOE, _KEEPER = "trimmoe.cli", "trimmoe.runtime.launch.keeper"


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What one process takes."""

    memory_mb: float
    """Resident."""
    descriptors: int
    threads: int
    at_s: float = 0.0
    """When."""


@dataclass(eq=False, kw_only=True, slots=True)
class Machine:
    """Servers and who watches them."""

    serve: Sequence[str]
    """Options of `trimmoe serve`."""
    run: RunFolder
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside this process's own."""
    network: str | None = None
    """Where its network is, see `Lan`; None: that of this process."""
    is_head: bool = True
    """Whether it says when all is ready; servers answer before, while they are measured."""
    supervisor: subprocess.Popen[bytes] | None = None
    """`trimmoe serve`, as long as nobody killed it."""


class Stage:
    """All processes of one run; their logs are in `folder`.

    Either one machine with all servers, or one for each of them, whose network is `lan`.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        *,
        gateway_port: int,
        folder: Path,
        lan: Lan | None = None,
    ) -> None:
        self.machines, self.lan = machines, lan
        self._gateway_port, self._folder = gateway_port, folder
        self._gateway: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs = 0
        self.endpoints: tuple[Endpoint, ...] = ()
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
        begun = [self.serve(machine) for machine in self.machines]
        job = None
        async with asyncio.timeout(START_S):
            while job is None or not await self.all_healthy():
                for process, log in begun:
                    self._require_alive(process, log)
                await asyncio.sleep(_POLL_S)
                if job is None and _READY in begun[0][1].read_bytes():
                    job = self.machines[0].run.read()
                    self.endpoints = () if job is None else job.spec.endpoints
        servers = [option for url in self.urls for option in ("--server", url)]
        network = None if self.lan is None else self.lan.path(None)
        command = ("gateway", "--port", str(self._gateway_port), *servers)
        self._gateway, log = self._started(command, network, {})
        while await self._status(self.gateway) != httpx.codes.OK:
            self._require_alive(self._gateway, log)
            await asyncio.sleep(_POLL_S)

    def serve(self, machine: Machine) -> tuple[subprocess.Popen[bytes], Path]:
        """Start `trimmoe serve` there; the process and its log."""
        command = ("serve", *machine.serve)
        machine.supervisor, log = self._started(command, machine.network, machine.environment)
        return machine.supervisor, log

    async def serve_again(self) -> bool:
        """`trimmoe serve` once more wherever it was killed: whether it takes over what runs."""
        killed = [machine for machine in self.machines if machine.supervisor is None]
        taken = await asyncio.gather(*(self._taken_over(machine) for machine in killed))
        return all(taken)

    async def _taken_over(self, machine: Machine) -> bool:
        process, log = self.serve(machine)
        ready = _READY if machine.is_head else b"taking them over"
        try:
            async with asyncio.timeout(BACK_S):
                while ready not in (said := log.read_bytes()):
                    self._require_alive(process, log)
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
        for machine in self.machines:
            if machine.run.alive():
                await asyncio.to_thread(stop_servers, machine.run)

    @property
    def urls(self) -> list[str]:
        hosts = ["127.0.0.1" if self.lan is None else each.machine for each in self.endpoints]
        return [
            f"http://{host}:{each.http_port}"
            for host, each in zip(hosts, self.endpoints, strict=True)
        ]

    async def all_healthy(self) -> bool:
        if not self.endpoints:
            return False
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
        return self.machine_of(server).run.pid(server)

    def machine_of(self, server: int) -> Machine:
        return self.machines[0 if self.lan is None else server]

    def kill_supervisor(self, machine: Machine) -> None:
        """kill -9 of `trimmoe serve`."""
        assert machine.supervisor is not None
        machine.supervisor.kill()
        machine.supervisor.wait()
        machine.supervisor = None

    def crash(self, machine: Machine) -> None:
        """kill -9 of all that runs there."""
        self.kill_supervisor(machine)
        numbers = [machine.run.pid(each) for each in machine.run.alive()]
        for pid in (*_processes_that_say(self._keeping(machine)), *numbers):
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def keeper(self, machine: Machine, but: int | None = None) -> int | None:
        """The process that servers have started in its place, another than `but`."""
        try:
            async with asyncio.timeout(BACK_S):
                while True:
                    for pid in _processes_that_say(self._keeping(machine)):
                        if pid != but:
                            return pid
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return None

    def usage(self) -> dict[tuple[str, int], Usage]:
        """What every process takes, by name and process number."""
        pids = {each.name: self.pid(index) for index, each in enumerate(self.endpoints)}
        pids["gateway"] = self._gateway and self._gateway.pid
        for number, machine in enumerate(self.machines):
            pids[f"supervisor {number}"] = machine.supervisor and machine.supervisor.pid
        found = {(name, pid): _usage(pid) for name, pid in pids.items() if pid is not None}
        return {process: usage for process, usage in found.items() if usage is not None}

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

    @staticmethod
    def _keeping(machine: Machine) -> bytes:
        """What a command line says of a process that keeps its servers."""
        return f"{_KEEPER}\0{machine.run.path}\0".encode()

    async def _status(self, url: str) -> int | None:
        try:
            return (await self.client.get(f"{url}/health", timeout=2)).status_code
        except httpx.HTTPError:
            return None

    def _started(
        self, command: Sequence[str], network: str | None, environment: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], Path]:
        module = [_TRIMMOE] if network is None else [f"{_TRIMMOE}.inside", network]
        self._logs += 1
        path = self._folder / f"{self._logs}-{command[0]}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *module, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"} | dict(environment),
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


def _usage(pid: int) -> Usage | None:
    """None of a process that has just ended."""
    folder = Path("/proc") / str(pid)
    try:
        lines = (folder / "status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines)
        return Usage(
            memory_mb=int(fields["VmRSS"].split()[0]) / 1024,
            descriptors=len(list((folder / "fd").iterdir())),
            threads=int(fields["Threads"]),
            at_s=time.monotonic(),
        )
    except (OSError, KeyError):
        return None
