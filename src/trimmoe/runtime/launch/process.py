"""A server inside a process of its own: an event loop in a thread, watched from outside it.

The thread keeps whatever started the process off the loop that tokens pass through.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import faulthandler
import gc
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import torch

import trimmoe
from trimmoe.core.errors import UserError
from trimmoe.models.embedded.materialise import default_cache_dir
from trimmoe.runtime.launch.emulated import SlowSelector
from trimmoe.runtime.launch.server import Orders, ServerSpec, Started, run_server
from trimmoe.runtime.launch.status import Phase, ServerStatus
from trimmoe.runtime.machine_report import MachineReport, link_reports

_log = logging.getLogger(__name__)


class ServerProcess:
    """Starts serving when made; `status` answers at any time."""

    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        self._selector = SlowSelector() if spec.slowdown > 1.0 else None
        self._loop = (
            asyncio.new_event_loop()
            if self._selector is None
            else asyncio.SelectorEventLoop(self._selector)
        )
        self._orders = Orders()
        self._started: Started | None = None
        self._error = ""
        self._thread = threading.Thread(target=self._run, name=f"trimmoe-{spec.name}", daemon=True)
        self._thread.start()

    def status(self) -> ServerStatus:
        """How it is now; waits for the event loop, so a server that hangs gives no answer."""
        pid = os.getpid()
        if self._started is not None:
            with contextlib.suppress(concurrent.futures.CancelledError, RuntimeError):
                return asyncio.run_coroutine_threadsafe(
                    self._look(self._started), self._loop
                ).result()
        if self._thread.is_alive():
            return ServerStatus(phase=Phase.STARTING, pid=pid)
        if self._error:
            return ServerStatus(phase=Phase.FAILED, pid=pid, error=self._error)
        return ServerStatus(phase=Phase.STOPPED, pid=pid)

    async def _look(self, started: Started) -> ServerStatus:
        health, stats = started.service.health(), started.service.stats()
        return ServerStatus(
            phase=Phase.DRAINED if self._orders.drained else Phase.SERVING,
            pid=os.getpid(),
            healthy=health.ok,
            reason=health.reason,
            peers_up=tuple(sorted(started.transport.peers_up())),
            running=stats.running,
            waiting=stats.waiting,
            dense_bytes=started.bytes_read.dense,
            expert_bytes=started.bytes_read.experts,
            warning=" ".join(started.transport.strangers().values()),
            version=trimmoe.__version__,
            links=link_reports(started.transport.link_estimates().values()),
        )

    def measure(self) -> MachineReport:
        """Time the server. Raises `UserError` if it does not serve."""
        if self._started is None:
            raise UserError(f"{self._spec.name} does not serve, so that nothing can be measured.")
        return asyncio.run_coroutine_threadsafe(self._started.measure(), self._loop).result()

    def drain(self) -> None:
        """Take no more requests; `status` tells when all there were are answered."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._orders.drain.set)

    def stop(self, patience_s: float) -> None:
        """End what is being answered, give the ports back and return when done or out of time."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._orders.stop.set)
            self._thread.join(patience_s)

    def _run(self) -> None:
        torch.set_num_threads(1)
        # The thread that computes shares the interpreter with the one that listens: neither should
        # wait five milliseconds, the default, for the other.
        sys.setswitchinterval(0.0005)
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(run_server(self._spec, self._orders, self._on_started))
        except UserError as error:
            self._error = str(error)
        except BaseException as error:
            _log.exception("%s failed", self._spec.name)
            kind = type(error).__name__
            self._error = f"{self._spec.name} failed ({kind}: {error}); see {log_path(self._spec)}."
        finally:
            self._started = None
            self._end_loop()

    def _end_loop(self) -> None:
        """Cancel what is left, so that nobody waits for an answer that cannot come."""
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def _on_started(self, started: Started) -> None:
        self._started = started
        if self._selector is not None:
            # What it took to open the model is no more than it takes this machine.
            self._selector.slowdown = self._spec.slowdown
        # What is there now stays: to look through all of it for garbage takes half a second.
        gc.collect()
        gc.freeze()
        name, url = self._spec.name, self._spec.endpoint.url
        _log.info("%s serves at %s after %.1f s of processing", name, url, time.process_time())


def log_path(spec: ServerSpec) -> Path:
    """Where a server on this machine writes what went wrong."""
    safe = "".join(each if each.isalnum() or each in "-_." else "_" for each in spec.name)
    return _logs() / f"{safe}-{spec.endpoint.http_port}.log"


def keeper_log_path(port: str) -> Path:
    """Where a keeper of the servers from a port on writes what it sees."""
    return _logs() / f"keeper-{port}.log"


def _logs() -> Path:
    return default_cache_dir() / "logs"


_fault_log: TextIO | None = None
"""Kept open: the fault handler writes to its descriptor when the process crashes."""


def log_to_file(spec: ServerSpec) -> None:
    """Send this process's log to the server's file, which goes on after a restart."""
    global _fault_log
    path = log_path(spec)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _fault_log is None:
            _fault_log = path.open("a")
            faulthandler.enable(_fault_log)
    except OSError:
        return  # Serving without a log is better than not serving.
    logging.basicConfig(
        filename=path,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
