"""Sizes of published models, as their config.json give them, and nothing else of them."""

from __future__ import annotations

from typing import Any

MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN15_MOE_A27B: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SWITCH_BASE_8: dict[str, Any] = {
    "model_type": "switch_transformers",
    "vocab_size": 32128,
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 3072,
    "num_layers": 12,
    "num_sparse_encoder_layers": 6,
    "num_decoder_layers": 12,
    "num_sparse_decoder_layers": 6,
    "num_heads": 12,
    "num_experts": 8,
    "tie_word_embeddings": True,
}


def cut(config: dict[str, Any], *, layers: int, experts: int, shrink: int) -> dict[str, Any]:
    """A configuration with fewer layers and experts, its widths and vocabulary divided by `shrink`;
    what is left keeps its proportions: heads, groups of heads, activated experts."""
    widths = [name for name in config if name.endswith(("_size", "vocab_size"))]
    smaller = {name: config[name] // shrink for name in widths}
    counts = {"num_hidden_layers": layers}
    counts |= {name: experts for name in ("num_experts", "num_local_experts") if name in config}
    return config | smaller | counts
