"""Decoder-only families: what a family file gives, and how its checkpoints are opened.

A family file gives a `DecoderFamily`: the model class, the tensor names, and how its attention
makes keys and values before the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimmoe.core.precision import Precision
from trimmoe.core.specs import IntArray, ModelSpec
from trimmoe.models.base import MoEView
from trimmoe.models.checkpoint import Checkpoint
from trimmoe.models.compiled.build import (
    can_compile,
    parts_of,
    shape_of,
    stand_in,
    tables_of,
    turns_whole_heads,
)
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.decoder_steps import window_of
from trimmoe.models.decoder_view import DecoderView, KeysValues
from trimmoe.models.experts import ExpertStacks
from trimmoe.models.family import (
    ExpertChoice,
    ExpertNames,
    Geometry,
    load_dense,
    load_experts,
    refuse_quantised,
)
from trimmoe.models.passed import BytesRead
from trimmoe.models.sane import built


def plain_keys_values(attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values where nothing but a projection makes them."""
    shape = (*normed.shape[:-1], -1, attention.head_dim)
    return attention.k_proj(normed).view(shape), attention.v_proj(normed).view(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderFamily:
    """One decoder-only family; see `Family` for what the loader asks of it."""

    model_type: str
    config_class: Any
    model_class: Any
    rotary_class: Any
    apply_rotary: Callable[..., tuple[Tensor, Tensor]]
    expert_names: ExpertNames
    renormalises: Callable[[Any], bool]
    keys_values: KeysValues = plain_keys_values
    rounds_gates: bool = True
    """Whether the router casts its gates to the model's dtype."""
    stored_prefix: tuple[str, str] | None = None
    """Part of a module's name and what files that keep experts apart write instead."""

    def config(self, raw: dict[str, Any]) -> Any:
        return self.config_class.from_dict(raw)

    def geometry(self, config: Any) -> Geometry:
        tied = bool(getattr(config, "tie_word_embeddings", False))
        return Geometry(
            family=self.model_type,
            moe_blocks=_moe_blocks(config),
            block_count=config.num_hidden_layers,
            expert_count=getattr(config, "num_local_experts", None) or config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            context_length=config.max_position_embeddings,
            gates_renormalised=self.renormalises(config),
            expert_names=self.expert_names,
            block_prefix="model.layers.{block}.",
            unread=("lm_head.weight",) if tied else (),
            head_names=("model.embed_tokens.weight" if tied else "lm_head.weight",),
        )

    def open(
        self,
        config: Any,
        checkpoint: Checkpoint,
        *,
        spec: ModelSpec,
        choice: ExpertChoice,
        encoder_choice: ExpertChoice,
        streamed: bool,
        dtype: torch.dtype,
        device: torch.device,
        precision: Precision,
        compiled: bool,
        stand_ins: IntArray | None,
    ) -> MoEView:
        geometry = self.geometry(config)
        compiled = compiled and not streamed and can_compile(config, dtype, device)
        compiled = compiled and turns_whole_heads(config)
        # Compiled blocks hold weights of their own.
        model = self._load_model(config, checkpoint, None if compiled else dtype, device)
        read = BytesRead(dense=checkpoint.bytes_read)

        def load(choice: ExpertChoice) -> ExpertStacks:
            return load_experts(
                geometry,
                checkpoint,
                choice=choice,
                streamed=streamed,
                read=read,
                activation=model.model.layers[geometry.moe_blocks[0]].mlp.act_fn,
                dtype=dtype,
                device=device,
            )

        stacks = load(choice)
        if compiled:
            view = _compiled(config, geometry, model, stacks, spec, read, precision)
            if stand_ins is not None:
                stand_in(view, lambda layer, ids: load({layer: ids})[layer], stand_ins)
            return view
        refuse_quantised(spec.name, precision)
        return DecoderView(
            keys_values=self.keys_values,
            apply_rotary=self.apply_rotary,
            rounds_gates=self.rounds_gates,
            geometry=geometry,
            model=model,
            stacks=stacks,
            spec=spec,
            dtype=dtype,
            device=device,
            bytes_read=read,
        )

    def _load_model(
        self, config: Any, checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device
    ) -> Any:
        """The model without routed experts, its dense weights loaded, as `load_dense` has it."""
        config._attn_implementation = "sdpa"
        model: Any = built(lambda: self.model_class(config), checkpoint.folder)
        for block in _moe_blocks(config):
            mlp = model.model.layers[block].mlp
            mlp.act_fn = mlp.experts.act_fn
            mlp.experts = nn.Identity()
        # Its buffers are computed, not stored, so the meta device has nothing to give.
        model.model.rotary_emb = self.rotary_class(config=config).to(device)
        load_dense(
            model,
            checkpoint,
            stored_name=lambda name: self._stored_name(name, checkpoint),
            dtype=dtype,
            device=device,
        )
        if getattr(config, "tie_word_embeddings", False):
            model.lm_head.weight = model.model.embed_tokens.weight
        return model

    def _stored_name(self, name: str, checkpoint: Checkpoint) -> str:
        if name in checkpoint.entries or self.stored_prefix is None:
            return name
        return name.replace(*self.stored_prefix)


def _compiled(
    config: Any,
    geometry: Geometry,
    model: Any,
    stacks: ExpertStacks,
    spec: ModelSpec,
    read: BytesRead,
    precision: Precision,
) -> CompiledView:
    """The same model in compiled blocks; what the modules hold can be let go."""
    decoder = model.model
    shape = shape_of(config, geometry, decoder)
    windows = [window_of(layer.self_attn, config) for layer in decoder.layers]
    tables = tables_of(
        shape, geometry, decoder, stacks.loaded, stacks.__getitem__, windows, precision
    )
    parts = parts_of(decoder, model.lm_head.weight, stacks.loaded, precision)
    return CompiledView(parts, tables, spec, read)


def _moe_blocks(config: Any) -> tuple[int, ...]:
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    step = getattr(config, "decoder_sparse_step", None) or 1
    blocks = range(config.num_hidden_layers)
    return tuple(b for b in blocks if b not in dense and (b + 1) % step == 0)
