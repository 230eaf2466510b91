"""Rows of states as compiled blocks read and write them: padded to whole panels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimmoe.core.specs import IntArray
from trimmoe.models.compiled import calls

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Room for what routers say; shapes as `calls.segment` has them."""

    experts: IntArray
    logits: Floats
    probabilities: Floats
    gates: Floats
    normed: Floats

    @staticmethod
    def of(shape: calls.Shape, blocks: int, count: int) -> Found:
        wide = calls.wide(shape.experts)
        return Found(
            experts=np.empty((blocks, count, shape.top_k), dtype=np.int64),
            logits=np.empty((count, wide), dtype=np.float32),
            probabilities=np.empty((count, wide), dtype=np.float32),
            gates=np.empty((count, shape.top_k), dtype=np.float32),
            normed=np.zeros((count, calls.wide(shape.hidden)), dtype=np.float32),
        )


def beside(positions: Tensor, slot: int) -> tuple[IntArray, IntArray]:
    """Places of what-if queries [S] into one slot."""
    where = np.ascontiguousarray(positions.numpy(), dtype=np.int64)
    return np.full_like(where, slot), where


def widened(rows: Tensor) -> Floats:
    """A copy of [n, d] as wide rows."""
    # Compiled products read by address, whatever is there.
    assert rows.dtype is torch.float32, f"states of {rows.dtype} in compiled blocks"
    given = rows.numpy()
    count, size = given.shape
    if calls.wide(size) == size:
        return given.copy()
    whole = np.zeros((count, calls.wide(size)), dtype=np.float32)
    whole[:, :size] = given
    return whole
