"""Where a model's weights are, as the compiled blocks read it: records of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trimmoe.models.compiled import step
from trimmoe.models.compiled.product import (
    DATA,
    FORMAT,
    IN,
    OFFSETS,
    OUT,
    RECORD,
    RUN,
    SCALES,
    product_of,
)
from trimmoe.models.quantise import Packed


@dataclass(kw_only=True)
class Tables:
    """Blocks of a model; keeps what they point to."""

    shape: step.Shape
    blocks: NDArray[np.int64]
    """[B, COLUMNS]."""
    index: NDArray[np.int64]
    """Where in its block's stack an expert is, [B, E]; -1 where it is not here."""
    block_of: tuple[int, ...]
    """Of each MoE layer."""
    kept: list[Any] = field(default_factory=list)

    @staticmethod
    def empty(shape: step.Shape, block_count: int, block_of: Sequence[int]) -> Tables:
        """Blocks with nothing in them yet."""
        blocks = np.zeros((block_count, step.COLUMNS), dtype=np.int64)
        blocks[:, step.LAYER] = -1
        blocks[list(block_of), step.LAYER] = np.arange(len(block_of))
        index = np.full((block_count, shape.experts), -1, dtype=np.int64)
        return Tables(shape=shape, blocks=blocks, index=index, block_of=tuple(block_of))

    @property
    def size_bytes(self) -> int:
        """Of the weights."""
        return sum(each.nbytes for each in self.kept)

    def vector(self, block: int, column: int, values: Tensor | None) -> None:
        """Note a vector, such as a norm's weights or a bias."""
        if values is not None:
            array = values.detach().float().numpy().copy()
            self.kept.append(array)
            self.blocks[block, column] = array.ctypes.data

    def matrix(self, block: int, column: int, matrix: Packed) -> None:
        """Note a matrix."""
        self.kept.append(matrix)
        self.blocks[block, column : column + RECORD] = record(matrix)

    def stack(self, block: int, column: int, strides: int, matrix: Packed, count: int) -> None:
        """Note the matrices of a block's `count` experts, stored one below the other."""
        self.kept.append(matrix)
        one = record(matrix)
        one[OUT] //= count
        self.blocks[block, column : column + RECORD] = one
        sizes = [each.nbytes // count for each in (matrix.data, matrix.scales, matrix.offsets)]
        self.blocks[block, strides : strides + len(sizes)] = sizes

    def experts(self, block: int, ids: Sequence[int]) -> None:
        """Say which experts a block's stacks hold."""
        self.index[block, list(ids)] = np.arange(len(ids))


def record(matrix: Packed) -> NDArray[np.int64]:
    """A matrix as `product` reads it; whoever asks keeps what it points to."""
    columns = np.zeros(RECORD, dtype=np.int64)
    arrays = matrix.data, matrix.scales, matrix.offsets
    columns[[DATA, SCALES, OFFSETS]] = [array.ctypes.data for array in arrays]
    columns[FORMAT], columns[OUT] = matrix.form, matrix.shape[0]
    columns[RUN] = product_of(matrix.form).address
    columns[IN] = matrix.padded_columns
    return columns
