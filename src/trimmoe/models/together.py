"""Many experts in few launches, for accelerators.

There a launch costs more than the product of one token and one expert, and asking which experts
were chosen keeps the accelerator waiting. So slots are sorted by expert where they are, and all of
a layer's products are one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

GATHERED_BYTES = 256 << 20
"""Up to so many bytes weights are copied by slot, in dtypes that have no product of groups."""


def can_group(device: torch.device, *sizes: int) -> bool:
    """Whether torch multiplies groups of rows by matrices of such sizes there, in bfloat16."""
    if device.type != "cuda" or not hasattr(F, "grouped_mm"):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and not any(n % 8 for n in sizes)


def sorted_slots(index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Slots [S] in the order of their experts `index` [S], and where each of `count` experts' slots
    end, int32."""
    order = index.argsort(stable=True)
    experts = torch.arange(count, device=index.device)
    return order, torch.searchsorted(index[order], experts, right=True).int()


def products(rows: Tensor, stacked: Tensor, index: Tensor, ends: Tensor) -> Tensor:
    """Rows [S, x], sorted by expert, times the matrix of each one's expert: of `stacked` [E, y, x],
    [S, y]. `index` [S] are their experts, `ends` as of `sorted_slots`."""
    if rows.dtype is torch.bfloat16:
        return F.grouped_mm(rows, stacked.transpose(1, 2), offs=ends)
    own = stacked.index_select(0, index).transpose(1, 2)
    return torch.bmm(rows.unsqueeze(1), own).squeeze(1)


def apart(
    rows: Tensor,
    index: Tensor,
    count: int,
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """What `run` gives for slots sorted by expert, in the slots' own order, [S, y].

    `rows` [S, x] are what slots read and `index` [S] their experts of `count`; `run` takes sorted
    rows, their experts, and `ends`.
    """
    order, ends = sorted_slots(index, count)
    given = run(rows.index_select(0, order), index.index_select(0, order), ends)
    return torch.empty_like(given).index_copy_(0, order, given)
