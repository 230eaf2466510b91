"""Qwen2-MoE: a gated shared expert beside the routed ones, dense blocks possible."""

from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import (
    Qwen2MoeForCausalLM,
    Qwen2MoeRotaryEmbedding,
    apply_rotary_pos_emb,
)

from trimmoe.models.decoder import DecoderFamily
from trimmoe.models.family import GATE_UP_DOWN

FAMILY = DecoderFamily(
    model_type="qwen2_moe",
    config_class=Qwen2MoeConfig,
    model_class=Qwen2MoeForCausalLM,
    rotary_class=Qwen2MoeRotaryEmbedding,
    apply_rotary=apply_rotary_pos_emb,
    expert_names=GATE_UP_DOWN,
    renormalises=lambda config: bool(config.norm_topk_prob),
)
