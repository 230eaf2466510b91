"""Ctrl-C, SIGTERM and a terminal that closes as an event; a second one hurries what may be hurried,
and only that."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop(threading.Event):
    """Set by the first signal."""

    def __init__(self) -> None:
        super().__init__()
        self._may_hurry = False
        self._also: list[threading.Event] = []

    def also(self, event: threading.Event) -> None:
        """Set that too, now or with this."""
        self._also.append(event)
        if self.is_set():
            event.set()

    def set(self) -> None:
        super().set()
        for event in self._also:
            event.set()

    def listen(self) -> None:
        """Take the signals over."""
        for number in _SIGNALS:
            # Under nohup it is to outlive its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._received)

    def _received(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_set() and self._may_hurry:
            raise KeyboardInterrupt
        self.set()

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """What another signal may cut short; clearing up is not among it."""
        self._may_hurry = True
        try:
            yield
        except KeyboardInterrupt:
            pass
        finally:
            self._may_hurry = False


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """An event that Ctrl-C, SIGTERM or SIGHUP sets; as before afterwards."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    stop = Stop()
    stop.listen()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
