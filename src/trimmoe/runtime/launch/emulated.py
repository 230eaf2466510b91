"""A slower machine's event loop: what is done in it takes so many times as long.

Batches are slowed down where they are computed. What else a server does, which is to read and write
messages, to choose, and to answer its users, is done in its loop.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable


class SlowSelector(selectors.DefaultSelector):
    """Rests before it waits, in proportion to the processor time that the loop has taken since it
    waited last. Used by the loop's thread alone, but for `slowdown`."""

    def __init__(
        self,
        worked_s: Callable[[], float] = time.thread_time,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self.slowdown = 1.0
        """How many times as long everything takes from now on."""
        self._worked_s, self._rest = worked_s, rest
        self._began_s: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As of every selector; what it rests is time that it does not wait."""
        rested_s = 0.0
        if self._began_s is not None and self.slowdown > 1.0:
            rested_s = (self._worked_s() - self._began_s) * (self.slowdown - 1.0)
            self._rest(rested_s)
        left_s = None if timeout is None else max(timeout - rested_s, 0.0)
        found = super().select(left_s)
        self._began_s = self._worked_s()
        return found
