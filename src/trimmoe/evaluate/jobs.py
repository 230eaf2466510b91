"""Many sequences on one driver: each is a job, and a finished one makes room for the next.

A job is an exactly run prompt and a rule that names the next token. Teacher forcing names the
answer's, generation the one drawn. Either way every token passes the driver's policy as it would
in serving, whatever else is decoded beside it.

Answers are known beforehand, so they need not be decoded step by step: see `runtime.layerwise` for
what of it is the same (all that is decided, charged and steered) and what is not (rounding).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import IntArray
from trimmoe.evaluate.scoring import Scoring
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.progress import track
from trimmoe.runtime.layerwise import Layerwise
from trimmoe.runtime.local import LocalDriver
from trimmoe.runtime.sampling import Sampling, draw
from trimmoe.runtime.texts import Text


class Job(Protocol):
    """One sequence from its prompt to its end."""

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids that run exactly."""
        ...

    @property
    def length(self) -> int:
        """Positions that it takes at most."""
        ...

    def next_token(self, logits: Tensor, ledger: Ledger | None) -> int | None:
        """The token to decode after a prediction [V]; None ends the sequence.

        `ledger` is what the prediction cost, None for the one that the prompt made.
        """
        ...


@dataclass(kw_only=True, slots=True)
class Forced:
    """An answer decoded token by token whatever the model would say, n >= 1 tokens."""

    prompt: Sequence[int]
    answer: Sequence[int]
    predictions: list[int] = field(default_factory=list)
    """Most probable token at each of the answer's positions; the prompt makes the first."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithm of the answer's probability at each position."""
    ledger: Ledger | None = None
    """Of the n - 1 decoded tokens, None if there are none."""
    worst_prefix: float = 0.0
    """Largest share of the credit so far that had been charged after any decoded token."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer) - 1

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have given the answer."""
        return self.predictions == list(self.answer)

    def next_token(self, logits: Tensor, ledger: Ledger | None) -> int | None:
        token = self.answer[len(self.predictions)]
        self.add(int(logits.argmax()), float(logits.float().log_softmax(-1)[token]), ledger)
        return token if len(self.predictions) < len(self.answer) else None

    def add(self, prediction: int, logprob: float, ledger: Ledger | None) -> None:
        """Note the next prediction; `ledger` as in `next_token`."""
        self.predictions.append(prediction)
        self.logprobs.append(logprob)
        self.ledger = added(self.ledger, ledger)
        if self.ledger is not None and self.ledger.loss > 0:
            self.worst_prefix = max(self.worst_prefix, self.ledger.loss / self.ledger.budget)


@dataclass(kw_only=True, slots=True)
class Generated:
    """A text generated until it ends by itself, by a stop or by its length."""

    prompt: Sequence[int]
    max_new_tokens: int
    stop_tokens: Collection[int]
    has_ended: Callable[[list[int]], bool]
    """Whether the tokens made so far hold a text to stop at."""
    sampling: Sampling = field(default_factory=Sampling)
    made: list[int] = field(default_factory=list)
    """Without the stop token."""
    ledger: Ledger | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + self.max_new_tokens

    def next_token(self, logits: Tensor, ledger: Ledger | None) -> int | None:
        self.ledger = added(self.ledger, ledger)
        token = draw(logits, self.sampling, len(self.prompt) + len(self.made)).token
        if token in self.stop_tokens:
            return None
        self.made.append(token)
        full = len(self.made) == self.max_new_tokens
        return None if full or self.has_ended(self.made) else token


def run_jobs(
    driver: LocalDriver,
    jobs: Sequence[Job],
    *,
    access: IntArray,
    budget: float,
    confidence: float,
    at_once: int,
    label: str,
    scoring: Scoring = Scoring.LAYERS,
) -> None:
    """Run all jobs to their ends, `at_once` of them together, the longest first.

    Job i enters at server `access[i]`, [jobs]. The driver needs `at_once` free slots; where
    `scoring` is by layers, more of them let answers of unlike lengths follow one another sooner.
    """
    forced = [job for job in jobs if isinstance(job, Forced)]
    if (
        scoring is Scoring.LAYERS
        and len(forced) == len(jobs)
        and driver.view.rewinds
        and not isinstance(driver.view, EncoderDecoderView)
    ):
        finished = _scored(
            driver, forced, access, budget=budget, confidence=confidence, at_once=at_once
        )
    else:

        def admitted(index: int) -> tuple[int, int | None]:
            job, policy = jobs[index], driver.engine.settings
            plain = not isinstance(job, Generated) or job.sampling.is_plain
            logits = driver.open(
                index,
                job.prompt,
                access=int(access[index]),
                budget=policy.allowed(budget, plain=plain),
                confidence=confidence,
            )
            return index, job.next_token(logits, None)

        finished = _finished(driver, jobs, admitted, at_once)
    for _ in track(range(len(jobs)), label):
        next(finished)


def _finished(
    driver: LocalDriver,
    jobs: Sequence[Job],
    admitted: Callable[[int], tuple[int, int | None]],
    at_once: int,
) -> Iterator[int]:
    """Jobs by number as they end."""
    waiting = deque(_longest_first(jobs))
    tokens: dict[int, int] = {}
    while waiting or tokens:
        nexts: list[tuple[int, int | None]]
        if waiting and len(tokens) < at_once:
            nexts = [admitted(waiting.popleft())]
        else:
            nexts = [
                (one.sequence, jobs[one.sequence].next_token(one.logits, one.ledger))
                for one in driver.decode(tokens)
            ]
        for index, token in nexts:
            if token is not None:
                tokens[index] = token
                continue
            tokens.pop(index, None)
            driver.close(index)
            yield index


def _longest_first(jobs: Sequence[Job]) -> list[int]:
    return sorted(range(len(jobs)), key=lambda index: -jobs[index].length)


def _scored(
    driver: LocalDriver,
    jobs: Sequence[Forced],
    access: IntArray,
    *,
    budget: float,
    confidence: float,
    at_once: int,
) -> Iterator[int]:
    """Answers scored layer by layer, jobs by number as they end."""
    texts: list[Text] = []
    decoded: list[int] = []
    for index in _longest_first(jobs):
        job = jobs[index]
        text = Text(
            prompt=job.prompt,
            tokens=job.answer[:-1],
            following=job.answer[1:],
            access=int(access[index]),
            budget=budget,
            confidence=confidence,
        )
        if text.tokens:
            texts.append(text)
            decoded.append(index)
            continue
        logits = driver.open(
            index, job.prompt, access=text.access, budget=budget, confidence=confidence
        )
        job.next_token(logits, None)
        driver.close(index)
        yield index

    def opened(text: int, logits: Tensor) -> None:
        jobs[decoded[text]].next_token(logits, None)

    for one in Layerwise(driver, texts, at_once=at_once, opened=opened).run():
        job = jobs[decoded[one.text]]
        job.add(one.prediction, one.logprob, one.ledger)
        if len(job.predictions) == len(job.answer):
            yield decoded[one.text]


def added(total: Ledger | None, more: Ledger | None) -> Ledger | None:
    """Their sum, where None is nothing."""
    if total is None or more is None:
        return total or more
    return total + more
