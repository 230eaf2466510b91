"""The decoder of a Switch Transformer, with its cross attention, and the encoder beside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache

from trimmoe.models.batch import TokenBatch
from trimmoe.models.batching import describe
from trimmoe.models.cache import KVCache, cache_argument
from trimmoe.models.decoder_steps import Through
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.exact import full_depth
from trimmoe.models.switch_stack import SwitchEncoder, SwitchStack


class SwitchCache(KVCache):
    """The decoder's cache, and beside it the keys and values of the encoder's states."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.sources = KVCache(**sizes)
        self.source_lengths = [0] * self.slots

    @property
    def bytes(self) -> int:
        return super().bytes + self.sources.bytes

    def forget(self) -> None:
        super().forget()
        self.sources.forget()


class _States:
    """One block's keys and values of the encoder's states, as cross attention looks for them."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values


class _Sources:
    """`cross_attention_cache` for attention: block number to states."""

    def __init__(self, cache: SwitchCache, batch: TokenBatch) -> None:
        self._cache = cache
        self._batch = batch
        self.layers = self

    def __getitem__(self, block: int) -> _States:
        length = self._batch.source_length
        return _States(*self._cache.sources.read_first(block, self._batch, length))


class _Filled:
    """Says of every block that the encoder's states are already in the cache."""

    def get(self, block: int) -> bool:
        return True


class _Through(EncoderDecoderCache):
    """The cache object that attention takes; it looks for this very class."""

    def __init__(self, cache: SwitchCache, batch: TokenBatch) -> None:
        self.self_attention_cache: Any = Through(cache, batch)
        self.cross_attention_cache: Any = _Sources(cache, batch)
        self.is_updated: Any = _Filled()

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0  # Only used to compute the position bias, which the batch brings along.


class SwitchView(SwitchStack, EncoderDecoderView):
    """The decoder, with the encoder beside it."""

    def __init__(self, model: Any, encoder: SwitchEncoder, *rest: Any) -> None:
        super().__init__(model.decoder, *rest)
        self.encoder = encoder
        self._final_norm = encoder.final_norm
        self._model = model
        start = getattr(model.config, "decoder_start_token_id", None)
        self.start_token = model.config.pad_token_id if start is None else start
        self._cache_argument = cache_argument(self._moe[0])
        # Cross attention has no position bias; given one of size one it need not make its own.
        self._no_bias = torch.zeros((1, 1, 1, 1), dtype=self.dtype, device=self.device)

    def new_cache(self, *, slots: int) -> SwitchCache:
        return self._new_cache(SwitchCache, slots)

    def encode(self, sources: Sequence[Sequence[int]]) -> list[Tensor]:
        cache = self.encoder.new_cache(slots=len(sources))
        rows = [range(len(source)) for source in sources]
        batch = self.encoder.batch(cache, range(len(sources)), rows)
        hidden = self.encoder.embed(batch.pad(sources), batch)
        states = self.states(full_depth(self.encoder, hidden, batch, cache))
        return list(states.split([len(source) for source in sources]))

    def states(self, hidden: Tensor) -> Tensor:
        return self._final_norm(hidden)

    def attach(
        self,
        cache: KVCache,
        slot: int,
        states: Tensor,
        *,
        layers: Collection[int] | None = None,
    ) -> None:
        assert isinstance(cache, SwitchCache)
        cache.source_lengths[slot] = len(states)
        wanted = range(self.spec.layer_count) if layers is None else layers
        for layer in wanted:
            last = self._trailing if layer == self.spec.layer_count - 1 else []
            for block in (*self._dense[layer], self._moe[layer], *last):
                attention = block.layer[1].EncDecAttention
                keys, values = _project(attention, states.unsqueeze(0))
                cache.sources.write_slot(attention.layer_idx, slot, keys, values)

    def batch(
        self, cache: KVCache, slots: Sequence[int], positions: Sequence[Sequence[int]]
    ) -> TokenBatch:
        assert isinstance(cache, SwitchCache)
        described = describe(slots, positions, device=self.device)
        cache.check(described.length)
        lengths = [cache.source_lengths[slot] for slot in slots]
        assert all(lengths), "attach the encoder's states before the first token"
        return replace(
            described,
            position_bias=self._causal_bias(described),
            source_length=max(lengths),
            source_mask=self._source_mask(lengths),
        )

    def attend(self, layer: int, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Tensor:
        through = self._through(cache, batch)
        hidden = self._run(self._dense[layer], hidden, batch, through)
        block = self._moe[layer]
        hidden = block.layer[0](
            hidden, position_bias=batch.position_bias, **{self._cache_argument: through}
        )[0]
        return block.layer[1](
            hidden,
            key_value_states=hidden,  # Unused: the cache has them.
            attention_mask=batch.source_mask,
            position_bias=self._no_bias,
            **{self._cache_argument: through},
        )[0]

    def tail(self, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Tensor:
        return self._run(self._trailing, hidden, batch, self._through(cache, batch))

    def propagate(self, layer: int, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        for block in (*self._dense[layer], self._moe[layer]):
            self._propagate(block, hidden, batch, cache)

    def propagate_tail(self, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        for block in self._trailing:
            self._propagate(block, hidden, batch, cache)

    def head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._stack.final_layer_norm(hidden)
        if self._model.config.tie_word_embeddings:
            normed = normed * self.spec.hidden_size**-0.5
        return normed, self._model.lm_head.weight

    def _causal_bias(self, batch: TokenBatch) -> Tensor:
        """Position bias and causal mask in one, [B, heads, T, length]."""
        bias = self._bias(batch.position_ids, batch.length, both_ways=False)
        keys = torch.arange(batch.length, device=self.device)
        hides = keys > batch.position_ids[:, None, :, None]
        return bias.masked_fill(hides, torch.finfo(self.dtype).min)

    def _source_mask(self, lengths: list[int]) -> Tensor | None:
        longest = max(lengths)
        if all(length == longest for length in lengths):
            return None
        ends = torch.tensor(lengths, device=self.device)[:, None, None, None]
        hides = torch.arange(longest, device=self.device) >= ends
        mask = torch.zeros(hides.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hides, torch.finfo(self.dtype).min)

    def _through(self, cache: KVCache, batch: TokenBatch) -> _Through:
        assert isinstance(cache, SwitchCache)
        return _Through(cache, batch)

    def _run(
        self, blocks: list[Any], hidden: Tensor, batch: TokenBatch, through: _Through
    ) -> Tensor:
        for block in blocks:
            hidden = block(
                hidden,
                position_bias=batch.position_bias,
                encoder_hidden_states=hidden,  # Unused: the cache has them.
                encoder_attention_mask=batch.source_mask,
                encoder_decoder_position_bias=self._no_bias,
                **{self._cache_argument: through},
            )[0]
        return hidden

    def _propagate(self, block: Any, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        attention = block.layer[0].SelfAttention
        keys, values = _project(attention, block.layer[0].layer_norm(hidden))
        cache.write(attention.layer_idx, keys, values, batch)


def _project(attention: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, heads, T, size] of states [B, T, d]."""
    shape = (*states.shape[:-1], -1, attention.key_value_proj_dim)
    keys = attention.k(states).view(shape).transpose(1, 2)
    return keys, attention.v(states).view(shape).transpose(1, 2)
