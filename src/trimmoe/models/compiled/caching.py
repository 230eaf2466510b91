"""What the blocks of a model in compiled steps keep: keys and values, or recurrent states.

Of a sequence's states the last ones stay, each where its number of tokens says, so that whoever
goes on from an earlier token finds the state before it: what was withdrawn is written over. The
inputs of a convolution lie beside them likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimmoe.models.cache import SNAPSHOTS, KVCache, lost_state
from trimmoe.models.compiled.lanes import LANES


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSizes:
    """Floats that a block with a recurrent state keeps of a sequence."""

    state: int
    """Of one state, with a lane behind it that says how many tokens it has seen."""
    inputs: int
    """Of what the convolution reads of one token."""
    input_count: int
    """Tokens of which they are kept."""


class BlockCache(KVCache):
    """See `KVCache`. `heads` are those of each block [B], `sizes` what a row of one takes in
    memory, `states` the sizes of blocks that keep states instead."""

    def __init__(
        self,
        *,
        heads: Sequence[int],
        sizes: Sequence[int],
        states: Mapping[int, StateSizes],
        **more: Any,
    ) -> None:
        super().__init__(heads=max(heads), head_size=max(sizes), **more)
        self._by_block = list(zip(heads, sizes, strict=True))
        self._states = states
        self._lacking = np.zeros(1, dtype=np.int64)

    @property
    def bytes(self) -> int:
        """Slabs of keys as they are, and those states that are kept: what was never written takes
        no memory."""
        held = sum(
            4 * int((slabs[0][:, 0, :, -LANES] > 0).sum()) * slabs[0].shape[3] + slabs[1].nbytes
            for block, slabs in self._slabs.items()
            if block in self._states
        )
        kept = [slabs for block, slabs in self._slabs.items() if block not in self._states]
        both = sum(keys.nbytes + values.nbytes for keys, values in kept)
        return held + (both // 2 if self._once else both)

    def free(self, slot: int) -> None:
        super().free(slot)
        for block in self._states:
            if block in self._slabs:
                self._slabs[block][0][slot, 0, :, -LANES] = 0.0

    def copy(self, source: int, slot: int, length: int) -> None:
        super().copy(source, slot, length)
        for block in self._states:
            for slab in self._slabs.get(block, ()):
                slab[slot] = slab[source]

    def check_states(self) -> None:
        """Raises UserError if a state was asked for that is no longer there."""
        if self._lacking[0]:
            length, self._lacking[0] = int(self._lacking[0]), 0
            raise lost_state(length)

    def _sizes(self, block: int) -> tuple[int, int]:
        return self._by_block[block]

    def _reserve(self, block: int, length: int) -> tuple[Tensor, Tensor]:
        sizes = self._states.get(block)
        if sizes is None:
            return super()._reserve(block, length)
        if block not in self._slabs:
            with torch.inference_mode(False):
                states = self._zeros((self.slots, 1, SNAPSHOTS, sizes.state))
                inputs = self._zeros((self.slots, 1, sizes.input_count, sizes.inputs))
            self._slabs[block] = states, inputs
            self._note(block, states, inputs)
            # Where the room of others is: enough for any length.
            self._addresses[block, 3] = self._lacking.ctypes.data
        return self._slabs[block]
