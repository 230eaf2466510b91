"""What the encoder and the decoder of a Switch Transformer have in common, and the encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trimmoe.core.specs import ModelSpec
from trimmoe.models.base import MoEView
from trimmoe.models.batch import TokenBatch
from trimmoe.models.batching import describe
from trimmoe.models.cache import KVCache
from trimmoe.models.experts import ExpertStacks
from trimmoe.models.passed import BytesRead, Routing


class SwitchStack(MoEView):
    """Routing, experts and residual of one stack of blocks; attention is the subclass's.

    Routing follows transformers in evaluation: top-1 in the model's dtype, and an expert takes at
    most `expert_capacity` tokens of one sequence per call. A token beyond that keeps its expert in
    `Routing.experts` and gets a gate of zero, so that it takes the residual.
    """

    def __init__(
        self,
        stack: Any,
        stacks: ExpertStacks,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        bytes_read: BytesRead,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.bytes_read = bytes_read
        self._stack = stack
        self._stacks = stacks
        self._config = stack.config
        moe = [index for index, block in enumerate(stack.block) if block.is_sparse]
        self._moe = [stack.block[index] for index in moe]
        starts, ends = (-1, *moe), (*moe, len(stack.block))
        before = [list(stack.block[a + 1 : b]) for a, b in zip(starts, ends, strict=True)]
        self._dense, self._trailing = before[:-1], before[-1]

    @property
    def loaded(self) -> tuple[frozenset[int], ...]:
        return self._stacks.loaded

    def let_go(self) -> None:
        self._stacks.let_go()

    def embed(self, token_ids: Tensor, batch: TokenBatch) -> Tensor:
        return self._stack.embed_tokens(token_ids)

    def route(self, layer: int, hidden: Tensor, *, groups: Tensor | None = None) -> Routing:
        feed_forward = self._moe[layer].layer[-1]
        router = feed_forward.mlp.router
        normed = feed_forward.layer_norm(hidden)
        logits = router.classifier(normed.to(router.dtype))
        probabilities = F.softmax(logits, dim=-1, dtype=router.dtype)
        rounded = probabilities.to(self.dtype)
        experts = rounded.argmax(-1, keepdim=True)
        gates = rounded.gather(1, experts).float()
        capacity = self._config.expert_capacity
        if groups is not None and len(hidden) > capacity:
            key = groups * self.spec.expert_count + experts[:, 0]
            gates = gates.masked_fill((_rank(key) >= capacity).unsqueeze(1), 0.0)
        return Routing(
            probabilities=probabilities.float(),
            logits=logits.float(),
            experts=experts,
            gates=gates,
            normed=normed,
        )

    def shared(self, layer: int, hidden: Tensor, *, normed: Tensor | None = None) -> None:
        return None

    def experts(
        self,
        layer: int,
        hidden: Tensor,
        experts: Tensor,
        gates: Tensor,
        *,
        normed: Tensor | None = None,
    ) -> Tensor:
        stack = self._stacks[layer]
        rows: Tensor = self._moe[layer].layer[-1].layer_norm(hidden) if normed is None else normed
        return stack(rows, experts, gates)

    def attend_whatif(
        self, layer: int, hidden: Tensor, positions: Tensor, slot: int, cache: KVCache
    ) -> Tensor:
        raise NotImplementedError("Switch Transformers have no what-if attention; run the tokens")

    def tail_whatif(self, hidden: Tensor, positions: Tensor, slot: int, cache: KVCache) -> Tensor:
        raise NotImplementedError("Switch Transformers have no what-if attention; run the tokens")

    def _new_cache(self, kind: type[KVCache], slots: int) -> Any:
        return kind(
            slots=slots,
            heads=self._config.num_heads,
            head_size=self._config.d_kv,
            context_limit=self.spec.context_length,
            dtype=self.dtype,
            device=self.device,
        )

    def _bias(self, position_ids: Tensor, length: int, *, both_ways: bool) -> Tensor:
        """Relative position bias [B, heads, T, length] as the first block has it for all."""
        first = self._stack.block[0].layer[0].SelfAttention
        relative = torch.arange(length, device=self.device) - position_ids.unsqueeze(-1)
        buckets = first._relative_position_bucket(
            relative,
            bidirectional=both_ways,
            num_buckets=first.relative_attention_num_buckets,
            max_distance=first.relative_attention_max_distance,
        )
        return first.relative_attention_bias(buckets).permute(0, 3, 1, 2)


class SwitchEncoder(SwitchStack):
    """The encoder's stack: bidirectional attention, no cache (see `EncoderDecoderView`)."""

    def new_cache(self, *, slots: int) -> KVCache:
        return self._new_cache(KVCache, slots)

    def batch(
        self, cache: KVCache, slots: Sequence[int], positions: Sequence[Sequence[int]]
    ) -> TokenBatch:
        assert all(list(row) == list(range(len(row))) for row in positions), "whole sequences only"
        described = describe(slots, positions, device=self.device)
        cache.check(described.length)
        every = torch.arange(described.length, device=self.device).unsqueeze(0)
        bias = self._bias(every, described.length, both_ways=True)
        if described.packed is not None:
            hides = ~described.valid[:, None, None, :]
            bias = bias.masked_fill(hides, torch.finfo(self.dtype).min)
        return replace(described, position_bias=bias)

    def attend(self, layer: int, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Tensor:
        hidden = self._run(self._dense[layer], hidden, batch)
        return self._moe[layer].layer[0](hidden, position_bias=batch.position_bias)[0]

    def tail(self, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Tensor:
        return self._run(self._trailing, hidden, batch)

    def propagate(self, layer: int, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        return

    def propagate_tail(self, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        return

    def head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the encoder has no head")

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._stack.final_layer_norm(hidden)

    def _run(self, blocks: list[Any], hidden: Tensor, batch: TokenBatch) -> Tensor:
        for block in blocks:
            hidden = block(hidden, position_bias=batch.position_bias)[0]
        return hidden


def _rank(keys: Tensor) -> Tensor:
    """How many earlier elements have the same key, int64 [n]."""
    ordered, order = torch.sort(keys, stable=True)
    within = torch.arange(len(keys), device=keys.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(within).index_copy_(0, order, within)
