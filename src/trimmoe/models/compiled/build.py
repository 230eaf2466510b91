"""From a decoder's modules and experts to compiled blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimmoe.core.precision import Precision
from trimmoe.models.compiled import step
from trimmoe.models.compiled.lanes import LANES
from trimmoe.models.compiled.tables import Tables
from trimmoe.models.experts import ExpertStack, ExpertStacks
from trimmoe.models.family import Geometry
from trimmoe.models.quantise import Packed, pack_joined, placed

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]
_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
"""Whose angles depend on the position alone."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a compiled view needs besides its blocks."""

    loaded: tuple[frozenset[int], ...]
    precision: Precision
    has_shared: bool
    embeddings: Packed
    head: Packed
    last_norm: NDArray[np.float32]
    rotary: Rotary
    """Position ids [1, P] to cosine and sine [1, P, head]."""


def can_compile(config: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled blocks know all of a decoder."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", "default")
    return (
        dtype is torch.float32
        and device.type == "cpu"
        and getattr(config, "hidden_act", "silu") == "silu"
        and kind in _ROTARY
        and float(rope.get("partial_rotary_factor", 1.0)) == 1.0
    )


def parts_of(model: Any, loaded: tuple[frozenset[int], ...], precision: Precision) -> Parts:
    """The ends of a model."""
    embed, head = model.model.embed_tokens.weight, model.lm_head.weight
    (embeddings,), rotary = placed([_packed([embed], precision)]), model.model.rotary_emb
    like = torch.empty(0)
    return Parts(
        loaded=loaded,
        precision=precision,
        has_shared=any(hasattr(each.mlp, "shared_expert") for each in model.model.layers),
        embeddings=embeddings,
        head=embeddings if head is embed else placed([_packed([head], precision)])[0],
        last_norm=model.model.norm.weight.detach().float().numpy().copy(),
        rotary=lambda ids: rotary(like, position_ids=ids),
    )


def shape_of(config: Any, geometry: Geometry, model: Any) -> step.Shape:
    """What all blocks have in common."""
    attention = model.model.layers[0].self_attn
    norm = step.NORM_NONE
    if hasattr(attention, "q_norm"):
        whole = attention.q_norm.weight.shape[0] != attention.head_dim
        norm = step.NORM_WHOLE if whole else step.NORM_HEADS
    clip = getattr(config, "clip_qkv", None)
    head = attention.head_dim
    return step.Shape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head=head,
        head_wide=head + -head % LANES,
        experts=geometry.expert_count,
        top_k=geometry.top_k,
        epsilon=float(config.rms_norm_eps),
        renormalise=geometry.gates_renormalised,
        qk_norm=norm,
        clip=float("inf") if clip is None else float(clip),
        routed=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
    )


def tables_of(
    shape: step.Shape,
    geometry: Geometry,
    model: Any,
    stacks: ExpertStacks,
    windows: list[int | None],
    precision: Precision,
) -> Tables:
    """All blocks."""
    tables = Tables.empty(shape, geometry.block_count, geometry.moe_blocks)
    for block, layer in enumerate(model.model.layers):
        _attention(tables, block, layer, precision)
        tables.blocks[block, step.WINDOW] = windows[block] or 0
        tables.vector(block, step.EXPERTS_NORM, layer.post_attention_layernorm.weight)
        _dense(tables, block, layer.mlp, precision)
    for number, block in enumerate(geometry.moe_blocks):
        gate = model.model.layers[block].mlp.gate.weight
        # Routers stay as they are: what they say is what everything is decided by.
        tables.matrix(block, {step.ROUTER: _packed([gate], Precision.NONE)})
        if stacks.loaded[number]:
            _experts(tables, block, stacks[number], precision)
    return tables


def _packed(weights: list[Tensor], precision: Precision) -> Packed:
    """Matrices one below another, each in panels of its own."""
    return pack_joined([each.detach().float().numpy() for each in weights], precision)


def _attention(tables: Tables, block: int, layer: Any, precision: Precision) -> None:
    attention = layer.self_attn
    query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
    tables.vector(block, step.ATTENTION_NORM, layer.input_layernorm.weight)
    matrices = {
        step.QUERY: [query.weight],
        step.KEY_VALUE: [key.weight, value.weight],
        step.OUTPUT: [attention.o_proj.weight],
    }
    tables.matrix(block, {at: _packed(each, precision) for at, each in matrices.items()})
    biases = (step.QUERY_BIAS, query), (step.KEY_BIAS, key), (step.VALUE_BIAS, value)
    for column, part in biases:
        tables.vector(block, column, part.bias)
    if hasattr(attention, "q_norm"):
        tables.vector(block, step.QUERY_NORM, attention.q_norm.weight)
        tables.vector(block, step.KEY_NORM, attention.k_norm.weight)


def _dense(tables: Tables, block: int, mlp: Any, precision: Precision) -> None:
    """The shared expert, or the whole MLP of a block without routed ones."""
    shared = getattr(mlp, "shared_expert", mlp if hasattr(mlp, "gate_proj") else None)
    if shared is None:
        return
    both = [shared.gate_proj.weight, shared.up_proj.weight]
    matrices = {step.SHARED_UP: both, step.SHARED_DOWN: [shared.down_proj.weight]}
    tables.matrix(block, {at: _packed(each, precision) for at, each in matrices.items()})
    if hasattr(mlp, "shared_expert_gate"):
        mix = [mlp.shared_expert_gate.weight]
        tables.matrix(block, {step.SHARED_MIX: _packed(mix, Precision.NONE)})


def _experts(tables: Tables, block: int, stack: ExpertStack, precision: Precision) -> None:
    for at, expert in enumerate(stack.order):
        up = _packed(list(stack.up[at].chunk(2)), precision)
        tables.expert(block, expert, up, _packed([stack.down[at]], precision))
