"""Flip counts -> monotone loss curves with upper confidence bounds; pure numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.stats import beta, spearmanr

from trimmoe.core.profile import LossCurves
from trimmoe.core.specs import FloatArray, IntArray

_SPANS = (1, 4)
"""Neighbouring bins whose pooled count may bound a bin from above, besides all that follow."""


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
    mass: FloatArray
    """Router mass the change removed, [S]."""
    flipped: np.ndarray
    """Whether the prediction differs from the full-depth one, bool [S]."""


def loss_curves(edges: FloatArray, measured: Measured, confidence: float) -> LossCurves:
    """Fit one curve per layer (5) to the measured flips; `edges` [N, G]."""
    layers, bins = edges.shape
    flips = np.zeros((layers, bins), dtype=np.int64)
    samples = np.zeros((layers, bins), dtype=np.int64)
    for layer in range(layers):
        here = measured.layer == layer
        bin_index = bin_of(edges[layer], measured.mass[here])
        samples[layer] = np.bincount(bin_index, minlength=bins)
        flips[layer] = np.bincount(bin_index[measured.flipped[here]], minlength=bins)
    mean = np.stack([isotonic_rates(f, s) for f, s in zip(flips, samples, strict=True)])
    upper = np.stack(
        [monotone_upper(f, s, confidence) for f, s in zip(flips, samples, strict=True)]
    )
    return LossCurves(
        edges=edges[:, None],
        mean=mean[:, None],
        upper=upper[:, None],
        samples=samples[:, None],
    )


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
