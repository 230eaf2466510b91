"""How quick answers were lately."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

WINDOW_S = 300.0
"""How far back answers count."""
RATE_S = 5.0
"""How far back tokens count."""
_MOST = 2_000
_SHARES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Of some times, seconds; 0 where there are none."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Of the answers of the last `WINDOW_S`."""

    tokens_per_s: float
    """All answers' together, over the last `RATE_S`."""
    first_token_s: Quantiles
    """From request to first token."""
    per_token_s: Quantiles
    """Of each answer that has ended, the mean time from token to token."""


class Recent:
    """What is told of tokens and answers as they come; clocks are monotonic, seconds."""

    def __init__(self) -> None:
        self._tokens: deque[float] = deque(maxlen=_MOST)
        self._first: deque[tuple[float, float]] = deque(maxlen=_MOST)
        self._each: deque[tuple[float, float]] = deque(maxlen=_MOST)

    def token(self, now_s: float) -> None:
        """A token came."""
        self._tokens.append(now_s)

    def first(self, now_s: float, after_s: float) -> None:
        """It was an answer's first one."""
        self._first.append((now_s, after_s))

    def ended(self, now_s: float, per_token_s: float) -> None:
        """An answer of several tokens ended."""
        self._each.append((now_s, per_token_s))

    def speed(self, now_s: float) -> Speed:
        """As of now."""
        lately = [at for at in self._tokens if at > now_s - RATE_S]
        # Where more came than are kept, those that are kept say how fast.
        span_s = now_s - lately[0] if len(lately) == _MOST else RATE_S
        return Speed(
            tokens_per_s=len(lately) / span_s if lately else 0.0,
            first_token_s=_quantiles(self._first, now_s),
            per_token_s=_quantiles(self._each, now_s),
        )


def _quantiles(told: deque[tuple[float, float]], now_s: float) -> Quantiles:
    while told and told[0][0] < now_s - WINDOW_S:
        told.popleft()
    if not told:
        return Quantiles()
    p50, p90, p99 = np.percentile([value for _, value in told], _SHARES).tolist()
    return Quantiles(p50=p50, p90=p90, p99=p99, count=len(told))
