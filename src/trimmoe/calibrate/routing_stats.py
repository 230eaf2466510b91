"""Routing statistics (eq. 26, 27, 38) from the recorded activated sets; pure numpy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb

import numpy as np

from trimmoe.calibrate.curves import clopper_pearson_upper
from trimmoe.core.specs import FloatArray, IntArray

_SMOOTHING = 1.0
"""Pseudo-tokens, spread as the next layer's marginal, added to each row of transitions."""


def transition_rows(
    source: IntArray, target: IntArray, shape: tuple[int, int], smoothing: float = _SMOOTHING
) -> FloatArray:
    """Row-stochastic counts of (source -> target) pairs (38), shape [S, T].

    Smoothed by a pseudo-count towards the marginal of the targets: a row never seen is the
    marginal itself.
    """
    counts = np.bincount(source * shape[1] + target, minlength=shape[0] * shape[1])
    counts = counts.reshape(shape).astype(np.float64)
    marginal = np.bincount(target, minlength=shape[1]) / target.size
    smoothed = counts + smoothing * marginal
    return smoothed / smoothed.sum(axis=1, keepdims=True)


def expert_transitions(first: IntArray, experts: int) -> FloatArray:
    """P_l(k -> k') of (38) from the first activated experts [N, T]; shape [N-1, E, E]."""
    rows = [transition_rows(a, b, (experts, experts)) for a, b in pairwise(first)]
    return np.stack(rows) if rows else np.zeros((0, experts, experts))


@dataclass(frozen=True, kw_only=True, slots=True)
class PatternStatistics:
    """The pattern fields of a Profile, same names, shapes and meaning."""

    patterns: IntArray
    pattern_share: FloatArray
    pattern_transitions: FloatArray
    pattern_mass: FloatArray
    pattern_importance: FloatArray
    pattern_coverage: FloatArray


def pattern_statistics(
    activated: IntArray, masses: FloatArray, importance: FloatArray, experts: int, limit: int
) -> PatternStatistics:
    """Codebook of activated sets and how tokens move between them.

    `activated` [N, T, k] in the router's order, `masses` the same shape, `importance` [N, T].
    """
    layers = activated.shape[0]
    order = np.argsort(activated, axis=2)
    sets = np.take_along_axis(activated, order, axis=2)
    masses = np.take_along_axis(masses, order, axis=2)
    books = [codebook(sets[layer], experts, limit) for layer in range(layers)]
    width = max(book.shape[0] for book in books)
    assigned = [nearest_pattern(sets[layer], books[layer], experts) for layer in range(layers)]
    pattern = np.stack([found for found, _ in assigned])
    exact = np.stack([exactly for _, exactly in assigned])
    moves = [transition_rows(a, b, (width, width)) for a, b in pairwise(pattern)]
    per_layer = [
        _given_pattern(pattern[layer], masses[layer], importance[layer], width)
        for layer in range(layers)
    ]
    return PatternStatistics(
        patterns=np.stack([_pad_book(book, width) for book in books]),
        pattern_share=np.stack([np.bincount(row, minlength=width) / row.size for row in pattern]),
        pattern_transitions=np.stack(moves) if moves else np.zeros((0, width, width)),
        pattern_mass=np.stack([mass for mass, _ in per_layer]),
        pattern_importance=np.stack([deciles for _, deciles in per_layer]),
        pattern_coverage=exact.mean(axis=1),
    )


def codebook(sets: IntArray, experts: int, limit: int) -> IntArray:
    """All sets of k experts if they are at most `limit`, else the `limit` most frequent ones
    (ties by expert ids), shape [P', k], rows ascending; `sets` [T, k] with ascending rows."""
    top_k = sets.shape[1]
    if comb(experts, top_k) <= limit:
        return np.array(list(combinations(range(experts), top_k)), dtype=np.int64)
    found, counts = np.unique(sets, axis=0, return_counts=True)
    kept = np.sort(np.argsort(-counts, kind="stable")[:limit])
    return found[kept].astype(np.int64)


