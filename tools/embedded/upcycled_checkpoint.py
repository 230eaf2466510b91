"""The upcycled deltas merged with the dense source: a checkpoint in Mixtral's form."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trimmoe.models.embedded.deltas import ATTENTION, FFN, Geometry, read_geometry, update_of
from trimmoe.models.embedded.materialise import model_config

from .stages import Bench

UPCYCLED_FORMAT = "trimmoe-upcycled-deltas/1"
_MIXTRAL_NAMES = dict(zip(FFN, ("w1", "w3", "w2"), strict=True))
_QWEN_ONLY = (
    "qkv_bias", "use_sliding_window", "decoder_sparse_step", "mlp_only_layers", "num_experts",
    "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob",
)  # fmt: skip


def mixtral_config(geometry: Geometry) -> dict[str, object]:
    """config.json of a Mixtral checkpoint."""
    common = {k: v for k, v in model_config(geometry).items() if k not in _QWEN_ONLY}
    return common | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": geometry.expert_neurons,
        "num_local_experts": geometry.experts,
        "sliding_window": None,
    }


def merge_upcycled(
    dense: dict[str, torch.Tensor], deltas: dict[str, torch.Tensor], geometry: Geometry
) -> dict[str, torch.Tensor]:
    """bfloat16 tensors under Mixtral's names (the output head is tied to the embedding)."""
    out = {"model.embed_tokens.weight": dense["embed"], "model.norm.weight": dense["norm"]}
    for layer in range(geometry.layers):
        short, full = f"layers.{layer}", f"model.layers.{layer}"
        for name in ATTENTION:
            out[f"{full}.self_attn.{name}_proj.weight"] = dense[f"{short}.{name}"]
        out[f"{full}.input_layernorm.weight"] = dense[f"{short}.input_norm"]
        out[f"{full}.post_attention_layernorm.weight"] = dense[f"{short}.post_norm"]
        out[f"{full}.block_sparse_moe.gate.weight"] = deltas[f"{short}.router"]
        for expert in range(geometry.experts):
            for name, stored in _MIXTRAL_NAMES.items():
                update = update_of(deltas, f"{short}.experts.{expert}.{name}")
                base = dense[f"{short}.{name}"]
                whole = base if update is None else base + update
                # Rounded here: eight copies in float32 would not fit a small machine.
                key = f"{full}.block_sparse_moe.experts.{expert}.{stored}.weight"
                out[key] = whole.to(torch.bfloat16, copy=True)
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in out.items()}


def write_checkpoint(folder: Path, deltas_path: Path, bench: Bench) -> None:
    """Weights, configuration and tokenizer, as any loader of the format expects them."""
    with safe_open(deltas_path, framework="pt") as handle:
        geometry = read_geometry(handle.metadata())
    folder.mkdir(parents=True, exist_ok=True)
    tensors = merge_upcycled(bench.dense, load_file(deltas_path), geometry)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(mixtral_config(geometry), indent=2) + "\n")
    bench.tokenizer.save_pretrained(folder)  # pyright: ignore[reportAttributeAccessIssue]
