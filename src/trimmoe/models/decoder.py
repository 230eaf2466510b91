"""Decoder-only families: what a family file gives, and how its checkpoints are opened.

A family file gives a `DecoderFamily`: what transformers' classes begin with, the tensor names, and
how its attention makes keys and values before the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from trimmoe.core.specs import ModelSpec
from trimmoe.models.base import MoEView
from trimmoe.models.checkpoint import Checkpoint
from trimmoe.models.compiled.build import (
    can_compile,
    parts_of,
    shape_of,
    tables_of,
    turns_whole_heads,
)
from trimmoe.models.compiled.filling import Weights, stand_in
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.decoder_steps import window_of
from trimmoe.models.decoder_view import DecoderView, KeysValues
from trimmoe.models.experts import ReadExperts
from trimmoe.models.family import (
    ExpertNames,
    Geometry,
    Wanted,
    chosen_by_layer,
    expert_reader,
    load_dense,
    load_experts,
    refuse_quantised,
    require_dense,
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
    classes: str
    """What the names of transformers' classes begin with."""
    expert_names: ExpertNames
    renormalises: Callable[[Any], bool]
    keys_values: KeysValues = plain_keys_values
    rounds_gates: bool = True
    """Whether the router casts its gates to the model's dtype."""
    stored_prefix: tuple[str, str] | None = None
    """Part of a module's name and what files that keep experts apart write instead."""

    def config(self, raw: dict[str, Any]) -> Any:
        name = f"transformers.models.{self.model_type}.configuration_{self.model_type}"
        return getattr(import_module(name), f"{self.classes}Config").from_dict(raw)

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

    def open(self, config: Any, checkpoint: Checkpoint, spec: ModelSpec, wanted: Wanted) -> MoEView:
        geometry = self.geometry(config)
        may_compile = wanted.compiled and not wanted.streamed and turns_whole_heads(config)
        if may_compile and can_compile(config, wanted.dtype, wanted.device):
            return self._compiled(config, geometry, checkpoint, spec, wanted)
        refuse_quantised(spec.name, wanted.precision)
        model = self._meta_model(config, checkpoint, wanted.device)
        self._load(model, checkpoint, wanted.dtype, wanted.device)
        _tie(model, config)
        read = BytesRead(dense=checkpoint.bytes_read)
        reader = _expert_reader(geometry, checkpoint, model, read, wanted)
        return DecoderView(
            keys_values=self.keys_values,
            apply_rotary=self._modelling.apply_rotary_pos_emb,
            rounds_gates=self.rounds_gates,
            geometry=geometry,
            model=model,
            stacks=load_experts(
                geometry, checkpoint, reader, wanted.experts, streamed=wanted.streamed
            ),
            spec=spec,
            dtype=wanted.dtype,
            device=wanted.device,
            bytes_read=read,
        )

    def _compiled(
        self,
        config: Any,
        geometry: Geometry,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        wanted: Wanted,
    ) -> CompiledView:
        """A model in compiled blocks, which hold weights of their own."""
        model = self._meta_model(config, checkpoint, wanted.device)
        decoder, read = model.model, BytesRead(dense=0)

        @contextmanager
        def filled(block: int) -> Generator[None]:
            layer, prefix = decoder.layers[block], f"model.layers.{block}."
            self._load(layer, checkpoint, None, wanted.device, prefix=prefix)
            yield
            layer.to("meta")

        weights = Weights(
            loaded=chosen_by_layer(wanted.experts, geometry),
            read=_expert_reader(geometry, checkpoint, model, read, wanted),
            block=filled,
            threads=wanted.threads,
        )
        shape = shape_of(config, geometry, decoder)
        windows = [window_of(layer.self_attn, config) for layer in decoder.layers]
        # The largest matrices of all while there is most room.
        self._load(model, checkpoint, None, wanted.device, skips="model.layers.")
        _tie(model, config)
        parts = parts_of(decoder, model.lm_head.weight, weights.loaded, wanted.precision)
        for end in (decoder.embed_tokens, model.lm_head):
            end.to("meta")
        tables = tables_of(shape, geometry, decoder, weights, windows, wanted.precision)
        read.dense = checkpoint.bytes_read - read.experts
        view = CompiledView(parts, tables, spec, read)
        view.fit_copies(wanted.input_squares)
        if wanted.stand_ins is not None:
            stand_in(view, weights, wanted.stand_ins)
        return view

    @property
    def _modelling(self) -> Any:
        """Where the model's classes are. It takes more than a second to import, which nobody should
        wait for who only asks what a model is."""
        return import_module(f"transformers.models.{self.model_type}.modeling_{self.model_type}")

    def _meta_model(self, config: Any, checkpoint: Checkpoint, device: torch.device) -> Any:
        """The model without routed experts, and without weights, all of which the checkpoint has.
        Raises UserError."""
        config._attn_implementation = "sdpa"
        model_class = getattr(self._modelling, f"{self.classes}ForCausalLM")
        rotary_class = getattr(self._modelling, f"{self.classes}RotaryEmbedding")
        model: Any = built(lambda: model_class(config), checkpoint.folder)
        for block in _moe_blocks(config):
            mlp = model.model.layers[block].mlp
            mlp.act_fn = mlp.experts.act_fn
            mlp.experts = nn.Identity()
        # Its buffers are computed, not stored, so the meta device has nothing to give.
        model.model.rotary_emb = rotary_class(config=config).to(device)
        require_dense(model, checkpoint, lambda name: self._stored_name(name, checkpoint))
        return model

    def _load(
        self,
        module: nn.Module,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None,
        device: torch.device,
        *,
        prefix: str = "",
        skips: str | None = None,
    ) -> None:
        """Give a module, whose parameters' names in the model begin with `prefix`, its weights, as
        `load_dense` does."""
        load_dense(
            module,
            checkpoint,
            stored_name=lambda name: self._stored_name(prefix + name, checkpoint),
            dtype=dtype,
            device=device,
            skips=skips,
        )

    def _stored_name(self, name: str, checkpoint: Checkpoint) -> str:
        if name in checkpoint.entries or self.stored_prefix is None:
            return name
        return name.replace(*self.stored_prefix)


def _expert_reader(
    geometry: Geometry, checkpoint: Checkpoint, model: Any, read: BytesRead, wanted: Wanted
) -> ReadExperts:
    activation = model.model.layers[geometry.moe_blocks[0]].mlp.act_fn
    return expert_reader(
        geometry, checkpoint, read, activation, dtype=wanted.dtype, device=wanted.device
    )


def _tie(model: Any, config: Any) -> None:
    if getattr(config, "tie_word_embeddings", False):
        model.lm_head.weight = model.model.embed_tokens.weight


def _moe_blocks(config: Any) -> tuple[int, ...]:
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    step = getattr(config, "decoder_sparse_step", None) or 1
    blocks = range(config.num_hidden_layers)
    return tuple(b for b in blocks if b not in dense and (b + 1) % step == 0)
