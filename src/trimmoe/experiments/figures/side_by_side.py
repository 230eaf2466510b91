"""Figures in several processes at a time, those that share runs in the same one."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from trimmoe.experiments.figures.base import Content
from trimmoe.experiments.figures.bench import Bench
from trimmoe.experiments.figures.suite import find_figures, run_figures
from trimmoe.experiments.figures.world import Announce
from trimmoe.progress import no_bars

MakeBench = Callable[[Announce], Bench]
"""Makes the bench of a process; goes to processes as a pickle."""

_TOGETHER = (("4", "5"), ("11",), ("S",), ("6", "7", "8", "E"), ("9",), ("10",))
"""Figures that share most of their runs; what takes longest first."""


def run_side_by_side(
    make_bench: MakeBench,
    numbers: Sequence[str],
    folder: Path,
    *,
    processes: int,
    announce: Announce = lambda _: None,
    done: Callable[[str], None] = lambda _: None,
) -> dict[str, Content]:
    """`run_figures` in up to so many processes; the same figures whatever their number.

    What a figure times, decisions in Fig. 8, it times beside others. Raises `UserError`.
    """
    wanted = [figure.number for figure in find_figures(numbers)]
    groups = [kept for group in _TOGETHER if (kept := [n for n in group if n in wanted])]
    processes = min(processes, len(groups))
    if processes == 1:
        return run_figures(make_bench(announce), numbers, folder, done=done)
    contents: dict[str, Content] = {}
    with _pool(make_bench, processes, announce) as pool:
        with _deaf_to_ctrl_c():
            futures = [pool.submit(_measure, group, folder) for group in groups]
        for future in as_completed(futures):
            contents |= future.result()
            for number in future.result():
                done(number)
    return {number: contents[number] for number in wanted}


@contextmanager
def _pool(
    make_bench: MakeBench, processes: int, announce: Announce
) -> Iterator[ProcessPoolExecutor]:
    """Processes with a bench each, which announce through this one and end with it."""
    # A process with threads, of bars and of libraries, cannot be copied safely. They are copies of
    # one that has only imported what all of them take.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    said: Any = context.SimpleQueue()
    listener = threading.Thread(target=_pass_on, args=(said, announce), daemon=True)
    listener.start()
    pool = ProcessPoolExecutor(
        processes, mp_context=context, initializer=_begin, initargs=(make_bench, said.put)
    )
    try:
        yield pool
    except BaseException:
        # Nobody waits for what the others are at, which may take minutes; nor for the listener,
        # which ends with this process: one that is terminated may have held the queue's lock.
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()
    said.put(None)
    listener.join()


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """What is started meanwhile never hears it: it is the first process's to handle."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _pass_on(said: Any, announce: Announce) -> None:
    while (what := said.get()) is not None:
        announce(what)


_make: Callable[[], Bench] | None = None
"""Of a process of the pool, made at its beginning."""


@cache
def _bench() -> Bench:
    """What the groups that a process takes one after the other share."""
    assert _make is not None
    made = _make()
    threadpool_limits(1)  # Of the libraries that are loaded by now: the processes share the cores.
    return made


def _begin(make_bench: MakeBench, announce: Announce) -> None:
    global _make
    no_bars()
    _make = partial(make_bench, announce)


def _measure(numbers: Sequence[str], folder: Path) -> dict[str, Content]:
    # Made here and not in `_begin`, whose errors nobody is told.
    return run_figures(_bench(), numbers, folder)