def nearest_pattern(sets: IntArray, book: IntArray, experts: int) -> tuple[IntArray, np.ndarray]:
    """The codebook row of largest overlap for each set (ties to the earlier row) and whether it
    is the set itself; shapes [T], bool [T]."""
    in_book = np.zeros((book.shape[0], experts), dtype=np.float32)
    np.put_along_axis(in_book, book, 1.0, axis=1)
    found, inverse = np.unique(sets, axis=0, return_inverse=True)
    in_set = np.zeros((found.shape[0], experts), dtype=np.float32)
    np.put_along_axis(in_set, found, 1.0, axis=1)
    overlap = in_set @ in_book.T
    inverse = inverse.reshape(-1)
    best = overlap.argmax(axis=1)
    exact = overlap.max(axis=1) >= sets.shape[1] - 0.5
    return best[inverse].astype(np.int64), exact[inverse]


def _pad_book(book: IntArray, width: int) -> IntArray:
    missing = width - book.shape[0]
    return np.concatenate([book, np.repeat(book[:1], missing, axis=0)])


def _given_pattern(
    pattern: IntArray, masses: FloatArray, importance: FloatArray, width: int
) -> tuple[FloatArray, FloatArray]:
    """Mean mass per slot [P, k] and importance deciles [P, 11] given the pattern; a pattern that
    was never seen takes the layer's own mean importance, evenly spread, and its deciles."""
    levels = np.linspace(0.0, 1.0, 11)
    everywhere = np.quantile(importance, levels)
    top_k = masses.shape[1]
    mean_mass = np.full((width, top_k), masses.mean())
    deciles = np.tile(everywhere, (width, 1))
    by_pattern = np.argsort(pattern, kind="stable")
    starts = np.searchsorted(pattern[by_pattern], np.arange(width + 1))
    for index in range(width):
        members = by_pattern[starts[index] : starts[index + 1]]
        if members.size:
            mean_mass[index] = masses[members].mean(axis=0)
            deciles[index] = np.quantile(importance[members], levels)
    return mean_mass, deciles


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionStatistics:
    """pi, sigma and a of a Profile (26, 27) with their upper bounds; same names and shapes."""

    active: FloatArray
    active_upper: FloatArray
    executed: FloatArray
    executed_upper: FloatArray
    activated: FloatArray
    activated_upper: FloatArray


def execution_statistics(
    activated: IntArray,
    importance: FloatArray,
    theta: FloatArray,
    exit_layer: IntArray,
    experts: int,
    confidence: float,
) -> ExecutionStatistics:
    """pi_l, sigma_l^k and a_l^k, each with its one-sided upper bound.

    `activated` [N, T, k], `importance` [N, T], `theta` [N], `exit_layer` [T] in 1..N.
    """
    layers, tokens, _ = activated.shape
    reaches = (exit_layer[None, :] >= np.arange(1, layers + 1)[:, None]).sum(axis=1)
    chosen, kept = np.zeros((2, layers, experts), dtype=np.int64)
    for layer in range(layers):
        chosen[layer] = np.bincount(activated[layer].ravel(), minlength=experts)
        important = importance[layer] > theta[layer]
        kept[layer] = np.bincount(activated[layer][important].ravel(), minlength=experts)
    everyone = np.full_like(chosen, tokens)
    return ExecutionStatistics(
        active=reaches / tokens,
        active_upper=clopper_pearson_upper(reaches, np.full(layers, tokens), confidence),
        # An expert never activated is never skipped either.
        executed=np.where(chosen > 0, kept / np.maximum(chosen, 1), 1.0),
        executed_upper=clopper_pearson_upper(kept, chosen, confidence),
        activated=chosen / tokens,
        activated_upper=clopper_pearson_upper(chosen, everyone, confidence),
    )
