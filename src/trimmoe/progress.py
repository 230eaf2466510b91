"""Progress of whatever takes longer than a moment: bars on a terminal, else a line now and then.

All of it goes to standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from threading import Event, Thread
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)

Item = TypeVar("Item")

_AROUND: ContextVar[Progress | None] = ContextVar("around", default=None)
"""The bars of whatever is going on, beneath which its parts have theirs: two displays at a time
would write over one another."""


LINE_EVERY_S = 10.0
_MANY_BYTES = 1 << 30
"""From so many on, reading takes long enough to show how far it is."""


class Bars(Progress):
    """Bars on standard error; where that is no terminal, how far all is in a line every
    `LINE_EVERY_S`. A context; silent unless `shown`."""

    def __init__(
        self,
        *columns: ProgressColumn,
        transient: bool = True,
        shown: bool = True,
        line_every_s: float = LINE_EVERY_S,
    ) -> None:
        console = Console(stderr=True)
        watched = shown and console.is_terminal
        super().__init__(*columns, console=console, transient=transient, disable=not watched)
        self._line_every_s = line_every_s if shown and not watched else None
        self._ended = Event()
        self._teller: Thread | None = None

    def start(self) -> None:
        super().start()
        if self._line_every_s is not None and self._teller is None:
            self._ended.clear()
            self._teller = Thread(target=self._tell, args=(self._line_every_s,), daemon=True)
            self._teller.start()

    def stop(self) -> None:
        super().stop()
        self._ended.set()
        if self._teller is not None:
            self._teller.join()
            self._teller = None

    def _tell(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            if line := progress_line(self.tasks):
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def progress_line(tasks: Sequence[Task]) -> str:
    """How far what is under way is and how long it may still take; empty if nothing is."""
    under_way = (task for task in tasks if task.started and task.remaining != 0)
    return "; ".join(map(_how_far, under_way))


def _how_far(task: Task) -> str:
    if not task.total:
        return f"{task.description} ..."
    said = f"{task.description}: {task.percentage:.0f} %"
    # By all that is done, not by the last half minute: steps may take longer than that.
    if task.completed and task.elapsed is not None:
        left_s = task.elapsed * (task.total - task.completed) / task.completed
        said += f", {timedelta(seconds=round(left_s))} left"
    return said


@contextmanager
def bars_around() -> Iterator[Progress]:
    """Bars on standard error that disappear when done; whatever is tracked meanwhile has its bar
    among them."""
    with _bars() as progress:
        before = _AROUND.set(progress)
        try:
            yield progress
        finally:
            _AROUND.reset(before)


def no_bars() -> None:
    """From now on nothing shows bars in this process: another one does."""
    _AROUND.set(Progress(disable=True))


def track(items: Sequence[Item] | Iterable[Item], label: str) -> Generator[Item]:
    """Iterate over `items` with a bar on standard error that disappears when done."""
    around = _AROUND.get()
    if around is None:
        with _bars() as progress:
            yield from progress.track(items, description=label)
        return
    bar = around.add_task(label, total=None)
    try:
        yield from around.track(items, task_id=bar)
    finally:
        around.remove_task(bar)


@contextmanager
def bytes_bar(label: str, total_bytes: int) -> Generator[Callable[[int], object]]:
    """A bar for so many bytes, which is told how many more there are; none for what takes a
    moment."""
    if total_bytes < _MANY_BYTES:
        yield lambda _: None
        return
    with Bars() as bars:
        task = bars.add_task(label, total=total_bytes)
        yield lambda more: bars.advance(task, more)


def _bars() -> Bars:
    return Bars(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )
