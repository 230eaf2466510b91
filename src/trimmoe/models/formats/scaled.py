"""Weights stored as numbers of eight bits, which scales of blocks, rows or all of them multiply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimmoe.models.checkpoint import SafetensorsCheckpoint
from trimmoe.models.formats.bits import e8m0_values
from trimmoe.models.formats.coded import Coded, Parts, misfit

Grid = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """How scales lie over a matrix."""

    grid: Grid
    """Scales in a column and in a row."""
    size: Grid
    """Rows and columns that share one; the last ones may be cut off."""

    def spread(self, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """Scales of any shape of as many numbers as the grid, over a matrix of `shape`.

        Dimensions that one scale spans are left at size 1.
        """
        grid = scales.reshape(self.grid)
        for dim in (0, 1):
            if self.grid[dim] > 1:
                grid = grid.repeat_interleave(self.size[dim], dim).narrow(dim, 0, shape[dim])
        return grid


def blocks_of(
    shape: Sequence[int], scales: Sequence[int], declared: Sequence[int] | None = None
) -> Blocks | None:
    """How scales of the shape `scales` lie over a matrix [J, K] or over each of [E, J, K].

    `declared` is the size of a block where the settings name one. None if they do not fit.
    """
    rows, columns = shape[-2:]
    own = list(scales)
    if len(shape) == 3 and own and own[0] == shape[0]:
        own = own[1:]
    while len(own) > 2 and own[-1] == 1:
        own.pop()
    if len(own) > 2:
        return None
    down, across = [*own, 1, 1][:2]
    grid = (down, across)
    if declared is not None:
        size = (int(declared[0]), int(declared[1]))
        if grid == (-(-rows // size[0]), -(-columns // size[1])):
            return Blocks(grid=grid, size=size)
    if 0 in grid or rows % grid[0] or columns % grid[1]:
        return None
    return Blocks(grid=grid, size=(rows // grid[0], columns // grid[1]))


def scale_values(scales: Tensor) -> Tensor:
    """In float32; bytes are exponents of two."""
    return e8m0_values(scales) if scales.dtype == torch.uint8 else scales.to(torch.float32)


def scaled(
    stored: SafetensorsCheckpoint,
    weight: str,
    *,
    scale: str,
    zero: str | None = None,
    declared: Sequence[int] | None = None,
) -> Coded:
    """(weight - zero) * scale. Raises UserError for scales that do not fit the weight."""
    shape, scales = stored.entry(weight).shape, stored.entry(scale).shape
    blocks = blocks_of(shape, scales, declared)
    if len(shape) not in (2, 3) or blocks is None:
        raise misfit(
            stored.folder, scale, f"scales {list(scales)} do not fit weights {list(shape)}"
        )

    def decode(parts: Parts) -> Tensor:
        # The file may map what it hands out, so nothing is written in place before the copy.
        values = parts["weight"].to(torch.float32)
        if "zero" in parts:
            values -= blocks.spread(parts["zero"].to(torch.float32), values.shape)
        return values * blocks.spread(scale_values(parts["scale"]), values.shape)

    parts = {"weight": weight, "scale": scale} | ({} if zero is None else {"zero": zero})
    return Coded(shape=shape, parts=parts, decode=decode)
