"""When a token is likely to be done: exit hazards by predicted exit layer (36)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimmoe.core.specs import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitForecast:
    """The chance that a token leaves after each layer, by its predicted exit layer.

    Predictions that forecast the same share a row, so that tables stay small. After a skip no
    token exits; that is for the caller to see to.
    """

    row_of: IntArray
    """Row of each predicted exit layer 0..N, [N+1]; prediction 0 does not occur."""
    goes_on: FloatArray
    """P(no exit right after layer l, having executed it | alive), [Q, N]; 0 after the last."""

    def rows(self, exit_at: IntArray) -> IntArray:
        """The row of each predicted exit layer, same shape."""
        return self.row_of[exit_at]


def certain(layer_count: int) -> ExitForecast:
    """The paper's reading: the cost is zero from the predicted exit layer on (39)."""
    predicted = np.arange(layer_count + 1)
    goes_on = (np.arange(1, layer_count + 1) < predicted[:, None]).astype(np.float64)
    return ExitForecast(row_of=predicted, goes_on=goes_on)


def never(layer_count: int) -> ExitForecast:
    """Nothing exits before the last layer."""
    goes_on = np.ones((1, layer_count))
    goes_on[:, -1] = 0.0
    return ExitForecast(row_of=np.zeros(layer_count + 1, dtype=np.int64), goes_on=goes_on)


def calibrated(hazard: FloatArray, groups: int = 4) -> ExitForecast:
    """Measured hazards [N+1, N], neighbouring predictions pooled into at most `groups` rows.

    The rows of a group are averaged; groups split the predictions by the depth that is expected.
    """
    layers = hazard.shape[1]
    alive = np.cumprod(1.0 - hazard[1:, :-1], axis=1)
    depth = 1.0 + alive.sum(axis=1)
    edges = np.linspace(depth.min(), depth.max(), groups + 1)[1:-1]
    group = np.searchsorted(edges, depth, side="right")
    kept, row = np.unique(group, return_inverse=True)
    goes_on = np.stack([1.0 - hazard[1:][group == one].mean(axis=0) for one in kept])
    goes_on[:, -1] = 0.0
    assert goes_on.shape == (kept.size, layers)
    return ExitForecast(row_of=np.concatenate([row[:1], row]), goes_on=np.clip(goes_on, 0.0, 1.0))
