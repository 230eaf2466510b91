"""What transformers' blocks of a decoder are given besides their input: a cache, and masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimmoe.models.batch import TokenBatch
from trimmoe.models.cache import KVCache


class Through:
    """What attention takes for its cache: writes the new keys, returns all of the sequence's."""

    __slots__ = ("_batch", "_cache")

    def __init__(self, cache: KVCache, batch: TokenBatch) -> None:
        self._cache = cache
        self._batch = batch

    def update(
        self, keys: Tensor, values: Tensor, block: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self._cache.write(block, keys, values, self._batch)
        return self._cache.read(block, self._batch)


class Beside:
    """The same for what-if queries: the cached keys, then the queries' own, nothing written."""

    __slots__ = ("_cache", "_length", "_slot")

    def __init__(self, cache: KVCache, slot: int, length: int) -> None:
        self._cache = cache
        self._slot = slot
        self._length = length

    def update(
        self, keys: Tensor, values: Tensor, block: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        clean_keys, clean_values = self._cache.read_slot(block, self._slot, self._length)
        return torch.cat((clean_keys, keys), 2), torch.cat((clean_values, values), 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockStep:
    """What a block needs besides its input."""

    through: Through | Beside
    rotary: tuple[Tensor, Tensor] | None
    mask: Tensor | None
    window_mask: Tensor | None


def window_of(attention: Any, config: Any) -> int | None:
    """Sliding window of one attention module, if any."""
    types = getattr(config, "layer_types", None)
    if types is not None and types[attention.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None


def whatif_masks(
    positions: Tensor, length: int, window: int | None
) -> tuple[Tensor, Tensor | None]:
    """[1, 1, S, length + S]: cached positions before one's own, then only oneself."""
    keys = torch.arange(length, device=positions.device)
    own = torch.eye(len(positions), dtype=torch.bool, device=positions.device)
    clean = keys < positions[:, None]
    mask = torch.cat((clean, own), 1)[None, None]
    if window is None:
        return mask, None
    near = clean & (keys > positions[:, None] - window)
    return mask, torch.cat((near, own), 1)[None, None]
