"""From a decoder's modules and experts to compiled blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.precision import Precision
from trimmoe.core.specs import IntArray
from trimmoe.models.compiled import columns
from trimmoe.models.compiled.attention import Shape
from trimmoe.models.compiled.forms import DEFAULT, SHARED, Form
from trimmoe.models.compiled.kinds import NORM_HEADS, NORM_NONE, NORM_WHOLE
from trimmoe.models.compiled.lanes import LANES
from trimmoe.models.compiled.latent import add_latent, is_latent
from trimmoe.models.compiled.packing import packed
from trimmoe.models.compiled.parts import Parts
from trimmoe.models.compiled.tables import ExpertParts, Tables
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.experts import ExpertStack, ReadLayer
from trimmoe.models.family import Geometry
from trimmoe.models.quantise import placed

_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
"""Whose angles depend on the position alone."""


def can_compile(config: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled blocks know what a configuration asks of all of them."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", "default")
    return (
        dtype is torch.float32
        and device.type == "cpu"
        and getattr(config, "hidden_act", "silu") == "silu"
        and kind in _ROTARY
    )


def turns_whole_heads(config: Any) -> bool:
    """Whether rotary embedding leaves no number of a head as it is."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return float(rope.get("partial_rotary_factor", 1.0)) == 1.0


def parts_of(
    decoder: Any, head: Tensor, loaded: tuple[frozenset[int], ...], precision: Precision
) -> Parts:
    """The ends of a model whose `head` are these rows [V, d]."""
    embed, rotary = decoder.embed_tokens.weight, decoder.rotary_emb
    (embeddings,), size = placed([packed([embed], precision)]), _turned(decoder)
    return Parts(
        loaded=loaded,
        precision=precision,
        has_shared=any(_shared(each.mlp) is not None for each in decoder.layers),
        embeddings=embeddings,
        head=embeddings if head is embed else placed([packed([head], precision)])[0],
        last_norm=decoder.norm.weight.detach().float().numpy().copy(),
        rotary=lambda ids: _angles(rotary, ids, size),
    )


def shape_of(config: Any, geometry: Geometry, decoder: Any, form: Form = DEFAULT) -> Shape:
    """What all blocks have in common."""
    attention = decoder.layers[0].self_attn
    clip = getattr(config, "clip_qkv", None)
    renormalises = form.renormalises
    best = form.best_of_group(config)
    return Shape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        experts=geometry.expert_count,
        top_k=geometry.top_k,
        epsilon=float(config.rms_norm_eps),
        renormalise=geometry.gates_renormalised if renormalises is None else renormalises,
        clip=float("inf") if clip is None else float(clip),
        routed=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        rotary=_turned(decoder),
        scores=form.scores,
        groups=int(config.n_group) if best else 1,
        kept_groups=int(config.topk_group) if best else 1,
        best_of_group=best,
        gate_scale=float(getattr(config, "routed_scaling_factor", None) or 1.0),
        gated=form.gated,
        steepness=float(getattr(config, "swiglu_alpha", 1.0)),
        limit=float(getattr(config, "swiglu_limit", math.inf)),
        **_heads(config, attention),
    )


def _heads(config: Any, attention: Any) -> dict[str, Any]:
    """What attention is like."""
    if is_latent(attention):
        head = attention.kv_lora_rank + attention.qk_rope_head_dim
        return {
            "kv_heads": 1,
            "head": head,
            "head_wide": head + -head % LANES,
            "qk_norm": NORM_NONE,
            "scale": float(attention.scaling),
            "latent": attention.kv_lora_rank,
            "value": attention.v_head_dim,
        }
    head, norm = attention.head_dim, NORM_NONE
    if hasattr(attention, "q_norm"):
        whole = attention.q_norm.weight.shape[0] != head
        norm = NORM_WHOLE if whole else NORM_HEADS
    return {
        "kv_heads": config.num_key_value_heads,
        "head": head,
        "head_wide": head + -head % LANES,
        "qk_norm": norm,
        "scale": 1.0 / math.sqrt(head),
    }


def tables_of(
    shape: Shape,
    geometry: Geometry,
    decoder: Any,
    loaded: Sequence[frozenset[int]],
    read: ReadLayer,
    windows: Sequence[int | None],
    precision: Precision,
    form: Form = DEFAULT,
) -> Tables:
    """All blocks; experts are read layer by layer."""
    tables = Tables.empty(shape, geometry.block_count, geometry.moe_blocks)
    for block, layer in enumerate(decoder.layers):
        _attention(tables, block, layer, precision)
        tables.blocks[block, columns.WINDOW] = windows[block] or 0
        tables.vector(block, columns.EXPERTS_NORM, layer.post_attention_layernorm.weight)
        _dense(tables, block, layer.mlp, precision)
    for number, block in enumerate(geometry.moe_blocks):
        mlp = decoder.layers[block].mlp
        gate = getattr(mlp, form.router)
        # Routers stay as they are: what they say is what everything is decided by.
        tables.matrix(block, {columns.ROUTER: packed([gate.weight], Precision.NONE)})
        tables.vector(block, columns.ROUTER_BIAS, getattr(gate, "bias", None))
        if form.correction is not None:
            tables.vector(block, columns.CORRECTION, mlp.get_buffer(form.correction))
        if loaded[number]:
            stack = read(number)
            for at, expert in enumerate(stack.order):
                tables.expert(block, expert, expert_parts(stack, at, form), precision)
    return tables


def _attention(tables: Tables, block: int, layer: Any, precision: Precision) -> None:
    attention = layer.self_attn
    tables.vector(block, columns.ATTENTION_NORM, layer.input_layernorm.weight)
    if is_latent(attention):
        add_latent(tables, block, attention, precision)
        return
    query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
    matrices = {
        columns.QUERY: [query.weight],
        columns.KEY_VALUE: [key.weight, value.weight],
        columns.OUTPUT: [attention.o_proj.weight],
    }
    tables.matrix(block, {at: packed(each, precision) for at, each in matrices.items()})
    biases = (
        (columns.QUERY_BIAS, query),
        (columns.KEY_BIAS, key),
        (columns.VALUE_BIAS, value),
        (columns.OUTPUT_BIAS, attention.o_proj),
    )
    for column, part in biases:
        tables.vector(block, column, part.bias)
    tables.vector(block, columns.SINKS, getattr(attention, "sinks", None))
    if hasattr(attention, "q_norm"):
        tables.vector(block, columns.QUERY_NORM, attention.q_norm.weight)
        tables.vector(block, columns.KEY_NORM, attention.k_norm.weight)


def _shared(mlp: Any) -> Any | None:
    return next((getattr(mlp, name) for name in SHARED if hasattr(mlp, name)), None)


def _dense(tables: Tables, block: int, mlp: Any, precision: Precision) -> None:
    """The shared expert, or the whole MLP of a block without routed ones."""
    shared = mlp if hasattr(mlp, "gate_proj") else _shared(mlp)
    if shared is None:
        return
    both = [shared.gate_proj.weight, shared.up_proj.weight]
    matrices = {columns.SHARED_UP: both, columns.SHARED_DOWN: [shared.down_proj.weight]}
    tables.matrix(block, {at: packed(each, precision) for at, each in matrices.items()})
    if hasattr(mlp, "shared_expert_gate"):
        mix = [mlp.shared_expert_gate.weight]
        tables.matrix(block, {columns.SHARED_MIX: packed(mix, Precision.NONE)})


def expert_parts(stack: ExpertStack, at: int, form: Form = DEFAULT) -> ExpertParts:
    """The expert that is the `at`th of a stack."""
    up, bias = stack.up[at], stack.up_biases[at]
    if form.alternating:
        gate, up = up[0::2], up[1::2]
        bias = None if bias is None else torch.cat((bias[0::2], bias[1::2]))
    else:
        gate, up = up.chunk(2)
    return ExpertParts(
        gate=gate, up=up, down=stack.down[at], up_bias=bias, down_bias=stack.down_biases[at]
    )


def stand_in(
    view: CompiledView,
    read: Callable[[int, list[int]], ExpertStack],
    bits: IntArray,
    form: Form = DEFAULT,
) -> None:
    """Give a view copies of experts that it was opened without, layer by layer; bits [N, E]."""
    for layer, wanted in enumerate(bits):
        ids = [each for each in np.flatnonzero(wanted).tolist() if each not in view.loaded[layer]]
        if ids:
            stack = read(layer, ids)
            for at, expert in enumerate(stack.order):
                parts = expert_parts(stack, at, form)
                view.add_copy(layer, expert, int(wanted[expert]), parts)
    view.stand_in_bits = bits


def _turned(decoder: Any) -> int:
    """Numbers of a head that rotary embedding turns."""
    return 2 * decoder.rotary_emb.inv_freq.numel()


def _angles(rotary: Any, ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of positions [1, P], [1, P, size] each."""
    made = rotary(torch.empty(0), position_ids=ids)
    both = (made.real, made.imag) if isinstance(made, Tensor) else made
    cosine, sine = (
        part if part.shape[-1] == size else torch.cat((part, part), -1) for part in both
    )
    return cosine, sine
