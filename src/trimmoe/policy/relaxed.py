"""Relaxed acceptance: guesses that full depth does not name and that are kept all the same.

A wrong guess costs the way of a token through all servers. Where full depth puts it second, nearly
as high as its first, and the request's budget has a whole token left, it is kept instead. Whatever
followed it was computed exactly, upon it, so that one prediction flips, and none behind it: the
charge is known, where that of other levers is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FLIP = 1.0
"""What a guess that is kept is charged, in tokens."""
NEAR = 0.5
"""Share of the first one's probability that the second one needs."""
RANKED = 2
"""Tokens that full depth has to rank."""
NOBODY = -1
"""No token."""


def runner_up(ranked: Sequence[tuple[int, float]]) -> int:
    """The second of the most probable tokens, best first, with the natural logarithms of their
    probabilities, where it is nearly as probable as the first; else `NOBODY`."""
    if len(ranked) < RANKED:
        return NOBODY
    (_, first), (token, second) = ranked[:RANKED]
    return token if second >= first + math.log(NEAR) else NOBODY


def keeps(credit: float, guess: int, second: int) -> bool:
    """Whether a guess is kept by a request that has so much `credit` left, its own token's counted
    in, where `second` is the `runner_up` of full depth."""
    return credit >= FLIP and second != NOBODY and guess == second
