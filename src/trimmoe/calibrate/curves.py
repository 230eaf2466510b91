"""Flip counts -> monotone loss curves with upper confidence bounds; pure numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.stats import beta, spearmanr

from trimmoe.core.loss_curves import LossCurves
from trimmoe.core.specs import BoolArray, FloatArray, IntArray

_SPANS = (4, 8)
"""Neighbouring bins whose pooled count may bound a bin from above, besides all that follow: a
bin of a steady class has too few samples to bound a low rate by itself."""


def clopper_pearson_upper(flips: IntArray, samples: IntArray, confidence: float) -> FloatArray:
    """Exact one-sided upper confidence bound of binomial rates; 1 where there are no samples."""
    bound = beta.ppf(confidence, np.add(flips, 1.0), np.maximum(np.subtract(samples, flips), 0.5))
    return np.where(np.greater_equal(flips, samples), 1.0, bound)


def clopper_pearson_lower(flips: IntArray, samples: IntArray, confidence: float) -> FloatArray:
    """Exact one-sided lower confidence bound of binomial rates; 0 where there are no flips."""
    bound = beta.ppf(1.0 - confidence, np.maximum(flips, 0.5), np.subtract(samples, flips) + 1.0)
    return np.where(np.equal(flips, 0), 0.0, bound)


def isotonic_rates(flips: IntArray, samples: IntArray) -> FloatArray:
    """Non-decreasing fit of the flip rates of ordered bins, weighted by their counts, [G].

    Bins without samples take the value between their neighbours; all zero without any sample.
    """
    seen = np.flatnonzero(samples)
    if seen.size == 0:
        return np.zeros(samples.shape[0])
    fit = isotonic_regression(flips[seen] / samples[seen], weights=samples[seen])
    return np.interp(np.arange(samples.shape[0]), seen, fit.x)


def monotone_upper(flips: IntArray, samples: IntArray, confidence: float) -> FloatArray:
    """Upper confidence bounds of flip rates that do not decrease from bin to bin, [G].

    A bin's rate is then at most the mean rate of itself and any bins that follow it, so the
    exact bound of their pooled count bounds it too: the least of a few such spans is taken, each
    at a confidence that makes the least hold at `confidence`. Low bins, where skips happen, thus
    lean on all the samples above them. Where a bin's own lower bound exceeds the result, the data
    refute the monotony and the bin's own upper bound stands. Finally the cumulative maximum.
    """
    count = samples.shape[0]
    spans = sorted({min(span, count) for span in (*_SPANS, count)})
    level = 1.0 - (1.0 - confidence) / len(spans)
    bounds = [
        clopper_pearson_upper(_ahead(flips, span), _ahead(samples, span), level) for span in spans
    ]
    upper = np.min(bounds, axis=0)
    own_lower = clopper_pearson_lower(flips, samples, confidence)
    own_upper = clopper_pearson_upper(flips, samples, confidence)
    upper = np.where(own_lower > upper, own_upper, upper)
    return np.maximum.accumulate(np.maximum(upper, isotonic_rates(flips, samples)))


def _ahead(values: IntArray, span: int) -> IntArray:
    """Sum of each value and the `span - 1` that follow it."""
    total = np.concatenate([[0], np.cumsum(values)])
    first = np.arange(values.shape[0])
    return total[np.minimum(first + span, values.shape[0])] - total[first]


def quantile_edges(mass: FloatArray, bins: int) -> FloatArray:
    """Upper edges of `bins` bins of equal shares of `mass`, the last one 1, shape [bins]."""
    edges = np.quantile(mass, np.arange(1, bins + 1) / bins)
    edges[-1] = 1.0
    return np.minimum(edges, 1.0)


def bin_of(edges: FloatArray, mass: FloatArray) -> IntArray:
    """The bin (edges[g-1], edges[g]] of each mass."""
    last = edges.shape[0] - 1
    return np.minimum(np.searchsorted(edges, mass, side="left"), last)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Forced changes and what became of the prediction, one entry per what-if."""

    layer: IntArray
    """[S]."""
    steadiness: IntArray
    """Class of the token, [S]."""
    mass: FloatArray
    """Router mass the change removed, [S]."""
    flipped: np.ndarray
    """Whether the prediction differs from the full-depth one, bool [S]."""


