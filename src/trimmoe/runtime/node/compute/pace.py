"""How long the steps of a batch take: as long as they do, or as long as on another machine.

An emulated machine takes what the cost model says, however fast this one is; the worker works
first and waits for the rest. Where this one is too slow for a step, it catches up in the next.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from trimmoe.core.specs import FloatArray, IntArray, straight_times
from trimmoe.cost.batching import batch_s
from trimmoe.cost.guessing import draft_times_s, guess_times_s, token_batch_times
from trimmoe.cost.model import CostModel
from trimmoe.models.base import DROPPED

_LATELY = 0.99
"""Share of what came before that counts with every batch."""
_FEWEST = 8.0
"""Guesses of late that say what one takes."""


class Pace:
    """Nothing is waited for; used by the worker only."""

    def begin(self) -> None:
        """A batch begins."""

    def dense(self, layer: int, rows: int) -> None:
        """Attention, router and shared expert of so many rows are computed."""

    def experts(self, layer: int, experts: IntArray) -> None:
        """Slots of these experts, or copies, are computed, [n, k]; `DROPPED` ones are none."""

    def segment(self, first: int, experts: IntArray) -> None:
        """Layers from `first` on are computed whole, these experts of them, [n, L, k]."""

    def guess(self, rows: int) -> None:
        """So many rows pass a layer with the experts at hand."""

    def draft(self, rows: int) -> None:
        """So many rows pass the draft model."""


@dataclass(kw_only=True, slots=True)
class GuessPace:
    """What this server's own guesses took it lately, those that were withdrawn counted in."""

    batch_times: tuple[float, ...]
    """See `token_batch_times`."""
    _spent_s: float = 0.0
    _made: float = 0.0
    """As many guesses of a stream by itself would have been made with that work."""

    def took(self, spent_s: float, made: int, streams: int) -> None:
        """A batch of readings of so many streams is over, of which so many guesses came. What reads
        a prompt says nothing of what a guess takes, and is not told here."""
        self._spent_s = self._spent_s * _LATELY + spent_s
        alone = batch_s(1.0, streams, self.batch_times) / streams
        self._made = self._made * _LATELY + made * alone

    @property
    def token_s(self) -> float | None:
        """Seconds for a guess of one stream by itself; None where there were too few to tell."""
        return self._spent_s / self._made if self._made >= _FEWEST else None


@dataclass(kw_only=True, slots=True)
class ChunkPace:
    """What prompts took this server lately."""

    _row_s: float | None = None
    """A row of a chunk in a layer; None before the first."""

    def took(self, spent_s: float, rows: int) -> None:
        """So many rows have passed a layer each."""
        self._row_s = spent_s / rows

    def layers(self, rows: int, until_s: float) -> int:
        """How many layers a chunk of so many rows passes until then, at least one."""
        if self._row_s is None:
            return 1
        left_s = until_s - time.perf_counter()
        return max(round(left_s / (self._row_s * rows)), 1)


@dataclass(kw_only=True, slots=True)
class EmulatedPace(Pace):
    """Returns when the emulated machine would be done."""

    dense_s: FloatArray
    """Of one row, [N]."""
    expert_s: FloatArray
    """Of one row in all that may run in a slot, [N, F * E]."""
    guess_s: float
    """Of one row that is read by itself, in a layer."""
    batch_times: tuple[float, ...]
    """As in `Speeds`."""
    guess_times: tuple[float, ...]
    """The same of guesses, see `token_batch_times`."""
    draft_s: float = 0.0
    """Of one row in the draft model."""
    _due_s: float = field(default=0.0)

    @staticmethod
    def of(
        cost: CostModel, server: int, batch_share: float, top_k: int, draft_size: float = 0.0
    ) -> EmulatedPace:
        """The pace of one server of the cost model's cluster; `draft_size` as in
        `cost.guessing.draft_times_s`."""
        times = straight_times(batch_share)
        return EmulatedPace(
            draft_s=float(draft_times_s(cost, top_k, draft_size)[server]),
            dense_s=cost.dense_s[server],
            expert_s=cost.form_s[server],
            guess_s=float(guess_times_s(cost, top_k)[server]) / cost.layer_count,
            batch_times=times,
            guess_times=token_batch_times(replace(cost, batch_times=times), top_k),
        )

    def begin(self) -> None:
        self._due_s = time.perf_counter()

    def dense(self, layer: int, rows: int) -> None:
        self._spend(batch_s(float(self.dense_s[layer]), rows, self.batch_times))

    def experts(self, layer: int, experts: IntArray) -> None:
        used, rows = np.unique(experts[experts != DROPPED], return_counts=True)
        each_s = self.expert_s[layer, used].tolist()
        pairs = zip(each_s, rows.tolist(), strict=True)
        self._spend(sum(batch_s(one_s, count, self.batch_times) for one_s, count in pairs))

    def segment(self, first: int, experts: IntArray) -> None:
        for at in range(experts.shape[1]):
            self.dense(first + at, experts.shape[0])
            self.experts(first + at, experts[:, at])

    def draft(self, rows: int) -> None:
        self._spend(batch_s(self.draft_s, rows, self.batch_times))

    def guess(self, rows: int) -> None:
        self._spend(batch_s(self.guess_s, rows, self.guess_times))

    def _spend(self, seconds: float) -> None:
        self._due_s += seconds
        left_s = self._due_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
