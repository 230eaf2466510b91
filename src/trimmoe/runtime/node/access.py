"""The users' side of a server: admission, streaming, and going on elsewhere when servers die.

A request is answered in *attempts*. Each has a sequence number, a route and a place on every
server of it. When an attempt is lost the next one begins from the prompt and the tokens that were
already sent: sampling depends on the position only and the credit is what those tokens left, so
the answer goes on as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from trimmoe.core.events import SequenceOpened
from trimmoe.core.ledger import Ledger
from trimmoe.engine.guesses import Lead
from trimmoe.policy.settings import BudgetRule
from trimmoe.runtime.node.executor import Arrival
from trimmoe.runtime.node.homes import Guessed, Guessing, ToGuess
from trimmoe.runtime.node.jobs import Attempt, Backroom, Job
from trimmoe.runtime.node.messages import (
    ANY_POSITION,
    After,
    Message,
    Parcel,
    Prompt,
    Release,
    Reserve,
    SamplingSpec,
    Token,
    Withdraw,
)
from trimmoe.runtime.node.passengers import unpack_charge, unpack_ledger, unpack_receipt
from trimmoe.runtime.node.stalls import stalled
from trimmoe.runtime.service import (
    FinishReason,
    GenerationRequest,
    Health,
    Overloaded,
    ServedModel,
    ServiceStats,
    TokenEvent,
    TokenStream,
    Unavailable,
    check_length,
    quality,
)
from trimmoe.runtime.streams import QueueStream

_log = logging.getLogger(__name__)
RETRY_AFTER_S = 1.0
MOST_RESTARTS = 12
"""Attempts in a row without a new token, after which a request is given up."""
STALL_COUNTS = 4
"""A stall takes so long that it counts as so many."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
STRANDED = (
    "An expert that this request needs is on a server that cannot be reached, and no substitute "
    "is within its quality budget; try again when the server is back."
)
GIVEN_UP = "Servers were lost again and again while this request was answered; try again shortly."
STOPPING = "The server is stopping."
LOST, NO_EXPERT, STALLED = "lost", "no expert", "stalled"


