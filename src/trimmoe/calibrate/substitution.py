"""Which experts may stand in for which, and what that costs (eq. 3); pure numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trimmoe.calibrate.curves import (
    around,
    clopper_pearson_upper,
    falling,
    isotonic_rates,
    monotone_upper,
    with_neighbours,
)
from trimmoe.calibrate.sampling import Changes, Classes
from trimmoe.core.profile import slot_ranks
from trimmoe.core.specs import BoolArray, FloatArray, IntArray

_MIN_LAYER_SAMPLES = 300
"""With fewer measurements than this of a class, a layer's phi is fitted on its neighbours too."""


def similarities(logit_gram: FloatArray) -> FloatArray:
    """Sim_l(r, k): cosine of two experts' columns of router logits centred per token, from their
    inner products [N, E, E]; the same shape, exactly 1 on the diagonal."""
    norm = np.sqrt(np.einsum("nee->ne", logit_gram))
    scale = np.maximum(norm[:, :, None] * norm[:, None, :], 1e-12)
    similarity = np.clip(logit_gram / scale, -1.0, 1.0)
    diagonal = np.arange(similarity.shape[1])
    similarity[:, diagonal, diagonal] = 1.0
    return similarity


def feasible_sets(similarity: FloatArray, quantile: float, substitutes: int) -> BoolArray:
    """R_{l,r} with r itself, bool [N, E, E].

    An expert's substitutes are its `substitutes` most similar ones, of those whose similarity is
    at least the layer's quantile; the most similar one always is.
    """
    layers, experts, _ = similarity.shape
    diagonal = np.eye(experts, dtype=bool)
    if experts == 1:
        return np.ones((layers, 1, 1), dtype=bool)
    others = similarity[:, ~diagonal].reshape(layers, -1)
    threshold = np.quantile(others, quantile, axis=1)
    ranked = np.argsort(np.argsort(np.where(diagonal, -np.inf, -similarity), axis=2), axis=2)
    # Rank 0 is the expert itself, 1 its most similar.
    near = (ranked <= substitutes) & (similarity >= threshold[:, None, None])
    return near | (ranked <= 1) | diagonal


def pair_bins(similarity: FloatArray, feasible: BoolArray, bins: int) -> IntArray:
    """Bin of each feasible pair's distance (1 - Sim) / 2 among its layer's, least distance first;
    -1 for other pairs and the diagonal; [N, E, E]."""
    result = np.full(similarity.shape, -1, dtype=np.int64)
    off_diagonal = feasible & ~np.eye(similarity.shape[1], dtype=bool)
    for layer, pairs in enumerate(off_diagonal):
        order = np.argsort(np.argsort(-similarity[layer][pairs], kind="stable"), kind="stable")
        result[layer][pairs] = order * min(bins, order.size) // max(order.size, 1)
    return result


Counts = tuple[IntArray, IntArray]
"""Flips and samples of each pair, the same shape."""


def by_rank(losses: Callable[[Counts], FloatArray], counts: Counts) -> FloatArray:
    """The `losses` of every slot rank by itself, [N, B, R, E, E], like the `counts`."""
    flips, samples = counts
    ranks = range(flips.shape[2])
    return np.stack([losses((flips[:, :, rank], samples[:, :, rank])) for rank in ranks], axis=2)


def substitution_losses(
    bins: IntArray,
    bin_count: int,
    counts: Counts,
    *,
    pair_samples: int,
    neighbours: int,
    confidence: float,
) -> FloatArray:
    """Upper bounds of Q_l(r, k) by class, zero on the diagonal, 1 where a pair is not feasible;
    [N, B, E, E]. `bins` [N, E, E] are those of `pair_bins`, `counts` flips and samples of each
    pair, [N, B, E, E] each.

    phi bounds the flip rate against distance, isotonic within a class, fitted on each layer and its
    `neighbours` as `loss_curves` is; where those have few measurements, on as few layers around it
    as have enough. What is bounded is the mean of the layers. A pair that was measured often enough
    is judged by its own count if that is tighter; either bound holds at half the risk, so that the
    tighter of them holds at `confidence`.
    """
    flips, samples = counts
    level = 1.0 - (1.0 - confidence) / 2
    own = clopper_pearson_upper(flips, samples, level)
    losses = np.ones(flips.shape)
    pairs = bins >= 0
    binned = _by_bin(flips, bins, bin_count), _by_bin(samples, bins, bin_count)
    wide = with_neighbours(*binned, neighbours, confidence)
    fitted_flips, fitted_samples = _enough(*binned, *wide)
    for cell in np.ndindex(samples.shape[:2]):
        phi = monotone_upper(fitted_flips[cell], fitted_samples[cell], level)
        at = pairs[cell[0]]
        losses[cell][at] = phi[bins[cell[0]][at]]
    often = (samples >= pair_samples) & pairs[:, None]
    losses = np.where(often, np.minimum(losses, own), losses)
    losses = falling(losses, samples.sum(axis=(2, 3)) > 0)
    diagonal = np.arange(bins.shape[1])
    losses[..., diagonal, diagonal] = 0.0
    return losses


