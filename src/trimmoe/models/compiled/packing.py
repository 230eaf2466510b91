"""Weights of modules as compiled blocks hold them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trimmoe.core.precision import Precision
from trimmoe.models.compiled.quantise import Packed, pack_joined


def packed(weights: Sequence[Tensor], precision: Precision) -> Packed:
    """Matrices one below another, each in panels of its own."""
    return pack_joined([each.detach().float().numpy() for each in weights], precision)
