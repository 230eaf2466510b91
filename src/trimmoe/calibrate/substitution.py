"""Which experts may stand in for which, and what that costs (eq. 3); pure numpy."""

from __future__ import annotations

import numpy as np

from trimmoe.calibrate.curves import clopper_pearson_upper, monotone_upper
from trimmoe.calibrate.sampling import Changes
from trimmoe.core.specs import BoolArray, FloatArray, IntArray

_MIN_LAYER_SAMPLES = 300
"""With fewer measurements than this, a layer's phi is fitted on all layers together."""


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


def substitution_losses(
    bins: IntArray,
    bin_count: int,
    counts: tuple[IntArray, IntArray],
    *,
    pair_samples: int,
    confidence: float,
) -> FloatArray:
    """Upper bounds of Q_l(r, k) (3), [N, E, E]: zero on the diagonal, 1 for infeasible pairs.

    phi is a non-decreasing function of the distance's bin, fitted per layer, or on all layers
    together for layers with few measurements. A pair that was measured often enough is judged by
    its own count if that is tighter; either bound holds at half the risk, so that the tighter of
    them holds at `confidence`. `counts` are flips and samples per pair, [N, E, E] each.
    """
    flips, samples = counts
    level = 1.0 - (1.0 - confidence) / 2
    binned_flips, binned_samples = (_by_bin(values, bins, bin_count) for values in counts)
    pooled = monotone_upper(binned_flips.sum(axis=0), binned_samples.sum(axis=0), level)
    own = clopper_pearson_upper(flips, samples, level)
    losses = np.ones(bins.shape)
    for layer in range(bins.shape[0]):
        few = binned_samples[layer].sum() < _MIN_LAYER_SAMPLES
        fitted = monotone_upper(binned_flips[layer], binned_samples[layer], level)
        phi = pooled if few else fitted
        pairs = bins[layer] >= 0
        losses[layer][pairs] = phi[bins[layer][pairs]]
    often = (samples >= pair_samples) & (bins >= 0)
    losses = np.where(often, np.minimum(losses, own), losses)
    diagonal = np.arange(bins.shape[1])
    losses[:, diagonal, diagonal] = 0.0
    return losses


def _by_bin(values: IntArray, bins: IntArray, bin_count: int) -> IntArray:
    """Sum of pair values [N, E, E] by bin, [N, bin_count]."""
    result = np.zeros((bins.shape[0], bin_count), dtype=np.int64)
    layer, _, _ = where = np.nonzero(bins >= 0)
    np.add.at(result, (layer, bins[where]), values[where])
    return result


def pair_counts(
    activated: IntArray, changes: Changes, flipped: BoolArray, experts: int
) -> tuple[IntArray, IntArray]:
    """Flips and samples of each measured pair, [N, E, E] each.

    `activated` [N, T, k] are the recorded sets that the changes (one substitute each) refer to.
    """
    shape = (activated.shape[0], experts, experts)
    flips, samples = np.zeros((2, *shape), dtype=np.int64)
    row = np.arange(changes.count)
    slot = changes.slots.argmax(axis=1)  # the only entry that is an expert; the rest is KEEP
    pair = (
        changes.layer,
        activated[changes.layer, changes.token, slot],
        changes.slots[row, slot],
    )
    np.add.at(samples, pair, 1)
    np.add.at(flips, pair, flipped.astype(np.int64))
    return flips, samples
