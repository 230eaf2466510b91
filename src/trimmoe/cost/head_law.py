"""How often a draft head is right, by the chance that it gives a draft itself.

One figure of a head is measured, the share of its first drafts that are right. The rest is a law:
its chances are spread evenly from none to certain, and it is right more often than it says,

    P(right | chance p) = 1 - (1 - p) ** g,   g = right / (1 - right),

which makes the share of all first drafts that are right what was measured. How well that holds,
`benchmarks/bench_draft_head.py` shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trimmoe.core.specs import MOST_DRAFTED, USUAL_DRAFTED, FloatArray

_STEPS, _NONE = 100, 1e-12
_CHANCES = np.linspace(0.0, 1.0, _STEPS)


def chance_right(chance: FloatArray, right: float) -> FloatArray:
    """How likely drafts are right to which a head gives these chances, [n] both; `right` of all
    first drafts are."""
    return 1.0 - (1.0 - chance) ** _exponent(right)


def right_among(least: float, right: float) -> float:
    """The share that is right of those first drafts to which a head gives at least this chance."""
    power = _exponent(right)
    return 1.0 - (1.0 - least) ** power / (power + 1.0)


def tokens_per_pass(right: float) -> float:
    """Guesses that a pass of a server's own brings where a head, `right` so often, names as many
    drafts behind the token that it reads as it usually does: one more than are right of these."""
    return sum(right**behind for behind in range(1 + USUAL_DRAFTED))


def rows_among(least: float) -> float:
    """A token and the drafts behind it that are read along, on average, where the chance that a
    head gives to a draft and all before it has to be `least`."""
    return 1.0 + sum(_likely(least, count) for count in range(1, MOST_DRAFTED + 1))


def named_by_step(least: float) -> tuple[float, ...]:
    """The chance that a head names a first draft to that end, a second one, and so on: with the one
    that is not likely enough any more."""
    return (1.0, *(_likely(least, count) for count in range(1, MOST_DRAFTED)))


def tokens_among(least: Sequence[float], right: float) -> list[float]:
    """Tokens that those rows bring, for each of several chances: drafts up to the first wrong one,
    and what follows that."""
    kept, brought = np.ones(_STEPS), np.ones(len(least))
    for _ in range(MOST_DRAFTED):
        kept = _one_more(kept, right)
        brought += np.interp(least, _CHANCES, kept)
    return brought.tolist()


def _likely(least: float, count: int) -> float:
    """The chance that the product of so many even chances is at least this."""
    drop = -math.log(max(least, _NONE))
    return max(1.0 - least * sum(drop**j / math.factorial(j) for j in range(count)), 0.0)


def _one_more(kept: FloatArray, right: float) -> FloatArray:
    """With what chance a draft and those behind it are right and likely enough, by what they have
    to be, if those behind it are with chance `kept`, both for `_CHANCES`."""
    given = (np.arange(_STEPS) + 0.5) / _STEPS
    behind = np.interp(_CHANCES[:, None] / given, _CHANCES, kept, right=0.0)
    return (behind * chance_right(given, right)).mean(axis=1)


def _exponent(right: float) -> float:
    return right / (1.0 - right) if right < 1.0 else math.inf
