"""Servers as processes of this machine: started, asked, ended, and started again when they die."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from trimmoe.runtime.launch.control import Question, Unreachable
from trimmoe.runtime.launch.folder import SPARE, Name, RunFolder
from trimmoe.runtime.launch.handles import ServerGone
from trimmoe.runtime.launch.job import Job
from trimmoe.runtime.launch.process import log_path
from trimmoe.runtime.launch.server import TOKEN_VARIABLE
from trimmoe.runtime.launch.status import ServerStatus
from trimmoe.runtime.machine_report import MachineReport

_CHILD = "trimmoe.runtime.launch.child"
_POLL_S = 0.02
_AGAIN_S = 1.0
"""Between two attempts to start a server that ends at once."""
_CALM_S = 10.0
"""How long nothing was started until a spare is."""
_BECOMING_S = 2.0


class Spares:
    """A process that has imported everything, to become the next server that dies: that one is back
    in two thirds of the time."""

    def __init__(self, folder: RunFolder, job: Job) -> None:
        self._folder, self._job = folder, job
        self._calm_s = time.monotonic()
        """When one was last needed, or this began."""
        self._spare: subprocess.Popen[bytes] | None = None

    def keep(self) -> None:
        """Have one, once servers have had the machine to themselves for a while."""
        if not self._job.spare or time.monotonic() - self._calm_s < _CALM_S:
            return
        if self._spare is None or self._spare.poll() is not None:
            self._spare = _started(self._folder, self._job, SPARE, None)

    def become(self, index: int) -> subprocess.Popen[bytes] | None:
        """The process that is that server from now on; None if there is none to spare."""
        self._calm_s = time.monotonic()
        spare, self._spare = self._spare, None
        if spare is None or spare.poll() is not None:
            return None
        with contextlib.suppress(Unreachable):
            asked = Question(self._folder.socket(SPARE), "become", index)
            if asked.answered(_BECOMING_S) and asked.answer():
                return spare
        spare.kill()
        return None

    def end(self) -> None:
        """Have none."""
        self._calm_s = math.inf
        if self._spare is not None:
            self._spare.kill()
            self._spare.wait()
            self._spare = None


class ProcessHandle:
    """`ServerHandle` of a process of this machine, whoever started it."""

    def __init__(self, folder: RunFolder, job: Job, index: int, spares: Spares) -> None:
        self._folder, self._job, self._index = folder, job, index
        self._spares = spares
        self.name = job.spec_of(index).name
        self._child: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._asked: Question | None = None
        self._measured: Question | None = None

    @property
    def pid(self) -> int | None:
        """Its process's number; None if there is none, or it has not said it yet."""
        return self._folder.pid(self._index) if self._folder.is_alive(self._index) else None

    def begin(self) -> None:
        """Start its process unless that lives already."""
        if self._folder.is_alive(self._index):
            return
        self._folder.socket(self._index).unlink(missing_ok=True)
        self._started_s = time.monotonic()
        self._child = self._spares.become(self._index)
        if self._child is None:
            log = _log_of(self._job, self._index)
            self._child = _started(self._folder, self._job, self._index, log)

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
            status: ServerStatus = asked.answer()
        except Unreachable:
            # It is just starting or just ending: the next look tells.
            self._asked = None
            time.sleep(_POLL_S)
            return None
        if status.ready:
            self._spares.keep()
        return status

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

    def drain(self) -> None:
        with contextlib.suppress(Unreachable):
            self._question("drain")

    def stop(self, patience_s: float) -> None:
        with contextlib.suppress(Unreachable):
            self._question("stop", patience_s)

    def kill(self, patience_s: float) -> None:
        self._spares.end()
        end_s = time.monotonic() + patience_s
        while self._folder.is_alive(self._index) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        self._signal(signal.SIGKILL)
        while self._folder.is_alive(self._index):
            time.sleep(_POLL_S)
        if self._child is not None:
            self._child.wait()

    def _question(self, question: str, *arguments: Any) -> Question:
        return Question(self._folder.socket(self._index), question, *arguments)

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
    spares = Spares(folder, job)
    handles = [ProcessHandle(folder, job, index, spares) for index in job.here]
    for handle in handles:
        handle.begin()
    return handles


def running_processes(folder: RunFolder) -> list[ProcessHandle]:
    """The servers of a folder, to be asked by whoever does not watch them; none if nobody says what
    they are."""
    job = folder.read()
    if job is None:
        return []
    return [ProcessHandle(folder, job, index, Spares(folder, job)) for index in job.here]


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


def _started(
    folder: RunFolder, job: Job, name: Name, log: IO[bytes] | None
) -> subprocess.Popen[bytes] | None:
    """A process; None if it lives already."""
    lock = folder.claim_process(name)
    if lock is None:
        return None
    try:
        # It has the lock from birth, so that nobody takes it for dead and starts another.
        return subprocess.Popen(
            [sys.executable, "-m", _CHILD, str(folder.path), str(name), str(lock)],
            env=environment(job),
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


def _log_of(job: Job, index: int) -> IO[bytes] | None:
    path = log_path(job.spec_of(index))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError:
        return None  # Serving without a log is better than not serving.
