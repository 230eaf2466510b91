"""How answers grow at their access server: what comes in, what is shown, what sets out next.

Tokens may be predicted before full depth has spoken, on their way (drafts) or by this server itself
(guesses). The next one sets out on that at once, nobody is shown what is not confirmed, and where
it is wrong what followed is withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isinf

from trimmoe.core.events import SequenceOpened
from trimmoe.core.ledger import Ledger
from trimmoe.engine.guesses import HEAD, Lead
from trimmoe.policy.readings import BudgetRule
from trimmoe.runtime.node.front.drafts import GUESSED, Guessing, Kind
from trimmoe.runtime.node.front.jobs import Attempt, FrontEndContext, Job
from trimmoe.runtime.node.front.memory import Memory
from trimmoe.runtime.node.records.messages import After, Parcel, Token, Withdraw
from trimmoe.runtime.node.records.output import Arrival
from trimmoe.runtime.node.records.packing import unpack_charge, unpack_ledger, unpack_receipt
from trimmoe.runtime.node.records.readings import Reading
from trimmoe.runtime.node.records.samplings import unpack_scores
from trimmoe.runtime.service import FinishReason, TokenEvent, quality

MOST_UNDRAFTED = 40
"""Tokens in a row that a draft head may name nothing behind before a stream does without it."""


class Answers:
    """Of all attempts under way at one front end; `job_of` finds a sequence's request, `end` is
    told of those that are complete."""

    def __init__(
        self,
        context: FrontEndContext,
        memory: Memory,
        job_of: Callable[[int], Job | None],
        end: Callable[[Job], None],
    ) -> None:
        self._context, self._memory, self._job_of, self._end = context, memory, job_of, end
        self.guessing = Guessing()
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
        for job, attempt, token in known:
            if job.attempt is not attempt:
                continue
            if token.epoch < attempt.epoch and token.ledger is not None:
                self._in_vain(job, unpack_ledger(token.ledger, **self._context.ledger_shape))
            elif (token.epoch, token.position) == (attempt.epoch, attempt.position):
                self._advance(job, attempt, token)
                if job.attempt is attempt and attempt.lead is not None:
                    self._follow_head(job, attempt, attempt.lead, token)
            elif token.epoch == attempt.epoch and token.position > attempt.position:
                attempt.early[token.position] = token

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

    def guessed(self, guesses: Sequence[Reading]) -> None:
        """This server has guessed what follows tokens; what is probable is followed at once."""
        for asked in guesses:
            job = self._job_of(asked.sequence)
            if job is None or (attempt := job.attempt) is None:
                continue
            if attempt.reading is not asked:
                continue
            attempt.reading = None
            if asked.failed:
                if attempt.lead is not None:
                    attempt.lead.sources[asked.source].able = False
                self.guess(job, attempt)
                continue
            following = _following(job, attempt)
            if asked.position == following >= attempt.prompt:
                followed = self._followed(job, attempt, asked)
                # What nothing follows need not be read again before word has come of it.
                read = attempt.read_by(asked.source) + min(followed, len(asked.made) - 1)
                attempt.goes_on_from(asked.source, read)
                if not followed:
                    self._release(attempt)
                    continue
            self.guess(job, attempt)

    def _follow_head(self, job: Job, attempt: Attempt, lead: Lead, token: Token) -> None:
        """What a draft head has named behind a token that came, if anything, sets out with that,
        unless something else has."""
        if not token.follows:
            attempt.undrafted += lead.turn == HEAD
            if attempt.undrafted >= MOST_UNDRAFTED:
                # It is never sure, or there is none where the sequence ends.
                lead.drafts.able = False
            return
        attempt.undrafted = 0
        following = _following(job, attempt)
        known = attempt.unfed is None and not attempt.pending.drafts
        if not known or token.position + 1 != following:
            return
        for position, each in enumerate(token.follows[: lead.along], following):
            if not self._set_out(job, attempt, position, each, GUESSED[HEAD]):
                break
        self._release(attempt)

    def reconsider(self, attempt: Attempt) -> None:
        """The load has changed: what is read for guesses that nobody would follow is let be."""
        if attempt.lead is None:
            return
        self.choose(attempt, attempt.lead)
        idle = isinf(attempt.lead.least) or attempt.lead.turn == HEAD
        if attempt.reading is not None and idle:
            attempt.stop_reading()
            self._release(attempt)

    def choose(self, attempt: Attempt, lead: Lead) -> int:
        """The source of guesses whose turn it is, as busy as servers are now."""
        lead.least = self._context.least_chance(attempt.route)
        lead.crowd = self._context.crowd(attempt.route)
        lead.pace_s = self._context.guess_pace_s()
        return lead.choose()

    def _followed(self, job: Job, attempt: Attempt, guessed: Reading) -> int:
        """Follow what is probable; how many tokens are."""
        least = self._context.planner.settings.guess_confidence
        each = zip(guessed.made, guessed.confidence, strict=True)
        for at, (token, confidence) in enumerate(each):
            if confidence < least:
                return at
            kind = GUESSED[guessed.source]
            if not self._set_out(job, attempt, guessed.position + at, token, kind):
                return at
        return len(guessed.made)

    def _set_out(self, job: Job, attempt: Attempt, position: int, guess: int, kind: Kind) -> bool:
        """Follow a guess, unless it ends the answer: whether it is followed."""
        token = Token(
            sequence=attempt.sequence,
            position=position,
            token=guess,
            logprob=0.0,
            top=[],
            ledger=None,
            receipt=None,
            agrees=None,
            epoch=attempt.epoch,
            draft=True,
        )
        if self._ends(job, token):
            return False
        attempt.pending.add(token, None, kind)
        attempt.held.append(token)
        if len(attempt.held) >= attempt.together:
            self._release(attempt)
        return True

    def _release(self, attempt: Attempt) -> None:
        """Guesses that were held set out, in one frame."""
        held, attempt.held = attempt.held, []
        for token in held:
            self._feed(attempt, token)

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
            self.guessing.checked(right=right)
            attempt.lookup.checked(token.position, right=right)
            self._checked(job, attempt, token, ledger)
        else:
            token = attempt.pending.add(token, ledger)
            last = self._ends(job, token) is not None
            self._show(job, attempt)
            if not last:
                attempt.unfed = token
                self._feed_in_turn(attempt)
        if job.attempt is not attempt:
            return
        self.guess(job, attempt)
        if (following := attempt.early.pop(attempt.position, None)) is not None:
            self._advance(job, attempt, following)

    def guess(self, job: Job, attempt: Attempt) -> None:
        """Have this server read what it has not read yet, and guess what follows."""
        self._ask(job, attempt)
        if attempt.reading is None:
            self._release(attempt)

    def _ask(self, job: Job, attempt: Attempt) -> None:
        lead, request, context = attempt.lead, job.request, self._context
        if lead is None or attempt.reading:
            return
        source = self.choose(attempt, lead)
        if isinf(lead.least):
            return
        ids = self._looked_up(job, attempt, lead)
        if source == HEAD or not lead.sources[source].able:
            return
        if attempt.pending.drafts >= lead.window or not attempt.may_guess(len(ids)):
            return
        start = attempt.read_by(source)
        tokens = tuple(ids[start : start + context.chunk])
        if not tokens:
            return
        if attempt.seen is not None:
            attempt.seen.tokens = ids
        attempt.reading = Reading(
            sequence=attempt.sequence,
            start=start,
            tokens=tokens,
            source=source,
            route=attempt.route,
            sampling=request.sampling,
            seen=attempt.seen,
            more=self._more(job, attempt, start + len(tokens)),
        )
        context.guess(attempt.reading)
        attempt.goes_on_from(source, start + len(tokens))

    def _more(self, job: Job, attempt: Attempt, position: int) -> int:
        """How many of the guesses that follow one at a position may be made with it."""
        request, pending = job.request, attempt.pending
        if (
            attempt.lead is None
            or attempt.seen is not None
            or not attempt.prompt <= position == _following(job, attempt)
        ):
            # Of a prompt none, nor where draws look back at what comes before.
            return 0
        # The answer's last token is not followed.
        left = len(request.prompt_ids) + request.max_new_tokens - 2 - position
        if attempt.chunks is not None:
            left = min(left, attempt.chunk_end - position - 1)
        return max(min(attempt.lead.window - pending.drafts - 1, left), 0)

    def _looked_up(self, job: Job, attempt: Attempt, lead: Lead) -> list[int]:
        """Follow what followed the same tokens before; all tokens afterwards."""
        ids = [*job.request.prompt_ids, *job.tokens]
        lookup = attempt.lookup
        lookup.learn(ids)
        ids += attempt.pending.tokens
        if attempt.unfed is not None or attempt.chunks is not None or len(ids) <= attempt.prompt:
            return ids
        known = len(ids)
        while (token := lookup.guess(ids, lead)) is not None:
            if not self._set_out(job, attempt, len(ids), token, "copy"):
                break
            self.guessing.copied += 1
            lookup.pending.add(len(ids))
            ids.append(token)
        if len(ids) > known:
            # They come all at once, and there is nothing to wait for.
            self._release(attempt)
        return ids

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
            attempt.strand()
            if attempt.held and attempt.held[0].position == token.position:
                # Full depth was faster.
                self._release(attempt)
            self._feed_in_turn(attempt)
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
        # Here as well, whether or not the route comes by: what is to set out is dropped.
        for server in {*attempt.servers, self._context.server}:
            withdraw = Withdraw(attempt.sequence, token.position, attempt.epoch)
            self._context.post(Parcel(to=server, message=withdraw))
        self._feed(attempt, token)

    def _feed(self, attempt: Attempt, token: Token) -> None:
        """Predict what follows a token."""
        first = attempt.pending.unconfirmed
        attempt.position, attempt.unfed = token.position + 1, None
        guessed = False
        if attempt.lead is not None and first is not None and first <= token.position:
            # What is guessed is awaited nevertheless.
            attempt.position, guessed = first, True
        attempt.fed = token.position if first is None else first - 1
        self._context.arrive(
            Arrival(
                sequence=attempt.sequence,
                position=token.position,
                token=token.token,
                epoch=attempt.epoch,
                guessed=guessed,
                wants=0 if attempt.lead is None else attempt.lead.along,
            )
        )

    def _ends(self, job: Job, token: Token) -> FinishReason | None:
        """Why the answer ends with this token, if it does."""
        if token.token in job.request.stop_ids:
            return "stop"
        count = token.position - len(job.request.prompt_ids) + 1
        return "length" if count == job.request.max_new_tokens else None

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
            job.tokens.append(token.token)
            reason = self._ends(job, token)
            event = TokenEvent(
                token=token.token,
                logprob=token.logprob,
                top_logprobs=tuple((each, value) for each, value in token.top),
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

    def quality_of(self, job: Job) -> tuple[float, float]:
        planner = self._context.planner
        copied = planner.in_force.engine.copied_bits is not None
        return quality(job.request, planner.settings, planner.profile, copied=copied)


def _following(job: Job, attempt: Attempt) -> int:
    """The position behind all that there is of an answer, guesses among it."""
    return len(job.request.prompt_ids) + len(job.tokens) + len(attempt.pending)
