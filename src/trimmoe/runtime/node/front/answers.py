"""How answers grow at their access server: what comes in, and what is shown of it.

Tokens may be predicted before full depth has spoken, on their way (drafts) or by this server itself
(guesses). The next one sets out on that at once (`speculation.py`), nobody is shown what is not
confirmed, and where it is wrong what followed is withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from trimmoe.core.events import SequenceOpened
from trimmoe.core.ledger import Ledger
from trimmoe.engine.books import flip, flipped
from trimmoe.engine.lead import HEAD
from trimmoe.policy.readings import BudgetRule
from trimmoe.policy.relaxed import RANKED, keeps, runner_up
from trimmoe.runtime.node.front.jobs import Attempt, FrontEndContext, Job
from trimmoe.runtime.node.front.memory import Memory
from trimmoe.runtime.node.front.speculation import Speculation, ended
from trimmoe.runtime.node.records.messages import Parcel, Withdraw
from trimmoe.runtime.node.records.packing import unpack_charge, unpack_ledger, unpack_receipt
from trimmoe.runtime.node.records.samplings import unpack_scores
from trimmoe.runtime.node.records.tokens import After, Token
from trimmoe.runtime.sampling_params import Sampling
from trimmoe.runtime.service import TokenEvent, quality


class Answers:
    """Of all attempts under way at one front end; `job_of` finds a sequence's request, `end` is
    told of those that are complete."""

    def __init__(
        self,
        context: FrontEndContext,
        memory: Memory,
        speculation: Speculation,
        job_of: Callable[[int], Job | None],
        end: Callable[[Job], None],
    ) -> None:
        self._context, self._memory, self._speculation = context, memory, speculation
        self._job_of, self._end = job_of, end
        self.tokens = 0
        """Handed out so far."""

    def received(self, sender: int, tokens: list[Token]) -> None:
        """Tokens of this server's users came; only servers of its route have a say in an answer."""
        known = [
            (job, job.attempt, token)
            for token in tokens
            if (job := self._job_of(token.sequence)) and job.attempt and sender in job.attempt.route
        ]
        receipts = tuple(
            unpack_receipt(token.receipt, token.sequence)
            for _, attempt, token in known
            if token.receipt is not None and token.epoch == attempt.epoch
        )
        agrees = [token.agrees for token in tokens if token.agrees is not None]
        if receipts or agrees:
            self._context.control(lambda: self._context.settle(receipts, agrees))
        for _, attempt, token in known:
            if token.epoch == attempt.epoch and not token.draft:
                attempt.heard = max(attempt.heard, token.position)
        for job, attempt, token in known:
            if job.attempt is not attempt:
                continue
            if token.epoch < attempt.epoch and token.ledger is not None:
                self._in_vain(job, unpack_ledger(token.ledger, **self._context.ledger_shape))
            elif (token.epoch, token.position) == (attempt.epoch, attempt.position):
                self._advance(job, attempt, token)
                if job.attempt is attempt and attempt.lead is not None:
                    self._speculation.follow_head(job, attempt, attempt.lead, token)
            elif token.epoch == attempt.epoch and token.position > attempt.position:
                attempt.early[token.position] = token
        # When all of it is known, lest what is guessed next is as little as there was room for at
        # the first of these tokens.
        for job, attempt in {id(job): (job, attempt) for job, attempt, _ in known}.values():
            if job.attempt is attempt:
                self._speculation.guess(job, attempt)

    def followed(self, sender: int, after: list[After]) -> None:
        """Word of tokens after their exits; what they cost is told with the next one that is
        shown, unless it is their own."""
        agrees = [one.agrees for one in after if one.agrees is not None]
        if agrees:
            self._context.control(lambda: self._context.settle((), agrees))
        for one in after:
            ledger = unpack_ledger(one.ledger, **self._context.ledger_shape)
            job = self._job_of(one.sequence)
            if job is None or job.attempt is None or sender not in job.attempt.route:
                continue
            if one.token is None:
                job.owe(ledger)
            elif one.token.epoch == job.attempt.epoch:
                self._checked(job, job.attempt, one.token, ledger)
            else:
                self._in_vain(job, ledger)

    def _advance(self, job: Job, attempt: Attempt, token: Token) -> None:
        """A token came, perhaps one that this server has guessed; the next one is predicted from it
        unless it is the last."""
        attempt.news = True
        ledger: Ledger | None = None
        if token.ledger is not None:
            ledger = unpack_ledger(token.ledger, **self._context.ledger_shape)
        elif token.charge is not None:
            ledger = unpack_charge(
                token.charge, self.quality_of(job)[0], **self._context.ledger_shape
            )
        guess = attempt.pending.token_at(token.position)
        if guess is not None and ledger is not None and token.charge is None:
            kept = self._keeps(job, attempt, guess, token, job.credit + ledger.budget - ledger.loss)
            if kept:
                token, ledger = _kept(token, guess), flipped(ledger)
                self._charge_flip(attempt.sequence)
                if attempt.lead is not None:
                    # It has lost the thread.
                    attempt.lead.drafts.able = False
        stream = attempt.chunks or attempt.lead
        if stream is not None and ledger is not None and token.charge is None:
            right = guess is not None and guess.token == token.token
            passed = stream.after(
                ledger.delay_s,
                guessed=guess is not None,
                right=right,
                source=attempt.pending.source_at(token.position),
            )
            # What is sent in vain tells itself when it is withdrawn.
            ledger = replace(ledger, delay_s=passed.interval_s)
        if guess is not None:
            attempt.position += 1
            right = guess.token == token.token
            self._speculation.guessing.checked(right=right)
            attempt.lookup.checked(token.position, right=right)
            self._checked(job, attempt, token, ledger)
        else:
            token = attempt.pending.add(token, ledger)
            last = ended(job, token) is not None
            self._show(job, attempt)
            if not last:
                attempt.unfed = token
                self._speculation.feed_in_turn(attempt)
        if job.attempt is not attempt:
            return
        if (following := attempt.early.pop(attempt.position, None)) is not None:
            self._advance(job, attempt, following)

    def _keeps(self, job: Job, attempt: Attempt, guess: Token, token: Token, credit: float) -> bool:
        """Whether a guess is shown in place of the token that full depth has predicted."""
        if not self._context.planner.settings.relaxed or guess.token == token.token:
            return False
        pending, position = attempt.pending, token.position
        # An answer's end is its end, and a draft head goes on from what full depth has predicted.
        able = pending.unconfirmed == position and pending.source_at(position) != HEAD
        second = runner_up(token.top)
        return able and ended(job, token) is None and keeps(credit, guess.token, second)

    def _charge_flip(self, sequence: int) -> None:
        """Its account knows of it before anything else of the sequence sets out."""
        receipts = (flip(sequence),)
        self._context.control(lambda: self._context.settle(receipts, []))

    def _checked(self, job: Job, attempt: Attempt, token: Token, ledger: Ledger | None) -> None:
        """Full depth has predicted a token of which there was a draft."""
        attempt.news = True
        wrong = attempt.pending.check(token, ledger)
        self._show(job, attempt)
        if job.attempt is not attempt:
            return
        if wrong is None:
            attempt.strand()
            if attempt.held and attempt.held[0].position == token.position:
                # Full depth was faster.
                self._speculation.release(attempt)
            self._speculation.feed_in_turn(attempt)
            return
        for entry in wrong:
            if entry.ledger is not None:
                self._in_vain(job, entry.ledger)
        attempt.epoch, attempt.stranded = attempt.epoch + 1, None
        attempt.held.clear()
        attempt.lookup.pending.clear()
        attempt.withdraw(token.position)
        for early in attempt.early.values():
            if early.ledger is not None:
                self._in_vain(job, unpack_ledger(early.ledger, **self._context.ledger_shape))
        attempt.early.clear()
        opened = self.opened(job, attempt)
        route, start = attempt.route, token.position
        self._context.control(lambda: self._context.begin_anew(opened, route, start))
        # Here as well, whether or not the route comes by: what is to set out is dropped. What sets
        # out now tells the others by itself, who need not know sooner if nothing is on its way.
        others = set[int]() if attempt.is_through else set(attempt.servers)
        for server in {*others, self._context.server}:
            withdraw = Withdraw(attempt.sequence, token.position, attempt.epoch)
            self._context.post(Parcel(to=server, message=withdraw))
        attempt.heard = token.position
        self._speculation.feed(attempt, token)

    def _in_vain(self, job: Job, ledger: Ledger) -> None:
        """A token was withdrawn; what it sent was sent all the same."""
        job.owe(replace(Ledger.empty(**self._context.ledger_shape), messages=ledger.messages))

    def _show(self, job: Job, attempt: Attempt) -> None:
        """Hand out what nothing can change any more."""
        for entry in attempt.pending.shown():
            token, ledger = entry.token, entry.ledger
            first = len(job.tokens) == len(job.request.received)
            cached = job.cached if first else 0
            self._memory.shown(job, attempt, token.position, ledger)
            if ledger is not None and token.charge is None:
                job.credit += ledger.budget - ledger.loss
                if job.after is not None:
                    ledger, job.after = ledger + job.after, None
            scores = () if job.tokens else token.scores
            asked = job.request.sampling.logprobs
            job.tokens.append(token.token)
            reason = ended(job, token)
            event = TokenEvent(
                token=token.token,
                logprob=None if asked is None else token.logprob,
                top_logprobs=tuple((each, value) for each, value in token.top[: asked or 0]),
                prompt=unpack_scores(scores),
                ledger=ledger,
                ahead=entry.ahead,
                cached_tokens=cached,
                finish_reason=reason,
            )
            job.out.put_nowait(event)
            # Where all is here no other server waits for the next batch.
            self._context.make_way(first or attempt.at_home)
            self.tokens += 1
            if reason is not None:
                attempt.trouble.set_result("") if not attempt.trouble.done() else None
                self._end(job)
                return

    def opened(self, job: Job, attempt: Attempt) -> SequenceOpened:
        """Its account, with what the tokens shown so far left."""
        bucket = self._context.planner.settings.readings.budget_rule is BudgetRule.BUCKET
        budget, confidence = self.quality_of(job)
        return SequenceOpened(
            sequence=attempt.sequence,
            access=self._context.server,
            budget=budget,
            confidence=confidence,
            balance=max(job.credit, 0.0) if bucket else 0.0,
        )

    def sampling_of(self, job: Job) -> Sampling:
        """How its tokens are drawn, with the probabilities that are needed to keep a guess."""
        sampling = job.request.sampling
        if not self._context.planner.settings.relaxed or self.quality_of(job)[0] <= 0:
            return sampling
        return replace(sampling, logprobs=max(sampling.logprobs or 0, RANKED))

    def quality_of(self, job: Job) -> tuple[float, float]:
        planner = self._context.planner
        copied = planner.in_force.engine.copied_bits is not None
        return quality(job.request, planner.settings, planner.profile, copied=copied)


def _kept(token: Token, guess: Token) -> Token:
    """What full depth has predicted, with the guess that is kept in its place."""
    logprob = dict(token.top)[guess.token]
    return msgspec.structs.replace(token, token=guess.token, logprob=logprob)
