"""Sums of experts' outputs on the wire: as wide as they have to be, and no wider.

What one expert gives is a vector in the model's dtype, and so is what is gathered already. A sum
that others are to be added to is not rounded yet (`models.sums`), and takes twice the bytes. So
rows of both kinds travel as two tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimmoe.core.specs import BoolArray


def parted(sums: Tensor, wide: BoolArray, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sums [n, d], those of the rows that are `wide` [n] apart from the others, in `dtype`."""
    if not wide.any():
        return sums.to(dtype), ()
    where = torch.from_numpy(wide).to(sums.device)
    return sums[~where].to(dtype), (sums[where],)


def joined(narrow: Tensor, wide: Tensor | None, rows: Sequence[int]) -> Tensor:
    """Sums [n, d] that were `parted`; `rows` are those of `wide`, ascending."""
    if wide is None:
        return narrow
    if not len(narrow):
        return wide
    count = len(narrow) + len(wide)
    is_wide = torch.zeros(count, dtype=torch.bool)
    is_wide[list(rows)] = True
    sums = wide.new_empty(count, wide.shape[1])
    sums[is_wide], sums[~is_wide] = wide, narrow.to(wide.dtype)
    return sums
