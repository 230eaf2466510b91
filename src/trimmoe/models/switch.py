"""Switch Transformers: encoder and decoder, top-1 routing, MoE layers among dense blocks.

Deviations from transformers: expert capacity is counted over the tokens of one call, as there, so
a prompt fed to the decoder in chunks is counted chunk by chunk; transformers' `jitter` is training
only and absent. The positions are relative and know no limit; `context_length` is the
configuration's `n_positions`, or 2048.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.switch_transformers.configuration_switch_transformers import (
    SwitchTransformersConfig,
)
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersForConditionalGeneration,
)

from trimmoe.core.specs import ModelSpec
from trimmoe.models.checkpoint import Checkpoint
from trimmoe.models.experts import ExpertStacks
from trimmoe.models.family import (
    ExpertNames,
    Geometry,
    Wanted,
    build_spec,
    expert_reader,
    load_dense,
    load_experts,
    refuse_quantised,
    require_dense,
)
from trimmoe.models.passed import BytesRead
from trimmoe.models.sane import built
from trimmoe.models.switch_stack import SwitchEncoder
from trimmoe.models.switch_view import SwitchView

_MODEL_TYPE = "switch_transformers"
_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchFamily:
    """See `Family`."""

    def config(self, raw: dict[str, Any]) -> SwitchTransformersConfig:
        return SwitchTransformersConfig.from_dict(raw)

    def geometry(self, config: Any) -> Geometry:
        return _geometry(config, "decoder")

    def open(
        self, config: Any, checkpoint: Checkpoint, spec: ModelSpec, wanted: Wanted
    ) -> SwitchView:
        refuse_quantised(spec.name, wanted.precision)
        dtype, device = wanted.dtype, wanted.device
        model = _load_model(config, checkpoint, dtype, device)
        read = BytesRead(dense=checkpoint.bytes_read)
        activation = ACT2FN[config.dense_act_fn]
        stacks: dict[str, ExpertStacks] = {}
        for side, choice in (("encoder", wanted.encoder_experts), ("decoder", wanted.experts)):
            geometry = _geometry(config, side)
            reader = expert_reader(
                geometry, checkpoint, read, activation, dtype=dtype, device=device
            )
            stacks[side] = load_experts(
                geometry, checkpoint, reader, choice, streamed=wanted.streamed
            )
        encoder_spec = build_spec(
            _geometry(config, "encoder"),
            checkpoint,
            name=spec.name,
            model_hash=spec.model_hash,
            dtype=dtype,
        )
        encoder = SwitchEncoder(model.encoder, stacks["encoder"], encoder_spec, dtype, device, read)
        return SwitchView(model, encoder, stacks["decoder"], spec, dtype, device, read)


def _geometry(config: Any, side: str) -> Geometry:
    """The encoder's or the decoder's stack."""
    count = config.num_decoder_layers if side == "decoder" else config.num_layers
    step = config.decoder_sparse_step if side == "decoder" else config.encoder_sparse_step
    feed_forward = 2 if side == "decoder" else 1
    experts = f"{side}.block.{{block}}.layer.{feed_forward}.mlp.experts.expert_{{expert}}."
    tied = bool(config.tie_word_embeddings)
    return Geometry(
        family=_MODEL_TYPE,
        moe_blocks=tuple(b for b in range(count) if step and (b % step == 1 or step == 1)),
        block_count=count,
        expert_count=config.num_experts,
        top_k=1,
        hidden_size=config.d_model,
        vocab_size=config.vocab_size,
        context_length=getattr(config, "n_positions", None) or 2048,
        gates_renormalised=False,
        expert_names=ExpertNames(up=(experts + "wi.weight",), down=experts + "wo.weight"),
        block_prefix=f"{side}.block.{{block}}.",
        head_names=("shared.weight" if tied else "lm_head.weight",),
        aside="encoder." if side == "decoder" else None,
        unread=(*_EMBEDDINGS, "lm_head.weight") if tied else (),
        once_per_sequence=(
            "EncDecAttention.k.",
            "EncDecAttention.v.",
            "relative_attention_bias",
        ),
    )


def _load_model(
    config: Any, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Any:
    """The model without routed experts, its dense weights loaded and tied."""
    config._attn_implementation = "eager"  # What transformers itself takes for this family.
    model: Any = built(
        lambda: SwitchTransformersForConditionalGeneration(config), checkpoint.folder
    )
    routers = []
    for block in (*model.encoder.block, *model.decoder.block):
        if block.is_sparse:
            block.layer[-1].mlp.experts = nn.Identity()
            routers.append(block.layer[-1].mlp.router)
    _tie(model, config, checkpoint)  # What is tied is not asked for.
    require_dense(model, checkpoint, str)
    load_dense(model, checkpoint, stored_name=str, dtype=dtype, device=device)
    _tie(model, config, checkpoint)
    for router in routers:
        router.classifier.to(router.dtype)
    return model


def _tie(model: Any, config: Any, checkpoint: Checkpoint) -> None:
    """Have one matrix where there is one: always the embeddings that are not stored apart."""
    both = zip((model.encoder, model.decoder), _EMBEDDINGS, strict=True)
    tied = bool(config.tie_word_embeddings)
    for stack, name in both:
        if tied or name not in checkpoint.entries:
            stack.embed_tokens.weight = model.shared.weight
    if tied:
        model.lm_head.weight = model.shared.weight


FAMILY = SwitchFamily()
