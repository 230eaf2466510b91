"""The processes below this one, so that what was started is ended and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass

_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process by its number and birth: numbers are used again."""

    pid: int
    born: str


def descendants(of_pid: int | None = None) -> frozenset[Process]:
    """All processes below this one, or below `of_pid`, as they are now."""
    root = os.getpid() if of_pid is None else of_pid
    found: dict[int, Process] = {}
    children: dict[int, list[int]] = {}
    listing = subprocess.Popen(
        ["ps", "-A", "-o", "pid=,ppid=,stat=,lstart="], stdout=subprocess.PIPE, text=True
    )
    out, _ = listing.communicate()
    for line in out.splitlines():
        pid, parent, state, *born = line.split()
        if int(pid) != listing.pid and not state.startswith("Z"):
            found[int(pid)] = Process(pid=int(pid), born=" ".join(born))
            children.setdefault(int(parent), []).append(int(pid))
    below, ahead = set(), [root]
    while ahead:
        for pid in children.get(ahead.pop(), ()):
            below.add(found[pid])
            ahead.append(pid)
    return frozenset(below)


def alive(processes: frozenset[Process]) -> frozenset[Process]:
    """Those of `processes` that still run."""
    if not processes:
        return processes
    numbers = ",".join(str(process.pid) for process in processes)
    listing = subprocess.run(
        ["ps", "-o", "pid=,stat=,lstart=", "-p", numbers],
        capture_output=True,
        text=True,
        check=False,  # It fails where none is left.
    )
    now = set()
    for line in listing.stdout.splitlines():
        pid, state, *born = line.split()
        if not state.startswith("Z"):
            now.add(Process(pid=int(pid), born=" ".join(born)))
    return processes & now


def end(processes: frozenset[Process], *, patience_s: float) -> None:
    """Wait for `processes` to end by themselves, then make them."""
    deadline_s = time.monotonic() + patience_s
    while (left := alive(processes)) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    for process in left:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
