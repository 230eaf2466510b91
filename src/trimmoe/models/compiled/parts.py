"""What a compiled view needs besides its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trimmoe.core.precision import Precision
from trimmoe.models.compiled.quantise import Packed

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The ends of a model, and what is known of it."""

    loaded: tuple[frozenset[int], ...]
    precision: Precision
    has_shared: bool
    embeddings: Packed
    head: Packed
    last_norm: NDArray[np.float32]
    rotary: Rotary
    """Position ids [1, P] to cosine and sine [1, P, rotary], of one kind of block after another."""
    embedding_scale: float = 1.0
    """What rows of the embeddings are multiplied with."""
    logit_cap: float | None = None
    """Logits are held within it by a hyperbolic tangent."""
