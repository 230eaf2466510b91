"""What exit heads, steadiness heads and the exit-point predictor say of a hidden state (eq. 7, 36).

Calibration and runtime both call these, so that both compute the very same numbers. All read
the state's direction only: the residual stream grows with depth while the output head, behind its
normalisation, never sees the scale. Exit heads can be calibrated to read the state itself instead,
as the paper's do.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

HeadInput = Literal["direction", "state"]
"""What exit heads read: h / rms(h), or h itself (7)."""
_TINY = 1e-12


def rms_direction(hidden: Tensor) -> Tensor:
    """h / rms(h) in float32, shape [n, d] as given; a zero state stays zero."""
    hidden = hidden.float()
    return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + _TINY)


def head_input(hidden: Tensor, reads: HeadInput) -> Tensor:
    """What an exit head reads of states [n, d], float32."""
    return rms_direction(hidden) if reads == "direction" else hidden.float()


def confidence(
    hidden: Tensor, weight: Tensor, bias: Tensor | float, reads: HeadInput = "direction"
) -> Tensor:
    """xi = sigmoid(weight . x + bias), x what the head `reads` of the state (eq. 7).

    `hidden` [n, d] of any float type, `weight` [d]; returns float32 [n] in [0, 1]. The product is
    a sum over each row alone, so a token's confidence does not depend on its batch.
    """
    return torch.sigmoid(_linear(head_input(hidden, reads), weight, bias))


def steadiness(hidden: Tensor, weight: Tensor, bias: Tensor | float) -> Tensor:
    """weight . h / rms(h) + bias: larger where the prediction depends less on any one layer.

    `hidden` [n, d] is what the router reads, `weight` [d]; returns float32 [n].
    """
    return _linear(rms_direction(hidden), weight, bias)


def steadiness_class(scores: Tensor, edges: Tensor) -> Tensor:
    """How many of the edges, float64 [B-1], each score [n] is at least; int64 [n]."""
    return (scores.double()[:, None] >= edges).sum(dim=1)


def _linear(features: Tensor, weight: Tensor, bias: Tensor | float) -> Tensor:
    return (features * weight.float()).sum(dim=-1) + bias


def nearest_centroid(hidden: Tensor, centroids: Tensor) -> Tensor:
    """Index of the centroid of largest cosine similarity (eq. 36).

    `hidden` [n, d], `centroids` [C, d] of unit length; returns int64 [n].
    """
    return (rms_direction(hidden) @ centroids.float().T).argmax(dim=-1)
