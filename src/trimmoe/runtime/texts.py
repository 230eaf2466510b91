"""Texts that are decoded whatever the model predicts, and which of them have a token in a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A sequence to be decoded whatever the model predicts."""

    prompt: Sequence[int]
    """Token ids that run exactly."""
    tokens: Sequence[int]
    """What is decoded under the policy, n >= 1 token ids."""
    following: Sequence[int]
    """What really follows each of them, n token ids."""
    access: int
    budget: float
    confidence: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The prediction after one token of a text."""

    text: int
    prediction: int
    logprob: float
    """Natural logarithm of the probability of the token that follows."""
    slot_expert: IntArray
    """Expert that ran in each slot of each of the L layers passed, -1 = dropped, [L, k]."""
    ledger: Ledger


def schedule(lengths: Sequence[int], at_once: int) -> list[tuple[int, ...]]:
    """Which texts have a token in each step: `at_once` of them, a finished one makes room.

    `lengths` are their tokens, >= 1; texts begin in order.
    """
    waiting, left = deque(range(len(lengths))), {}
    steps = []
    while waiting or left:
        while waiting and len(left) < at_once:
            text = waiting.popleft()
            left[text] = lengths[text]
        steps.append(tuple(left))
        left = {text: count - 1 for text, count in left.items() if count > 1}
    return steps


def batches(lengths: Sequence[int], *, most_rows: int) -> list[list[int]]:
    """Which sequences run as one batch, as wide as its longest, of at most so many tokens.

    A sequence that is longer than that runs alone. In order.
    """
    made: list[list[int]] = []
    widest = 0
    for index, length in enumerate(lengths):
        widest = max(widest, length)
        if not made or widest * (len(made[-1]) + 1) > most_rows:
            made.append([])
            widest = length
        made[-1].append(index)
    return made
