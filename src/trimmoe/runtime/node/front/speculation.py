"""What sets out next of answers, before what comes before it is confirmed or after that.

Guesses come of this server's own pass, of its draft model, of a draft head at the end of the route,
or of what was read before. A stream has one source at a time, besides copies, which cost nothing.
What was guessed sets out at once, and some of it together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isinf

from trimmoe.engine.lead import DRAFT_MODEL, HEAD, MOST_TOGETHER, OWN, Lead
from trimmoe.runtime.node.front.drafts import GUESSED, Guessing, Kind
from trimmoe.runtime.node.front.jobs import Attempt, FrontEndContext, Job
from trimmoe.runtime.node.records.output import Arrival
from trimmoe.runtime.node.records.readings import Reading
from trimmoe.runtime.node.records.tokens import Token
from trimmoe.runtime.service import FinishReason

MOST_UNDRAFTED = 40
"""Tokens in a row that a draft head may name nothing behind before a stream does without it."""


class Speculation:
    """Of all attempts under way at one front end; `job_of` finds a sequence's request."""

    def __init__(self, context: FrontEndContext, job_of: Callable[[int], Job | None]) -> None:
        self._context, self._job_of = context, job_of
        self.guessing = Guessing()

    def guess(self, job: Job, attempt: Attempt) -> None:
        """Have this server read what it has not read yet, and guess what follows."""
        self._ask(job, attempt)
        if attempt.reading is None:
            self.release(attempt)

    def follow_head(self, job: Job, attempt: Attempt, lead: Lead, token: Token) -> None:
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
        self.release(attempt)

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
                    self.release(attempt)
                    continue
            self.guess(job, attempt)

    def reconsider(self, job: Job, attempt: Attempt) -> None:
        """The load has changed: what is read for guesses that nobody would follow is let be, and
        what has come is read where somebody would follow."""
        if attempt.lead is None:
            return
        self._tell(job, attempt, attempt.lead)
        idle = isinf(attempt.lead.least) or attempt.lead.turn == HEAD
        if attempt.reading is not None and idle:
            attempt.stop_reading()
            self.release(attempt)
        elif attempt.reading is None and not idle:
            self.guess(job, attempt)

    def feed_in_turn(self, attempt: Attempt) -> None:
        """Follow the last token, unless that is a guess upon a guess: most of those would be in
        vain, and where full depth is nearly through they hardly save anything."""
        token = attempt.unfed
        if token is not None and attempt.pending.unconfirmed in (None, token.position):
            self.feed(attempt, token)

    def feed(self, attempt: Attempt, token: Token) -> None:
        """Predict what follows a token."""
        first = attempt.pending.unconfirmed
        attempt.position, attempt.unfed = token.position + 1, None
        guessed = False
        if attempt.lead is not None and first is not None and first <= token.position:
            # What is guessed is awaited nevertheless.
            attempt.position, guessed = first, True
        attempt.fed = token.position if first is None else first - 1
        attempt.last_fed = token.position
        self._context.arrive(
            Arrival(
                sequence=attempt.sequence,
                position=token.position,
                token=token.token,
                epoch=attempt.epoch,
                guessed=guessed,
                wants=attempt.wants,
            )
        )

    def release(self, attempt: Attempt) -> None:
        """Guesses that were held set out, in one frame."""
        held, attempt.held = attempt.held, []
        for token in held:
            self.feed(attempt, token)

    def _ask(self, job: Job, attempt: Attempt) -> None:
        lead, request, context = attempt.lead, job.request, self._context
        if lead is None or attempt.reading:
            return
        source = self._tell(job, attempt, lead)
        if isinf(lead.least):
            return
        ids = self._looked_up(job, attempt, lead)
        if source == HEAD or not lead.sources[source].able:
            return
        if attempt.pending.drafts >= lead.window or not attempt.may_guess(len(ids)):
            return
        start = attempt.read_by(source)
        tokens = tuple(ids[start : min(start + context.chunk, _until(job, ids, start))])
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
            prepares=lead.is_far,
        )
        context.guess(attempt.reading)
        attempt.goes_on_from(source, start + len(tokens))

    def _tell(self, job: Job, attempt: Attempt, lead: Lead) -> int:
        """Tell a stream what there is to know; the source whose turn it is by that."""
        known = _following(job, attempt)
        lead.unread = [known - attempt.read_by(source) for source in (OWN, DRAFT_MODEL)]
        lead.left = _end(job) - known
        if known <= attempt.prompt:
            # It has not begun: of what was expected when it came, nothing is to be made up for.
            lead.turn = OWN
        return self._context.prices.tell(lead, attempt.route)

    def _more(self, job: Job, attempt: Attempt, position: int) -> int:
        """How many of the guesses that follow one at a position may be made with it."""
        if (
            attempt.lead is None
            or attempt.seen is not None
            or not attempt.prompt <= position == _following(job, attempt)
        ):
            # Of a prompt none, nor where draws look back at what comes before.
            return 0
        # The answer's last token is not followed.
        left = _end(job) - 2 - position
        if attempt.chunks is not None:
            left = min(left, attempt.chunk_end - position - 1)
        return max(min(attempt.lead.window - attempt.pending.drafts - 1, left), 0)

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
            self.release(attempt)
        return ids

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
        if ended(job, token):
            return False
        attempt.pending.add(token, None, kind)
        attempt.held.append(token)
        if len(attempt.held) >= attempt.together:
            self.release(attempt)
        return True


def _until(job: Job, ids: Sequence[int], start: int) -> int:
    """Up to where tokens from a position on are read: where they are many, such as a prompt, not
    those that may yet be withdrawn, or all would be read in vain."""
    known = len(job.request.prompt_ids) + len(job.tokens)
    return known if known - start > MOST_TOGETHER else len(ids)


def ended(job: Job, token: Token) -> FinishReason | None:
    """Why the answer ends with this token, if it does."""
    if token.token in job.request.stop_ids:
        return "stop"
    return "length" if token.position + 1 == _end(job) else None


def _end(job: Job) -> int:
    """The position behind the last token that an answer may have."""
    return len(job.request.prompt_ids) + job.request.max_new_tokens


def _following(job: Job, attempt: Attempt) -> int:
    """The position behind all that there is of an answer, guesses among it."""
    return len(job.request.prompt_ids) + len(job.tokens) + len(attempt.pending)