def loss_curves(
    edges: FloatArray, measured: Measured, *, classes: int, neighbours: int, confidence: float
) -> LossCurves:
    """Fit one curve per layer and class (5) to the measured flips; `edges` [N, G].

    With `neighbours` > 0 a layer is judged together with as many on either side, bin by bin, for
    the bound of a low rate is little else than three over the number of samples. What is bounded
    is then the mean rate of those layers: summed over the depth, as a budget sees it, much the
    same. Their samples must be of different tokens. A class that flips clearly more often in its
    layer than in that company is judged alone.
    """
    flips, samples = _counts(edges, measured, classes)
    flips, samples = with_neighbours(flips, samples, neighbours, confidence)
    mean, upper = np.ones(samples.shape), np.ones(samples.shape)
    for cell in np.ndindex(samples.shape[:2]):
        mean[cell] = isotonic_rates(flips[cell], samples[cell])
        upper[cell] = monotone_upper(flips[cell], samples[cell], confidence)
    return LossCurves(
        edges=np.repeat(edges[:, None], classes, axis=1),
        mean=mean,
        upper=falling(upper, samples.sum(axis=2) > 0),
        samples=samples,
    )


def _counts(edges: FloatArray, measured: Measured, classes: int) -> tuple[IntArray, IntArray]:
    """Flips and samples of each layer, class and bin, [N, B, G] each."""
    layers, bins = edges.shape
    flips, samples = np.zeros((2, layers, classes, bins), dtype=np.int64)
    for layer in range(layers):
        here = measured.layer == layer
        cell = measured.steadiness[here], bin_of(edges[layer], measured.mass[here])
        np.add.at(samples[layer], cell, 1)
        np.add.at(flips[layer], cell, measured.flipped[here].astype(np.int64))
    return flips, samples


def with_neighbours(
    flips: IntArray, samples: IntArray, radius: int, confidence: float
) -> tuple[IntArray, IntArray]:
    """Counts [N, B, G] summed over the layers within `radius`, but a class's own where its rate in
    the layer is above that of the sum with the given confidence in both."""
    wide_flips, wide_samples = (around(counts, radius) for counts in (flips, samples))
    own_lower = clopper_pearson_lower(flips.sum(2), samples.sum(2), confidence)
    wide_upper = clopper_pearson_upper(wide_flips.sum(2), wide_samples.sum(2), confidence)
    alone = (own_lower > wide_upper)[:, :, None]
    return np.where(alone, flips, wide_flips), np.where(alone, samples, wide_samples)


def around(counts: IntArray, radius: int) -> IntArray:
    """Sums over the layers, the first axis, within `radius` of each."""
    layers = counts.shape[0]
    spans = (slice(max(0, layer - radius), layer + radius + 1) for layer in range(layers))
    return np.stack([counts[span].sum(axis=0) for span in spans])


def falling(upper: FloatArray, seen: BoolArray) -> FloatArray:
    """Bounds [N, B, ...] raised so that a steadier class is never said to lose more.

    Raising keeps bounds valid, where lowering would lean on the classes being in order. A class
    that was not seen [N, B] is bounded by 1 and raises nobody.
    """
    seen = seen.reshape(seen.shape + (1,) * (upper.ndim - 2))
    raised = np.maximum.accumulate(np.where(seen, upper, 0.0)[:, ::-1], axis=1)[:, ::-1]
    return np.where(seen, raised, 1.0)


def monotony(edges: FloatArray, measured: Measured) -> list[dict[str, float]]:
    """How far the raw bins of each layer are from monotone: the mean absolute difference between
    raw and isotonic rate, weighted by samples, and the rank correlation of bin and raw rate
    (0 where the rate is constant)."""
    report = []
    for layer, layer_edges in enumerate(edges):
        here = measured.layer == layer
        bin_index = bin_of(layer_edges, measured.mass[here])
        samples = np.bincount(bin_index, minlength=layer_edges.size)
        flips = np.bincount(bin_index[measured.flipped[here]], minlength=layer_edges.size)
        report.append(_departure(flips, samples))
    return report


def _departure(flips: IntArray, samples: IntArray) -> dict[str, float]:
    seen = np.flatnonzero(samples)
    if seen.size < 2:
        return {"departure": 0.0, "spearman": 0.0}
    raw = flips[seen] / samples[seen]
    fitted = isotonic_rates(flips, samples)[seen]
    departure = float(np.average(np.abs(raw - fitted), weights=samples[seen]))
    varies = np.ptp(raw) > 0
    result: Any = spearmanr(seen, raw) if varies else None  # untyped in SciPy
    correlation = float(result.statistic) if varies else 0.0
    return {"departure": round(departure, 6), "spearman": round(correlation, 4)}
