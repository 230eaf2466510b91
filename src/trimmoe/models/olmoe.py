"""OLMoE: keys and queries normed over the whole projection, optionally clipped."""

from typing import Any

from torch import Tensor

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
    classes="Olmoe",
    expert_names=GATE_UP_DOWN,
    renormalises=lambda config: bool(config.norm_topk_prob),
    keys_values=_keys_values,
)
