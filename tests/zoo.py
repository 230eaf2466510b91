"""A tiny model of random weights for every family of transformers that routes to experts.

`TABLE` has what each configuration class needs besides the sizes that all of them share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from serving import Tiny
from trimmoe.models.base import MoEView
from trimmoe.models.general.catalogue import FAST, SERVED, TEXT_PARTS, class_of
from trimmoe.models.load import open_model
from trimmoe.runtime.service import ServedModel

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
    "index_topk": 4,
    "index_n_heads": 16,
    "index_head_dim": 16,
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

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "partial_rotary_factor": 1.0,
}

TABLE: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"], "n_group": 2, "topk_group": 1},
    "axk1": _MLA,
    "axk2": _MLA,
    "bailing_hybrid": _KDA | {"num_expert_group": 2, "topk_group": 1},
    "deepseek_v2": _MLA | {"n_shared_experts": 2},
    "deepseek_v3": _MLA | {"n_group": 2, "topk_group": 1},
    "deepseek_v32": _MLA,
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": _MLA
    | {
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "shared_experts_intermediate_size": 16,
        "per_layer_config": {"01": {"head_dim": 16, "v_head_dim": 16}},
    },
    "gemma4_text": {
        "pad_token_id": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "per_layer_config": {"02": {"head_dim": 16, "num_key_value_heads": 1}},
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
        },
    },
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
        }
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
    "llama4_text": {
        "intermediate_size_mlp": 24,
        "moe_layers": [1, 2],
        "attention_chunk_size": 4,
        "no_rope_layers": [1, 1, 0],
    },
    "mistral_large4_text": _MLA,
    "mistral4": _MLA | {"qk_head_dim": 16, "head_dim": 8, "rope_parameters": _YARN},
    "nemotron_h": {
        "moe_latent_size": 16,
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
    "step3p5": {
        "pad_token_id": 0,
        "sliding_window": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "shared_expert_intermediate_size": 16,
        "share_expert_dim": 16,
    },
    "sarvam_mla": _MLA,
    "zaya": {"num_experts_per_tok": 1},
}


_SIGHT: dict[str, Any] = {
    "hidden_size": 16,
    "embed_dim": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "out_hidden_size": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "d_model": 16,
    "output_dim": 32,
    "downsample_hidden_size": 16,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
"""Sizes of what sees and hears, which no test looks at."""


def config_of(model_type: str, **more: Any) -> Any:
    """A tiny configuration of a family; of one that sees or hears, with a tiny part for text."""
    kind: Any = CONFIG_MAPPING[model_type]
    known = kind()
    if "text_config" in kind.sub_configs:
        return _composed(kind, known, model_type, more)
    # What differs between layers cannot be asked of the whole.
    fields = known.to_dict()
    values = {name: value for name, value in _SIZES.items() if name in fields}
    if fields.get("sliding_window"):
        values["sliding_window"] = 4
    return kind(**values | TABLE.get(model_type, {}) | more)


def _composed(kind: Any, known: Any, model_type: str, more: dict[str, Any]) -> Any:
    parts: dict[str, Any] = {}
    for name in kind.sub_configs:
        part = getattr(known, name)
        if name == "text_config":
            parts[name] = config_of(part.model_type, **more).to_dict()
        elif part is not None:
            fields = part.to_dict()
            small = {field: value for field, value in _SIGHT.items() if field in fields}
            parts[name] = small | OTHERS.get(model_type, {}).get(name, {})
    # No token of the vocabulary, or text would be taken for an image.
    ids = {name: 99 for name in known.to_dict() if name.endswith("token_id")}
    extra = {k: v for k, v in OTHERS.get(model_type, {}).items() if k not in kind.sub_configs}
    return kind(**parts, **{"pad_token_id": 0} | ids | extra)


OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {
        "vision_config": {
            "sam_config": {
                "hidden_size": 16,
                "output_channels": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "global_attn_indexes": [0],
                "downsample_channels": [16, 16],
                "image_size": 64,
            },
            "encoder_config": {
                "vocab_size": 64,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
        }
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 2, "vision_end_token_id": 3},
}
"""What else the parts that see and hear need."""


SEEDS = {
    "deepseek_ocr2": 1,
    "ernie4_5_moe": 2,
    "flint": 4,
    "llama4_text": 2,
    "mellum": 1,
    "mistral4": 2,
    "qwen3_moe": 1,
    "qwen3_omni_moe_thinker": 2,
    "qwen3_vl_moe": 2,
}
"""Of those whose weights of seed 0 say few tokens again and again, whatever they read."""


def write(model_type: str, folder: Path, **more: Any) -> Path:
    """Write a checkpoint with fixed weights into `folder` and return it."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.manual_seed(SEEDS.get(model_type, 0))
    model = class_of(model_type)(config_of(model_type, **more)).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # Norms of one and biases of zero would hide what is done with them.
            constant = tensor.is_floating_point() and tensor.numel() > 1 and tensor.std() == 0
            if constant and name in model.state_dict():
                tensor.add_(0.2 * torch.randn(tensor.shape))
        table = model.get_input_embeddings().weight
        if table is getattr(model.get_output_embeddings(), "weight", None):
            # Or a token would say itself again, whatever was read before it.
            table.mul_(0.1)
    model.save_pretrained(folder)
    return folder


