"""The requests of a run: when they come, where they enter, what they are made of."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.simulator.settings import Load, Prefill

_AT_ONCE = 256
"""Requests that are drawn at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """R requests in the order they arrive; their tokens are consecutive tokens of a sequence of
    the trace, from `offset` on, around its end."""

    arrival_s: FloatArray
    """[R]; in the closed loop 0, they come when there is room."""
    access: IntArray
    sequence: IntArray
    """Of the trace, [R]."""
    offset: IntArray
    prompt: IntArray
    """Prompt tokens to run, 0 if prefill is excluded, [R]."""
    output: IntArray
    """Tokens to generate, >= 1, [R]. With a prompt the first of them comes out of the prefill."""

    @property
    def count(self) -> int:
        return self.access.size

    @property
    def decoded(self) -> IntArray:
        """Tokens that go through the layers one by one, [R]."""
        return self.output - (self.prompt > 0)

    def taken(self, which: IntArray | BoolArray) -> Requests:
        """Some of them, or all in another order: rows [R'], or whether to take each [R]."""
        return Requests(**{item.name: getattr(self, item.name)[which] for item in fields(self)})


class Source:
    """Draws requests, the same for the same seed however many are asked for at a time."""

    def __init__(
        self,
        load: Load,
        access_share: FloatArray,
        *,
        sequences: int,
        length: int,
        seed: int,
    ) -> None:
        self._load, self._share = load, access_share
        self._sequences, self._length = sequences, length
        self._rng = [np.random.default_rng([seed, stream]) for stream in range(6)]
        self._clock_s = 0.0

    def draw(self, count: int) -> Requests:
        """The next `count` requests."""
        load, (gaps, where, which, offset, prompt, output) = self._load, self._rng
        asked = self._lengths(prompt, load.prompt_tokens, count)
        if load.prefill is Prefill.EXCLUDED:
            asked = np.zeros_like(asked)
        return Requests(
            arrival_s=self._arrivals(gaps, count),
            access=where.choice(self._share.size, size=count, p=self._share),
            sequence=which.integers(self._sequences, size=count),
            offset=offset.integers(self._length, size=count),
            prompt=asked,
            output=self._lengths(output, load.output_tokens, count),
        )

    def until(self, end_s: float) -> Requests:
        """The requests of the open loop that arrive before `end_s`."""
        assert self._load.rate_per_s is not None
        most, parts = self._load.requests, [self.draw(_AT_ONCE)]
        while self._clock_s < end_s and (most is None or _AT_ONCE * len(parts) < most):
            parts.append(self.draw(_AT_ONCE))
        drawn = join_requests(parts)
        kept = drawn.arrival_s < end_s
        if most is not None:
            kept[most:] = False
        return drawn.taken(kept)

    def _arrivals(self, rng: np.random.Generator, count: int) -> FloatArray:
        rate, cv2 = self._load.rate_per_s, self._load.burstiness
        if rate is None:
            return np.zeros(count)
        scaled = rng.gamma(1.0 / cv2, cv2, count) if cv2 else np.ones(count)
        times = self._clock_s + np.cumsum(scaled / rate)
        self._clock_s = float(times[-1])
        return times

    def _lengths(self, rng: np.random.Generator, mean: float, count: int) -> IntArray:
        if self._load.fixed_lengths:
            return np.full(count, round(mean))
        return rng.geometric(1.0 / mean, count)


def join_requests(parts: list[Requests]) -> Requests:
    """The requests of all parts, one after another."""
    columns = {
        item.name: np.concatenate([getattr(part, item.name) for part in parts])
        for item in fields(Requests)
    }
    return Requests(**columns)
