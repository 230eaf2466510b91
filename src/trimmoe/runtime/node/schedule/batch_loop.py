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
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from trimmoe.runtime.node.compute.run_batch import run_batch, use_threads
from trimmoe.runtime.node.compute.worker import Worker
from trimmoe.runtime.node.records.exact_hosts import ExactHosts
from trimmoe.runtime.node.records.messages import Parcel, Stranded
from trimmoe.runtime.node.records.output import BatchOutput
from trimmoe.runtime.node.records.readings import Reading
from trimmoe.runtime.node.records.work import Step, Work
from trimmoe.runtime.node.schedule.intake import Intake

T = TypeVar("T")
Control = Callable[[], None]
_LOOK_S = 0.005
SHORT_S = 0.03
"""What messages may be left unheard for: of many rows less than so long, since a batch takes less
than its rows one by one."""
MAKE_WAY_TURNS = 8
"""Of the event loop, until what was put out to a user is in his socket: it passes from one task to
another on its way. Without them seven tokens are made before the first one is sent."""
_LONG = frozenset({Step.CHUNK, Step.CHUNK_SLOTS, Step.CHUNK_END})


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopContext:
    """What a batch loop works with, and whom it tells."""

    intake: Intake
    worker: Worker
    exact_hosts: Callable[[], ExactHosts]
    post: Callable[[Parcel], None]
    guessed: Callable[[Sequence[Reading]], None]
    worked: Callable[[float, bool], None]
    """Told how long was worked, seconds, and whether at a prompt."""


class BatchLoop:
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
            initializer=use_threads,
            initargs=(threads,),
        )
        self._slowdown, self._log_batches = slowdown, log_batches
        self._controls: list[Control] = []
        self._context: LoopContext | None = None
        """None while it does not run."""
        self._turns_left = 0
        """Turns of the event loop that are left to others before the next batch."""
        self._owes_turns = False
        """Whether they are left to them after it."""
        self._due = self._busy = False
        """Whether it is about to look for work; whether the worker thread has some."""
        self.batches: list[tuple[str, int, int]] = []
        """Step, layer and items of every batch, if they are kept."""
        self.batch_counts: Counter[str] = Counter()
        self.item_counts: Counter[str] = Counter()

    def control(self, control: Control) -> None:
        """Run something in the worker before its next batch."""
        self._controls.append(control)
        self.wake()

    def make_way(self, at_once: bool) -> None:
        """Have what was just put out to a user sent before the next batch or, where another server
        may wait for that, before the one after it."""
        if at_once:
            self._turns_left = MAKE_WAY_TURNS
        else:
            self._owes_turns = True

    def wake(self) -> None:
        """There may be work."""
        if self._context is not None and not (self._due or self._busy):
            self._due = True
            self._loop.call_soon(self._turn)

    async def apart(self, work: Callable[[], T]) -> T:
        """Have the worker thread do something by itself; batches wait meanwhile."""
        while self._busy:
            await asyncio.sleep(_LOOK_S)
        self._busy = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._busy = False
            self.wake()

    async def run(self, context: LoopContext) -> None:
        """Work while there is any; ends when cancelled, or by what goes wrong."""
        loop, here = asyncio.get_running_loop(), threading.get_ident()

        def send_early(parcels: list[Parcel]) -> None:
            if threading.get_ident() == here:
                self._send(parcels)
            else:
                loop.call_soon_threadsafe(self._send, parcels)

        context.worker.send = send_early
        use_threads(self._threads)
        self._loop, self._context = loop, context
        self._ended: asyncio.Future[None] = loop.create_future()
        self.wake()
        try:
            await self._ended
        finally:
            self._context = None

    async def close(self) -> None:
        """Wait until the worker has stopped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._pool.shutdown)

    def _turn(self) -> None:
        """One batch, and what had to come before it; then another turn, if there was anything."""
        if self._context is None or self._busy:
            self._due = False
            return
        if self._turns_left:
            self._turns_left -= 1
            self._loop.call_soon(self._turn)
            return
        if self._owes_turns:
            self._turns_left, self._owes_turns = MAKE_WAY_TURNS, False
        try:
            self._due = self._work(self._context)
        except BaseException as error:  # As of a task: whoever awaits `run` hears of it.
            self._fail(error)
            return
        if self._due:
            # Behind what has come meanwhile: the loop reads that now, and hands it over in its next
            # turn.
            self._loop.call_soon(self._loop.call_soon, self._turn)

    def _work(self, context: LoopContext) -> bool:
        """A batch, unless there is none or the worker thread has it; whether there was."""
        quick = True
        while quick:
            work = context.intake.scheduler.next()
            controls, self._controls = self._controls, []
            if work is None and not controls:
                return False
            began_s = self._loop.time()
            if not self._is_short(work):
                self._busy = True
                running = self._loop.run_in_executor(self._pool, self._compute, controls, work)
                running.add_done_callback(partial(self._computed, work, began_s))
                return False
            self._finish(context, work, self._compute(controls, work), began_s)
            # What arrived sets out at once; after all else what has come meanwhile is heard first.
            quick = work is None or work.step is Step.ARRIVE
        return True

    def _computed(
        self, work: Work | None, began_s: float, done: asyncio.Future[BatchOutput]
    ) -> None:
        """The worker thread is through with a batch."""
        self._busy = False
        if self._context is None or done.cancelled():
            return
        try:
            self._finish(self._context, work, done.result(), began_s)
        except BaseException as error:
            self._fail(error)
        else:
            self.wake()

    def _finish(
        self, context: LoopContext, work: Work | None, result: BatchOutput, began_s: float
    ) -> None:
        """Spread what came of a batch."""
        self._send(result.parcels)
        intake = context.intake
        if work is not None:
            took_s = self._loop.time() - began_s
            self._took_s[work.step] = took_s / len(work.items)
            if work.step is not Step.GUESS:
                # Guesses make way: they are no reason to make fewer.
                context.worked(took_s, work.step in _LONG)
            self._count(work)
            intake.worked(work)
        intake.absorb(result)
        intake.read_on(result.reading)
        if result.guessed:
            context.guessed(result.guessed)
        for unit in result.stranded:
            name = unit.name
            message = Stranded(name.sequence, unit.layer, name.start, name.epoch)
            context.post(Parcel(to=unit.seat.access, message=message))

    def _send(self, parcels: list[Parcel]) -> None:
        if self._context is not None:
            for parcel in parcels:
                self._context.post(parcel)

    def _fail(self, error: BaseException) -> None:
        self._context = None
        if not self._ended.done():
            self._ended.set_exception(error)

    def _compute(self, controls: list[Control], work: Work | None) -> BatchOutput:
        """In the worker."""
        context = self._context
        for control in controls:
            control()
        if work is None or context is None:
            return BatchOutput()
        return run_batch(context.worker, context.exact_hosts(), work, slowdown=self._slowdown)

    def _is_short(self, work: Work | None) -> bool:
        """Whether a batch may be expected to be over soon; controls are."""
        if work is None:
            return self._may_be_short
        took_s = self._took_s.get(work.step)
        if not self._may_be_short or took_s is None or work.step in _LONG:
            return False
        if work.step is Step.GUESS and any(one.by_draft_model for one in work.items):
            # It is not interrupted, and reads text at once.
            return False
        return took_s * len(work.items) < SHORT_S

    def _count(self, work: Work) -> None:
        self.batch_counts[work.step.name] += 1
        self.item_counts[work.step.name] += len(work.items)
        if self._log_batches:
            self.batches.append((work.step.name, work.layer, len(work.items)))
