"""An alarm clock for an event loop that rings on time.

On Linux an asyncio timer is rounded up to whole milliseconds (the resolution of epoll), several
times the delay of a good link. A timer descriptor of the kernel's own has no such rounding.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import sys
import time
from collections.abc import Callable

_ABSOLUTE = 1
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Alarm:
    """Calls back at one moment of `time.monotonic`, which `set` moves; made in a running loop."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._due_s = math.inf
        self._handle: asyncio.TimerHandle | None = None
        self._descriptor = _timer_descriptor()
        if self._descriptor is not None:
            self._loop.add_reader(self._descriptor, self._ring)

    def set(self, due_s: float) -> None:
        """Ring at `due_s`, at once if that is past, never if it is infinite."""
        if due_s == self._due_s:
            return
        self._due_s = due_s
        if self._descriptor is not None:
            _set_timer(self._descriptor, due_s)
            return
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if due_s < math.inf:
            wait_s = max(due_s - time.monotonic(), 0.0)
            self._handle = self._loop.call_later(wait_s, self._ring)

    def close(self) -> None:
        """Never ring again."""
        if self._handle is not None:
            self._handle.cancel()
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        self._due_s = math.inf

    def _ring(self) -> None:
        if self._descriptor is not None:
            try:
                os.read(self._descriptor, 8)
            except BlockingIOError:
                return  # it was moved after it rang
        self._due_s = math.inf
        self._callback()


def _timer_descriptor() -> int | None:
    """A timer of the monotonic clock; None where the system has none."""
    if _libc is None:
        return None
    descriptor = _libc.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
    return None if descriptor < 0 else descriptor


def _set_timer(descriptor: int, due_s: float) -> None:
    # All zeros would disarm it, and so would a time before the clock's origin.
    due_ns = 0 if math.isinf(due_s) else max(round(due_s * 1e9), 1)
    value = _TimeSpec(due_ns // 10**9, due_ns % 10**9)
    spec = _TimerSpec(_TimeSpec(0, 0), value)
    assert _libc is not None
    failed = _libc.timerfd_settime(descriptor, _ABSOLUTE, ctypes.byref(spec), None)
    assert failed == 0, "the kernel refused a valid time"
