"""The users' side of a server: admission, streaming, and going on elsewhere when servers die.

A request is answered in *attempts*. Each has a sequence number, a route and a place on every
server of it. When an attempt is lost the next one begins from the prompt and the tokens that were
already sent: sampling depends on the position only and the credit is what those tokens left, so
the answer goes on as if nothing had happened. An answer that was begun at another server of the
cluster goes on here likewise (`GenerationRequest.received`), without its credit.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from dataclasses import replace
from functools import partial

from trimmoe.engine.lead import Lead
from trimmoe.runtime.node.front.answers import Answers
from trimmoe.runtime.node.front.jobs import (
    NO_EXPERT,
    REFUSED,
    SHORT,
    Attempt,
    Begun,
    FrontEndContext,
    Job,
)
from trimmoe.runtime.node.front.lengths import Lengths
from trimmoe.runtime.node.front.memory import Memory
from trimmoe.runtime.node.front.reservations import Reservations
from trimmoe.runtime.node.front.speculation import Speculation
from trimmoe.runtime.node.front.watchdog import stalled
from trimmoe.runtime.node.records.checks import prompt
from trimmoe.runtime.node.records.messages import ANY_POSITION, Message, Parcel, Release, Withdraw
from trimmoe.runtime.picture import MOST_REQUESTS, Picture, RequestPicture
from trimmoe.runtime.service import (
    GenerationRequest,
    Health,
    Overloaded,
    ServedModel,
    ServiceStats,
    TokenStream,
    Unavailable,
    check_length,
)
from trimmoe.runtime.streams import QueueStream

_log = logging.getLogger(__name__)
RETRY_AFTER_S = 1.0
MOST_RESTARTS = 12
"""Attempts in a row without a new token, after which a request is given up."""
STALL_COUNTS, DISPUTE_COUNTS = 4, 4
"""A stall takes so long that it counts as so many; who disputes once is left out, or does it again.
"""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
STRANDED = (
    "An expert that this request needs is on a server that cannot be reached, and no substitute "
    "is within its quality budget; try again when the server is back."
)
GIVEN_UP = "Servers were lost again and again while this request was answered; try again shortly."
UNDECIDED = (
    "Servers gave different results for this request, and none is left to tell which are right; "
    "have the cluster's operator look at their logs."
)
STOPPING = "The server is stopping."
LOST, STALLED, DISPUTED = "lost", "stalled", "disputed"
COUNTS = {STALLED: STALL_COUNTS, DISPUTED: DISPUTE_COUNTS}


class FrontEnd:
    """An `InferenceService` on one server of a cluster."""

    def __init__(self, model: ServedModel, context: FrontEndContext, first_sequence: int) -> None:
        self.model = model
        self._context = context
        self._sequences = itertools.count(first_sequence)
        self._jobs: set[Job] = set()
        self._by_sequence: dict[int, Job] = {}
        self._turn = asyncio.Lock()
        """Places are asked for by one request at a time, in order."""
        self.memory = Memory(context)
        self.speculation = Speculation(context, self._by_sequence.get)
        self.answers = Answers(
            context,
            self.memory,
            self.speculation,
            self._by_sequence.get,
            lambda job: self._end(job, None),
        )
        self.reservations = Reservations(
            context=context,
            answers=self.answers,
            release=self._release,
            renumber=self._renumber,
        )
        self.lengths = Lengths()
        self.restarts = 0
        """Attempts that were lost."""
        self.stalls = 0
        """Of which nobody knew anything any more."""
        self._closing = self.leaving = False

    async def start(self) -> None:
        """The node starts its front end; nothing is left to do."""

    async def close(self) -> None:
        """End all streams and take no more requests."""
        self._closing = True
        for job in list(self._jobs):
            self._end(job, Unavailable(self.health().reason or STOPPING))

    def submit(self, request: GenerationRequest) -> TokenStream:
        check_length(request, self.model.context_length)
        if not (health := self.health()).ok:
            raise Unavailable(health.reason)
        waiting, context = self.waiting, self._context
        if len(self._jobs) >= context.kv_slots + context.max_waiting or (
            self.reservations.blocked and waiting > context.max_waiting
        ):
            raise Overloaded(RETRY_AFTER_S)
        now_s = asyncio.get_running_loop().time()
        job = self._job(request, now_s)
        self._jobs.add(job)
        job.task = asyncio.create_task(self._serve(job), name=f"request {request.request_id}")
        return QueueStream(job.out, partial(self.cancel, job))

    def _job(self, request: GenerationRequest, now_s: float) -> Job:
        encoder, source = self._context.encoder, ()
        if encoder is not None:
            source = tuple(request.prompt_ids)
            request = replace(request, prompt_ids=(encoder.start_token,))
        return Job(request=request, source=source, since_s=now_s, tokens=list(request.received))

    def health(self) -> Health:
        health = self._context.health()
        return Health(ok=False, reason=STOPPING) if health.ok and self._closing else health

    def stats(self) -> ServiceStats:
        return self._context.stats(self.running, self.waiting)

    def picture(self) -> Picture:
        return self._context.picture()

    def under_way(self) -> list[RequestPicture]:
        """The oldest requests of this server's users."""
        now_s = asyncio.get_running_loop().time()
        oldest = sorted(self._jobs, key=lambda job: job.since_s)[:MOST_REQUESTS]
        return [job.picture(now_s) for job in oldest]

    def leave(self) -> None:
        self.leaving = True

    def cancel(self, job: Job) -> None:
        """Its reader went away: free everything now."""
        self._end(job, None)

    def granted(self, server: int, sequence: int, ok: bool, kept: int) -> None:
        """A server answered a reservation, and has so much of the sequence already."""
        if attempt := self._attempt(sequence):
            attempt.granted(server, ok, kept)

    def in_hand(self, sequence: int) -> None:
        """Some server works at a sequence."""
        if attempt := self._attempt(sequence):
            attempt.news = True

    def look_after(self) -> None:
        """Begin anew what nobody has in hand; called now and then, see `stalls`."""
        attempts = [job.attempt for job in self._by_sequence.values() if job.attempt]
        for attempt in stalled(attempts, self._context.ask):
            _log.warning("Sequence %d on route %s stalled.", attempt.sequence, attempt.route)
            self.stalls += 1
            attempt.fail(STALLED)

    def lost(self, sequence: int, position: int, disputed: bool = False) -> None:
        """Work for a position may be lost; old news if that token has come. `disputed` as in
        `Lost`."""
        attempt = self._attempt(sequence)
        if attempt and (position == ANY_POSITION or position >= attempt.fed):
            attempt.fail(DISPUTED if disputed else LOST)

    def stranded(self, sequence: int, start: int, epoch: int) -> None:
        """An expert has no host for what is at a position of a sequence; old news if that was
        withdrawn."""
        if (attempt := self._attempt(sequence)) and epoch == attempt.epoch:
            attempt.stranded = start
            attempt.strand()

    def server_lost(self, server: int) -> None:
        """What crosses a server cannot go on as it is."""
        self.memory.server_lost(server)
        for job in self._by_sequence.values():
            if job.attempt and server in job.attempt.route:
                job.attempt.fail(LOST)

    def load_changed(self) -> None:
        """Others, or this server's users, have more answers under way now, or fewer."""
        for job in self._by_sequence.values():
            if job.attempt is not None:
                self.speculation.reconsider(job, job.attempt)

    @property
    def running(self) -> int:
        """Answers under way."""
        return len(self._jobs) - self.waiting

    @property
    def leads(self) -> list[Lead]:
        """Of the streams that are guessed ahead."""
        attempts = (job.attempt for job in self._jobs)
        return [one.lead for one in attempts if one is not None and one.lead is not None]

    @property
    def waiting(self) -> int:
        """Those that have no place yet."""
        return sum(not job.seated for job in self._jobs)

    def _attempt(self, sequence: int) -> Attempt | None:
        job = self._by_sequence.get(sequence)
        return job.attempt if job else None

    async def _serve(self, job: Job) -> None:
        """One attempt after the other until one ends well."""
        made, restarts, help_until_s = -1, 0, math.inf
        loop, planner = asyncio.get_running_loop(), self._context.planner
        while True:
            trouble = await self._attempted(job)
            if not trouble:
                return
            self._forget(job, put_off=trouble == SHORT)
            if trouble in (REFUSED, SHORT):
                self.reservations.asks_first = job.refused = True
                continue
            self.restarts += 1
            if len(job.tokens) > made:
                made, restarts, help_until_s = len(job.tokens), 0, math.inf
            elif trouble != NO_EXPERT or not planner.lost:
                restarts += COUNTS.get(trouble, 1)
            if trouble == NO_EXPERT:
                help_until_s = min(help_until_s, loop.time() + self._context.patience_s)
                if not await self._help_comes(help_until_s - loop.time()):
                    self._end(job, Unavailable(STRANDED))
            if restarts > MOST_RESTARTS:
                self._end(job, Unavailable(UNDECIDED if trouble == DISPUTED else GIVEN_UP))
            await asyncio.sleep(min(FIRST_PAUSE_S * 2**restarts, LONGEST_PAUSE_S))

    async def _help_comes(self, patience_s: float) -> bool:
        """Whether the cluster changes in time, or all servers are back already."""
        planner = self._context.planner
        if not planner.lost:
            return True
        try:
            await asyncio.wait_for(planner.next_change(), patience_s)
        except TimeoutError:
            return False
        return True

    async def _attempted(self, job: Job) -> str:
        """Run one attempt; why it ended."""
        planner, encoder = self._context.planner, self._context.encoder
        if encoder is not None and job.encoded is None:
            job.encoded = await encoder.encode(job.source)
        async with self._turn:
            await planner.until_settled()
            route = planner.in_force.route_of(self._context.server)
            attempt = Attempt(
                sequence=next(self._sequences),
                route=route,
                trouble=asyncio.get_running_loop().create_future(),
                begun=self._begins_with(job, route),
            )
            job.attempt = attempt
            self._by_sequence[attempt.sequence] = job
            if not await self.reservations.made(job, attempt):
                return attempt.trouble.result() if attempt.trouble.done() else LOST
        if not job.seated:
            self.lengths.began()
        job.seated = True
        self._context.load_changed()
        self._send_off(job, attempt)
        return await attempt.trouble

    def _begins_with(self, job: Job, route: tuple[int, ...]) -> Begun | None:
        """What the last attempt left behind, or else what begins as the prompt does."""
        left, job.begun = job.begun, None
        begun = None if left is None else self.memory.resume(left, route)
        if begun is None and not _reads_all(job):
            begun = self.memory.match(route, _ids(job))
        return begun

    def _send_off(self, job: Job, attempt: Attempt) -> None:
        """The prompt, with what was made of the answer, enters the route: what is not there yet."""
        context = self._context
        opened = self.answers.opened(job, attempt)
        context.control(lambda: context.open_account(opened, attempt.route))
        ids = _ids(job)
        attempt.position = attempt.prompt = len(ids)
        attempt.at_home = context.is_home(attempt.route)
        self._begin(attempt)
        self.memory.began(job, attempt, attempt.start)
        settings = context.planner.settings
        if settings.guesses:
            attempt.lead = context.prices.lead(attempt.route, at_home=attempt.at_home)
            attempt.holds = context.holds(attempt.route)
            if settings.guess_chunks:
                rules = context.planner.in_force.engine.guess_rules
                attempt.chunks = rules.chunks(context.server)
            attempt.seen = job.request.seen(self.model)
        asked = {
            "start": attempt.start,
            "epoch": attempt.epoch,
            "wants": attempt.wants,
        }
        context.post(prompt(attempt.route[0], attempt.sequence, ids, **asked))
        self.speculation.guess(job, attempt)

    def _begin(self, attempt: Attempt) -> None:
        """Go on from what every server of the route has."""
        if (begun := attempt.begun) is None:
            return
        known = attempt.expected is not None
        attempt.start = begun.prefix.length if known else min(attempt.kept.values())
        attempt.read = min(begun.read, attempt.start)
        sequence, start, context = attempt.sequence, attempt.start, self._context
        context.control(lambda: context.adopt(sequence, begun, start))
        if not known and max(attempt.kept.values()) > start:
            # Some have more, which is void then.
            attempt.epoch = 1
            for server in attempt.servers:
                self._post(server, Withdraw(sequence, start, attempt.epoch))

    def _renumber(self, job: Job, attempt: Attempt) -> None:
        """Places were released under the old number and are asked for under a new one, so that no
        answer is mistaken."""
        del self._by_sequence[attempt.sequence]
        attempt.sequence = next(self._sequences)
        self._by_sequence[attempt.sequence] = job

    def _post(self, server: int, message: Message) -> None:
        self._context.post(Parcel(to=server, message=message))

    def _release(self, attempt: Attempt) -> None:
        gone = [attempt.sequence]
        if attempt.begun is not None and attempt.begun.prefix.moves:
            # Where it has not taken over the place of that, nobody will.
            source = attempt.begun.prefix.sequence
            gone.append(source)
            self._context.control(lambda: self._context.close_account(source))
        for server in attempt.servers:
            self._post(server, Release(gone))

    def _forget(self, job: Job, *, retained: bool = False, put_off: bool = False) -> None:
        """Free what the job's attempt holds on every server, unless it is to be retained, for other
        jobs or, if it is `put_off`, for this one."""
        attempt, job.attempt, job.seated = job.attempt, None, False
        if attempt is None:
            if job.begun is not None:
                self.memory.let_go(job.begun)
            return
        sequence = attempt.sequence
        self._by_sequence.pop(sequence, None)
        self.memory.forget(sequence)
        if put_off:
            job.begun = self.memory.put_off(attempt)
            return
        if retained and self.memory.ended(job, attempt):
            return
        self._release(attempt)
        self._context.control(lambda: self._context.close_account(sequence))

    def _end(self, job: Job, error: Unavailable | None) -> None:
        """The job is over: complete, cancelled or failed."""
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        if job.seated:
            self.lengths.ended(len(job.tokens) - len(job.request.received))
        self._context.load_changed()
        self._forget(job, retained=error is None)
        if error is not None:
            job.out.put_nowait(error)
        if job.task is not None:
            job.task.cancel()


def _ids(job: Job) -> list[int]:
    """The prompt, with what was made of the answer."""
    return [*job.request.prompt_ids, *job.tokens]


def _reads_all(job: Job) -> bool:
    """Whether the whole prompt has to be read, since its tokens' scores are asked for."""
    return job.request.sampling.prompt_logprobs is not None and not job.tokens
