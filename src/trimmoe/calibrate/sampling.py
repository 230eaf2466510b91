"""Which what-ifs to run: forced skips, drops and substitutions, drawn where policies act."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.curves import bin_of
from trimmoe.core.specs import BoolArray, FloatArray, IntArray

KEEP = -2
"""A slot that runs its own target."""
DROP = -1
"""A slot that runs nothing, as `MoEView.experts` reads it."""
_LOW, _HIGH = 2.0, 0.5
"""Relative sampling of the lowest and the highest bin; policies act on low mass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Forced changes: at `layer`, token `token` runs `slots` instead of its activated set."""

    token: IntArray
    """[S]."""
    layer: IntArray
    """[S]."""
    slots: IntArray
    """Per slot of the activated set KEEP, DROP or the expert to run instead, [S, k]."""

    @property
    def count(self) -> int:
        return self.token.shape[0]

    def take(self, index: IntArray | BoolArray) -> Changes:
        """The changes at these indices."""
        return Changes(token=self.token[index], layer=self.layer[index], slots=self.slots[index])


def join(parts: Sequence[Changes]) -> Changes:
    """All changes of several sets, in order."""
    return Changes(
        token=np.concatenate([part.token for part in parts]),
        layer=np.concatenate([part.layer for part in parts]),
        slots=np.concatenate([part.slots for part in parts]),
    )


def by_window(changes: Changes, windows: int, length: int) -> list[IntArray]:
    """Indices of the changes of each of `windows` windows of `length` tokens, ordered by layer."""
    owner = changes.token // length
    order = np.lexsort((np.arange(changes.count), changes.layer, owner))
    bounds = np.searchsorted(owner[order], np.arange(windows + 1))
    return [order[a:b] for a, b in pairwise(bounds)]


def forced(experts: Tensor, slots: Tensor) -> Tensor:
    """The activated sets [n, k] with the slots [n, k] that are not KEEP put in their place."""
    return torch.where(slots == KEEP, experts, slots)


def stratified(bins: IntArray, bin_count: int, wanted: int, rng: np.random.Generator) -> IntArray:
    """Indices into `bins` [n]: about `wanted`, uniform within a bin, more from low bins.

    The estimate of a bin stays honest, because within it every entry is as likely. A bin of -1
    marks an entry that cannot be taken.
    """
    shuffled = rng.permutation(bins.shape[0])
    by_bin = shuffled[np.argsort(bins[shuffled], kind="stable")]
    starts = np.searchsorted(bins[by_bin], np.arange(bin_count + 1))
    sizes = np.diff(starts)
    quota = _quotas(sizes, wanted, np.linspace(_LOW, _HIGH, bin_count))
    return np.concatenate(
        [by_bin[start : start + n] for start, n in zip(starts, quota, strict=False)]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Classes:
    """Which class every token is in; what-ifs are drawn within classes."""

    class_of: IntArray
    """[N, T]; negative: must not be drawn."""
    count: int
    """B."""
    apart: int = 1
    """Layers fewer than this apart draw different tokens: a token that one layer's change flips is
    likely to be flipped by the next one's, so counts of both would not be independent."""

    def of(self, changes: Changes) -> IntArray:
        """The class of each change's token where it is changed, [S]."""
        return self.class_of[changes.layer, changes.token]

    def draw(
        self, layer: int, bins: IntArray, bin_count: int, wanted: int, rng: np.random.Generator
    ) -> IntArray:
        """About `wanted` tokens of one layer, stratified by their `bins` [T] within each class.

        More from the steadier classes, the last one B times as many as the first: their rates are
        low, and what bounds a low rate is the number of samples.
        """
        drawable = (np.arange(bins.size) - layer) % self.apart == 0
        own = np.where(drawable & (bins >= 0), self.class_of[layer], -1)
        sizes = np.bincount(own[own >= 0], minlength=self.count)
        quota = _quotas(sizes, wanted, np.arange(1.0, self.count + 1))
        parts = [
            stratified(np.where(own == index, bins, -1), bin_count, int(share), rng)
            for index, share in enumerate(quota)
        ]
        return np.concatenate(parts)


def _quotas(sizes: IntArray, wanted: int, weights: FloatArray) -> IntArray:
    """How many to take from each bin: proportional to the weights, never more than it has; what
    a small bin cannot give is asked of the others."""
    quota = np.zeros_like(sizes)
    for _ in range(sizes.shape[0]):
        open_bins = quota < sizes
        left = wanted - int(quota.sum())
        if left <= 0 or not open_bins.any():
            break
        share = np.where(open_bins, weights, 0.0)
        more = np.ceil(left * share / share.sum()).astype(np.int64)
        quota = np.minimum(quota + more, sizes)
    return quota


