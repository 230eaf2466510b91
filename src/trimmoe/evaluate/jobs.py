"""Many sequences on one driver: each is a job, and a finished one makes room for the next.

A job is an exactly run prompt and a rule that names the next token. Teacher forcing names the
answer's, generation the one drawn. Either way every token passes the driver's policy as it would
in serving, whatever else is decoded beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import IntArray
from trimmoe.progress import track
from trimmoe.runtime.local import LocalDriver
from trimmoe.runtime.sampling import Sampling, draw


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

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer) - 1

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have given the answer."""
        return self.predictions == list(self.answer)

    def next_token(self, logits: Tensor, ledger: Ledger | None) -> int | None:
        token = self.answer[len(self.predictions)]
        self.predictions.append(int(logits.argmax()))
        self.logprobs.append(float(logits.float().log_softmax(-1)[token]))
        self.ledger = added(self.ledger, ledger)
        return token if len(self.predictions) < len(self.answer) else None


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
) -> None:
    """Run all jobs to their ends, `at_once` of them together, the longest first.

    Job i enters at server `access[i]`, [jobs]. The driver needs `at_once` free slots.
    """

    def admitted(index: int) -> tuple[int, int | None]:
        logits = driver.open(
            index,
            jobs[index].prompt,
            access=int(access[index]),
            budget=budget,
            confidence=confidence,
        )
        return index, jobs[index].next_token(logits, None)

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
    waiting = deque(sorted(range(len(jobs)), key=lambda index: -jobs[index].length))
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


def added(total: Ledger | None, more: Ledger | None) -> Ledger | None:
    """Their sum, where None is nothing."""
    if total is None or more is None:
        return total or more
    return total + more
