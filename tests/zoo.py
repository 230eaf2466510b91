"""A tiny model of random weights for every family of transformers that routes to experts.

`TABLE` has what each configuration class needs besides the sizes that all of them share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "d_model": 32,
    "num_hidden_layers": 3,
    "n_layers": 3,
    "num_attention_heads": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "ffn_hidden_size": 24,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "max_seq_len": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

_MLA: dict[str, Any] = {"num_key_value_heads": 4}
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_KDA: dict[str, Any] = _MLA | {
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "model_max_length": 128,
}

TABLE: dict[str, dict[str, Any]] = {
    "axk1": _MLA,
    "axk2": _MLA,
    "bailing_hybrid": _KDA | {"num_expert_group": 2, "topk_group": 1},
    "deepseek_v2": _MLA | {"n_shared_experts": 2},
    "deepseek_v3": _MLA | {"n_group": 2, "topk_group": 1},
    "deepseek_v32": _MLA,
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": _MLA,
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "per_layer_config": {"02": {"head_dim": 16, "num_key_value_heads": 1}},
    },
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA,
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "residual_multiplier": 0.22,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "granitemoeshared": {"residual_multiplier": 0.22, "logits_scaling": 2.0},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 4,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "kimi_linear": _KDA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": _MLA,
    "mistral4": _MLA | {"qk_head_dim": 16, "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 16,
    },
    "qwen3_5_moe_text": _DELTA,
    "qwen3_next": _DELTA,
    "qwen4_exp_text": _DELTA | {"hc_lowrank": 8, "layer_types": ["linear_attention"] * 3},
    "zaya": {"num_experts_per_tok": 1},
}


def config_of(model_type: str, **more: Any) -> Any:
    """A tiny configuration of a family."""
    kind: Any = CONFIG_MAPPING[model_type]
    known = kind()
    # What differs between layers cannot be asked of the whole.
    fields = known.to_dict()
    values = {name: value for name, value in _SIZES.items() if name in fields}
    if fields.get("sliding_window"):
        values["sliding_window"] = 4
    return kind(**values | TABLE.get(model_type, {}) | more)


def write(model_type: str, folder: Path, **more: Any) -> Path:
    """Write a checkpoint with fixed weights into `folder` and return it."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    from trimmoe.models.general.catalogue import class_of

    model = class_of(model_type)(config_of(model_type, **more)).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # Norms of one and biases of zero would hide what is done with them.
            constant = tensor.is_floating_point() and tensor.numel() > 1 and tensor.std() == 0
            if constant and name in model.state_dict():
                tensor.add_(0.2 * torch.randn(tensor.shape))
    model.save_pretrained(folder)
    return folder
