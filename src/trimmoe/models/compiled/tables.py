"""Where a model's weights are, as the compiled blocks read it: records of addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trimmoe.core.precision import Precision
from trimmoe.core.stand_ins import FORMS, number_of
from trimmoe.models.compiled import columns, product
from trimmoe.models.compiled.apart import prepare
from trimmoe.models.compiled.attention import Shape
from trimmoe.models.compiled.lanes import Format
from trimmoe.models.compiled.packing import packed
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
from trimmoe.models.compiled.quantise import Packed, placed


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParts:
    """An expert: gate and up projection [f, d] each, down projection [d, f], what is added to what
    they give, [2 f] and [d], if anything."""

    gate: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(kw_only=True)
class Tables:
    """Blocks of a model; keeps what they point to."""

    shape: Shape
    blocks: NDArray[np.int64]
    """[B, COLUMNS]."""
    experts: NDArray[np.int64]
    """Where the matrices of experts and copies are, as `core.stand_ins` numbers them, [B, F,
    EXPERT]; zeros of those that are not here."""
    block_of: tuple[int, ...]
    """Of each MoE layer."""
    kept: list[Any] = field(default_factory=list)
    matrices: dict[tuple[int, int], tuple[Packed, Packed]] = field(default_factory=dict)
    """What experts are made of, by block and expert."""
    copies: dict[tuple[int, int], tuple[Packed, Packed]] = field(default_factory=dict)
    """What copies are made of, by block and number."""
    input_squares: NDArray[np.float32] | None = None
    """Means of what experts read, [N, d], to which copies are fitted; None: nothing is known."""
    deltas: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    """What is known of linear attention, by block."""

    @staticmethod
    def empty(shape: Shape, block_count: int, block_of: Sequence[int]) -> Tables:
        """Blocks with nothing in them yet."""
        blocks = np.zeros((block_count, columns.COLUMNS), dtype=np.int64)
        blocks[:, columns.LAYER] = -1
        blocks[list(block_of), columns.LAYER] = np.arange(len(block_of))
        usual = (shape.head, shape.kv_heads, shape.rotary)
        blocks[:, [columns.HEAD, columns.KV_HEADS, columns.TURNED]] = usual
        experts = np.zeros((block_count, FORMS * shape.experts, columns.EXPERT), dtype=np.int64)
        return Tables(shape=shape, blocks=blocks, experts=experts, block_of=tuple(block_of))

    @property
    def size_bytes(self) -> int:
        """Of the weights."""
        copies = (each.nbytes for both in self.copies.values() for each in both)
        return sum(each.nbytes for each in self.kept) + sum(copies)

    def vector(self, block: int, column: int, values: Tensor | None) -> None:
        """Note a vector, such as a norm's weights or a bias."""
        if values is not None:
            self.blocks[block, column] = self.keep(values)

    def matrix(self, block: int, matrices: Mapping[int, Packed]) -> None:
        """Note matrices, by column, that are read one after the other."""
        those = self._keep(*matrices.values())
        for column, matrix in zip(matrices, those, strict=True):
            self.blocks[block, column : column + RECORD] = record(matrix, those[-1])

    def latents(
        self, block: int, known: Sequence[int], pairs: Sequence[tuple[Packed, Packed]]
    ) -> None:
        """Note what is `known` of compressed keys, and two matrices of every head."""
        records = [record(one) for pair in pairs for one in self._keep(*pair)]
        table = np.concatenate([np.array(known, dtype=np.int64), *records])
        self.kept.append(table)
        self.blocks[block, columns.LATENTS] = table.ctypes.data

    def delta(self, block: int, known: Sequence[int]) -> None:
        """Note what is `known` of linear attention."""
        table = np.array(known, dtype=np.int64)
        self.deltas[block] = table
        self.blocks[block, columns.DELTA] = table.ctypes.data

    def expert(self, block: int, expert: int, parts: ExpertParts, precision: Precision) -> None:
        """Note an expert; the matrices of its gate and up projection are one."""
        up = packed([parts.gate, parts.up], precision)
        up, down = self._keep(up, packed([parts.down], precision))
        self.matrices[block, expert] = up, down
        self.experts[block, expert] = expert_record(up, down, self.keep_biases(parts))

    def copy(
        self, block: int, expert: int, bits: int, up: Packed, down: Packed, biases: tuple[int, int]
    ) -> None:
        """Note a copy of an expert in so many bits; `biases` are addresses, 0 for none."""
        number = number_of(expert, bits, self.shape.experts)
        up, down = placed((up, down))
        self.copies[block, number] = up, down
        self.experts[block, number] = expert_record(up, down, biases)

    def fit_copies(self, squares: NDArray[np.float32] | None) -> None:
        """Fit copies to these from here on. Those that were fitted to others are not found any
        longer, but somebody may still compute with them."""
        known, self.input_squares = self.input_squares, squares
        if known is None and squares is None:
            return
        if known is None or squares is None or not np.array_equal(known, squares):
            self.kept += [part for both in self.copies.values() for part in both]
            self.drop_copies()

    def drop_copies(self) -> None:
        """Hold none any more."""
        self.experts[:, self.shape.experts :] = 0
        self.copies.clear()

    def biases(self, block: int, expert: int) -> tuple[int, int]:
        """Addresses of what is added to what an expert's projections give."""
        both = self.experts[block, expert, [columns.UP_BIAS, columns.DOWN_BIAS]]
        return int(both[0]), int(both[1])

    def keep_biases(self, parts: ExpertParts) -> tuple[int, int]:
        """Addresses of those of an expert, 0 for none."""
        up, down = (
            0 if bias is None else self.keep(bias) for bias in (parts.up_bias, parts.down_bias)
        )
        return up, down

    def keep(self, values: Tensor) -> int:
        """The address of a copy of numbers in single precision."""
        array = values.detach().float().numpy().copy()
        self.kept.append(array)
        return array.ctypes.data

    def _keep(self, *matrices: Packed) -> tuple[Packed, ...]:
        those = placed(matrices)
        self.kept += those
        return those


def expert_record(up: Packed, down: Packed, biases: tuple[int, int] = (0, 0)) -> NDArray[np.int64]:
    """An expert as `step.routed` reads it, whose matrices are `placed`, with the addresses of
    biases; whoever asks keeps what it points to."""
    return np.concatenate([record(up, down), record(down), biases])


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
    columns[RUN] = _run_of(matrix.form)
    columns[IN] = matrix.padded_columns
    return columns


@cache
def _run_of(form: Format) -> int:
    """The address of the product with matrices of a format."""
    prepare(product)
    return product_of(form).address
