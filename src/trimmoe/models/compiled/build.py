"""From a decoder's modules and experts to compiled blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trimmoe.core.precision import Precision
from trimmoe.models.compiled import columns
from trimmoe.models.compiled.attention import Shape
from trimmoe.models.compiled.beside import add_beside, value_norm
from trimmoe.models.compiled.delta import add_delta
from trimmoe.models.compiled.filling import Weights, each_expert
from trimmoe.models.compiled.forms import DEFAULT, LINEAR, SHARED, Form
from trimmoe.models.compiled.kinds import GATED_GELU, NORM_HEADS, NORM_NONE, NORM_WHOLE
from trimmoe.models.compiled.lanes import LANES
from trimmoe.models.compiled.latent import add_latent, is_latent
from trimmoe.models.compiled.packing import packed
from trimmoe.models.compiled.parts import Parts
from trimmoe.models.compiled.quantise import placed
from trimmoe.models.compiled.tables import ExpertParts, Tables
from trimmoe.models.family import Geometry

_ROTARY = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""Whose angles depend on the position alone."""
_ACTIVATION = {GATED_GELU: "gelu_pytorch_tanh"}
"""What configurations call it; silu elsewhere."""


def can_compile(
    config: Any, dtype: torch.dtype, device: torch.device, form: Form = DEFAULT
) -> bool:
    """Whether the compiled blocks know what a configuration asks of all of them."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [one for one in rope.values() if isinstance(one, dict)] or [rope]
    acts = (getattr(config, name, None) for name in ("hidden_act", "hidden_activation"))
    act = next((one for one in acts if one is not None), "silu")
    return (
        dtype is torch.float32
        and device.type == "cpu"
        and act == _ACTIVATION.get(form.gated, "silu")
        and all(one.get("rope_type", "default") in _ROTARY for one in each)
    )


def turns_whole_heads(config: Any) -> bool:
    """Whether rotary embedding leaves no number of a head as it is."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return float(rope.get("partial_rotary_factor", 1.0)) == 1.0


def parts_of(
    decoder: Any,
    head: Tensor,
    loaded: tuple[frozenset[int], ...],
    precision: Precision,
    form: Form = DEFAULT,
) -> Parts:
    """The ends of a model whose `head` are these rows [V, d]."""
    # The decoder's weights are let go; what is kept of it must not hold them.
    embed, rotary = decoder.embed_tokens.weight, decoder.rotary_emb
    (embeddings,) = placed([packed([embed], precision)])
    return Parts(
        loaded=loaded,
        precision=precision,
        has_shared=any(_shared(each.mlp) is not None for each in decoder.layers),
        embeddings=embeddings,
        head=embeddings if head is embed else placed([packed([head], precision)])[0],
        last_norm=_norm(decoder.norm, form).detach().float().numpy().copy(),
        rotary=lambda ids: _angles(rotary, ids),
        embedding_scale=float(getattr(decoder.embed_tokens, "embed_scale", 1.0)),
        logit_cap=getattr(decoder.config, "final_logit_softcapping", None),
    )


def shape_of(config: Any, geometry: Geometry, decoder: Any, form: Form = DEFAULT) -> Shape:
    """What all blocks have in common."""
    attention = next(one.self_attn for one in decoder.layers if hasattr(one, "self_attn"))
    clip, turned = getattr(config, "clip_qkv", None), _turned(decoder.rotary_emb)
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
        rotary=turned[_kind(attention, turned)],
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
        "kv_heads": attention.k_proj.weight.shape[0] // head,
        "head": head,
        "head_wide": head + -head % LANES,
        "qk_norm": norm,
        "scale": float(attention.scaling),
    }


def tables_of(
    shape: Shape,
    geometry: Geometry,
    decoder: Any,
    weights: Weights,
    windows: Sequence[int | None],
    precision: Precision,
    form: Form = DEFAULT,
) -> Tables:
    """All blocks, one after another."""
    tables = Tables.empty(shape, geometry.block_count, geometry.moe_blocks)
    numbers = {block: number for number, block in enumerate(geometry.moe_blocks)}

    def hold(block: int, expert: int, parts: ExpertParts) -> None:
        tables.expert(block, expert, parts, precision)

    for block, layer in enumerate(decoder.layers):
        number = numbers.get(block)
        with weights.block(block):
            tables.blocks[block, columns.WINDOW] = windows[block] or 0
            _attention(tables, block, layer, decoder.rotary_emb, precision, form)
            if form.beside:
                add_beside(tables, block, layer)
            else:
                tables.vector(
                    block, columns.EXPERTS_NORM, _norm(layer.post_attention_layernorm, form)
                )
            _dense(tables, block, layer.mlp, precision)
            if number is not None:
                _router(tables, block, layer, form)
        if number is not None:
            each_expert(weights, number, weights.loaded[number], partial(hold, block), form)
    return tables


