"""What a draft head names behind the tokens of a simulation, and whether that is right: as it was
recorded where it was, else by the law of `cost.head_law`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trimmoe.core.specs import MOST_DRAFTED, BoolArray, FloatArray, IntArray
from trimmoe.core.trace import Trace
from trimmoe.cost.head_law import chance_right
from trimmoe.engine.guesses import DraftsAlong
from trimmoe.simulator.uniform import uniform
from trimmoe.simulator.world import RIGHT, UNSURE, WRONG

_GIVEN_SEED, _RIGHT_SEED = 7919, 15013
"""Apart from the draws that exits are audited by."""
_BEHIND = 1_000_003
"""Apart from the numbers of tokens: draws of what is drafted behind a draft."""


class Draft(NamedTuple):
    """A right one, and all before it."""

    ahead: int
    """How many there are of them."""
    chance: float
    """That the head gives all of them."""
    behind: int
    """The token of the trace that they follow."""


class Named(NamedTuple):
    """What the head names behind a token and the drafts that have followed it."""

    chances: FloatArray
    """That it gives all of a chain up to each one more, [at most `MOST_DRAFTED`]."""
    right: bool
    """Whether the first of these is."""


@dataclass(kw_only=True, slots=True)
class HeadDrafts(ABC):
    """Drafts are read along up to the last one that is, with all before it, likely enough to be
    right; those behind a token that is known, one after the other until one is wrong, are its
    chain."""

    along: DraftsAlong
    _chains: dict[int, dict[int, Draft]] = field(default_factory=dict)
    """By request and number of a token, the draft behind it where that is right."""

    def open(self, request: int) -> None:
        """Before any of its tokens is decided."""
        self._chains[request] = {}

    def close(self, request: int) -> None:
        """It is finished."""
        del self._chains[request]

    def is_right(self, requests: IntArray, numbers: IntArray) -> list[bool]:
        """Whether the `numbers`-th tokens of requests are followed by a right draft, [n]."""
        pairs = zip(requests.tolist(), numbers.tolist(), strict=True)
        return [number in self._chains[request] for request, number in pairs]

    def drafted(
        self, requests: IntArray, numbers: IntArray, access: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        """What becomes of the draft behind the `numbers`-th token of each request, one of `tokens`
        of the trace, and how many of its chain set out with that, wrong ones included, [n] each."""
        fates, counts = np.full(requests.size, UNSURE), np.zeros(requests.size, dtype=np.int64)
        asked = list(zip(requests.tolist(), numbers.tolist(), tokens.tolist(), strict=True))
        before = [
            self._chains[request].get(number - 1, Draft(0, 1.0, token))
            for request, number, token in asked
        ]
        named = self._named(requests, numbers, before)
        rows = zip(asked, before, named, access.tolist(), strict=True)
        for row, ((request, number, _), draft, its, server) in enumerate(rows):
            likely = int((its.chances >= self.along.likely[server]).sum())
            sure = min(likely, int(self.along.most[server]) - draft.ahead)
            counts[row] = draft.ahead + max(sure, 0)
            if sure <= 0:
                continue
            fates[row] = RIGHT if its.right else WRONG
            if its.right:
                chance = float(its.chances[0])
                self._chains[request][number] = Draft(draft.ahead + 1, chance, draft.behind)
        return fates, counts

    @abstractmethod
    def _named(self, requests: IntArray, numbers: IntArray, before: Sequence[Draft]) -> list[Named]:
        """Behind the `numbers`-th tokens of requests and the drafts that are there already, [n]."""


@dataclass(kw_only=True, slots=True)
class RecordedDrafts(HeadDrafts):
    """As a trace has it."""

    chances: FloatArray
    """[T, D]."""
    wrong: BoolArray
    """[T, D]."""

    def _named(self, requests: IntArray, numbers: IntArray, before: Sequence[Draft]) -> list[Named]:
        return [self._behind(one) for one in before]

    def _behind(self, one: Draft) -> Named:
        left = self.chances[one.behind, one.ahead :]
        return Named(left, bool(left.size and not self.wrong[one.behind, one.ahead]))


@dataclass(kw_only=True, slots=True)
class DrawnDrafts(HeadDrafts):
    """As the law has it."""

    seed: int
    first_right: float
    """Share of first drafts that are."""

    def _named(self, requests: IntArray, numbers: IntArray, before: Sequence[Draft]) -> list[Named]:
        behind = [numbers + _BEHIND * more for more in range(MOST_DRAFTED)]
        draws = [uniform(self.seed + _GIVEN_SEED, requests, each) for each in behind]
        given = np.stack(draws, axis=1)
        chance = chance_right(given[:, 0], self.first_right)
        right = uniform(self.seed + _RIGHT_SEED, requests, numbers) < chance
        rows = zip(before, given, right.tolist(), strict=True)
        return [Named(one.chance * np.cumprod(its), hit) for one, its, hit in rows]


def head_drafts(trace: Trace, along: DraftsAlong, *, seed: int, first_right: float) -> HeadDrafts:
    """Those of a run: recorded ones if the trace has them."""
    if trace.drafted_chance is None or trace.drafted_wrong is None:
        return DrawnDrafts(along=along, seed=seed, first_right=first_right)
    chances = trace.drafted_chance.astype(np.float64)
    return RecordedDrafts(along=along, chances=chances, wrong=trace.drafted_wrong)
