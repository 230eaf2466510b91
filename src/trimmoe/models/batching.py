"""Building a `TokenBatch`: indices and masks, once per step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from trimmoe.models.batch import TokenBatch


def describe(
    slots: Sequence[int], positions: Sequence[Sequence[int]], *, device: torch.device
) -> TokenBatch:
    """Indices of a step without its masks; see `MoEView.batch`."""
    assert slots
    assert len(slots) == len(positions)
    assert all(len(row) for row in positions)
    columns = max(len(row) for row in positions)
    if columns == 1:
        return _single(slots, positions, device)
    full = all(len(row) == columns for row in positions)
    padded = [[*row, *[row[-1]] * (columns - len(row))] for row in positions]
    first = slots[0]
    consecutive = list(slots) == list(range(first, first + len(slots)))
    write = [(s, p) for s, row in zip(slots, positions, strict=True) for p in row]
    write_index = torch.tensor(write, device=device)
    return TokenBatch(
        slots=tuple(slots),
        positions=tuple(positions),
        position_ids=torch.tensor(padded, device=device),
        valid=_valid(positions, columns, device),
        length=max(row[-1] for row in positions) + 1,
        packed=None if full else _packed(positions, columns, device),
        slot_ids=torch.tensor(list(slots), device=device),
        first_slot=first if consecutive else None,
        span=_span(positions),
        write_slots=write_index[:, 0],
        write_positions=write_index[:, 1],
    )


def _single(
    slots: Sequence[int], positions: Sequence[Sequence[int]], device: torch.device
) -> TokenBatch:
    """One token of each sequence, which is what decoding does."""
    at, first, count = [row[0] for row in positions], slots[0], len(slots)
    # Through numpy: torch takes several times as long to make a tensor of a list.
    slot_ids, position_ids = (
        torch.from_numpy(np.array(each, dtype=np.int64)) for each in (slots, at)
    )
    if device.type != "cpu":
        slot_ids, position_ids = slot_ids.to(device), position_ids.to(device)
    return TokenBatch(
        slots=tuple(slots),
        positions=tuple(positions),
        position_ids=position_ids[:, None],
        valid=_all_valid(count, device),
        length=max(at) + 1,
        packed=None,
        slot_ids=slot_ids,
        first_slot=first if list(slots) == list(range(first, first + count)) else None,
        span=(at[0], at[0] + 1) if count == 1 else None,
        write_slots=slot_ids,
        write_positions=position_ids,
    )


@cache
def _all_valid(count: int, device: torch.device) -> Tensor:
    return torch.ones((count, 1), dtype=torch.bool, device=device)


def _valid(positions: Sequence[Sequence[int]], columns: int, device: torch.device) -> Tensor:
    lengths = torch.tensor([len(row) for row in positions], device=device)
    return torch.arange(columns, device=device) < lengths[:, None]


def _packed(positions: Sequence[Sequence[int]], columns: int, device: torch.device) -> Tensor:
    flat = [b * columns + t for b, row in enumerate(positions) for t in range(len(row))]
    return torch.tensor(flat, device=device)


def _span(positions: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    if len(positions) != 1 or not _is_run(positions[0]):
        return None
    return positions[0][0], positions[0][-1] + 1


def _is_run(row: Sequence[int]) -> bool:
    """Whether positions follow one another; they increase, so ends and count tell."""
    return row[-1] - row[0] + 1 == len(row)


def masks(batch: TokenBatch, *, window: int | None) -> tuple[Tensor | None, Tensor | None]:
    """Boolean masks [B, 1, T, length], plain and windowed.

    None where plain causality suffices: when rows are prompts from position 0 (the padding comes
    after every token that could see it), or single tokens of equal position.
    """
    within = window is None or batch.length <= window
    columns = batch.shape[1]
    prompts = columns == batch.length and all(
        row[0] == 0 and _is_run(row) for row in batch.positions
    )
    aligned = columns == 1 and all(row[0] + 1 == batch.length for row in batch.positions)
    simple = prompts or aligned
    if simple and within:
        return None, None
    causal, near = all_masks(batch, window=window)
    return (None if simple else causal), near


def all_masks(batch: TokenBatch, *, window: int | None) -> tuple[Tensor, Tensor]:
    """The same whether plain causality suffices or not."""
    keys = torch.arange(batch.length, device=batch.position_ids.device)
    queries = batch.position_ids[:, None, :, None]
    causal = keys <= queries
    near = causal if window is None else causal & (keys > queries - window)
    return causal, near
