"""Servers as processes of this machine: started, asked, ended, and started again when they die."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import IO, Any

from trimmoe.runtime.launch.control import Question, Unreachable
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.fork_server import Order, environment, fork_server
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
"""How long nothing was started until one is made ready for the next start."""


class Starter:
    """Starts servers of a run folder."""

    def __init__(self, folder: RunFolder, job: Job) -> None:
        self._folder, self._job = folder, job
        self._calm_s = time.monotonic()
        """When one was last started, or this began."""

    def start(self, index: int) -> subprocess.Popen[bytes] | None:
        """Start a server that does not live; its process, if that is a child of this one."""
        self._calm_s = time.monotonic()
        lock = self._folder.claim_process(index)
        if lock is None:
            return None
        # It has the lock from birth, so that nobody takes it for dead and starts another; whose
        # number was in it has ended.
        os.ftruncate(lock, 0)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, lock)
            log = stack.enter_context(_log_of(self._job, index))
            if self._is_ordered(index, lock, log.fileno()):
                return None
            return subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(self._folder.path), str(index), str(lock)],
                env=os.environ | self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(lock,),
                # Ctrl-C in a terminal is the supervisor's to pass on.
                start_new_session=True,
            )

    def keep(self) -> None:
        """Once servers have had the machine to themselves for a while: be ready to start the next
        one at once, or keep nothing for it."""
        if time.monotonic() - self._calm_s < _CALM_S:
            return
        if self._job.spare:
            fork_server().begin(gently=True)
        else:
            fork_server().close()

    def _is_ordered(self, index: int, lock: int, log: int) -> bool:
        order = Order(
            folder=self._folder.path,
            index=index,
            environment=self._environment(),
            import_path=self._job.import_path,
        )
        return fork_server().begin() and fork_server().start(order, (lock, log))

    def _environment(self) -> dict[str, str]:
        return environment(self._job.import_path) | {TOKEN_VARIABLE: self._job.token}


class ProcessHandle:
    """`ServerHandle` of a process of this machine, whoever started it."""

    def __init__(self, folder: RunFolder, job: Job, index: int, starter: Starter) -> None:
        self._folder, self._index, self._starter = folder, index, starter
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
        self._child = self._starter.start(self._index)

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
            self._starter.keep()
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
        end_s = time.monotonic() + patience_s
        while self._folder.is_alive(self._index) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        while self._folder.is_alive(self._index):
            # Again and again: one that was only ordered has no number yet.
            self._signal(signal.SIGKILL)
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
    starter = Starter(folder, job)
    handles = [ProcessHandle(folder, job, index, starter) for index in job.here]
    for handle in handles:
        handle.begin()
    return handles


def running_processes(folder: RunFolder) -> list[ProcessHandle]:
    """The servers of a folder, to be asked by whoever does not watch them; none if nobody says what
    they are."""
    job = folder.read()
    if job is None:
        return []
    starter = Starter(folder, job)
    return [ProcessHandle(folder, job, index, starter) for index in job.here]


def _log_of(job: Job, index: int) -> IO[bytes]:
    path = log_path(job.spec_of(index))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError:
        # Serving without a log is better than not serving.
        return open(os.devnull, "ab")