def _router(tables: Tables, block: int, layer: Any, form: Form) -> None:
    gate = (layer if form.beside else layer.mlp).get_submodule(form.router)
    # Routers stay as they are: what they say is what everything is decided by.
    tables.matrix(block, {columns.ROUTER: packed([gate.weight], Precision.NONE)})
    tables.vector(block, columns.ROUTER_BIAS, getattr(gate, "bias", None))
    if form.correction is not None:
        tables.vector(block, columns.CORRECTION, layer.mlp.get_buffer(form.correction))


def _norm(norm: Any, form: Form) -> Tensor:
    """What a norm multiplies with."""
    return norm.weight.detach().float() + 1.0 if form.about_one else norm.weight


def _attention(
    tables: Tables, block: int, layer: Any, rotary: Any, precision: Precision, form: Form
) -> None:
    tables.vector(block, columns.ATTENTION_NORM, _norm(layer.input_layernorm, form))
    if hasattr(layer, LINEAR):
        add_delta(tables, block, getattr(layer, LINEAR), precision)
        return
    attention = layer.self_attn
    if is_latent(attention):
        add_latent(tables, block, attention, precision)
        return
    _sizes(tables, block, attention, rotary)
    key, value = attention.k_proj, attention.v_proj
    query, gate = attention.q_proj.weight, None
    if form.gates_heads:
        each = query.unflatten(0, (-1, 2, attention.head_dim))
        query, gate = each[:, 0].flatten(0, 1), each[:, 1].flatten(0, 1)
    matrices = {
        columns.QUERY: [query],
        columns.KEY_VALUE: [one.weight for one in (key, value) if one is not None],
        **({} if gate is None else {columns.GATE: [gate]}),
        columns.OUTPUT: [attention.o_proj.weight],
    }
    tables.matrix(block, {at: packed(each, precision) for at, each in matrices.items()})
    biases = (
        (columns.QUERY_BIAS, attention.q_proj),
        (columns.KEY_BIAS, key),
        (columns.VALUE_BIAS, value),
        (columns.OUTPUT_BIAS, attention.o_proj),
    )
    for column, part in biases:
        tables.vector(block, column, None if part is None else part.bias)
    tables.vector(block, columns.VALUE_NORM, value_norm(attention))
    tables.vector(block, columns.SINKS, getattr(attention, "sinks", None))
    if hasattr(attention, "q_norm"):
        tables.vector(block, columns.QUERY_NORM, _norm(attention.q_norm, form))
        tables.vector(block, columns.KEY_NORM, _norm(attention.k_norm, form))


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


def _sizes(tables: Tables, block: int, attention: Any, rotary: Any) -> None:
    """Note how large attention of a block is, and where its angles are."""
    turned = _turned(rotary)
    kind = _kind(attention, turned)
    before = [size for other, size in turned.items() if other < kind]
    tables.blocks[block, columns.HEAD] = attention.head_dim
    tables.blocks[block, columns.KV_HEADS] = attention.k_proj.weight.shape[0] // attention.head_dim
    tables.blocks[block, [columns.TURNED, columns.TURNED_AT]] = turned[kind], sum(before)


def _kind(attention: Any, turned: dict[str, int]) -> str:
    """Which of the angles an attention takes."""
    return attention.layer_type if len(turned) > 1 else next(iter(turned))


def _turned(rotary: Any) -> dict[str, int]:
    """Numbers of a head that rotary embedding turns, by the kind of attention, of which there may
    be but one, without a name."""
    if hasattr(rotary, "inv_freq"):
        return {"": 2 * rotary.inv_freq.numel()}
    kinds = sorted(rotary.rope_init_fns)
    return {kind: 2 * getattr(rotary, f"{kind}_inv_freq").numel() for kind in kinds}


def _angles(rotary: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of positions [1, P], [1, P, rotary] each, of one kind after another."""
    made = [_of_kind(rotary, ids, kind, size) for kind, size in _turned(rotary).items()]
    cosines, sines = zip(*made, strict=True)
    return torch.cat(cosines, -1), torch.cat(sines, -1)


def _of_kind(rotary: Any, ids: Tensor, kind: str, size: int) -> tuple[Tensor, Tensor]:
    named = {"layer_type": kind} if kind else {}
    made = rotary(torch.empty(0), position_ids=ids, **named)
    both = (made.real, made.imag) if isinstance(made, Tensor) else made
    cosine, sine = (
        part if part.shape[-1] == size else torch.cat((part, part), -1) for part in both
    )
    return cosine, sine