def mean_by_rank(
    bins: IntArray, bin_count: int, counts: Counts, upper: FloatArray, *, pair_samples: int
) -> FloatArray:
    """`substitution_means` of every slot rank by itself, [N, B, R, E, E], like all but `bins`."""
    flips, samples = counts
    means = [
        substitution_means(
            bins,
            bin_count,
            (flips[:, :, rank], samples[:, :, rank]),
            upper[:, :, rank],
            pair_samples=pair_samples,
        )
        for rank in range(flips.shape[2])
    ]
    return np.stack(means, axis=2)


def substitution_means(
    bins: IntArray, bin_count: int, counts: Counts, upper: FloatArray, *, pair_samples: int
) -> FloatArray:
    """Q_l(r, k) as measured on average, the shape of `upper`, its bounds [N, B, E, E].

    phi is the isotonic fit of a layer's and class's flip rates against distance; a pair that was
    measured often enough has its own rate. Where nothing was measured the bound stands.
    """
    flips, samples = counts
    means, pairs = upper.copy(), bins >= 0
    binned = _by_bin(flips, bins, bin_count), _by_bin(samples, bins, bin_count)
    for cell in np.ndindex(samples.shape[:2]):
        if binned[1][cell].any():
            phi = isotonic_rates(binned[0][cell], binned[1][cell])
            at = pairs[cell[0]]
            means[cell][at] = phi[bins[cell[0]][at]]
    often = (samples >= pair_samples) & pairs[:, None]
    return np.where(often, flips / np.maximum(samples, 1), means)


def _enough(
    flips: IntArray, samples: IntArray, wide_flips: IntArray, wide_samples: IntArray
) -> tuple[IntArray, IntArray]:
    """The wide counts [N, B, G], where they are of few samples those of as few layers around as
    give enough."""
    found_flips, found_samples = wide_flips.copy(), wide_samples.copy()
    for radius in range(1, samples.shape[0]):
        few = found_samples.sum(axis=2) < _MIN_LAYER_SAMPLES
        if not few.any():
            break
        found_flips[few] = around(flips, radius)[few]
        found_samples[few] = around(samples, radius)[few]
    return found_flips, found_samples


def _by_bin(values: IntArray, bins: IntArray, bin_count: int) -> IntArray:
    """Sum of pair values [N, B, E, E] by the pairs' bin, [N, B, bin_count]."""
    layers, classes = values.shape[:2]
    result = np.zeros((layers, bin_count, classes), dtype=np.int64)
    layer, _, _ = where = np.nonzero(bins >= 0)
    np.add.at(result, (layer, bins[where]), values.transpose(0, 2, 3, 1)[where])
    return result.transpose(0, 2, 1)


def pair_counts(
    activated: IntArray, changes: Changes, flipped: BoolArray, experts: int, classes: Classes
) -> Counts:
    """Flips and samples of each measured pair by class and slot rank, [N, B, R, E, E] each.

    `activated` [N, T, k] are the recorded sets that the changes (one substitute each) refer to.
    """
    ranks = min(activated.shape[2], 2)
    shape = (activated.shape[0], classes.count, ranks, experts, experts)
    flips, samples = np.zeros((2, *shape), dtype=np.int64)
    row = np.arange(changes.count)
    slot = changes.slots.argmax(axis=1)  # the only entry that is an expert; the rest is KEEP
    pair = (
        changes.layer,
        classes.of(changes),
        slot_ranks(activated.shape[2], ranks)[slot],
        activated[changes.layer, changes.token, slot],
        changes.slots[row, slot],
    )
    np.add.at(samples, pair, 1)
    np.add.at(flips, pair, flipped.astype(np.int64))
    return flips, samples
