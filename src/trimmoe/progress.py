"""Progress bars for whatever takes longer than a moment; silent where nobody watches."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")

_AROUND: ContextVar[Progress | None] = ContextVar("around", default=None)
"""The bars of whatever is going on, beneath which its parts have theirs: two displays at a time
would write over one another."""


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


def _bars() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
