"""When tokens leave, given where their nearest centroid says they will (eq. 36); pure numpy."""

from __future__ import annotations

import numpy as np

from trimmoe.core.specs import FloatArray, IntArray

_SMOOTHING = 8.0
"""Pseudo-tokens that exit at the layer's own rate, added to each predicted exit layer."""


def exit_layers(scores: np.ndarray, threshold: float) -> IntArray:
    """L_q: the first layer (1..N) after which the confidence reaches the threshold, else N.

    `scores` [N, T]; the last layer's score does not matter.
    """
    layers = scores.shape[0]
    ready = scores >= threshold
    ready[-1] = True
    return np.minimum(ready.argmax(axis=0) + 1, layers).astype(np.int64)


def exit_hazard(exit_layer: IntArray, predicted: IntArray) -> FloatArray:
    """P(exit right after layer l | alive there, predicted exit layer q), [N+1, N].

    `exit_layer` [T] is where each token leaves, 1..N; `predicted` [N, T] what the centroid nearest
    to its state after each layer foretells, 1..N. At layer l the prediction made after layer l - 1
    counts, at the first layer none. Row 0 is not used; after the last layer everyone leaves.
    """
    layers = predicted.shape[0]
    hazard = np.ones((layers + 1, layers))
    for layer in range(layers - 1):
        alive = exit_layer > layer
        leaves = exit_layer[alive] == layer + 1
        rate = leaves.mean() if leaves.size else 0.0
        hazard[:, layer] = rate
        if layer > 0:
            row = predicted[layer - 1, alive]
            met = np.bincount(row, minlength=layers + 1)
            left = np.bincount(row[leaves], minlength=layers + 1)
            hazard[:, layer] = (left + _SMOOTHING * rate) / (met + _SMOOTHING)
    return hazard
