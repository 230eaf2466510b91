"""Importance thresholds of a quality budget (eq. 24, 25)."""

from __future__ import annotations

import numpy as np

from trimmoe.core.loss_curves import LossCurves
from trimmoe.core.specs import FloatArray


def thresholds(
    skip: LossCurves, importance_quantiles: FloatArray, budget: float
) -> tuple[FloatArray, float]:
    """The skip thresholds that a budget per token allows, every layer taken to be remote.

    theta_l is the largest importance whose bounded skip loss is within epsilon (24), and epsilon
    is the supremum of `epsilon * kappa_bar(epsilon) <= budget` (25), kappa_bar being the expected
    number of layers per token with importance at most theta_l. Since kappa_bar only changes at
    the bounds themselves, the supremum is found exactly rather than by bisection; where the
    product jumps over the budget, epsilon is the last number below the jump.

    `skip` has one class (`LossCurves.pooled`); `importance_quantiles` is [N, Q], quantiles
    0..100 % of each layer's importance; `budget` a flip rate. Returns theta [N] (0 where nothing
    may be skipped) and epsilon in [0, 1].
    """
    assert budget >= 0.0
    levels = np.unique(np.append(skip.upper, [0.0, 1.0]))
    best, last = 0, levels.size - 1
    # The product is non-decreasing in epsilon: the bisection (25) asks for, over its own steps.
    while best < last:
        middle = (best + last + 1) // 2
        if levels[middle] * skipped_layers(skip, importance_quantiles, levels[middle]) <= budget:
            best = middle
        else:
            last = middle - 1
    epsilon = float(levels[best])
    skipped = skipped_layers(skip, importance_quantiles, epsilon)
    ceiling = float(np.nextafter(levels[best + 1], 0.0)) if best + 1 < levels.size else 1.0
    if skipped > 0.0:
        ceiling = min(ceiling, budget / skipped)
    epsilon = max(epsilon, ceiling)
    while epsilon * skipped > budget:  # the quotient may round upwards
        epsilon = float(np.nextafter(epsilon, 0.0))
    return theta_at(skip, epsilon), epsilon


def theta_at(skip: LossCurves, epsilon: float) -> FloatArray:
    """theta_l of (24) for one tolerance: the upper edge of the last bin whose bound is within
    `epsilon`, 0 where there is none; shape [N]."""
    assert skip.edges.shape[1] == 1
    edges, upper = skip.edges[:, 0], skip.upper[:, 0]
    within = (upper <= epsilon).sum(axis=1)
    padded = np.concatenate([np.zeros((edges.shape[0], 1)), edges], axis=1)
    return np.take_along_axis(padded, within[:, None], axis=1)[:, 0]


def skipped_layers(skip: LossCurves, importance_quantiles: FloatArray, epsilon: float) -> float:
    """kappa_bar of (25): expected layers per token with importance at most theta_l(epsilon)."""
    return float(share_within(importance_quantiles, theta_at(skip, epsilon)).sum())


def share_within(quantiles: FloatArray, mass: FloatArray) -> FloatArray:
    """Share of tokens whose mass is at most `mass` [N], from quantiles [N, Q]; shape [N].

    Rounded up to the next stored quantile, so that what is skipped is never underestimated.
    """
    steps = quantiles.shape[1] - 1
    below = (quantiles <= mass[:, None]).sum(axis=1)
    return np.minimum(below, steps) / steps