REPRESENTATIVE = (
    "afmoe",
    "deepseek_v32",
    "deepseek_v3",
    "gemma4",
    "gpt_oss",
    "granitemoehybrid",
    "jamba",
    "llama4_text",
    "nemotron_h",
    "qwen3_5_moe",
)
"""Norms behind experts and windows; an indexer; groups and compressed keys; text beside images;
biases and sinks; factors and a shared expert beside the block; states that take one token at a
time; weighted inputs and chunks; layers of one thing each; a delta rule."""


def families(
    quick: Collection[str], *slow: str, of: Callable[[str], bool] = lambda _: True
) -> list[Any]:
    """Parameters of a test over families: these, those marked as slow, and every other one that is
    served, as slow too, where `TRIMMOE_ALL_FAMILIES` asks for it."""
    rest = dict.fromkeys(one for one in slow if one not in quick)
    if os.environ.get("TRIMMOE_ALL_FAMILIES"):
        every = (*SERVED, *TEXT_PARTS, *FAST)
        rest |= dict.fromkeys(one for one in every if one not in quick and of(one))
    return [*quick, *(pytest.param(one, marks=pytest.mark.slow) for one in rest)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Specimen:
    """The tiny model of a family, as it is stored, and as transformers and as we run it."""

    folder: Path
    reference: Any
    view: MoEView

    def generated(self, prompt: list[int], new: int) -> list[int]:
        """What transformers itself generates."""
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        made = self.reference.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0
        )
        return made[0, len(prompt) :].tolist()

    def modules(self) -> MoEView:
        """The same by transformers' own modules, where the view is compiled."""
        return open_model(self.folder, compiled=False)

    def tiny(self) -> Tiny:
        """What tests of nodes take."""
        return _Untold(folder=self.folder, view=self.view, tokenizer=None)


class _Untold(Tiny):
    """Without a tokenizer: tokens go in and come out."""

    def model(self, *, stop_ids: frozenset[int] = frozenset()) -> ServedModel:
        spec = self.view.spec
        return ServedModel(
            id=spec.family,
            tokenizer=None,
            context_length=spec.context_length,
            vocab_size=spec.vocab_size,
            created=1,
            stop_ids=stop_ids,
        )


def specimen(model_type: str, folder: Path, **more: Any) -> Specimen:
    """Written into `folder` and opened."""
    write(model_type, folder, **more)
    reference = class_of(model_type).from_pretrained(folder, dtype=torch.float32).eval()
    if model_type == "llama4":
        # The whole of it looks for images where there is only text, and fails.
        reference = reference.language_model
    return Specimen(folder=folder, reference=reference, view=open_model(folder))


def prompts(*lengths: int) -> list[list[int]]:
    """Random tokens, as many as `lengths` say."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, 64, (n,), generator=generator).tolist() for n in lengths]
