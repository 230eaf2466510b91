"""Where a model's weights are, as the compiled blocks read it: records of addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trimmoe.models.compiled import step
from trimmoe.models.compiled.product import (
    DATA,
    END,
    FORMAT,
    IN,
    NEXT,
    OFFSETS,
    OUT,
    RECORD,
    RUN,
    SCALES,
    product_of,
)
from trimmoe.models.quantise import Packed, placed


@dataclass(kw_only=True)
class Tables:
    """Blocks of a model; keeps what they point to."""

    shape: step.Shape
    blocks: NDArray[np.int64]
    """[B, COLUMNS]."""
    experts: NDArray[np.int64]
    """Where an expert's matrices are, [B, E, EXPERT]; zeros where it is not here."""
    block_of: tuple[int, ...]
    """Of each MoE layer."""
    kept: list[Any] = field(default_factory=list)
    matrices: dict[tuple[int, int], tuple[Packed, Packed]] = field(default_factory=dict)
    """What experts are made of, by block and expert."""
    copies: dict[tuple[int, int, int], NDArray[np.int64]] = field(default_factory=dict)
    """Where the matrices of an expert's copy are, [EXPERT], by block, expert and bits."""

    @staticmethod
    def empty(shape: step.Shape, block_count: int, block_of: Sequence[int]) -> Tables:
        """Blocks with nothing in them yet."""
        blocks = np.zeros((block_count, step.COLUMNS), dtype=np.int64)
        blocks[:, step.LAYER] = -1
        blocks[list(block_of), step.LAYER] = np.arange(len(block_of))
        experts = np.zeros((block_count, shape.experts, step.EXPERT), dtype=np.int64)
        return Tables(shape=shape, blocks=blocks, experts=experts, block_of=tuple(block_of))

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

    def matrix(self, block: int, matrices: Mapping[int, Packed]) -> None:
        """Note matrices, by column, that are read one after the other."""
        those = self._keep(*matrices.values())
        for column, matrix in zip(matrices, those, strict=True):
            self.blocks[block, column : column + RECORD] = record(matrix, those[-1])

    def expert(self, block: int, expert: int, up: Packed, down: Packed) -> None:
        """Note the matrices of an expert; those of its gate and up projection are one."""
        up, down = self._keep(up, down)
        self.matrices[block, expert] = up, down
        self.experts[block, expert] = np.concatenate([record(up, down), record(down)])

    def copy(self, block: int, expert: int, bits: int, up: Packed, down: Packed) -> None:
        """Note a copy of an expert in so many bits."""
        up, down = self._keep(up, down)
        self.copies[block, expert, bits] = np.concatenate([record(up, down), record(down)])

    def _keep(self, *matrices: Packed) -> tuple[Packed, ...]:
        those = placed(matrices)
        self.kept += those
        return those


def record(matrix: Packed, last: Packed | None = None) -> NDArray[np.int64]:
    """A matrix as `product` reads it, in whose room the `last` one lies behind it that is read
    after it; whoever asks keeps what it points to."""
    columns = np.zeros(RECORD, dtype=np.int64)
    arrays = matrix.data, matrix.scales, matrix.offsets
    columns[[DATA, SCALES, OFFSETS]] = [array.ctypes.data for array in arrays]
    last = last or matrix
    columns[NEXT] = matrix.nbytes // len(matrix.data)
    assert len(matrix.data) == 1 or matrix.data.strides[0] == columns[NEXT], "not `placed`"
    columns[END] = last.data.ctypes.data + last.nbytes
    columns[FORMAT], columns[OUT] = matrix.form, matrix.shape[0]
    columns[RUN] = product_of(matrix.form).address
    columns[IN] = matrix.padded_columns
    return columns
