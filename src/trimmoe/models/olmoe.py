"""OLMoE: keys and queries normed over the whole projection, optionally clipped."""

from typing import Any

from torch import Tensor
from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import (
    OlmoeForCausalLM,
    OlmoeRotaryEmbedding,
    apply_rotary_pos_emb,
)

from trimmoe.models.decoder import DecoderFamily
from trimmoe.models.family import GATE_UP_DOWN


def _keys_values(attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
    keys = attention.k_norm(attention.k_proj(normed))
    values = attention.v_proj(normed)
    if (limit := attention.config.clip_qkv) is not None:
        keys, values = keys.clamp(-limit, limit), values.clamp(-limit, limit)
    shape = (*normed.shape[:-1], -1, attention.head_dim)
    return keys.view(shape), values.view(shape)


FAMILY = DecoderFamily(
    model_type="olmoe",
    config_class=OlmoeConfig,
    model_class=OlmoeForCausalLM,
    rotary_class=OlmoeRotaryEmbedding,
    apply_rotary=apply_rotary_pos_emb,
    expert_names=GATE_UP_DOWN,
    renormalises=lambda config: bool(config.norm_topk_prob),
    keys_values=_keys_values,
)
