"""Settings in GGUF files of families that compress keys or route by sigmoids, biases and groups."""

from __future__ import annotations

import re
from typing import Any

from trimmoe.core.errors import UserError
from trimmoe.models.formats.gguf_header import GgufHeader
from trimmoe.models.formats.gguf_settings import required, width

_SIGMOID = 2
"""llama.cpp's number of that gating function."""
_GROUPED_V2 = 160
"""Experts of the DeepSeek-V2 that chooses among groups, which old files do not say."""


def model_type_of(header: GgufHeader) -> str:
    """Of an architecture that several families share."""
    sigmoid = header.field("expert_gating_func") == _SIGMOID
    return "deepseek_v3" if sigmoid else "deepseek_v2"


def deepseek(header: GgufHeader) -> dict[str, Any]:
    turned = required(header, "rope.dimension_count")
    head = header.field("attention.key_length_mla", header.field("attention.key_length"))
    value = header.field("attention.value_length_mla", header.field("attention.value_length"))
    heads = required(header, "attention.head_count")
    told = _routed(header) | {
        "num_key_value_heads": heads,
        "q_lora_rank": header.field("attention.q_lora_rank"),
        "kv_lora_rank": required(header, "attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": head - turned,
        "v_head_dim": value,
        "head_dim": turned,
    }
    if model_type_of(header) == "deepseek_v2":
        grouped = (told["n_group"] or 1) > 1
        if told["n_routed_experts"] == _GROUPED_V2 and not grouped:
            raise UserError(
                f"{header.files[0]} does not say by which groups experts are chosen; put the "
                f"model's config.json beside it."
            )
        told["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    return told


def without_q_lora(told: dict[str, Any]) -> dict[str, Any]:
    """The same where queries are not compressed, which a configuration class has to be told."""
    return told | ({"q_lora_rank": None} if told.get("q_lora_rank") is None else {})


def glm(header: GgufHeader) -> dict[str, Any]:
    return _routed(header) | {
        "num_hidden_layers": _layers(header),
        "head_dim": required(header, "attention.key_length"),
        "use_qk_norm": any("attn_q_norm" in name for name in header.tensors),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }


def minimax(header: GgufHeader) -> dict[str, Any]:
    return {
        "num_local_experts": header.field("expert_count"),
        "intermediate_size": width(header, "ffn_down_exps"),
        "head_dim": required(header, "attention.key_length"),
    }


def gpt_oss(header: GgufHeader) -> dict[str, Any]:
    return {
        "num_local_experts": header.field("expert_count"),
        "intermediate_size": width(header, "ffn_down_exps"),
        "head_dim": required(header, "attention.key_length"),
        "sliding_window": required(header, "attention.sliding_window"),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }


def rope_of(header: GgufHeader, told: dict[str, Any]) -> dict[str, Any]:
    """What there is besides `told`, which any family has."""
    more: dict[str, Any] = {}
    head, turned = header.field("attention.key_length"), header.field("rope.dimension_count")
    if header.architecture in ("glm4moe", "minimax-m2") and head and turned:
        more["partial_rotary_factor"] = turned / head
    multiplier = header.field("rope.scaling.yarn_log_multiplier")
    if told["rope_type"] == "yarn" and multiplier:
        # llama.cpp keeps a tenth of it, and one for both.
        more |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    if told["rope_type"] == "yarn" and header.architecture == "gpt-oss":
        more["truncate"] = False
    return told | more


def extra_blocks(header: GgufHeader) -> int:
    """Blocks behind the last layer, which predict further tokens and are not read."""
    return int(header.field("nextn_predict_layers", 0) or 0)


def _layers(header: GgufHeader) -> int:
    return required(header, "block_count") - extra_blocks(header)


def _routed(header: GgufHeader) -> dict[str, Any]:
    dense = header.field("leading_dense_block_count", 0)
    experts = width(header, "ffn_down_exps")
    return {
        "n_routed_experts": header.field("expert_count"),
        "n_shared_experts": header.field("expert_shared_count", 1),
        "moe_intermediate_size": experts,
        "intermediate_size": width(header, "ffn_down", default=experts),
        "first_k_dense_replace": dense,
        "routed_scaling_factor": float(header.field("expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(header.field("expert_weights_norm", False)),
        "n_group": header.field("expert_group_count", 1),
        "topk_group": header.field("expert_group_used_count", 1),
    }


def is_extra(header: GgufHeader, name: str) -> bool:
    """Whether a stored tensor is of such a block."""
    match = re.match(r"blk\.(\d+)\.", name)
    return match is not None and int(match[1]) >= _layers(header)