class Desk:
    """An `InferenceService` on one server of a cluster."""

    def __init__(self, model: ServedModel, backroom: Backroom, first_sequence: int) -> None:
        self.model = model
        self._room = backroom
        self._sequences = itertools.count(first_sequence)
        self._jobs: set[Job] = set()
        self._by_sequence: dict[int, Job] = {}
        self._turn = asyncio.Lock()
        """Places are asked for by one request at a time, in order."""
        self.blocked = False
        """Whether the one whose turn it is had to queue for a place."""
        self.guessing = Guessing()
        self.restarts = 0
        """Attempts that were lost."""
        self.stalls = 0
        """Of which nobody knew anything any more."""
        self._closing = False

    async def start(self) -> None:
        """The node starts its desk; nothing is left to do."""

    async def close(self) -> None:
        """End all streams and take no more requests."""
        self._closing = True
        for job in list(self._jobs):
            self._end(job, Unavailable(self.health().reason or STOPPING))

    def submit(self, request: GenerationRequest) -> TokenStream:
        check_length(request, self.model.context_length)
        if not (health := self.health()).ok:
            raise Unavailable(health.reason)
        waiting, room = self._waiting, self._room
        if len(self._jobs) >= room.kv_slots + room.max_waiting or (
            self.blocked and waiting > room.max_waiting
        ):
            raise Overloaded(RETRY_AFTER_S)
        job = Job(request=request)
        self._jobs.add(job)
        job.task = asyncio.create_task(self._serve(job), name=f"request {request.request_id}")
        return QueueStream(job.out, partial(self.cancel, job))

    def health(self) -> Health:
        health = self._room.health()
        return Health(ok=False, reason=STOPPING) if health.ok and self._closing else health

    def stats(self) -> ServiceStats:
        waiting = self._waiting
        return self._room.stats(len(self._jobs) - waiting, waiting)

    def cancel(self, job: Job) -> None:
        """Its reader went away: free everything now."""
        self._end(job, None)

    def granted(self, server: int, sequence: int, ok: bool) -> None:
        """A server answered a reservation."""
        attempt = self._attempt(sequence)
        self.in_hand(sequence)
        grant = attempt.grants.get(server) if attempt else None
        if grant is not None and not grant.done():
            grant.set_result(ok)

    def in_hand(self, sequence: int) -> None:
        """Some server works at a sequence."""
        if attempt := self._attempt(sequence):
            attempt.news = True

    def look_after(self) -> None:
        """Begin anew what nobody has in hand; called now and then, see `stalls`."""
        attempts = [job.attempt for job in self._by_sequence.values() if job.attempt]
        for attempt in stalled(attempts, self._room.ask):
            _log.warning("Sequence %d on route %s stalled.", attempt.sequence, attempt.route)
            self.stalls += 1
            attempt.fail(STALLED)

    def lost(self, sequence: int, position: int) -> None:
        """Work for a position may be lost; old news if that token has come."""
        attempt = self._attempt(sequence)
        if attempt and (position == ANY_POSITION or position >= attempt.fed):
            attempt.fail(LOST)

    def stranded(self, sequence: int) -> None:
        """An expert has no host for a sequence."""
        if attempt := self._attempt(sequence):
            attempt.fail(NO_EXPERT)

    def server_lost(self, server: int) -> None:
        """What crosses a server cannot go on as it is."""
        for job in self._by_sequence.values():
            if job.attempt and server in job.attempt.route:
                job.attempt.fail(LOST)

    def received(self, tokens: list[Token]) -> None:
        """Tokens of this server's users came."""
        known = [
            (job, job.attempt, token)
            for token in tokens
            if (job := self._by_sequence.get(token.sequence)) and job.attempt
        ]
        receipts = tuple(
            unpack_receipt(token.receipt, token.sequence)
            for _, attempt, token in known
            if token.receipt is not None and token.epoch == attempt.epoch
        )
        agrees = [token.agrees for token in tokens if token.agrees is not None]
        if receipts or agrees:
            self._room.control(lambda: self._room.settle(receipts, agrees))
        for job, attempt, token in known:
            if job.attempt is not attempt:
                continue
            if token.epoch < attempt.epoch and token.ledger is not None:
                self._in_vain(job, unpack_ledger(token.ledger, **self._room.ledger_shape))
            elif (token.epoch, token.position) == (attempt.epoch, attempt.position):
                self._advance(job, attempt, token)
            elif token.epoch == attempt.epoch and token.position > attempt.position:
                attempt.early[token.position] = token

    def followed(self, after: list[After]) -> None:
        """Word of tokens after their exits; what they cost is told with the next one that is
        shown, unless it is their own."""
        agrees = [one.agrees for one in after if one.agrees is not None]
        if agrees:
            self._room.control(lambda: self._room.settle((), agrees))
        for one in after:
            ledger = unpack_ledger(one.ledger, **self._room.ledger_shape)
            job = self._by_sequence.get(one.sequence)
            if job is None or job.attempt is None:
                continue
            if one.token is None:
                job.owe(ledger)
            elif one.token.epoch == job.attempt.epoch:
                self._checked(job, job.attempt, one.token, ledger)
            else:
                self._in_vain(job, ledger)

    @property
    def _waiting(self) -> int:
        return sum(not job.seated for job in self._jobs)

    def _attempt(self, sequence: int) -> Attempt | None:
        job = self._by_sequence.get(sequence)
        return job.attempt if job else None

    def _advance(self, job: Job, attempt: Attempt, token: Token) -> None:
        """A token came; the next one is predicted from it unless it is the last."""
        attempt.news = True
        ledger: Ledger | None = None
        if token.ledger is not None:
            ledger = unpack_ledger(token.ledger, **self._room.ledger_shape)
        elif token.charge is not None:
            ledger = unpack_charge(token.charge, self._quality(job)[0], **self._room.ledger_shape)
        if attempt.lead is not None:
            self._advance_led(job, attempt, attempt.lead, token, ledger)
            return
        token = attempt.pending.add(token, ledger)
        last = self._is_last(job, token)
        self._show(job, attempt)
        if not last:
            attempt.unfed = token
            self._feed_in_turn(attempt)

    def _advance_led(
        self, job: Job, attempt: Attempt, lead: Lead, token: Token, ledger: Ledger | None
    ) -> None:
        """A token came where this server guesses ahead; perhaps it has guessed it."""
        guess = attempt.pending.token_at(token.position)
        if ledger is not None and token.charge is None:
            right = guess is not None and guess.token == token.token
            passed = lead.after(ledger.delay_s, guessed=guess is not None, right=right)
            # What is sent in vain tells itself when it is withdrawn.
            ledger = replace(ledger, delay_s=passed.interval_s)
        attempt.position += 1
        if guess is not None:
            self.guessing.checked(right=guess.token == token.token)
            self._checked(job, attempt, token, ledger)
        else:
            attempt.pending.add(token, ledger)
            last = self._is_last(job, token)
            self._show(job, attempt)
            if not last:
                self._feed(attempt, token)
        if job.attempt is not attempt:
            return
        self._guess(job, attempt)
        if (following := attempt.early.pop(attempt.position, None)) is not None:
            self._advance(job, attempt, following)

    def _guess(self, job: Job, attempt: Attempt) -> None:
        """Have this server read what it has not read yet, and guess what follows."""
        lead, request, room = attempt.lead, job.request, self._room
        if lead is None or attempt.reading or attempt.pending.drafts >= lead.guesses:
            return
        ids = [*request.prompt_ids, *job.tokens, *attempt.pending.tokens]
        tokens = tuple(ids[attempt.read : attempt.read + room.chunk])
        if not tokens:
            return
        attempt.reading = True
        room.guess(
            ToGuess(
                sequence=attempt.sequence,
                start=attempt.read,
                tokens=tokens,
                epoch=attempt.epoch,
                route=attempt.route,
                sampling=request.sampling,
            )
        )
        attempt.read += len(tokens)

    def guessed(self, guesses: Sequence[Guessed]) -> None:
        """This server has guessed what follows tokens; what is probable is followed at once."""
        for one in guesses:
            asked, job = one.asked, self._by_sequence.get(one.asked.sequence)
            if job is None or (attempt := job.attempt) is None:
                continue
            attempt.reading = False
            following = len(job.request.prompt_ids) + len(job.tokens) + len(attempt.pending)
            fits = (asked.epoch, asked.position) == (attempt.epoch, following)
            if fits and following > attempt.prompt:
                if not one.wanted:
                    continue
                token = Token(
                    sequence=attempt.sequence,
                    position=asked.position,
                    token=one.token,
                    logprob=0.0,
                    top=[],
                    ledger=None,
                    receipt=None,
                    agrees=None,
                    epoch=attempt.epoch,
                    draft=True,
                )
                if self._is_last(job, token):
                    continue
                attempt.pending.add(token, None)
                self._feed(attempt, token)
            self._guess(job, attempt)

    def _feed_in_turn(self, attempt: Attempt) -> None:
        """Follow the last token, unless that is a guess upon a guess: most of those would be in
        vain, and where full depth is nearly through they hardly save anything."""
        token = attempt.unfed
        if token is not None and attempt.pending.unconfirmed in (None, token.position):
            self._feed(attempt, token)

    def _checked(self, job: Job, attempt: Attempt, token: Token, ledger: Ledger | None) -> None:
        """Full depth has predicted a token of which there was a draft."""
        attempt.news = True
        wrong = attempt.pending.check(token, ledger)
        self._show(job, attempt)
        if job.attempt is not attempt:
            return
        if wrong is None:
            self._feed_in_turn(attempt)
            return
        for entry in wrong:
            if entry.ledger is not None:
                self._in_vain(job, entry.ledger)
        attempt.epoch += 1
        attempt.read = min(attempt.read, token.position)
        attempt.early.clear()
        opened = self._opened(job, attempt)
        self._room.control(lambda: self._room.open_account(opened, attempt.route))
        # Here as well, whether or not the route comes by: what is to set out is dropped.
        for server in {*attempt.servers, self._room.server}:
            self._post(server, Withdraw(attempt.sequence, token.position, attempt.epoch))
        self._feed(attempt, token)

    def _feed(self, attempt: Attempt, token: Token) -> None:
        """Predict what follows a token."""
        first = attempt.pending.unconfirmed
        attempt.position, attempt.unfed = token.position + 1, None
        if attempt.lead is not None and first is not None:
            # What is guessed is awaited nevertheless.
            attempt.position = first
        attempt.fed = token.position if first is None else first - 1
        self._room.arrive(
            Arrival(
                sequence=attempt.sequence,
                position=token.position,
                token=token.token,
                epoch=attempt.epoch,
            )
        )

    def _ends(self, job: Job, token: Token, count: int) -> FinishReason | None:
        """Why the answer ends with this token, its `count`-th, if it does."""
        if token.token in job.request.stop_ids:
            return "stop"
        return "length" if count == job.request.max_new_tokens else None

    def _is_last(self, job: Job, token: Token) -> bool:
        """Whether an answer ends with a token."""
        count = token.position - len(job.request.prompt_ids) + 1
        return self._ends(job, token, count) is not None

    def _in_vain(self, job: Job, ledger: Ledger) -> None:
        """A token was withdrawn; what it sent was sent all the same."""
        job.owe(replace(Ledger.empty(**self._room.ledger_shape), messages=ledger.messages))

    def _show(self, job: Job, attempt: Attempt) -> None:
        """Hand out what nothing can change any more."""
        for entry in attempt.pending.shown():
            token, ledger = entry.token, entry.ledger
            if ledger is not None and token.charge is None:
                job.credit += ledger.budget - ledger.loss
                if job.after is not None:
                    ledger, job.after = ledger + job.after, None
            job.tokens.append(token.token)
            reason = self._ends(job, token, len(job.tokens))
            event = TokenEvent(
                token=token.token,
                logprob=token.logprob,
                top_logprobs=tuple((each, value) for each, value in token.top),
                ledger=ledger,
                finish_reason=reason,
            )
            job.out.put_nowait(event)
            if reason is not None:
                attempt.trouble.set_result("") if not attempt.trouble.done() else None
                self._end(job, None)
                return

    async def _serve(self, job: Job) -> None:
        """One attempt after the other until one ends well."""
        made, restarts = -1, 0
        while True:
            trouble = await self._attempted(job)
            if not trouble:
                return
            self._forget(job)
            self.restarts += 1
            counts = STALL_COUNTS if trouble == STALLED else 1
            restarts = 0 if len(job.tokens) > made else restarts + counts
            made = len(job.tokens)
            if trouble == NO_EXPERT and not await self._help_comes():
                self._end(job, Unavailable(STRANDED))
            elif restarts > MOST_RESTARTS:
                self._end(job, Unavailable(GIVEN_UP))
            await asyncio.sleep(min(FIRST_PAUSE_S * 2**restarts, LONGEST_PAUSE_S))

    async def _help_comes(self) -> bool:
        """Whether, within the patience there is, the cluster changes while servers are lost."""
        planner = self._room.planner
        if not planner.lost:
            return False
        try:
            await asyncio.wait_for(planner.next_change(), self._room.patience_s)
        except TimeoutError:
            return False
        return True

    async def _attempted(self, job: Job) -> str:
        """Run one attempt; why it ended."""
        planner = self._room.planner
        async with self._turn:
            await planner.until_settled()
            route = planner.in_force.route_of(self._room.server)
            attempt = Attempt(
                sequence=next(self._sequences),
                route=route,
                trouble=asyncio.get_running_loop().create_future(),
            )
            job.attempt = attempt
            self._by_sequence[attempt.sequence] = job
            if not await self._seat(job, attempt):
                return attempt.trouble.result() if attempt.trouble.done() else LOST
        job.seated = True
        self._send_off(job, attempt)
        return await attempt.trouble

    async def _seat(self, job: Job, attempt: Attempt) -> bool:
        """Get a place on every server of the route; False if one of them is lost meanwhile."""
        grants = [self._reserve(job, attempt, server, waits=False) for server in attempt.servers]
        if all(await asyncio.gather(*grants)):
            return not attempt.trouble.done()
        if attempt.trouble.done():
            return False
        self.blocked = True
        try:
            self._release(attempt)
            # Released under the old number, asked for under a new one: no answer is mistaken.
            del self._by_sequence[attempt.sequence]
            attempt.sequence = next(self._sequences)
            self._by_sequence[attempt.sequence] = job
            for server in attempt.servers:
                if not await self._reserve(job, attempt, server, waits=True):
                    return False
            return not attempt.trouble.done()
        finally:
            self.blocked = False

    def _reserve(
        self, job: Job, attempt: Attempt, server: int, *, waits: bool
    ) -> asyncio.Future[bool]:
        grant: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        attempt.grants[server] = grant
        sampling = job.request.sampling
        spec = SamplingSpec(
            sampling.temperature, sampling.top_p, sampling.seed, sampling.stream, sampling.logprobs
        )
        budget, _ = self._quality(job)
        reserve = Reserve(attempt.sequence, list(attempt.route), spec, budget, waits)
        self._post(server, reserve)
        return grant

    def _send_off(self, job: Job, attempt: Attempt) -> None:
        """The prompt, with what was made of the answer, enters the route."""
        request, room = job.request, self._room
        opened = self._opened(job, attempt)
        room.control(lambda: room.open_account(opened, attempt.route))
        ids = [*request.prompt_ids, *job.tokens]
        attempt.position = attempt.prompt = len(ids)
        guesses = room.planner.settings.guesses
        if guesses:
            attempt.lead = Lead(guesses=guesses, guess_s=room.guess_s())
        tokens = (torch.tensor(ids, dtype=torch.int32),)
        room.post(Parcel(to=attempt.route[0], message=Prompt(attempt.sequence), tensors=tokens))
        self._guess(job, attempt)

    def _opened(self, job: Job, attempt: Attempt) -> SequenceOpened:
        """Its account, with what the tokens shown so far left."""
        bucket = self._room.planner.settings.budget_rule is BudgetRule.BUCKET
        budget, confidence = self._quality(job)
        return SequenceOpened(
            sequence=attempt.sequence,
            access=self._room.server,
            budget=budget,
            confidence=confidence,
            balance=max(job.credit, 0.0) if bucket else 0.0,
        )

    def _quality(self, job: Job) -> tuple[float, float]:
        planner = self._room.planner
        return quality(job.request, planner.settings, planner.profile)

    def _post(self, server: int, message: Message) -> None:
        self._room.post(Parcel(to=server, message=message))

    def _release(self, attempt: Attempt) -> None:
        for server in attempt.servers:
            self._post(server, Release([attempt.sequence]))

    def _forget(self, job: Job) -> None:
        """Free what the job's attempt holds on every server."""
        attempt, job.attempt, job.seated = job.attempt, None, False
        if attempt is None:
            return
        sequence = attempt.sequence
        self._by_sequence.pop(sequence, None)
        self._release(attempt)
        self._room.control(lambda: self._room.close_account(sequence))

    def _end(self, job: Job, error: Unavailable | None) -> None:
        """The job is over: complete, cancelled or failed."""
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        self._forget(job)
        if error is not None:
            job.out.put_nowait(error)
        if job.task is not None:
            job.task.cancel()
