"""What a draft head names behind tokens, by chance: traces do not tell."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trimmoe.core.specs import MOST_DRAFTED, FloatArray, IntArray
from trimmoe.cost.head_law import chance_right
from trimmoe.engine.guesses import DraftsAlong
from trimmoe.simulator.uniform import uniform
from trimmoe.simulator.world import RIGHT, UNSURE, WRONG

_GIVEN_SEED, _RIGHT_SEED = 7919, 15013
"""Apart from the draws that exits are audited by."""
_BEHIND = 1_000_003
"""Apart from the numbers of tokens: draws of what is drafted behind a draft."""


@dataclass(kw_only=True, slots=True)
class HeadDrafts:
    """Drafts are read along up to the last one that is, with all before it, likely enough to be
    right; those behind a token that is known, one after the other until one is wrong, are its
    chain."""

    seed: int
    right: float
    """Share of first drafts that are."""
    along: DraftsAlong
    _chains: dict[int, dict[int, tuple[int, float]]] = field(default_factory=dict)
    """By request and number of a token, where the draft behind it is right, how many drafts of its
    chain there are by then, and the chance that the head gives them."""

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
        self, requests: IntArray, numbers: IntArray, access: IntArray
    ) -> tuple[IntArray, IntArray]:
        """What becomes of the draft behind the `numbers`-th token of each request, and how many of
        its chain set out with that, wrong ones included, [n] each."""
        given = self._given(requests, numbers)
        right = uniform(self.seed + _RIGHT_SEED, requests, numbers) < chance_right(
            given[:, 0], self.right
        )
        fates, counts = np.full(requests.size, UNSURE), np.zeros(requests.size, dtype=np.int64)
        rows = zip(requests.tolist(), numbers.tolist(), access.tolist(), strict=True)
        for row, (request, number, server) in enumerate(rows):
            chain = self._chains[request]
            ahead, chance = chain.get(number - 1, (0, 1.0))
            likely = chance * np.cumprod(given[row]) >= self.along.likely[server]
            sure = min(int(likely.sum()), int(self.along.most[server]) - ahead)
            counts[row] = ahead + max(sure, 0)
            if sure > 0:
                fates[row] = RIGHT if right[row] else WRONG
            if fates[row] == RIGHT:
                chain[number] = ahead + 1, chance * float(given[row, 0])
        return fates, counts

    def _given(self, requests: IntArray, numbers: IntArray) -> FloatArray:
        """The chances that the head gives to the draft behind a token, and to each one behind that,
        [n, MOST_DRAFTED]."""
        behind = [numbers + _BEHIND * more for more in range(MOST_DRAFTED)]
        draws = [uniform(self.seed + _GIVEN_SEED, requests, each) for each in behind]
        return np.stack(draws, axis=1)
