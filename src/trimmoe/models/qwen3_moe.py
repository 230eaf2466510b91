"""Qwen3-MoE: keys and queries normed head by head, dense blocks possible."""

from typing import Any

from torch import Tensor

from trimmoe.models.decoder import DecoderFamily, plain_keys_values
from trimmoe.models.family import GATE_UP_DOWN


def _keys_values(attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = plain_keys_values(attention, normed)
    return attention.k_norm(keys), values


FAMILY = DecoderFamily(
    model_type="qwen3_moe",
    classes="Qwen3Moe",
    expert_names=GATE_UP_DOWN,
    renormalises=lambda config: bool(config.norm_topk_prob),
    keys_values=_keys_values,
)
