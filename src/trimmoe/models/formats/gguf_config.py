"""The config.json that a GGUF file's settings and shapes amount to."""

from __future__ import annotations

from typing import Any

from trimmoe.core.errors import UserError
from trimmoe.models.formats import gguf_families as families
from trimmoe.models.formats.gguf_header import GgufHeader
from trimmoe.models.formats.gguf_settings import required, rows, width

_MODEL_TYPES = {
    "llama": "mixtral",
    "olmoe": "olmoe",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "deepseek2": "deepseek_v3",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
}
"""transformers' name of each of llama.cpp's architectures; Mixtral is a llama with experts, and
DeepSeek-V2 has the architecture of V3."""


def config_of(header: GgufHeader) -> dict[str, Any]:
    """What transformers' configuration class of the model takes.

    Sizes of feed-forward parts are those of the tensors, since not all files name them. Raises
    UserError for an architecture that TrimMoE does not know.
    """
    architecture = header.architecture
    if architecture not in _MODEL_TYPES or not header.field("expert_count"):
        raise UserError(
            f"{header.files[0]} holds a GGUF model of the architecture {architecture!r}"
            f"{' without experts' if architecture in _MODEL_TYPES else ''}, which TrimMoE does not "
            f"know; use one of {', '.join(_MODEL_TYPES)} with experts."
        )
    model_type = _MODEL_TYPES[architecture]
    if architecture == "deepseek2":
        model_type = families.model_type_of(header)
    heads = required(header, "attention.head_count")
    config = {
        "model_type": model_type,
        "vocab_size": rows(header, "token_embd.weight"),
        "hidden_size": required(header, "embedding_length"),
        "num_hidden_layers": required(header, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.field("attention.head_count_kv", heads),
        "max_position_embeddings": required(header, "context_length"),
        "rms_norm_eps": required(header, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "num_experts_per_tok": required(header, "expert_used_count"),
        "bos_token_id": header.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.fields.get("tokenizer.ggml.padding_token_id"),
    }
    known = config | _OWN[model_type](header)
    told = {key: value for key, value in known.items() if value is not None}
    return families.without_q_lora(told) if architecture == "deepseek2" else told


def _mixtral(header: GgufHeader) -> dict[str, Any]:
    return {
        "num_local_experts": header.field("expert_count"),
        "intermediate_size": width(header, r"ffn_down(_exps|\.0)"),
        "head_dim": header.field("attention.key_length", header.field("rope.dimension_count")),
        "sliding_window": header.field("attention.sliding_window"),
    }


def _olmoe(header: GgufHeader) -> dict[str, Any]:
    return {
        "num_experts": header.field("expert_count"),
        "intermediate_size": width(header, "ffn_down_exps"),
        "norm_topk_prob": bool(header.field("expert_weights_norm", False)),
        "clip_qkv": header.field("attention.clamp_kqv") or None,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }


def _qwen2_moe(header: GgufHeader) -> dict[str, Any]:
    experts = width(header, "ffn_down_exps")
    return _qwen(header) | {
        "shared_expert_intermediate_size": width(header, "ffn_down_shexp", default=experts),
        "norm_topk_prob": bool(header.field("expert_weights_norm", False)),
        "qkv_bias": "blk.0.attn_q.bias" in header.tensors,
    }


def _qwen3_moe(header: GgufHeader) -> dict[str, Any]:
    return _qwen(header) | {
        "head_dim": header.field("attention.key_length"),
        # llama.cpp computes this architecture so, whatever the file says.
        "norm_topk_prob": True,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }


def _qwen(header: GgufHeader) -> dict[str, Any]:
    blocks = range(required(header, "block_count"))
    experts = width(header, "ffn_down_exps")
    dense = [b for b in blocks if f"blk.{b}.ffn_gate_inp.weight" not in header.tensors]
    return {
        "num_experts": header.field("expert_count"),
        "moe_intermediate_size": experts,
        "intermediate_size": width(header, "ffn_down", default=experts),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


_OWN = {
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": families.deepseek,
    "deepseek_v3": families.deepseek,
    "glm4_moe": families.glm,
    "gpt_oss": families.gpt_oss,
    "minimax_m2": families.minimax,
}


def _rope(header: GgufHeader) -> dict[str, Any]:
    kind = header.field("rope.scaling.type", "none")
    told: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": header.field("rope.freq_base", 10000.0),
    }
    if kind not in ("none", "linear", "yarn"):
        raise UserError(
            f"{header.files[0]} scales positions by {kind!r}, which TrimMoE cannot tell from a "
            f"GGUF file; put the model's config.json beside it."
        )
    if kind != "none":
        told["factor"] = header.field("rope.scaling.factor", 1.0)
    if kind == "yarn":
        told["original_max_position_embeddings"] = header.field(
            "rope.scaling.original_context_length", header.field("context_length")
        )
    return families.rope_of(header, told)
