"""Processes of Python that need not import anything: forked from one that has imported it all.

Most of what it costs to start a supervisor or a server is to import torch and transformers, and
tests start dozens of them. `test_serve_e2e.py` starts them as users do.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Never

from trimmoe.experiments.chaos.lan import enter
from trimmoe.models.compiled import read_compiler
from trimmoe.runtime.launch.fork_server import fork_server

PRELOADED = (
    "trimmoe.api.app",
    "trimmoe.calibrate.run",
    "trimmoe.cli",
    "trimmoe.experiments.chaos.stage",
    "trimmoe.experiments.serve_cluster",
    "trimmoe.experiments.serve_local",
    "trimmoe.models.qwen2_moe",
    "trimmoe.runtime.launch.join",
    "trimmoe.runtime.launch.nodes",
    "trimmoe.runtime.launch.process",
    "transformers.models.qwen2_moe.modeling_qwen2_moe",
    "launching",
    "standin",
)
STARTERS = (
    "trimmoe.experiments.chaos.stage",
    "trimmoe.experiments.serve_methods",
    "trimmoe.runtime.launch.fork_server",
    "trimmoe.runtime.launch.processes",
)
"""What starts processes; keepers are started by others, as ever."""
_CHILDREN = {"trimmoe.runtime.launch.child", "trimmoe.runtime.launch.forking"}
"""What starts nothing by `popen`."""
_INSIDE = "trimmoe.cli.inside"
_LONGEST = 1 << 18
_MOST_FDS = 16
_HIGH_FD = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A process to start."""

    command: tuple[str, ...]
    """What Python is given: -m and a module, or a path, and arguments."""
    environment: dict[str, str]
    descriptors: tuple[int, ...]
    """The numbers that it has what is sent along by."""
    session: bool


class Nursery:
    """A child of this process, which starts others: they are below this one."""

    def __init__(self, wait: Callable[[], object], line: socket.socket) -> None:
        self._wait, self._line = wait, line
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        self._born: list[int] = []

    @staticmethod
    def fresh() -> Nursery:
        """One that imports everything now."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            begun = subprocess.Popen(
                [sys.executable, "-c", f"import quick; quick.main({theirs.fileno()})"],
                pass_fds=(theirs.fileno(),),
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"},
            )
        return Nursery(begun.wait, ours)

    @staticmethod
    def of_this() -> Nursery:
        """One that has what this process has; this one must have no other threads."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            _tend(theirs)
        theirs.close()
        return Nursery(lambda: os.waitpid(pid, 0), ours)

    def start(self, order: Order, descriptors: Sequence[int]) -> int:
        """The number of a new process."""
        with self._lock:
            socket.send_fds(self._line, [pickle.dumps(order)], descriptors)
            while not self._born:
                self._hear()
            return self._born.pop()

    def ended(self, pid: int, patience_s: float = 0.0) -> int | None:
        """The exit code of one, None while it lives."""
        with self._lock:
            while pid not in self._ended and select.select([self._line], [], [], patience_s)[0]:
                self._hear()
            return self._ended.get(pid)

    def close(self) -> None:
        """End it, and nothing that it started."""
        self._line.close()
        self._wait()

    def _hear(self) -> None:
        said = self._line.recv(_LONGEST)
        assert said, "what starts processes has ended"
        kind, pid, code = pickle.loads(said)
        if kind == "born":
            self._born.append(pid)
        else:
            self._ended[pid] = code


class Started:
    """What is used of `subprocess.Popen`, of a process that a nursery started."""

    def __init__(self, nursery: Nursery, pid: int, stdout: IO[str] | None) -> None:
        self._nursery, self.pid, self.stdout = nursery, pid, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ended(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end_s = time.monotonic() + (timeout or 1e9)
        while (code := self.poll()) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            # In turns, for other threads may wait for other processes.
            self._nursery.ended(self.pid, 0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_own: list[Nursery] = []


def nursery() -> Nursery:
    """This process's."""
    if not _own:
        _own.append(Nursery.fresh())
        atexit.register(_own[0].close)
    return _own[0]


def popen(
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[Any] = subprocess.DEVNULL,
    stderr: int | IO[Any] = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
    text: bool = False,
) -> Any:
    """`subprocess.Popen` of this Python, as far as this project uses it."""
    assert command[0] == sys.executable
    assert stdin == subprocess.DEVNULL
    assert stderr == subprocess.STDOUT or stdout == subprocess.DEVNULL
    order = Order(
        command=tuple(command[1:]),
        environment=dict(os.environ if env is None else env),
        descriptors=(0, 1, 2, *pass_fds),
        session=start_new_session,
    )
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(open(os.devnull, "r+b", buffering=0))
        reading: IO[str] | None = None
        out = nothing.fileno() if stdout == subprocess.DEVNULL else -1
        if stdout == subprocess.PIPE:
            ours, out = os.pipe()
            stack.callback(os.close, out)
            reading = open(ours, "r" if text else "rb")  # noqa: SIM115
        elif not isinstance(stdout, int):
            out = stdout.fileno()
        pid = nursery().start(order, (nothing.fileno(), out, out, *pass_fds))
    return Started(nursery(), pid, reading)


def run_quickly(patch: Callable[[Any, str, Any], object]) -> None:
    """Have whatever starts processes start them by `popen`."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT")}
    stand_in = SimpleNamespace(Popen=popen, TimeoutExpired=subprocess.TimeoutExpired, **names)
    for name in STARTERS:
        patch(importlib.import_module(name), "subprocess", stand_in)


def _tend(line: socket.socket) -> Never:
    """Start processes until whoever orders them is gone."""
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            ready, _, _ = select.select([line, woken], [], [])
            if woken in ready:
                os.read(woken, 64)
                _reap(line)
            if line in ready:
                said, descriptors, _, _ = socket.recv_fds(line, _LONGEST, _MOST_FDS)
                if not said:
                    break
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for each in (woken, waking, line.detach()):
                        os.close(each)
                    code = _become(pickle.loads(said), descriptors)
                    # To tear down all that was imported takes a second.
                    os._exit(code)
                for each in descriptors:
                    os.close(each)
                line.send(pickle.dumps(("born", pid, 0)))
    os._exit(0)


def _reap(line: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            line.send(pickle.dumps(("ended", found[0], os.waitstatus_to_exitcode(found[1]))))


def _become(order: Order, descriptors: Sequence[int]) -> int:
    """Be the process that was ordered, to its end; its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order.session:
        os.setsid()
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(moved, order.descriptors, strict=True):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(order.environment)
    if _INSIDE in order.command:
        # Before there is what starts others, which then are there too.
        enter(order.command[2])
    if not _CHILDREN.isdisjoint(order.command):
        return _run(order.command)
    _own[:] = [Nursery.of_this()]
    run_quickly(setattr)
    try:
        return _run(order.command)
    finally:
        # As at the end of Python, which this process comes to without it.
        fork_server().close()
        _own.pop().close()


def _run(command: Sequence[str]) -> int:
    """As Python does what it is given; the exit code."""
    head, *rest = command
    try:
        if head == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path.insert(0, str(Path(head).parent))
            runpy.run_path(head, run_name="__main__")
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
            return 1
        return left.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(descriptor: int) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    read_compiler()
    gc.collect()
    gc.freeze()
    _tend(socket.socket(fileno=descriptor))
