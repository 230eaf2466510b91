"""Weight matrices as the compiled blocks hold them: in panels, in full or in few bits.

Quantised, groups of `GROUP` in a row share a scale, and at four bits an offset; rounding is to
nearest. Weights that bfloat16 holds exactly, as most checkpoints', are held in it: what is computed
with them is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.precision import GROUP, Precision
from trimmoe.models.compiled.lanes import LANES, Format

Floats = NDArray[np.float32]
_NOTHING: Floats = np.empty((0, 0, LANES), np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A matrix [J, K]; columns padded with zeros to K', a multiple of `GROUP`, rows to panels."""

    form: Format
    data: NDArray[Any]
    """[P, K', LANES]; of Q8 [P, K' / 2, LANES, 2]; of Q4 bytes [P, K' / 2, LANES], a group's first
    half in the low bits."""
    scales: Floats
    """[P, K' / GROUP, LANES]; empty where there are none."""
    offsets: Floats
    """[P, K' / GROUP, LANES]; empty where there are none."""
    shape: tuple[int, int]
    """Without padding."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes + self.offsets.nbytes

    @property
    def padded_columns(self) -> int:
        return self.data.shape[1] * (2 if self.form in (Format.Q8, Format.Q4) else 1)

    def rows(self, which: NDArray[np.int64]) -> Floats:
        """What some rows stand for, [n, K]."""
        panel, lane = which // LANES, which % LANES
        data = self.data[panel, :, lane]
        if self.form is Format.BF16:
            whole = (data.astype(np.uint32) << 16).view(np.float32)
        elif self.form is Format.F32:
            whole = data
        else:
            if self.form is Format.Q4:
                halves = data.reshape(len(which), -1, GROUP // 2)
                data = np.concatenate([halves & 15, halves >> 4], axis=-1)
            groups = data.reshape(len(which), -1, GROUP).astype(np.float32)
            whole = groups * self.scales[panel, :, lane, None]
            if self.offsets.size:
                whole += self.offsets[panel, :, lane, None]
        return np.ascontiguousarray(whole.reshape(len(which), -1)[:, : self.shape[1]])

    @property
    def restored(self) -> Floats:
        """What the matrix stands for, [J, K]."""
        return self.rows(np.arange(self.shape[0]))


def pack(weights: Floats, precision: Precision) -> Packed:
    """A matrix [J, K] as it is held."""
    padded = np.pad(weights, [(0, -weights.shape[0] % LANES), (0, -weights.shape[1] % GROUP)])
    if precision is Precision.NONE:
        return _whole(padded, weights.shape)
    groups = padded.reshape(padded.shape[0], -1, GROUP)
    if precision is Precision.INT8:
        scales = (np.abs(groups).max(2) / np.float32(127)).astype(np.float32)
        numbers = np.rint(_over(groups, scales)).astype(np.int8).reshape(padded.shape)
        return Packed(
            form=Format.Q8,
            data=_paired(numbers),
            scales=_panels(scales),
            offsets=_NOTHING,
            shape=weights.shape,
        )
    low, high = groups.min(2), groups.max(2)
    scales = ((high - low) / np.float32(15)).astype(np.float32)
    numbers = np.clip(np.rint(_over(groups - low[..., None], scales)), 0, 15).astype(np.uint8)
    half = GROUP // 2
    both = numbers[..., :half] | numbers[..., half:] << 4
    return Packed(
        form=Format.Q4,
        data=_panels(both.reshape(padded.shape[0], -1)),
        scales=_panels(scales),
        offsets=_panels(low),
        shape=weights.shape,
    )


def joined(parts: Sequence[Packed]) -> Packed:
    """Matrices of one width below one another, each padded to panels.

    Raises AssertionError for parts of several forms.
    """
    first = parts[0]
    assert all(part.form is first.form and part.shape[1] == first.shape[1] for part in parts)
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


def _whole(padded: Floats, shape: tuple[int, int]) -> Packed:
    bits = padded.view(np.uint32)
    is_short = not (bits & 0xFFFF).any()
    return Packed(
        form=Format.BF16 if is_short else Format.F32,
        data=_panels((bits >> 16).astype(np.uint16) if is_short else padded),
        scales=_NOTHING,
        offsets=_NOTHING,
        shape=shape,
    )


def _widened(part: Packed) -> Packed:
    """In single precision."""
    if part.form is Format.F32:
        return part
    data = (part.data.astype(np.uint32) << 16).view(np.float32)
    return Packed(form=Format.F32, data=data, scales=_NOTHING, offsets=_NOTHING, shape=part.shape)


def _panels(rows: NDArray[Any]) -> NDArray[Any]:
    """[P * LANES, X] to [P, X, LANES]."""
    return np.ascontiguousarray(rows.reshape(-1, LANES, rows.shape[1]).transpose(0, 2, 1))


def _paired(rows: NDArray[Any]) -> NDArray[Any]:
    """[P * LANES, X] to [P, X / 2, LANES, 2]."""
    pairs = rows.reshape(-1, LANES, rows.shape[1] // 2, 2)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3))


def _over(groups: NDArray[Any], scales: NDArray[Any]) -> NDArray[Any]:
    """Groups divided by their scales; groups of zeros stay zero."""
    divisors = np.where(scales > 0, scales, np.float32(1))
    return groups / divisors[..., None]
