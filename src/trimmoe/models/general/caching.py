"""What attention of any kind keeps of many sequences, by slot.

Keys and values, whole or compressed, lie in slabs by position and can be cut back to any. A
recurrent state cannot: what it was after each of the last tokens is kept beside it, so that tokens
that are withdrawn are taken back by going on from an earlier one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimmoe.models.batch import TokenBatch
from trimmoe.models.cache import SNAPSHOTS, KVCache, lost_state

States = dict[Hashable, Tensor]
"""What one mixer keeps of one sequence after some token, each [1, ...]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Snapshot:
    length: int
    """Tokens that the states have seen."""
    states: States


class GeneralCache(KVCache):
    """A cache whose slabs have the shapes of what is first written to them, one set for each key.

    A key is a block, or a block and what of it is kept.
    """

    def __init__(
        self, *, slots: int, context_limit: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(
            slots=slots,
            heads=0,
            head_size=0,
            context_limit=context_limit,
            dtype=dtype,
            device=device,
        )
        self._stored: dict[Hashable, tuple[Tensor, ...]] = {}
        self._recurrent: dict[int, dict[int, list[_Snapshot]]] = {}

    @property
    def bytes(self) -> int:
        slabs = sum(slab.nbytes for slabs in self._stored.values() for slab in slabs)
        return slabs + sum(
            state.nbytes
            for by_slot in self._recurrent.values()
            for kept in by_slot.values()
            for snapshot in kept
            for state in snapshot.states.values()
        )

    def free(self, slot: int) -> None:
        super().free(slot)
        for by_slot in self._recurrent.values():
            by_slot.pop(slot, None)

    def copy(self, source: int, slot: int, length: int) -> None:
        for slabs in self._stored.values():
            for slab in slabs:
                slab[slot, :, :length] = slab[source, :, :length]
        for by_slot in self._recurrent.values():
            kept = [one for one in by_slot.get(source, []) if one.length <= length]
            by_slot[slot] = kept

    def forget(self) -> None:
        self._stored.clear()
        self._recurrent.clear()

    def put(self, key: Hashable, parts: Sequence[Tensor], batch: TokenBatch) -> None:
        """Store parts [B, heads, T, size] of any heads and sizes at the batch's positions."""
        slabs = self._room(key, parts, batch.length)
        for slab, part in zip(slabs, parts, strict=True):
            if batch.span is not None:
                first, last = batch.span
                slab[batch.slots[0], :, first:last] = part[0]
            else:
                slab[batch.write_slots, :, batch.write_positions] = _by_token(part, batch)

    def get(self, key: Hashable, batch: TokenBatch) -> tuple[Tensor, ...]:
        """What the batch's sequences have, each part [B, heads, length, size]."""
        slabs, length = self._stored[key], batch.length
        if (first := batch.first_slot) is not None:
            rows = slice(first, first + len(batch.slots))
            return tuple(slab[rows, :, :length] for slab in slabs)
        return tuple(slab[:, :, :length].index_select(0, batch.slot_ids) for slab in slabs)

    def get_slot(
        self, key: Hashable, slot: int, length: int, like: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """What one sequence has, each part [1, heads, length, size], as `like` these."""
        slabs = self._room(key, like, length)
        return tuple(slab[slot : slot + 1, :, :length] for slab in slabs)

    def keep(self, block: int, slot: int, length: int, states: States) -> None:
        """These are a sequence's states after its first `length` tokens."""
        kept = self._recurrent.setdefault(block, {}).setdefault(slot, [])
        while kept and kept[-1].length >= length:
            kept.pop()
        kept.append(_Snapshot(length=length, states=states))
        del kept[:-SNAPSHOTS]

    def kept(self, block: int, slot: int, length: int) -> States | None:
        """A sequence's states after its first `length` tokens, None before the first; those of
        later tokens are withdrawn.

        Raises UserError if they are no longer there.
        """
        snapshots = self._recurrent.setdefault(block, {}).setdefault(slot, [])
        while snapshots and snapshots[-1].length > length:
            snapshots.pop()
        if length == 0:
            return None
        if not snapshots or snapshots[-1].length != length:
            raise lost_state(length)
        return snapshots[-1].states

    def _room(self, key: Hashable, like: Sequence[Tensor], length: int) -> tuple[Tensor, ...]:
        slabs = self._stored.get(key)
        if slabs is not None and slabs[0].shape[2] >= length:
            return slabs
        self.check(length)
        capacity = 64 if slabs is None else slabs[0].shape[2]
        while capacity < length:
            capacity *= 2
        capacity = min(capacity, max(self.context_limit, length))
        # Zeros, because a masked score still meets its value; outside inference mode, because a
        # slab made inside it could not be written outside it.
        with torch.inference_mode(False):
            grown = tuple(
                torch.zeros(
                    (self.slots, part.shape[1], capacity, part.shape[3]),
                    dtype=part.dtype,
                    device=part.device,
                )
                for part in like
            )
        if slabs is not None:
            for old, new in zip(slabs, grown, strict=True):
                new[:, :, : old.shape[2]] = old
        self._stored[key] = grown
        return grown


def _by_token(part: Tensor, batch: TokenBatch) -> Tensor:
    """[B, heads, T, size] to the valid tokens' [n, heads, size]."""
    flat = part.transpose(1, 2).reshape(-1, part.shape[1], part.shape[3])
    return flat if batch.packed is None else flat.index_select(0, batch.packed)
