"""Computes one batch after the other and spreads what comes back.

Short ones, as steps of decoding are, are computed where they are handed out: to hand them to a
thread and take them back costs as much as the interpreter does for a whole segment. What takes
longer, such as prompts, goes to the worker thread, so that messages are heard meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from trimmoe.runtime.node.executor import Executor
from trimmoe.runtime.node.floor import Floor
from trimmoe.runtime.node.homes import Guessed
from trimmoe.runtime.node.messages import Parcel, Stranded
from trimmoe.runtime.node.outcome import Outcome
from trimmoe.runtime.node.passage import Passage
from trimmoe.runtime.node.perform import perform
from trimmoe.runtime.node.scheduler import Step, Work

Control = Callable[[], None]
SHORT_S = 0.03
"""What messages may be left unheard for: of many rows less than so long, since a batch takes less
than its rows one by one."""
_LONG = frozenset({Step.CHUNK, Step.CHUNK_SLOTS, Step.CHUNK_END})


class Pump:
    """The worker thread with what it is to do; `log_batches` keeps a list of all batches."""

    def __init__(self, *, threads: int, slowdown: float, emulated: bool, log_batches: bool) -> None:
        self._threads = threads
        # Whoever emulates a slower machine sleeps.
        self._may_be_short = slowdown == 1.0 and not emulated
        self._took_s: dict[Step, float] = {}
        """By the last batch of each step, a row."""
        self._pool = ThreadPoolExecutor(
            1,
            thread_name_prefix="trimmoe-work",
            initializer=torch.set_num_threads,
            initargs=(threads,),
        )
        self._slowdown, self._log_batches = slowdown, log_batches
        self._controls: list[Control] = []
        self._to_do = asyncio.Event()
        self.batches: list[tuple[str, int, int]] = []
        """Step, layer and items of every batch, if they are kept."""
        self.batch_counts: Counter[str] = Counter()
        self.item_counts: Counter[str] = Counter()

    def control(self, control: Control) -> None:
        """Run something in the worker before its next batch."""
        self._controls.append(control)
        self._to_do.set()

    def wake(self) -> None:
        """There may be work."""
        self._to_do.set()

    async def run(
        self,
        floor: Floor,
        executor: Executor,
        passage: Callable[[], Passage],
        post: Callable[[Parcel], None],
        guessed: Callable[[Sequence[Guessed]], None],
        worked: Callable[[float], None],
    ) -> None:
        """Work while there is any, and tell what was guessed and how long was worked; ends when
        cancelled."""
        loop, here = asyncio.get_running_loop(), threading.get_ident()

        def send(parcels: list[Parcel]) -> None:
            for parcel in parcels:
                post(parcel)

        def send_early(parcels: list[Parcel]) -> None:
            if threading.get_ident() == here:
                send(parcels)
            else:
                loop.call_soon_threadsafe(send, parcels)

        executor.send = send_early
        torch.set_num_threads(self._threads)
        while True:
            work = floor.scheduler.next()
            controls, self._controls = self._controls, []
            if work is None and not controls:
                self._to_do.clear()
                await self._to_do.wait()
                continue
            began_s = loop.time()
            if self._is_short(work):
                outcome = self._compute(controls, executor, passage(), work)
                # Let what has come meanwhile be heard.
                await asyncio.sleep(0)
            else:
                outcome = await loop.run_in_executor(
                    self._pool, self._compute, controls, executor, passage(), work
                )
            if work is not None:
                self._took_s[work.step] = (loop.time() - began_s) / len(work.items)
            if work is not None and work.step is not Step.GUESS:
                # Guesses make way: they are no reason to make fewer.
                worked(loop.time() - began_s)
            if work is not None:
                self._count(work)
                floor.worked(work)
            floor.absorb(outcome)
            send(outcome.parcels)
            floor.read_on(outcome.reading)
            if outcome.guessed:
                guessed(outcome.guessed)
            for unit in outcome.stranded:
                name = unit.name
                message = Stranded(name.sequence, unit.layer, name.start, name.epoch)
                post(Parcel(to=unit.seat.access, message=message))

    async def close(self) -> None:
        """Wait until the worker has stopped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._pool.shutdown)

    def _compute(
        self, controls: list[Control], executor: Executor, passage: Passage, work: Work | None
    ) -> Outcome:
        """In the worker."""
        for control in controls:
            control()
        if work is None:
            return Outcome()
        return perform(executor, passage, work, slowdown=self._slowdown)

    def _is_short(self, work: Work | None) -> bool:
        """Whether a batch may be expected to be over soon; controls are."""
        if work is None:
            return self._may_be_short
        took_s = self._took_s.get(work.step)
        if not self._may_be_short or took_s is None or work.step in _LONG:
            return False
        return took_s * len(work.items) < SHORT_S

    def _count(self, work: Work) -> None:
        self.batch_counts[work.step.name] += 1
        self.item_counts[work.step.name] += len(work.items)
        if self._log_batches:
            self.batches.append((work.step.name, work.layer, len(work.items)))
