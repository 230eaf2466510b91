"""The view over decoder-only families: transformers' own blocks, our routed experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trimmoe.core.specs import BoolArray, IntArray, ModelSpec
from trimmoe.models.base import MoEView
from trimmoe.models.batch import TokenBatch
from trimmoe.models.batching import all_masks, describe, masks
from trimmoe.models.cache import KVCache, cache_argument
from trimmoe.models.decoder_steps import Beside, BlockStep, Through, whatif_masks, window_of
from trimmoe.models.experts import ExpertStacks
from trimmoe.models.family import Geometry
from trimmoe.models.passed import BytesRead, Routing, Segment
from trimmoe.models.replay import Passed, Replays, Span, record_for

KeysValues = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
"""Attention module and normed hidden states [B, T, d] to keys and values [B, T, heads, size]."""


class DecoderView(MoEView):
    """See `MoEView`; made by `DecoderFamily.open`."""

    def __init__(
        self,
        *,
        keys_values: KeysValues,
        apply_rotary: Callable[..., tuple[Tensor, Tensor]],
        rounds_gates: bool,
        geometry: Geometry,
        model: Any,
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
        self._keys_values, self._apply_rotary = keys_values, apply_rotary
        self._model = model
        self._stacks = stacks
        self._rounds_gates = rounds_gates and dtype != torch.float32
        layers = model.model.layers
        self._cache_argument = cache_argument(layers[0].self_attn)
        self._windows = [window_of(layer.self_attn, model.config) for layer in layers]
        self._window = next((window for window in self._windows if window), None)
        self._moe = [layers[block] for block in geometry.moe_blocks]
        self._has_shared = hasattr(self._moe[0].mlp, "shared_expert")
        self._moe_blocks = geometry.moe_blocks
        starts = (-1, *geometry.moe_blocks)
        ends = (*geometry.moe_blocks, geometry.block_count)
        before = [[layers[i] for i in range(a + 1, b)] for a, b in zip(starts, ends, strict=True)]
        self._dense, self._trailing = before[:-1], before[-1]
        self._first_blocks = [start + 1 for start in starts[:-1]]
        record = None if stacks.streamed else record_for(device)
        self._replays = None if record is None else Replays(self, record)

    @property
    def loaded(self) -> tuple[frozenset[int], ...]:
        return self._stacks.loaded

    def let_go(self) -> None:
        self._stacks.let_go()

    def new_cache(self, *, slots: int) -> KVCache:
        attention = self._moe[0].self_attn
        return KVCache(
            slots=slots,
            heads=self._model.config.num_key_value_heads,
            head_size=attention.head_dim,
            context_limit=self.spec.context_length,
            dtype=self.dtype,
            device=self.device,
        )

    def batch(
        self, cache: KVCache, slots: Sequence[int], positions: Sequence[Sequence[int]]
    ) -> TokenBatch:
        described = describe(slots, positions, device=self.device)
        cache.check(described.length)
        mask, window_mask = masks(described, window=self._window)
        rotary = self._rotary(described.position_ids)
        return replace(described, mask=mask, window_mask=window_mask, rotary=rotary)

    def _rotary(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        like = self._model.model.embed_tokens.weight
        return self._model.model.rotary_emb(like, position_ids=position_ids)

    def embed(self, token_ids: Tensor, batch: TokenBatch) -> Tensor:
        return self._model.model.embed_tokens(token_ids)

    def attend(self, layer: int, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Tensor:
        step = self._step(batch, cache)
        return self._attend(self._moe[layer], self._run(self._dense[layer], hidden, step), step)

    def tail(self, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Tensor:
        return self._run(self._trailing, hidden, self._step(batch, cache))

    def attend_whatif(
        self, layer: int, hidden: Tensor, positions: Tensor, slot: int, cache: KVCache
    ) -> Tensor:
        step = self._whatif(positions, slot, cache)
        row = self._run(self._dense[layer], hidden.unsqueeze(0), step)
        return self._attend(self._moe[layer], row, step)[0]

    def tail_whatif(self, hidden: Tensor, positions: Tensor, slot: int, cache: KVCache) -> Tensor:
        if not self._trailing:
            return hidden
        step = self._whatif(positions, slot, cache)
        return self._run(self._trailing, hidden.unsqueeze(0), step)[0]

    def run(
        self,
        first: int,
        last: int,
        hidden: Tensor,
        batch: TokenBatch,
        cache: KVCache,
        settled: BoolArray,
        kept_at: int | None = None,
    ) -> Segment:
        if self._replays is None or batch.shape[1] > 1:
            return super().run(first, last, hidden, batch, cache, settled, kept_at)
        passed: list[IntArray] = []
        kept: Tensor | None = None
        layer = first
        while layer < last:
            until = self._whole_until(layer, last, hidden.shape[0], settled)
            ends = until if until == last else until + 1
            keeps = kept_at is not None and layer <= kept_at < ends
            span = Span(
                first=layer, last=until, kept_at=kept_at if keeps else None, routes=until < last
            )
            ran = self._replays.run(span, hidden, batch, cache)
            if ran is None:
                rest = super().run(layer, last, hidden, batch, cache, settled, kept_at)
                return _joined(passed, rest, kept)
            hidden, routing = ran.hidden, ran.routing
            kept = kept if ran.kept is None else ran.kept
            passed.append(ran.experts.cpu().numpy())
            if routing is not None:
                experts = routing.experts.cpu().numpy()
                if not settled[until][experts].all():
                    return _segment(until, passed, hidden, routing, kept)
                passed.append(experts[:, None])
                hidden = self._experts_here(until, hidden, routing, cache)
            layer = ends
        return _segment(last, passed, hidden, None, kept)

    def _whole_until(self, first: int, last: int, rows: int, settled: BoolArray) -> int:
        """The first layer that rows cannot pass as it was recorded whatever they activate."""
        for layer in range(first, last):
            if not settled[layer].all() or not self._is_recorded(layer, rows):
                return layer
        return last

    def _is_recorded(self, layer: int, rows: int) -> bool:
        """Whether a layer's experts run in a recording of so many rows, filled up."""
        stack = self._stacks[layer] if self.loaded[layer] else None
        return stack is not None and stack.asks_nobody(2 * rows * self.spec.top_k)

    def _experts_here(
        self, layer: int, attended: Tensor, routing: Routing, cache: KVCache
    ) -> Tensor:
        """The layer's output of rows [n, d], all of whose activated experts are here."""
        output = None
        if self._replays is not None and self._is_recorded(layer, len(attended)):
            output = self._replays.experts(layer, attended, routing, cache)
        return self.through(layer, attended, routing) if output is None else output

    def pass_span(self, span: Span, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Passed:
        """See `Passes`."""
        mask, window_mask = all_masks(batch, window=self._window)
        rotary = self._rotary(batch.position_ids)
        batch = replace(batch, mask=mask, window_mask=window_mask, rotary=rotary)
        chosen: list[Tensor] = []
        kept: Tensor | None = None
        last: Routing | None = None
        for layer in range(span.first, span.last + span.routes):
            kept = hidden if layer == span.kept_at else kept
            attended = batch.pack(self.attend(layer, batch.unpack(hidden), batch, cache))
            routing = self.route(layer, attended)
            if layer == span.last:
                hidden, last = attended, routing
                break
            hidden = self.through(layer, attended, routing)
            chosen.append(routing.experts)
        # Of no layer nothing is asked of the device afterwards.
        none = torch.empty((len(hidden), 0, self.spec.top_k), dtype=torch.int64)
        experts = torch.stack(chosen, 1) if chosen else none
        return Passed(hidden=hidden, experts=experts, kept=kept, routing=last)

    def pass_experts(
        self, layer: int, attended: Tensor, normed: Tensor, experts: Tensor, gates: Tensor
    ) -> Tensor:
        """See `Passes`."""
        shared = self.shared(layer, attended, normed=normed)
        routed = self._stacks[layer].unasked(normed, experts, gates)
        return self.finish(layer, attended, shared, routed)

    def reserve(self, span: Span, cache: KVCache, length: int) -> bytes:
        """See `Passes`."""
        end = span.last + span.routes
        blocks = range(self._first_blocks[span.first], self._moe_blocks[end - 1] + 1)
        return cache.addresses(blocks, length)[blocks.start : blocks.stop].tobytes()

    def propagate(self, layer: int, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        for block in (*self._dense[layer], self._moe[layer]):
            self._propagate(block, hidden, batch, cache)

    def propagate_tail(self, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        for block in self._trailing:
            self._propagate(block, hidden, batch, cache)

    def route(self, layer: int, hidden: Tensor, *, groups: Tensor | None = None) -> Routing:
        block = self._moe[layer]
        normed = block.post_attention_layernorm(hidden)
        logits = F.linear(normed, block.mlp.gate.weight).float()
        probabilities = F.softmax(logits, dim=-1)
        gates, experts = torch.topk(probabilities, self.spec.top_k, dim=-1)
        if self.spec.gates_renormalised:
            gates = gates / gates.sum(dim=-1, keepdim=True)
        if self._rounds_gates:
            gates = gates.to(self.dtype).float()
        return Routing(
            probabilities=probabilities, logits=logits, experts=experts, gates=gates, normed=normed
        )

    def shared(self, layer: int, hidden: Tensor, *, normed: Tensor | None = None) -> Tensor | None:
        if not self._has_shared:
            return None
        block = self._moe[layer]
        if normed is None:
            normed = block.post_attention_layernorm(hidden)
        mlp = block.mlp
        return torch.sigmoid(mlp.shared_expert_gate(normed)) * mlp.shared_expert(normed)

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
        rows: Tensor = (
            self._moe[layer].post_attention_layernorm(hidden) if normed is None else normed
        )
        return stack(rows, experts, gates)

    def head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self._model.model.norm(hidden), self._model.lm_head.weight

    def _step(self, batch: TokenBatch, cache: KVCache) -> BlockStep:
        return BlockStep(
            through=Through(cache, batch),
            rotary=batch.rotary,
            mask=batch.mask,
            window_mask=batch.window_mask,
        )

    def _whatif(self, positions: Tensor, slot: int, cache: KVCache) -> BlockStep:
        length = int(positions.max())
        mask, window_mask = whatif_masks(positions, length, self._window)
        return BlockStep(
            through=Beside(cache, slot, length),
            rotary=self._rotary(positions.unsqueeze(0)),
            mask=mask,
            window_mask=window_mask,
        )

    def _mask(self, block: Any, step: BlockStep) -> Tensor | None:
        windowed = self._windows[block.self_attn.layer_idx] is not None
        return step.window_mask if windowed else step.mask

    def _attend(self, block: Any, hidden: Tensor, step: BlockStep) -> Tensor:
        attended, _ = block.self_attn(
            hidden_states=block.input_layernorm(hidden),
            position_embeddings=step.rotary,
            attention_mask=self._mask(block, step),
            **{self._cache_argument: step.through},
        )
        return hidden + attended

    def _run(self, blocks: list[Any], hidden: Tensor, step: BlockStep) -> Tensor:
        """Whole dense blocks, as transformers runs them."""
        for block in blocks:
            hidden = block(
                hidden,
                attention_mask=self._mask(block, step),
                position_embeddings=step.rotary,
                **{self._cache_argument: step.through},
            )
        return hidden

    def _propagate(self, block: Any, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        assert batch.rotary is not None
        attention = block.self_attn
        keys, values = self._keys_values(attention, block.input_layernorm(hidden))
        keys = keys.transpose(1, 2)
        _, keys = self._apply_rotary(keys, keys, *batch.rotary)
        cache.write(attention.layer_idx, keys, values.transpose(1, 2), batch)


def _segment(
    layer: int,
    passed: list[IntArray],
    hidden: Tensor,
    routing: Routing | None,
    kept: Tensor | None,
) -> Segment:
    experts = np.concatenate(passed, axis=1)
    return Segment(layer=layer, hidden=hidden, routing=routing, experts=experts, kept=kept)


def _joined(passed: list[IntArray], rest: Segment, kept: Tensor | None) -> Segment:
    """The rest of a way whose first layers gave these."""
    experts = np.concatenate([*passed, rest.experts], axis=1)
    return replace(rest, experts=experts, kept=kept if rest.kept is None else rest.kept)
