"""Qwen2-MoE: a gated shared expert beside the routed ones, dense blocks possible."""

from trimmoe.models.decoder import DecoderFamily
from trimmoe.models.family import GATE_UP_DOWN

FAMILY = DecoderFamily(
    model_type="qwen2_moe",
    classes="Qwen2Moe",
    expert_names=GATE_UP_DOWN,
    renormalises=lambda config: bool(config.norm_topk_prob),
)
