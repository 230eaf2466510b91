"""Servers as processes of this machine: started, asked, ended, and started again when they die."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from trimmoe.runtime.launch.control import Question, Unreachable
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.handles import ServerGone
from trimmoe.runtime.launch.job import Job
from trimmoe.runtime.launch.process import log_path
from trimmoe.runtime.launch.server import TOKEN_VARIABLE
from trimmoe.runtime.launch.status import ServerStatus
from trimmoe.runtime.probe import MachineReport

_CHILD = "trimmoe.runtime.launch.child"
_POLL_S = 0.02
_AGAIN_S = 1.0
"""Between two attempts to start a server that ends at once."""


class ProcessHandle:
    """`ServerHandle` of a process of this machine, whoever started it."""

    def __init__(self, folder: RunFolder, job: Job, index: int) -> None:
        self._folder, self._job, self._index = folder, job, index
        self.name = job.spec_of(index).name
        self._child: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._asked: Question | None = None
        self._measured: Question | None = None

    def begin(self) -> None:
        """Start its process unless that lives already."""
        lock = self._folder.claim_server(self._index)
        if lock is None:
            return
        self._folder.server_socket(self._index).unlink(missing_ok=True)
        self._started_s = time.monotonic()
        log = _log_of(self._job, self._index)
        try:
            # It has the lock from birth, so that nobody takes it for dead and starts another.
            self._child = subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(self._folder.path), str(self._index), str(lock)],
                env=environment(self._job),
                stdin=subprocess.DEVNULL,
                stdout=log or subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                pass_fds=(lock,),
                # Ctrl-C in a terminal is the supervisor's to pass on.
                start_new_session=True,
            )
        finally:
            os.close(lock)
            if log is not None:
                log.close()

    def status(self, patience_s: float) -> ServerStatus | None:
        self._reap()
        if not self._folder.is_alive(self._index):
            self._forget()
            if time.monotonic() - self._started_s > _AGAIN_S:
                self.begin()
            raise ServerGone("its process has ended")
        try:
            # One question at a time: a server that hangs is not asked again and again.
            if self._asked is None:
                self._asked = self._question("status")
            if not self._asked.answered(patience_s):
                return None
            asked, self._asked = self._asked, None
            return asked.answer()
        except Unreachable:
            # It is just starting or just ending: the next look tells.
            self._asked = None
            time.sleep(_POLL_S)
            return None

    def begin_measuring(self) -> None:
        """Have it time itself."""
        with contextlib.suppress(Unreachable):
            self._measured = self._question("measure")

    def measured(self, patience_s: float) -> MachineReport | None:
        """What that gave; None if it failed or is not through in time."""
        question, self._measured = self._measured, None
        if question is None or not question.answered(patience_s):
            return None
        with contextlib.suppress(Unreachable):
            return question.answer()
        return None

    def restart(self) -> None:
        self._forget()
        self._signal(signal.SIGKILL)

    def stop(self, patience_s: float) -> None:
        with contextlib.suppress(Unreachable):
            self._question("stop", patience_s)

    def kill(self, patience_s: float) -> None:
        end_s = time.monotonic() + patience_s
        while self._folder.is_alive(self._index) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        self._signal(signal.SIGKILL)
        while self._folder.is_alive(self._index):
            time.sleep(_POLL_S)
        if self._child is not None:
            self._child.wait()

    def _question(self, question: str, *arguments: Any) -> Question:
        return Question(self._folder.server_socket(self._index), question, *arguments)

    def _signal(self, number: signal.Signals) -> None:
        if not self._folder.is_alive(self._index):
            return
        # Before it has said its number it can only be a child of ours.
        pid = self._folder.pid(self._index) or (self._child.pid if self._child else None)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _forget(self) -> None:
        """Do without an answer of a process that has ended."""
        if self._asked is not None:
            self._asked.close()
        self._asked = None

    def _reap(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            self._child = None


def start_processes(folder: RunFolder, job: Job) -> list[ProcessHandle]:
    """The servers of this machine, those that live already as they are."""
    handles = [ProcessHandle(folder, job, index) for index in job.here]
    for handle in handles:
        handle.begin()
    return handles


def environment(job: Job) -> dict[str, str]:
    """What the processes of a job find in theirs."""
    before = os.environ.get("PYTHONPATH")
    path = (*job.import_path, *([before] if before else []))
    return os.environ | {
        TOKEN_VARIABLE: job.token,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        # A server's threads are its own; see `ServerSpec.thread_count`.
        "OMP_NUM_THREADS": "1",
    }


def importable() -> tuple[str, ...]:
    """Where this process finds what it imports, beyond the standard library."""
    return tuple(each for each in sys.path if each and Path(each).is_dir())


def _log_of(job: Job, index: int) -> IO[bytes] | None:
    path = log_path(job.spec_of(index))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError:
        return None  # Serving without a log is better than not serving.
