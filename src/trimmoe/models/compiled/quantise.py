"""Weight matrices as the compiled blocks hold them: in panels, in full or in few bits.

Quantised, groups of `GROUP` in a row share a scale, and at four bits and fewer an offset: at eight
bits rounding is to nearest, else scale and offset are fitted (`rounding.py`), to what is read if
that is known. Weights that
bfloat16 holds exactly, as most checkpoints', are held in it: what is computed with them is the
same, bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.precision import GROUP, Precision
from trimmoe.models.compiled.lanes import (
    FACTOR_BYTES,
    LANES,
    SCALE_POWER,
    SCALE_SHIFT,
    Format,
)
from trimmoe.models.compiled.pages import CHUNKS
from trimmoe.models.compiled.rounding import fit, round_to_eight

Floats = NDArray[np.float32]
_FEW = {2: Format.Q2, 3: Format.Q3, 4: Format.Q4}
"""Formats with offsets, by their bits."""
_LEAST_WORTH = 0.01
_UPPER = 1 if sys.byteorder == "little" else 0
"""Which half of a float's bytes is what bfloat16 keeps of it."""
_NOTHING: Floats = np.empty((0, 0, LANES), np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A matrix [J, K]; columns padded with zeros to K', a multiple of `GROUP`, rows to panels."""

    form: Format
    data: NDArray[Any]
    """[P, K', LANES]; of quantised weights of b bits, in bytes, [P, K' * b / 16, LANES, 2]."""
    scales: NDArray[Any]
    """Of eight bits [P, K' / GROUP, LANES], uint16; of fewer, uint8, the panel's factor and then
    those of groups, [P, FACTOR_BYTES + K' / GROUP * LANES]; empty where there are none."""
    offsets: NDArray[Any]
    """The same, int8; empty where there are none."""
    shape: tuple[int, int]
    """Without padding."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes + self.offsets.nbytes

    @property
    def padded_columns(self) -> int:
        if self.form in (Format.F32, Format.BF16):
            return self.data.shape[1]
        return self.data.shape[1] * 16 // self.form.bits

    def rows(self, which: NDArray[np.int64]) -> Floats:
        """What some rows stand for, [n, K]."""
        panel, lane = which // LANES, which % LANES
        if self.form is Format.BF16:
            whole = _floats(self.data[panel, :, lane])
        elif self.form is Format.F32:
            whole = self.data[panel, :, lane]
        else:
            whole = self._numbers(panel, lane) * self._scales(panel, lane)[..., None]
            if self.offsets.size:
                whole += _factors(self.offsets, panel, lane)[..., None]
        return np.ascontiguousarray(whole.reshape(len(which), -1)[:, : self.shape[1]])

    def _numbers(self, panel: NDArray[np.int64], lane: NDArray[np.int64]) -> Floats:
        """What some rows hold of each group, [n, K' / GROUP, GROUP]."""
        stored = self.data[panel, :, lane].reshape(len(panel), -1, GROUP * self.form.bits // 8)
        return _together(stored, self.form).astype(np.float32)

    def _scales(self, panel: NDArray[np.int64], lane: NDArray[np.int64]) -> Floats:
        """What the groups of some rows are multiplied by, [n, K' / GROUP]."""
        if self.form is not Format.Q8:
            return _factors(self.scales, panel, lane)
        bits = self.scales[panel, :, lane].astype(np.uint32) << SCALE_SHIFT
        return bits.view(np.float32) * np.float32(2.0**SCALE_POWER)

    @property
    def restored(self) -> Floats:
        """What the matrix stands for, [J, K]."""
        return self.rows(np.arange(self.shape[0]))


def placed(matrices: Sequence[Packed]) -> tuple[Packed, ...]:
    """The same matrices one behind the other in memory, each panel by panel: its weights, then its
    scales and offsets. So that what is read next lies next."""
    whole = [
        [part.reshape(len(part), -1).view(np.uint8) for part in parts if part.size]
        for parts in ((each.data, each.scales, each.offsets) for each in matrices)
    ]
    sizes = [sum(part.shape[1] for part in parts) * len(parts[0]) for parts in whole]
    room, at = CHUNKS.room(sum(sizes)), 0
    those = []
    for matrix, parts, size in zip(matrices, whole, sizes, strict=True):
        panels = room[at : at + size].reshape(len(parts[0]), -1)
        np.concatenate(parts, axis=1, out=panels)
        those.append(_within(matrix, panels))
        at += size
    return tuple(those)


def _within(matrix: Packed, panels: NDArray[np.uint8]) -> Packed:
    """A matrix whose parts lie in these panels [P, bytes]."""
    found, at = [], 0
    for part in (matrix.data, matrix.scales, matrix.offsets):
        size = part.nbytes // len(panels)
        there = panels[:, at : at + size].view(part.dtype)
        found.append(there.reshape(part.shape) if part.size else part)
        at += size
    data, scales, offsets = found
    return replace(matrix, data=data, scales=scales, offsets=offsets)


def pack(weights: Floats, precision: Precision) -> Packed:
    """A matrix [J, K] as it is held."""
    padded = _padded(weights)
    if precision is Precision.NONE:
        return _whole(padded, weights.shape)
    if precision is Precision.INT8:
        data, scales = round_to_eight(padded)
        return Packed(
            form=Format.Q8, data=data, scales=scales, offsets=_NOTHING, shape=weights.shape
        )
    return pack_few(weights, 4)


def pack_bits(matrices: Sequence[Floats], bits: int, squares: Floats | None = None) -> Packed:
    """Matrices of one width in two, three, four or eight bits, one below another; `squares` as for
    `pack_few`."""
    if bits == 8:
        return pack_joined(matrices, Precision.INT8)
    return joined([pack_few(matrix, bits, squares) for matrix in matrices])


def pack_few(weights: Floats, bits: int, squares: Floats | None = None) -> Packed:
    """A matrix [J, K] in two, three or four bits; of what it is multiplied with the mean `squares`
    [K], if they are known."""
    padded = _padded(weights)
    groups = padded.reshape(padded.shape[0], -1, GROUP)
    fitted = fit(groups, bits, None if squares is None else _worth(squares))
    numbers, form = fitted.numbers, _FEW[bits]
    return Packed(
        form=form,
        data=_paired(_apart(numbers, form).reshape(padded.shape[0], -1)),
        scales=_factored(fitted.scales, fitted.scale_of_panel),
        offsets=_factored(fitted.offsets, fitted.offset_of_panel),
        shape=weights.shape,
    )


def _factored(codes: NDArray[Any], of_panel: Floats) -> NDArray[Any]:
    """Whole numbers of eight bits [P * LANES, G], and the factors [P] before them, by panel."""
    panels = _panels(codes).reshape(len(of_panel), -1)
    return np.concatenate([of_panel[:, None].view(codes.dtype), panels], axis=1)


def _factors(stored: NDArray[Any], panel: NDArray[np.int64], lane: NDArray[np.int64]) -> Floats:
    """What `_factored` stands for, of some rows, [n, G]."""
    of_panel = np.ascontiguousarray(stored[:, :FACTOR_BYTES]).view(np.float32)
    codes = stored[:, FACTOR_BYTES:].reshape(len(stored), -1, LANES)
    return codes[panel, :, lane].astype(np.float32) * of_panel[panel]


def _worth(squares: Floats) -> Floats:
    """How much columns count, by group, [K' / GROUP, GROUP]: by their share of the mean, and those
    next to nothing a little."""
    mean = float(squares.mean())
    counts = squares / mean if mean > 0.0 else np.ones_like(squares)
    padded = np.pad(counts, (0, -len(counts) % GROUP)) + _LEAST_WORTH
    return padded.reshape(-1, GROUP).astype(np.float32)


def _apart(numbers: NDArray[np.uint8], form: Format) -> NDArray[np.uint8]:
    """Numbers of groups [..., GROUP] in the bytes of a format, plane by plane."""
    planes, below = [], 0
    for bits in form.planes:
        part = numbers >> below & (1 << bits) - 1
        parts = part.reshape(*part.shape[:-1], 8 // bits, -1)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        planes.append(np.bitwise_or.reduce(parts << shifts, axis=-2))
        below += bits
    return np.concatenate(planes, axis=-1)


def _together(stored: NDArray[Any], form: Format) -> NDArray[Any]:
    """What `_apart` was given, of its bytes [..., GROUP * bits / 8]; those of eight bits as they
    are."""
    if form is Format.Q8:
        return stored
    ends = np.cumsum([GROUP * bits // 8 for bits in form.planes])[:-1]
    numbers, below = np.zeros((*stored.shape[:-1], GROUP), dtype=np.uint8), 0
    for bits, plane in zip(form.planes, np.split(stored, ends, axis=-1), strict=True):
        parts = [plane >> first & (1 << bits) - 1 for first in range(0, 8, bits)]
        numbers |= np.concatenate(parts, axis=-1) << below
        below += bits
    return numbers


def joined(parts: Sequence[Packed]) -> Packed:
    """Matrices of one width below one another, each padded to panels.

    Raises AssertionError for parts of several forms.
    """
    first = parts[0]
    assert all(part.form is first.form and part.shape[1] == first.shape[1] for part in parts)
    if len(parts) == 1:
        return replace(first, shape=(first.data.shape[0] * LANES, first.shape[1]))
    return Packed(
        form=first.form,
        data=np.concatenate([part.data for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        offsets=np.concatenate([part.offsets for part in parts]),
        shape=(sum(part.data.shape[0] for part in parts) * LANES, first.shape[1]),
    )


def pack_joined(matrices: Sequence[Floats], precision: Precision) -> Packed:
    """Matrices of one width, packed one below another."""
    parts = [pack(matrix, precision) for matrix in matrices]
    if len({part.form for part in parts}) > 1:
        parts = [_widened(part) for part in parts]
    return joined(parts)


def _padded(weights: Floats) -> Floats:
    """Rows to whole panels and columns to whole groups; the same where they are."""
    lacking = [(0, -weights.shape[0] % LANES), (0, -weights.shape[1] % GROUP)]
    return np.ascontiguousarray(np.pad(weights, lacking) if np.any(lacking) else weights)


def _whole(padded: Floats, shape: tuple[int, int]) -> Packed:
    # Copies of weights are most of what opening a model takes.
    found = np.bitwise_or.reduce(padded.view(np.uint32), axis=0)
    is_short = not (found & 0xFFFF).any()
    upper = padded.view(np.uint16)[:, _UPPER::2]
    return Packed(
        form=Format.BF16 if is_short else Format.F32,
        data=_panels(upper if is_short else padded),
        scales=_NOTHING,
        offsets=_NOTHING,
        shape=shape,
    )


def _widened(part: Packed) -> Packed:
    """In single precision."""
    if part.form is Format.F32:
        return part
    return Packed(
        form=Format.F32,
        data=_floats(part.data),
        scales=_NOTHING,
        offsets=_NOTHING,
        shape=part.shape,
    )


def _floats(values: NDArray[Any]) -> Floats:
    """Floats, or what the bits of bfloat16 stand for."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def _panels(rows: NDArray[Any]) -> NDArray[Any]:
    """[P * LANES, X] to [P, X, LANES]."""
    return np.ascontiguousarray(rows.reshape(-1, LANES, rows.shape[1]).transpose(0, 2, 1))


def _paired(rows: NDArray[Any]) -> NDArray[Any]:
    """[P * LANES, X] to [P, X / 2, LANES, 2]."""
    pairs = rows.reshape(-1, LANES, rows.shape[1] // 2, 2)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3))
