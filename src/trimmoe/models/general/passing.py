"""What the modules of transformers take for their cache while a batch passes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trimmoe.models.batch import TokenBatch
from trimmoe.models.general.caching import GeneralCache, States


class Passing:
    """A batch's rows in a `GeneralCache`, as a `Cache` of transformers answers and is told.

    Recurrent states are handed out as copies, which modules may change in place; `commit` keeps
    what has become of them.
    """

    is_compileable = False

    def __init__(self, cache: GeneralCache, batch: TokenBatch) -> None:
        self._cache, self._batch = cache, batch
        self._open: dict[int, States] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, ...]:
        self._cache.put(layer_idx, (keys, values), self._batch)
        return self._cache.get(layer_idx, self._batch)

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Keys [B, T, size] of what picks the keys that attention sees."""
        self._cache.put((layer_idx, "indexer"), (keys.unsqueeze(1),), self._batch)
        return self._cache.get((layer_idx, "indexer"), self._batch)[0][:, 0]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._states(layer_idx).get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._states(layer_idx).get(("recurrent", state_idx))

    def update_conv_state(
        self,
        states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """The states [B, channels, T] behind those that are kept; as many of the last ones are kept
        as a convolution is wide."""
        known, key = self._states(layer_idx), ("conv", state_idx)
        width = conv_kernel_size or known.get(key, states).shape[-1]
        if key in known:
            whole = torch.cat([known[key], states], dim=-1)
        else:
            whole = F.pad(states, (max(0, width - states.shape[-1]), 0))
        known[key] = whole[..., -width:].clone()
        return whole

    def update_recurrent_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self._states(layer_idx)[("recurrent", state_idx)] = states
        return states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return bool(self._states(layer_idx or 0))

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._batch.length - self._batch.shape[1]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._batch.length, 0

    def commit(self) -> None:
        """Keep the recurrent states that the batch has left."""
        for block, states in self._open.items():
            for row, slot in enumerate(self._batch.slots):
                length = self._batch.positions[row][-1] + 1
                own = {key: state[row : row + 1] for key, state in states.items()}
                self._cache.keep(block, slot, length, own)
        self._open.clear()

    def _states(self, block: int) -> States:
        """The batch's states before its tokens; empty if all of it begins."""
        if block not in self._open:
            batch = self._batch
            rows = [
                self._cache.kept(block, slot, positions[0])
                for slot, positions in zip(batch.slots, batch.positions, strict=True)
            ]
            self._open[block] = _joined(rows)
        return self._open[block]


def _joined(rows: Sequence[States | None]) -> States:
    """The states of rows together; a row that begins has zeros beside rows that do not."""
    known = next((row for row in rows if row), None)
    if known is None:
        return {}
    return {
        key: torch.cat([torch.zeros_like(state) if not row else row[key] for row in rows])
        for key, state in known.items()
    }


class Beside(Passing):
    """The same for what-if queries: the cached keys, then the queries' own, nothing written."""

    def __init__(self, cache: GeneralCache, batch: TokenBatch, slot: int, length: int) -> None:
        super().__init__(cache, batch)
        self._slot, self._length = slot, length

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, ...]:
        own = (keys, values)
        known = self._cache.get_slot(layer_idx, self._slot, self._length, own)
        return tuple(torch.cat(parts, 2) for parts in zip(known, own, strict=True))

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        own = (keys.unsqueeze(1),)
        key = (layer_idx, "indexer")
        (known,) = self._cache.get_slot(key, self._slot, self._length, own)
        return torch.cat((known, own[0]), 2)[:, 0]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._length + query_length, 0

    def _states(self, block: int) -> States:
        raise NotImplementedError("a recurrent state answers no what-if")

    def commit(self) -> None:
        """Nothing was changed."""
