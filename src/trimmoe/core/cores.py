"""The processor cores that this process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """How many there are; macOS does not tell those of a process, only the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
