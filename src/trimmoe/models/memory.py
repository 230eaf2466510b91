"""What memory a machine has left, to tell whether a model fits, and giving back what was taken."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Memory that could be taken now without driving anything else out; None if nobody says.

    Files that the system keeps in memory only because there is room count as free.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    machine, group = _machine_bytes(), _group_bytes(_GROUP)
    return min((size for size in (machine, group) if size is not None), default=None)


def give_back() -> None:
    """What this process let go of goes back to the system. The library that keeps it for later use
    does that when it is asked, if it is GNU's."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _machine_bytes() -> int | None:
    fields = _fields(_MEMINFO)
    if "MemAvailable:" in fields:
        return 1024 * fields["MemAvailable:"]
    try:
        # Elsewhere only what is built in can be had.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _group_bytes(folder: Path) -> int | None:
    """What a container's limit leaves; None if it has none."""
    try:
        limit = int((folder / "memory.max").read_text())
        taken = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(0, limit - taken + _fields(folder / "memory.stat").get("inactive_file", 0))


def _fields(path: Path) -> dict[str, int]:
    """The first number after each name in a file of such lines; none if there is no such file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
