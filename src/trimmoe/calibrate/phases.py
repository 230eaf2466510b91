"""The phases of a calibration as a user sees them: a bar each, and the seconds it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from trimmoe.calibrate.record import Advance
from trimmoe.progress import Bars

OnPhase = Callable[[str, float], None]
"""Told the name of a phase and the seconds it took, when it ends."""


class Phases:
    """One progress bar per phase, and the seconds each took."""

    def __init__(self, progress: bool, on_phase: OnPhase | None) -> None:
        self._on_phase = on_phase
        self._bars = Bars(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            transient=False,
            shown=progress,
        )

    def __enter__(self) -> Phases:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextmanager
    def run(self, name: str, total: int) -> Iterator[Advance]:
        """Time one phase of `total` steps; the function given advances its bar."""
        task = self._bars.add_task(name, total=total)
        start = time.perf_counter()
        yield lambda steps: self._bars.advance(task, steps)
        self._bars.update(task, completed=total)
        if self._on_phase is not None:
            self._on_phase(name, time.perf_counter() - start)
