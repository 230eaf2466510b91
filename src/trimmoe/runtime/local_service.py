"""The in-process back end: continuous batching of many requests in one worker thread.

Every step decodes one token of every running sequence together. Between two steps the worker
drops what was cancelled and admits at most one waiting prompt, so that a long queue of prompts
does not stall those who are already being answered.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from trimmoe.core.ledger import Ledger
from trimmoe.runtime.decoder import Decoder
from trimmoe.runtime.local import Decoded
from trimmoe.runtime.local_picture import picture_of
from trimmoe.runtime.picture import MOST_REQUESTS, Picture, RequestPicture
from trimmoe.runtime.sampling import draw
from trimmoe.runtime.scores import Score
from trimmoe.runtime.seen import Seen
from trimmoe.runtime.service import (
    GenerationRequest,
    Health,
    Overloaded,
    ServedModel,
    ServiceStats,
    TokenEvent,
    TokenStream,
    Unavailable,
    check_length,
)
from trimmoe.runtime.streams import Item, QueueStream

_log = logging.getLogger(__name__)
RETRY_AFTER_S = 1.0


@dataclass(eq=False, kw_only=True, slots=True)
class _Job:
    """A request on its way; after `submit` only the worker changes it, but for `cancelled`."""

    request: GenerationRequest
    sequence: int
    out: asyncio.Queue[Item]
    since_s: float
    cancelled: bool = False
    seen: Seen | None
    """Its tokens, where draws look back."""
    scores: tuple[Score, ...] = ()
    """Of its prompt, until they are handed out with the first token."""
    made: int = 0
    """Tokens of the answer, with those made elsewhere."""
    cached: int = 0
    """Tokens of its prompt that were not read again."""
    next_token: int = -1


@dataclass(kw_only=True, slots=True)
class _Shared:
    """What the event loop and the worker both touch, under `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[_Job] = field(default_factory=deque)
    running: dict[int, _Job] = field(default_factory=dict)
    closing: bool = False
    failure: str = ""


class LocalService:
    """An `InferenceService` over one `Decoder`."""

    def __init__(self, decoder: Decoder, model: ServedModel, *, max_waiting: int = 64) -> None:
        self.model = model
        self._decoder, self._max_waiting = decoder, max_waiting
        self._shared = _Shared()
        self.decoder = decoder
        self.since_s, self.tokens, self.leaving = time.monotonic(), 0, False
        self._queried = self._hit = 0
        """Tokens of prompts so far, and those of them that were not read again."""
        self._sequences = itertools.count()
        self._thread = threading.Thread(target=self._work, name="trimmoe-decode", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        with self._shared.changed:
            self._shared.closing = True
            self._shared.changed.notify()
        await asyncio.to_thread(self._thread.join)

    def submit(self, request: GenerationRequest) -> TokenStream:
        check_length(request, self.model.context_length)
        shared = self._shared
        with shared.changed:
            if not (health := self.health()).ok:
                raise Unavailable(health.reason)
            if len(shared.running) + len(shared.waiting) >= self._decoder.slots + self._max_waiting:
                raise Overloaded(RETRY_AFTER_S)
            job = _Job(
                request=request,
                sequence=next(self._sequences),
                out=asyncio.Queue(),
                seen=request.seen(self.model),
                made=len(request.received),
                since_s=time.monotonic(),
            )
            shared.waiting.append(job)
            shared.changed.notify()
        return QueueStream(job.out, partial(self.cancel, job))

    def health(self) -> Health:
        if self._loop is None or self._shared.closing:
            return Health(ok=False, reason="The service is not running.")
        return Health(ok=not self._shared.failure, reason=self._shared.failure)

    def stats(self) -> ServiceStats:
        shared = self._shared
        with shared.changed:
            running, waiting = len(shared.running), len(shared.waiting)
        stats = self._decoder.stats()
        return ServiceStats(
            running=running,
            waiting=waiting,
            kv_cache_usage=running / self._decoder.slots,
            links=stats.links,
            expert_executions=stats.expert_executions,
            audits=stats.audits,
            false_exits=stats.false_exits,
            prefix_queries=self._queried,
            prefix_hits=self._hit,
        )

    def picture(self) -> Picture:
        return picture_of(
            self.decoder.outline,
            self.health(),
            self.stats(),
            self.under_way(),
            since_s=self.since_s,
            tokens=self.tokens,
        )

    def leave(self) -> None:
        self.leaving = True

    def under_way(self) -> list[RequestPicture]:
        """The oldest requests."""
        now_s, shared = time.monotonic(), self._shared
        with shared.changed:
            running, waiting = list(shared.running.values()), list(shared.waiting)
        shown = [(job, "reading" if job.next_token < 0 else "answering") for job in running]
        shown += [(job, "waiting") for job in waiting]
        return [_shown(job, state, now_s) for job, state in shown[:MOST_REQUESTS]]

    def cancel(self, job: _Job) -> None:
        """Forget a job: at once if it waits, before the next step if it runs."""
        with self._shared.changed:
            job.cancelled = True
            if job in self._shared.waiting:
                self._shared.waiting.remove(job)
            self._shared.changed.notify()

    # The worker thread.

    def _work(self) -> None:
        try:
            while self._has_work():
                self._drop_cancelled()
                self._admit()
                self._decode()
        except Exception:
            # What the decoder holds is unknown now; saying so beats answering wrongly.
            _log.exception("decoding failed")
            self._shared.failure = "Decoding failed; see the server's log and restart it."
        self._end_all()

    def _has_work(self) -> bool:
        """Sleep until there is some; False when closing."""
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.closing or shared.waiting or shared.running)
            return not shared.closing

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._shared.running.values() if job.cancelled]:
            self._retire(job)

    def _retire(self, job: _Job) -> None:
        self._decoder.close(job.sequence)
        with self._shared.changed:
            del self._shared.running[job.sequence]

    def _admit(self) -> None:
        shared = self._shared
        with shared.changed:
            if not shared.waiting or len(shared.running) == self._decoder.slots:
                return
            job = shared.waiting.popleft()
            shared.running[job.sequence] = job
        job.scores = self._decoder.scores(job.request)
        logits = self._decoder.open(job.sequence, job.request)
        job.cached = self._decoder.kept(job.sequence)
        self._queried += len(job.request.ids)
        self._hit += job.cached
        self._deliver([(job, self._next(job, logits, self._decoder.spent(job.sequence)))])

    def _decode(self) -> None:
        running = [job for job in self._shared.running.values() if not job.cancelled]
        if not running:
            return
        decoded = self._decoder.decode({job.sequence: job.next_token for job in running})
        self._deliver(
            [
                (job, event)
                for job, one in zip(running, decoded, strict=True)
                for event in self._follow(job, one)
            ]
        )

    def _follow(self, job: _Job, decoded: Decoded) -> Iterator[TokenEvent]:
        """Draw the job's next token, and on as long as that was taken to follow."""
        yield (event := self._next(job, decoded.logits, decoded.ledger))
        right = 0
        for token, logits in decoded.behind:
            if event.finish_reason is not None or event.token != token:
                break
            right += 1
            yield (event := self._next(job, logits, decoded.ledger))
        if decoded.behind and event.finish_reason is None:
            self._decoder.confirm(job.sequence, right)

    def _next(self, job: _Job, logits: Tensor, ledger: Ledger | None) -> TokenEvent:
        """Draw the job's next token and retire the job if it is the last."""
        request = job.request
        position = len(request.prompt_ids) + job.made
        drawn = draw(logits, request.sampling, position, job.seen)
        if job.seen is not None:
            job.seen.put(position, drawn.token)
        job.made += 1
        self.tokens += 1
        job.next_token = drawn.token
        reason = None
        if drawn.token in request.stop_ids:
            reason = "stop"
        elif job.made == request.max_new_tokens:
            reason = "length"
        if reason is not None:
            self._retire(job)
        return TokenEvent(
            token=drawn.token,
            logprob=drawn.logprob,
            top_logprobs=drawn.top,
            prompt=job.scores if job.made == 1 else (),
            ledger=ledger,
            cached_tokens=job.cached if job.made == len(request.received) + 1 else 0,
            finish_reason=reason,
        )

    def _end_all(self) -> None:
        """Tell every open stream that nothing more will come."""
        reason = self._shared.failure or "The server is stopping."
        with self._shared.changed:
            jobs = [*self._shared.running.values(), *self._shared.waiting]
            self._shared.running.clear()
            self._shared.waiting.clear()
        self._deliver([(job, Unavailable(reason)) for job in jobs])

    def _deliver(self, items: Sequence[tuple[_Job, Item]]) -> None:
        """Hand items over to the event loop, all in one go."""
        assert self._loop is not None
        if items:
            self._loop.call_soon_threadsafe(_put, items)


def _shown(job: _Job, state: str, now_s: float) -> RequestPicture:
    return RequestPicture(
        state=state,
        prompt_tokens=len(job.request.prompt_ids),
        cached_tokens=job.cached,
        tokens=job.made,
        most_tokens=job.request.max_new_tokens,
        age_s=now_s - job.since_s,
    )


def _put(items: Sequence[tuple[_Job, Item]]) -> None:
    for job, item in items:
        job.out.put_nowait(item)
