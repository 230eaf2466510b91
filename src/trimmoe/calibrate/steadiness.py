"""How steady tokens are: heads that foretell how sure the full-depth prediction will be.

Whether a prediction survives a skip is mostly a matter of the token: where full depth is nearly
certain, little else can overtake. Regressing the log-probability of the full-depth prediction on
the state that a layer's router reads tells such tokens apart, better the later the layer. Classes
are cut from the scores; what a class loses is measured on its own, so that a poor head makes poor
use of the budget but never a wrong bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.exits import Splits
from trimmoe.calibrate.products import gram
from trimmoe.calibrate.record import Advance, Recording
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.models.exit_head import rms_direction, steadiness, steadiness_class

NO_CLASS = -1
"""Class of the tokens that the heads were fitted on: what they lose would flatter."""
_RIDGES = (0.1, 0.3, 1.0, 3.0)
"""Penalties tried, as shares of the tokens fitted on; features have variance one."""
_KEPT = 0.4
"""Share of the tokens above an edge that are above the next one too."""
_BLOCK = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Steadiness:
    """The steadiness fields of a Profile, and the class of every recorded token."""

    weight: np.ndarray
    """float32 [N, d]."""
    bias: np.ndarray
    """float32 [N]."""
    edges: FloatArray
    """[N, B-1]."""
    share: FloatArray
    """[N, B], of the tokens that were not fitted on."""
    class_of: IntArray
    """[N, T], or NO_CLASS."""
    explained: FloatArray
    """Share of the variance of log-probabilities that each head explains on tokens it was not
    fitted on, [N]; negative where it is worse than a constant."""

    @property
    def classes(self) -> int:
        return self.share.shape[1]


def one_class(recording: Recording) -> Steadiness:
    """No token is steadier than another: the paper's letter."""
    layers, _, width = recording.hidden.shape
    return Steadiness(
        weight=np.zeros((layers, width), dtype=np.float32),
        bias=np.zeros(layers, dtype=np.float32),
        edges=np.zeros((layers, 0)),
        share=np.ones((layers, 1)),
        class_of=np.zeros((layers, recording.token_count), dtype=np.int64),
        explained=np.zeros(layers),
    )


@torch.inference_mode()
def fit_steadiness(
    recording: Recording, splits: Splits, classes: int, advance: Advance
) -> Steadiness:
    """Fit a head per layer on the training split and cut its scores on the rest into `classes`.

    Each cut leaves `_KEPT` of what the one before left: a budget of a few flips in a hundred buys
    about one skip a token, so what matters is the best few layers of each.
    """
    assert recording.attended is not None
    held = np.sort(np.concatenate([splits.calibration, splits.test]))
    target = torch.from_numpy(recording.log_probability)
    found = Steadiness(
        weight=np.zeros(recording.hidden.shape[::2], dtype=np.float32),
        bias=np.zeros(recording.layer_count, dtype=np.float32),
        edges=np.zeros((recording.layer_count, classes - 1)),
        share=np.zeros((recording.layer_count, classes)),
        class_of=np.full((recording.layer_count, recording.token_count), NO_CLASS),
        explained=np.zeros(recording.layer_count),
    )
    for layer, states in enumerate(recording.attended):
        weight, bias = _fit_head(states, target, splits.train, recording.windows.length)
        scores = _scores(states[torch.from_numpy(held)], weight, bias)
        edges = np.quantile(scores.double().numpy(), 1.0 - _KEPT ** np.arange(1, classes))
        of_held = steadiness_class(scores, torch.from_numpy(edges)).numpy()
        found.weight[layer], found.bias[layer], found.edges[layer] = weight.numpy(), bias, edges
        found.class_of[layer, held] = of_held
        found.share[layer] = np.bincount(of_held, minlength=classes) / held.size
        found.explained[layer] = _explained(scores, target[torch.from_numpy(held)])
        recording.release()
        advance(1)
    return found


def _fit_head(states: Tensor, target: Tensor, train: IntArray, window: int) -> tuple[Tensor, float]:
    """Ridge regression of `target` [T] on directions of `states` [T, d]: weight [d] and bias.

    The penalty is the one that does best on the last quarter of the training windows when fitted
    on the others; by windows, because neighbouring tokens are alike.
    """
    cut = train.size // window * 3 // 4 * window or train.size // 2
    moments = [_Moments.of(states, target, part) for part in (train[:cut], train[cut:])]
    trials = [(moments[1].error(*moments[0].solve(ridge)), ridge) for ridge in _RIDGES]
    weight, bias = (moments[0] + moments[1]).solve(min(trials)[1])
    return weight.float(), bias


@dataclass(frozen=True, slots=True)
class _Moments:
    """Sums of products of rows (features, 1, target), float64 [d + 2, d + 2]: all that a linear
    regression, and its error, need to know of the data."""

    products: Tensor

    @classmethod
    def of(cls, states: Tensor, target: Tensor, tokens: IntArray) -> _Moments:
        width = states.shape[1]
        products = torch.zeros(width + 2, width + 2, dtype=torch.float64)
        for block in torch.from_numpy(tokens).split(_BLOCK):
            rows = rms_direction(states[block])
            rows = torch.cat([rows, torch.ones(len(block), 1), target[block, None]], dim=1)
            products += gram(rows).double()
        return cls(products)

    def __add__(self, other: _Moments) -> _Moments:
        return _Moments(self.products + other.products)

    def solve(self, ridge: float) -> tuple[Tensor, float]:
        """Weight [d] and bias under a penalty of `ridge` times the number of rows."""
        mean = self.products[-2] / self.products[-2, -2]
        covariance = self.products / self.products[-2, -2] - torch.outer(mean, mean)
        scale = covariance.diagonal()[:-2].clamp_min(1e-12).sqrt()
        scaled = covariance[:-2, :-2] / torch.outer(scale, scale)
        scaled += ridge * torch.eye(len(scale), dtype=torch.float64)
        weight = torch.linalg.solve(scaled, covariance[:-2, -1] / scale) / scale
        return weight, float(mean[-1] - weight @ mean[:-2])

    def error(self, weight: Tensor, bias: float) -> float:
        """Sum of squared errors of a head on these rows."""
        combination = torch.cat([weight, torch.tensor([bias, -1.0], dtype=torch.float64)])
        return float(combination @ self.products @ combination)


def _scores(states: Tensor, weight: Tensor, bias: float) -> Tensor:
    return torch.cat([steadiness(block, weight, bias) for block in states.split(_BLOCK)])


def _explained(scores: Tensor, target: Tensor) -> float:
    left = (scores - target).square().mean() / target.var(correction=0).clamp_min(1e-12)
    return float(1.0 - left)
