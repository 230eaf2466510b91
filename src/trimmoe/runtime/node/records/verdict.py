"""Who of those that were asked for the same experts gave what others did not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from trimmoe.core.specs import FloatArray
from trimmoe.runtime.node.records.packing import MalformedMessage
from trimmoe.runtime.node.records.units import Check, Part

_ULPS, _LEAST_ROUNDING = 4, 2.0**-12


def rounding_of(dtype: torch.dtype) -> float:
    """By what share of a row's largest number honest results of a model in this precision may
    differ.

    Other processors, accelerators and batches of other sizes add up in another order: in float32 by
    our own loops never, in bfloat16 now and then, with differences far below this. What a server
    may falsify without being noticed is that little.
    """
    return max(_LEAST_ROUNDING, _ULPS * torch.finfo(dtype).eps)


@dataclass(kw_only=True, slots=True)
class Verdict:
    """On the results of one unit."""

    checked: int = 0
    """Results that were compared."""
    liars: set[int] = field(default_factory=set)
    """Who gave wrong results for sure."""
    suspects: set[int] = field(default_factory=set)
    """Some of whom did; nobody can say which."""
    rounding: float = 0.0
    """As of `judged`."""

    @property
    def is_open(self) -> bool:
        """Whether nobody knows what the right result is."""
        return bool(self.suspects)

    def same(self, one: FloatArray, two: FloatArray) -> bool:
        """Whether two results [d] of one row are."""
        if np.array_equal(one, two, equal_nan=True):
            return True
        most = self.rounding * min(np.abs(one).max(), np.abs(two).max())
        # Nothing infinite or undefined is near anything.
        return bool((np.abs(one - two) <= most).all())


def judged(
    parts: Mapping[int, Part],
    seconds: Mapping[Check, Part],
    trusted: Collection[int],
    count: int,
    rounding: float = 0.0,
) -> tuple[dict[int, Part], Verdict]:
    """The parts of a unit of `count` rows, with right ones in place of wrong ones, and the verdict.
    `trusted` are those whose word decides: they could falsify the answer anyway. Results are the
    same if they differ by no more than `rounding` times the largest number of the row."""
    verdict, right = Verdict(rounding=rounding), dict(parts)
    for server in sorted({first for first, _ in seconds}):
        said, rows = _rows(parts[server]), _offsets(parts[server], count)
        at = {offset: row for row, offset in enumerate(rows)}
        second = {
            by: (_rows(part), _offsets(part, count))
            for (first, by), part in seconds.items()
            if first == server
        }
        asked = {each for _, offsets in second.values() for each in offsets}
        if not asked <= at.keys():
            raise MalformedMessage("a partial sum of other rows")
        wrong = False
        for offset in sorted(asked):
            verdict.checked += 1
            others = {
                by: states[offsets.index(offset)]
                for by, (states, offsets) in second.items()
                if offset in offsets
            }
            known = _right(server, said[at[offset]], others, trusted, verdict)
            if known is not None:
                said[at[offset]], wrong = known, True
        if wrong:
            # As wide as sums are: what one expert gives fits, too.
            right[server] = replace(parts[server], states=torch.from_numpy(said))
    return right, verdict


def _right(
    server: int,
    said: FloatArray,
    others: Mapping[int, FloatArray],
    trusted: Collection[int],
    verdict: Verdict,
) -> FloatArray | None:
    """What takes the place of what a server `said`, if that is wrong and what is right is known."""
    voices = [(server, said), *others.items()]
    sure = next((states for by, states in voices[1:] if by in trusted), None)
    if sure is None:
        sure = next(
            (one for _, one in voices if sum(verdict.same(one, two) for _, two in voices) > 1), None
        )
    if sure is None:
        verdict.suspects |= {by for by, _ in voices}
        return None
    verdict.liars |= {by for by, states in voices if not verdict.same(states, sure)}
    return None if verdict.same(said, sure) else sure


def _rows(part: Part) -> FloatArray:
    return part.states.cpu().double().numpy().copy()


def _offsets(part: Part, count: int) -> list[int]:
    return list(part.offsets) or list(range(count))
