"""Numbers of a few bits, taken out of the words that they are packed in."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32
"""Bits of the words that integers are packed in."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1; the fourth bit is the sign."""


def unpacked(words: Tensor, bits: int, *, dim: int) -> Tensor:
    """Unsigned numbers of `bits` bits, int32, from int32 words [R, C], the lowest bits first.

    [R, C * n] for `dim` 1, [R * n, C] for `dim` 0, where a word holds n.
    """
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    mask = (1 << bits) - 1
    if dim == 1:
        return ((words[:, :, None] >> shifts) & mask).flatten(1)
    return ((words[:, None, :] >> shifts[:, None]) & mask).flatten(0, 1)


def fp4_values(packed: Tensor) -> Tensor:
    """E2M1 numbers [..., 2n] from bytes [..., n], the low half of a byte first."""
    table = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.float32)
    halves = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return table[halves.int()]


def e8m0_values(exponents: Tensor) -> Tensor:
    """Powers of two, float32, from bytes or from float8_e8m0fnu."""
    return exponents.view(torch.float8_e8m0fnu).to(torch.float32)
