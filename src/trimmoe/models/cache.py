"""Keys and values of many sequences of unequal length, in one slab per block."""

from __future__ import annotations

import heapq
import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.errors import UserError
from trimmoe.core.specs import IntArray
from trimmoe.models.batch import TokenBatch

_FIRST_CAPACITY = 64
SNAPSHOTS = 18
"""Recurrent states kept of a sequence in a layer: as many tokens may be withdrawn, less one, and
guesses are sixteen at most."""


def lost_state(length: int) -> UserError:
    """The error where a recurrent state after so many tokens is asked for and not there."""
    return UserError(
        f"This model's state after {length} tokens is no longer kept, so that the answer cannot go "
        f"on from there; ask again."
    )


def cache_argument(module: Any) -> str:
    """What a module of transformers calls the cache that it takes: that was renamed within the
    fifth series."""
    named = inspect.signature(module.forward).parameters
    return "cache" if "cache" in named else "past_key_values"


class KVCache:
    """One pair of slabs [slots, heads, capacity, head size] per transformer block.

    A block's slabs are made when it is first written, so a server holds only those of its own
    layers, and grow by doubling up to the context limit. A slot belongs to one sequence from
    `alloc` to `free`. Blocks are transformer blocks, dense ones included, not MoE layers.
    """

    def __init__(
        self,
        *,
        slots: int,
        heads: int,
        head_size: int,
        context_limit: int,
        dtype: torch.dtype,
        device: torch.device,
        padded_size: int | None = None,
        values_are_keys: bool = False,
    ) -> None:
        """`padded_size`: what a head's rows take in memory, zeros behind the head size.
        `values_are_keys`: whether both are the same numbers, which are then kept once."""
        self.slots = slots
        self.context_limit = context_limit
        self._heads = heads
        self._head_size = head_size
        self._dtype = dtype
        self._device = device
        self._padded_size = head_size if padded_size is None else padded_size
        self._once = values_are_keys
        self._slabs: dict[int, tuple[Tensor, Tensor]] = {}
        self._addresses = np.zeros((0, 4), dtype=np.int64)
        self._free = list(range(slots))
        self._taken: set[int] = set()

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def bytes(self) -> int:
        """Memory the slabs take now."""
        both = sum(keys.nbytes + values.nbytes for keys, values in self._slabs.values())
        return both // 2 if self._once else both

    def alloc(self) -> int:
        """Take the lowest free slot; there must be one."""
        assert self._free, "no free slot: admit no more sequences than the cache has slots"
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back; its contents are never read again."""
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)

    def copy(self, source: int, slot: int, length: int) -> None:
        """Have a slot hold the first `length` positions of another one, in every block."""
        for slab in (slab for both in self._slabs.values() for slab in both):
            slab[slot, :, :length] = slab[source, :, :length]

    def take(self, other: KVCache, source: int, slot: int, length: int) -> None:
        """Have a slot hold the first `length` positions of one of another cache of this kind."""
        for block, theirs in other._slabs.items():
            for slab, its in zip(self._reserve(block, length), theirs, strict=True):
                slab[slot, :, :length] = its[source, :, :length]

    def forget(self) -> None:
        """Give back the memory of all blocks; the slots stay taken, and what is written next is
        all they hold."""
        self._slabs.clear()
        self._addresses[:] = 0

    def addresses(self, blocks: range, length: int) -> IntArray:
        """Where the slabs of all blocks are: of keys and of values, slots, capacity, [B, 4].

        Those of `blocks` have room for `length` positions; others may not be there.
        """
        room = self._addresses[blocks.start : blocks.stop, 3]
        if room.size < len(blocks) or (room < length).any():
            for block in blocks:
                self._reserve(block, length)
        return self._addresses

    def write(self, block: int, keys: Tensor, values: Tensor, batch: TokenBatch) -> None:
        """Store [B, heads, T, head size] at the batch's positions, without its padding."""
        slab_keys, slab_values = self._reserve(block, batch.length)
        if batch.span is not None:
            first, last = batch.span
            slot = batch.slots[0]
            slab_keys[slot, :, first:last, : self._head_size] = keys[0]
            slab_values[slot, :, first:last, : self._head_size] = values[0]
            return
        at = (batch.write_slots, slice(None), batch.write_positions)
        slab_keys[..., : self._head_size][at] = _by_token(keys, batch)
        slab_values[..., : self._head_size][at] = _by_token(values, batch)

    def read(self, block: int, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, length, head size] of the batch's sequences."""
        return self.read_first(block, batch, batch.length)

    def read_first(self, block: int, batch: TokenBatch, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of the batch's sequences."""
        slab_keys, slab_values = self._unpadded(block, length)
        if (first := batch.first_slot) is not None:
            rows = slice(first, first + len(batch.slots))
            return slab_keys[rows, :, :length], slab_values[rows, :, :length]
        return (
            slab_keys[:, :, :length].index_select(0, batch.slot_ids),
            slab_values[:, :, :length].index_select(0, batch.slot_ids),
        )

    def write_slot(self, block: int, slot: int, keys: Tensor, values: Tensor) -> None:
        """Store one sequence's keys and values [1, heads, length, head size] from position 0."""
        length = keys.shape[2]
        slab_keys, slab_values = self._unpadded(block, length)
        slab_keys[slot, :, :length] = keys[0]
        slab_values[slot, :, :length] = values[0]

    def read_slot(self, block: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, heads, length, head size] of one sequence."""
        slab_keys, slab_values = self._unpadded(block, length)
        return slab_keys[slot : slot + 1, :, :length], slab_values[slot : slot + 1, :, :length]

    def check(self, length: int) -> None:
        """Raise UserError if a sequence of this length does not fit."""
        if length > self.context_limit:
            raise UserError(
                f"The sequence needs {length} positions but the model takes at most "
                f"{self.context_limit}; shorten the prompt or ask for fewer new tokens."
            )

    def _unpadded(self, block: int, length: int) -> tuple[Tensor, Tensor]:
        """The slabs without padding."""
        keys, values = self._reserve(block, length)
        return keys[..., : self._head_size], values[..., : self._head_size]

    def _reserve(self, block: int, length: int) -> tuple[Tensor, Tensor]:
        slabs = self._slabs.get(block)
        if slabs is not None and slabs[0].shape[2] >= length:
            return slabs
        self.check(length)
        capacity = _FIRST_CAPACITY if slabs is None else slabs[0].shape[2]
        while capacity < length:
            capacity *= 2
        grown = self._empty(block, min(capacity, max(self.context_limit, length)))
        if slabs is not None:
            for old, new in zip(slabs, grown, strict=True):
                new[:, :, : old.shape[2]] = old
        self._slabs[block] = grown
        self._note(block, *grown)
        return grown

    def _note(self, block: int, keys: Tensor, values: Tensor) -> None:
        missing = block + 1 - self._addresses.shape[0]
        if missing > 0:
            self._addresses = np.pad(self._addresses, ((0, missing), (0, 0)))
        self._addresses[block] = keys.data_ptr(), values.data_ptr(), self.slots, keys.shape[2]

    def _sizes(self, block: int) -> tuple[int, int]:
        """Heads of a block, and what a row of one takes in memory."""
        return self._heads, self._padded_size

    def _empty(self, block: int, capacity: int) -> tuple[Tensor, Tensor]:
        # Zeros, because a masked score still meets its value: 0 * NaN would be NaN. Outside
        # inference mode, because a slab made inside it could not be written outside it.
        heads, size = self._sizes(block)
        shape = (self.slots, heads, capacity, size)
        with torch.inference_mode(False):
            keys = self._zeros(shape)
            return keys, keys if self._once else self._zeros(shape)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self._device.type == "cpu" and self._dtype is torch.float32:
            # NumPy's are the system's empty pages: most of them belong to slots and positions that
            # are never written, and torch would fill them all while a token waits.
            return torch.from_numpy(np.zeros(shape, dtype=np.float32))
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


def _by_token(states: Tensor, batch: TokenBatch) -> Tensor:
    """[B, heads, T, head size] to the valid tokens' [n, heads, head size]."""
    if states.shape[2] == 1:
        return states[:, :, 0]
    flat = states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])
    return flat if batch.packed is None else flat.index_select(0, batch.packed)
