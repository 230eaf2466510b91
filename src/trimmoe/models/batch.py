"""Which tokens one step of a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """Which token each row and column of a call is, and what one step computes only once.

    Made by `MoEView.batch`. Rows are padded on the right; padding is neither written to a cache
    nor attended to.
    """

    slots: tuple[int, ...]
    """Cache slot of each row."""
    positions: tuple[Sequence[int], ...]
    """Positions of each row's tokens, increasing, unpadded."""
    position_ids: Tensor
    """int64 [B, T]; padding repeats the row's last position."""
    valid: Tensor
    """bool [B, T]."""
    length: int
    """One more than the highest position: how many cached keys the batch reads."""
    packed: Tensor | None
    """Indices of the valid tokens in the flattened [B * T], None if all are."""
    slot_ids: Tensor
    """int64 [B]."""
    first_slot: int | None
    """First slot if the rows' slots are consecutive, so that a slab can be read as a view."""
    span: tuple[int, int] | None
    """Positions [first, last) if there is one row of consecutive tokens."""
    write_slots: Tensor
    """Slot of each valid token, int64 [n]."""
    write_positions: Tensor
    """Position of each valid token, int64 [n]."""
    mask: Tensor | None = None
    """What may be attended to, [B, 1, T, length]; None if causality says it all."""
    window_mask: Tensor | None = None
    """The same under the model's sliding window."""
    rotary: tuple[Tensor, Tensor] | None = None
    """Cosine and sine, each [B, T, head size]."""
    position_bias: Tensor | None = None
    """Relative position bias, [B, heads, T, length]."""
    source_mask: Tensor | None = None
    """Additive mask over the encoder's positions for cross attention, [B, 1, 1, source]."""
    source_length: int = 0
    """Encoder positions that cross attention reads."""
    calls: Any = None
    """What a general view's layers are called with."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.position_ids.shape[0], self.position_ids.shape[1]

    def pack(self, hidden: Tensor) -> Tensor:
        """Valid tokens of [B, T, x] in row order, [n, x]."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        return flat if self.packed is None else flat.index_select(0, self.packed)

    def unpack(self, flat: Tensor) -> Tensor:
        """[n, x] back to [B, T, x], zeros where there is padding."""
        rows, columns = self.shape
        if self.packed is not None:
            padded = flat.new_zeros(rows * columns, flat.shape[-1])
            flat = padded.index_copy_(0, self.packed, flat)
        return flat.view(rows, columns, flat.shape[-1])

    def last(self, hidden: Tensor) -> Tensor:
        """Each row's last valid token of [B, T, x], as [B, x]."""
        if self.shape[1] == 1:
            return hidden[:, 0]
        columns = [len(row) - 1 for row in self.positions]
        rows = torch.arange(len(columns), device=hidden.device)
        return hidden[rows, torch.tensor(columns, device=hidden.device)]

    def pad(self, rows: Sequence[Sequence[int]], fill: int = 0) -> Tensor:
        """Token ids of each row as int64 [B, T]."""
        columns = self.shape[1]
        padded = [[*row, *[fill] * (columns - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=self.position_ids.device)

    @property
    def groups(self) -> Tensor:
        """Row of each packed token, int64 [n]: what `MoEView.route` takes as `groups`."""
        counts = torch.tensor([len(row) for row in self.positions], device=self.slot_ids.device)
        return torch.repeat_interleave(counts)
