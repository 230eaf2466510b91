"""The process of one server: `python -m trimmoe.runtime.launch.child FOLDER INDEX LOCK`.

Servers that are forked (see `forking`) run a `Child` likewise. A server answers its supervisor
from the first moment on, and sees to it that it has one: should the supervisor be killed, the first
server to notice starts another.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from trimmoe.runtime.launch.control import Control
from trimmoe.runtime.launch.folder import RunFolder, say_pid
from trimmoe.runtime.launch.status import Phase, ServerStatus

if TYPE_CHECKING:
    from trimmoe.runtime.launch.process import ServerProcess
    from trimmoe.runtime.machine_report import MachineReport

_WATCH_S = 1.0
"""Between two looks whether there is a supervisor."""
_REPLACED = "TrimMoE was replaced by another version here; start `trimmoe serve` again."


class Child:
    """What its supervisor may ask of it."""

    def __init__(self) -> None:
        self._process: ServerProcess | None = None
        self._replaced = False
        """Whether its supervisor is of another version of this software."""
        self._ended = threading.Event()

    def run(self, folder: RunFolder, index: int) -> None:
        """Serve until told to stop."""
        answers = {
            "status": self.status,
            "measure": self.measure,
            "drain": self.drain,
            "stop": self.stop,
        }
        control = Control(folder.socket(index), answers)
        try:
            self._serve(folder, index)
        finally:
            control.close()

    def _serve(self, folder: RunFolder, index: int) -> None:
        # What takes seconds to import comes when there is somebody to answer for it.
        from trimmoe.runtime.launch.process import ServerProcess, log_to_file

        job = folder.read()
        if job is None:
            # A supervisor says what its servers are before it starts them.
            self._replaced = True
            self._ended.wait()
            return
        spec = job.spec_of(index)
        log_to_file(spec)
        if not self._ended.is_set():
            self._process = ServerProcess(spec)
        while not self._ended.wait(_WATCH_S):
            ensure_supervised(folder)

    def status(self) -> ServerStatus:
        process = self._process
        if self._replaced:
            return ServerStatus(phase=Phase.FAILED, pid=os.getpid(), error=_REPLACED)
        if process is None:
            return ServerStatus(phase=Phase.STARTING, pid=os.getpid())
        return process.status()

    def measure(self) -> MachineReport | None:
        """None if it does not serve."""
        return None if self._process is None else self._process.measure()

    def drain(self) -> None:
        if self._process is not None:
            self._process.drain()

    def stop(self, patience_s: float) -> None:
        """End in good order; the process ends with it."""
        try:
            if self._process is not None:
                self._process.stop(patience_s)
        finally:
            self._ended.set()


def ensure_supervised(folder: RunFolder) -> None:
    """Start a keeper if nobody watches the folder's servers."""
    lock = folder.claim()
    if lock is not None:
        from trimmoe.runtime.launch.keeper import start_keeper

        start_keeper(folder, lock)


def main() -> None:
    folder, index, lock = RunFolder(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    say_pid(lock)
    Child().run(folder, index)


if __name__ == "__main__":
    main()