def skip_changes(
    importance: np.ndarray,
    edges: FloatArray,
    classes: Classes,
    *,
    top_k: int,
    samples: int,
    seed: int,
) -> tuple[Changes, FloatArray]:
    """Skips (5): all slots dropped; the mass is the importance [N, T]. Returns changes and masses
    [S]. `edges` [N, G] are the curve's bins."""
    parts, masses = [], []
    for layer, row in enumerate(importance):
        rng = np.random.default_rng([seed, 1, layer])
        token = classes.draw(layer, bin_of(edges[layer], row), edges.shape[1], samples, rng)
        parts.append(_at(layer, token, np.full((token.size, top_k), DROP)))
        masses.append(row[token])
    return join(parts), np.concatenate(masses).astype(np.float64)


def random_subsets(tokens: int, top_k: int, rng: np.random.Generator) -> BoolArray:
    """A random proper non-empty subset of the slots for each token, its size uniform; [T, k]."""
    size = rng.integers(1, top_k, size=tokens)
    rank = rng.random((tokens, top_k)).argsort(axis=1).argsort(axis=1)
    return rank < size[:, None]


def drop_changes(
    dropped: Sequence[BoolArray],
    masses: Sequence[FloatArray],
    edges: FloatArray,
    classes: Classes,
    *,
    samples: int,
    seed: int,
) -> tuple[Changes, FloatArray]:
    """Drops of some slots: per layer the subsets [T, k] and the mass [T] they would remove."""
    parts, kept = [], []
    for layer, (subset, mass) in enumerate(zip(dropped, masses, strict=True)):
        rng = np.random.default_rng([seed, 3, layer])
        token = classes.draw(layer, bin_of(edges[layer], mass), edges.shape[1], samples, rng)
        parts.append(_at(layer, token, np.where(subset[token], DROP, KEEP)))
        kept.append(mass[token])
    return join(parts), np.concatenate(kept)


def substitution_changes(
    activated: IntArray,
    feasible: BoolArray,
    pair_bin: IntArray,
    bin_count: int,
    classes: Classes,
    *,
    samples: int,
    seed: int,
) -> Changes:
    """Substitutions (3): one slot runs a feasible expert from outside the activated set.

    `activated` [N, T, k], `feasible` and `pair_bin` (the bin of each pair's distance) [N, E, E].
    """
    parts = []
    for layer, chosen in enumerate(activated):
        rng = np.random.default_rng([seed, 4, layer])
        slot, substitute = _random_substitutes(chosen, feasible[layer], rng)
        target = np.take_along_axis(chosen, slot[:, None], axis=1)[:, 0]
        bins = np.where(substitute >= 0, pair_bin[layer][target, substitute], -1)
        token = classes.draw(layer, bins, bin_count, samples, rng)
        slots = np.full((token.size, chosen.shape[1]), KEEP)
        slots[np.arange(token.size), slot[token]] = substitute[token]
        parts.append(_at(layer, token, slots))
    return join(parts)


def _random_substitutes(
    chosen: IntArray, feasible: BoolArray, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """For each token a slot and a stand-in for it, uniform over what is possible; the stand-in is
    -1 where nothing is. `chosen` [T, k], `feasible` [E, E]; both results [T]."""
    tokens = chosen.shape[0]
    experts = feasible.shape[0]
    possible = feasible[chosen] & ~np.eye(experts, dtype=bool)[chosen]
    active = np.zeros((tokens, experts), dtype=bool)
    np.put_along_axis(active, chosen, True, axis=1)
    possible &= ~active[:, None, :]
    score = np.where(possible, rng.random(possible.shape, dtype=np.float32), -1.0)
    best = score.reshape(tokens, -1).argmax(axis=1)
    found = possible.reshape(tokens, -1)[np.arange(tokens), best]
    return best // experts, np.where(found, best % experts, -1)


def control_changes(classes: Classes, top_k: int, samples: int, seed: int) -> Changes:
    """What-ifs that change nothing from the first layer on: what they flip is numerical noise."""
    rng = np.random.default_rng([seed, 5])
    tokens = np.flatnonzero(classes.class_of[0] >= 0)
    token = rng.choice(tokens, size=min(samples, tokens.size), replace=False)
    return _at(0, token, np.full((token.size, top_k), KEEP))


def _at(layer: int, token: IntArray, slots: IntArray) -> Changes:
    return Changes(token=token, layer=np.full(token.size, layer, dtype=np.int64), slots=slots)
