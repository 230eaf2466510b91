"""Having this machine's servers time themselves when the head wishes it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from trimmoe.runtime.launch.deployment import Timed, Wish, timed_of
from trimmoe.runtime.launch.machine import Machine

_PATIENCE_S = 120.0


class Timing:
    """Answers wishes, each once, in threads of their own."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._begun: set[int] = set()
        self._timed: dict[int, Timed] = {}

    def take(self, wishes: Sequence[Wish]) -> None:
        """What the head wishes now; the answers to other wishes have reached it."""
        wanted = {wish.number for wish in wishes}
        self._timed = {number: each for number, each in self._timed.items() if number in wanted}
        for wish in wishes:
            if wish.number not in self._begun:
                self._begun.add(wish.number)
                threading.Thread(target=self._answer, args=(wish,), daemon=True).start()

    def timed(self) -> tuple[Timed, ...]:
        """What there is to tell."""
        return tuple(self._timed.values())

    def _answer(self, wish: Wish) -> None:
        report = None
        handle = self._machine.handle(wish.deployment, wish.server)
        if handle is not None:
            handle.begin_measuring()
            report = handle.measured(_PATIENCE_S)
        self._timed[wish.number] = timed_of(wish.number, report)
