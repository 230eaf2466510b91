"""Servers from a process that has imported what they take: they start in a third of the time, at
the start and when they die. `forking` is what that process does.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROCESS = "trimmoe.runtime.launch.forking"
_ENDING_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A server to start."""

    folder: Path
    """The run folder."""
    index: int
    environment: Mapping[str, str]
    """What it has in its environment beside what the fork server has."""
    import_path: tuple[str, ...]
    """Where it finds what it imports."""


class ForkServer:
    """The supervisor's side. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._ordered = False
        self._failed = sys.platform != "linux"
        """Elsewhere what is imported does not bear to be forked."""

    def begin(self, *, gently: bool = False) -> bool:
        """Start it unless it runs; whether it does. `gently`, it takes no core that others want.

        One that has died is not started again: servers then start by themselves, and say what is
        wrong in their logs.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._failed = True
            if self._failed or self._process is not None:
                return not self._failed
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _PROCESS, str(theirs.fileno()), str(int(gently))],
                    env=os.environ | environment(importable()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    # Ctrl-C in a terminal is the supervisor's to pass on.
                    start_new_session=True,
                )
            return True

    def start(self, order: Order, descriptors: Sequence[int]) -> bool:
        """Order a server, which has two `descriptors` from birth: the lock of its process, and what
        it writes to. Whether somebody took the order."""
        with self._lock:
            if self._line is None or self._failed:
                return False
            self._ordered = True
            try:
                socket.send_fds(self._line, [pickle.dumps(order)], list(descriptors))
            except OSError:
                self._failed = True
            return not self._failed

    def close(self) -> None:
        """End it, and none of the servers; those that were ordered before still start."""
        with self._lock:
            line, self._line = self._line, None
            process, self._process = self._process, None
        if line is not None:
            line.close()
        if process is not None:
            if not self._ordered:
                process.kill()
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@functools.cache
def fork_server() -> ForkServer:
    """That of this process."""
    made = ForkServer()
    atexit.register(made.close)
    return made


def begin_early() -> None:
    """For commands that start servers soon: what these take is imported beside what this process
    imports itself."""
    fork_server().begin()


def importable() -> tuple[str, ...]:
    """Where this process finds what it imports, beyond the standard library."""
    return tuple(each for each in sys.path if each and Path(each).is_dir())


def environment(import_path: Sequence[str]) -> dict[str, str]:
    """What servers that import from there find in theirs."""
    before = os.environ.get("PYTHONPATH")
    path = (*import_path, *([before] if before else []))
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        # A server's threads are its own; see `ServerSpec.thread_count`.
        "OMP_NUM_THREADS": "1",
    }
