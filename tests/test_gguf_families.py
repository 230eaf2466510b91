"""GGUF files of families that compress keys or route by sigmoids, biases and groups, as llama.cpp
writes them: the same model as the checkpoint they were made of."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import ExpertGatingFuncType as Gating
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import zoo
from kquants import K_QUANTS, random_blocks
from trimmoe.core.errors import UserError
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.exact import exact_logits
from trimmoe.models.load import open_model

ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_SIZES = {"hidden_size": 32, "moe_intermediate_size": 32, "intermediate_size": 32}
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": _SIZES
    | {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}, "q_lora_rank": None},
    "deepseek_v3": _SIZES | {"q_lora_rank": 32, "kv_lora_rank": 32, "routed_scaling_factor": 1.5},
    "glm4_moe": _SIZES
    | {"use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2},
    "gpt_oss": {"intermediate_size": 32, "rope_parameters": _YARN | {"truncate": False}},
    "minimax_m2": _SIZES
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
        }
    },
}
QUICK = ("deepseek_v3", "gpt_oss")
"""Compressed keys cut in two, groups and biases; experts fused and transposed, with biases."""
ROWS = [[5, 9, 33, 2, 61], [8, 3]]

NAMES = [
    (r"model\.embed_tokens", "token_embd"),
    (r"model\.norm", "output_norm"),
    (r"lm_head", "output"),
    (r"model\.layers", "blk"),
    (r"input_layernorm", "attn_norm"),
    (r"self_attn\.q_a_proj", "attn_q_a"),
    (r"self_attn\.q_b_proj", "attn_q_b"),
    (r"self_attn\.q_a_layernorm", "attn_q_a_norm"),
    (r"self_attn\.kv_a_layernorm", "attn_kv_a_norm"),
    (r"self_attn\.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    (r"self_attn\.kv_b_proj", "attn_kv_b"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"self_attn\.sinks", "attn_sinks.weight"),
    (r"(mlp|block_sparse_moe)\.(gate\.)?e_score_correction_bias", "exp_probs_b.bias"),
    (r"(mlp|block_sparse_moe)\.(gate|router)\.", "ffn_gate_inp."),
    (r"mlp\.shared_experts\.(gate|up|down)_proj", r"ffn_\1_shexp"),
    (r"mlp\.experts\.(\d+)\.(gate|up|down)_proj", r"ffn_\2_exps"),
    (r"block_sparse_moe\.experts\.(\d+)\.w1", "ffn_gate_exps"),
    (r"block_sparse_moe\.experts\.(\d+)\.w3", "ffn_up_exps"),
    (r"block_sparse_moe\.experts\.(\d+)\.w2", "ffn_down_exps"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
]
Array = NDArray[np.float32]


def _their_name(name: str, model: str) -> str:
    norm = "post_attention_norm" if model in ("glm4_moe", "gpt_oss") else "ffn_norm"
    for pattern, replacement in [*NAMES, ("post_attention_layernorm", norm)]:
        name = re.sub(pattern, replacement, name)
    return name


def _their_tensors(tensors: dict[str, Array], model: str, config: Any) -> dict[str, Array]:
    """All of a checkpoint's tensors as llama.cpp keeps them; newer files cut `kv_b` in two."""
    found: dict[str, Any] = {}
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        value, their = tensors[name], _their_name(name, model)
        block = ".".join(their.split(".")[:2])
        if model == "deepseek_v3" and "attn_kv_b" in their:
            whole = value.reshape(config["num_attention_heads"], -1, value.shape[-1])
            plain = config["qk_nope_head_dim"]
            found[f"{block}.attn_k_b.weight"] = whole[:, :plain].transpose(0, 2, 1)
            found[f"{block}.attn_v_b.weight"] = whole[:, plain:]
        elif model == "gpt_oss" and ".experts." in name:
            end = "bias" if name.endswith("_bias") else "weight"
            value = value if end == "bias" else value.transpose(0, 2, 1)
            if "gate_up" in name:
                found[f"{block}.ffn_gate_exps.{end}"] = value[:, 0::2]
                found[f"{block}.ffn_up_exps.{end}"] = value[:, 1::2]
            else:
                found[f"{block}.ffn_down_exps.{end}"] = value
        elif "_exps" in their:
            found.setdefault(their, []).append(value)
        else:
            found[their] = value
    return {n: np.stack(v) if isinstance(v, list) else v for n, v in found.items()}


def _settings(writer: gguf.GGUFWriter, model: str, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    # Blocks that predict further tokens are counted, and not read.
    writer.add_block_count(config["num_hidden_layers"] + (model == "glm4_moe"))
    writer.add_head_count(config["num_attention_heads"])
    is_latent = "kv_lora_rank" in config
    writer.add_head_count_kv(1 if is_latent else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    experts = next(config[n] for n in ("n_routed_experts", "num_local_experts") if n in config)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if is_latent:
        _latent(writer, config)
    else:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        writer.add_key_length(head)
        turned = rope.get("partial_rotary_factor", 1.0) * head
        writer.add_rope_dimension_count(int(turned))
    if model == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
    if "n_routed_experts" in config:
        _routed(writer, model, config)
    if model == "glm4_moe":
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.3.nextn.eh_proj.weight", np.zeros((32, 64), np.float32))


def _latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    latent, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + turned)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)


def _routed(writer: gguf.GGUFWriter, model: str, config: dict[str, Any]) -> None:
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(bool(config.get("norm_topk_prob")))
    writer.add_expert_gating_func(Gating.SOFTMAX if model == "deepseek_v2" else Gating.SIGMOID)
    if model != "deepseek_v2":
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def convert(folder: Path, model: str, file: Path, kind: Kind, *, decoded: bool = False) -> None:
    """Write a checkpoint as llama.cpp does, matrices in `kind`; or, `decoded`, what they stand for
    then in full precision."""
    tensors = {n: t.numpy() for n, t in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, ARCHITECTURES[model])
    _settings(writer, model, config)
    for at, (name, value) in enumerate(_their_tensors(tensors, model, config).items()):
        plain = np.ascontiguousarray(value)
        its = _kind_of(name, plain, kind)
        if its is Kind.F32:
            writer.add_tensor(name, plain)
            continue
        is_random = its in K_QUANTS
        stored = (
            random_blocks(its, plain.shape, seed=at) if is_random else gguf.quantize(plain, its)
        )
        if decoded:
            writer.add_tensor(name, gguf.dequantize(stored, its).reshape(plain.shape))
        else:
            writer.add_tensor(name, stored, raw_dtype=its)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind_of(name: str, value: Array, kind: Kind) -> Kind:
    """What a tensor is stored as: routers and vectors stay whole, and of K-quants llama.cpp takes
    others where rows are not made of their blocks."""
    if value.ndim == 1 or name.endswith(".bias"):
        return Kind.F32
    if kind not in K_QUANTS:
        return kind
    if "ffn_gate_inp" in name:
        return Kind.F32
    fits = [
        one for one in (kind, Kind.Q8_0) if value.shape[-1] % gguf.GGML_QUANT_SIZES[one][0] == 0
    ]
    return fits[0] if fits else Kind.F32


def _equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our, their)


@pytest.mark.parametrize(
    "model",
    [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in ARCHITECTURES],
)
def test_a_file_alone_is_the_checkpoint_it_was_made_of(tmp_path: Path, model: str) -> None:
    plain = zoo.write(model, tmp_path / "plain", **MORE[model])
    convert(plain, model, tmp_path / "model.gguf", Kind.F32)
    ours, theirs = open_model(tmp_path / "model.gguf"), open_model(plain)
    assert isinstance(ours, CompiledView)
    _equal(exact_logits(ours, ROWS), exact_logits(theirs, ROWS))
    assert ours.spec.family == theirs.spec.family == model
    assert ours.spec.dense_bytes == theirs.spec.dense_bytes
    assert (ours.spec.expert_bytes == theirs.spec.expert_bytes).all()
    some = open_model(tmp_path / "model.gguf", experts={0: [1, 3]}, streamed=True)
    hidden, gates = torch.randn(2, 32), torch.rand(2, 2)
    some.experts(0, hidden, torch.tensor([[3, 1], [1, -1]]), gates)
    assert some.bytes_read.experts == 2 * some.spec.expert_bytes[0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v2", "glm4_moe", "minimax_m2"])
def test_it_computes_with_what_the_blocks_stand_for(tmp_path: Path, model: str) -> None:
    more = {"head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 32} if model == "deepseek_v2" else {}
    plain = zoo.write(model, tmp_path / "plain", **MORE[model] | more)
    convert(plain, model, tmp_path / "model.gguf", Kind.Q8_0)
    decoded = tmp_path / "decoded"
    decoded.mkdir()
    shutil.copy(plain / "config.json", decoded)
    tensors = load_file(plain / "model.safetensors")
    save_file(
        {name: value if value.dim() == 1 else _rounded(value) for name, value in tensors.items()},
        decoded / "model.safetensors",
    )
    ours = open_model(tmp_path / "model.gguf", dtype=torch.float32)
    _equal(exact_logits(ours, ROWS), exact_logits(open_model(decoded), ROWS))


def _rounded(value: torch.Tensor) -> torch.Tensor:
    stored = gguf.quantize(value.numpy(), Kind.Q8_0)
    return torch.from_numpy(gguf.dequantize(stored, Kind.Q8_0).reshape(value.shape))


_WIDE = ("hidden_size", "moe_intermediate_size", "intermediate_size")


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("gpt_oss", Kind.Q4_K),
        *(
            pytest.param(model, kind, marks=pytest.mark.slow)
            for model in ("deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2")
            for kind in (Kind.Q4_K, Kind.Q6_K)
        ),
    ],
)
def test_k_quants_are_what_their_blocks_stand_for(tmp_path: Path, model: str, kind: Kind) -> None:
    """Stacked experts, fused and transposed ones, and compressed keys that are cut in two."""
    sizes = {name: 256 for name in _WIDE if model != "gpt_oss" or name != "moe_intermediate_size"}
    plain = zoo.write(model, tmp_path / "plain", **MORE[model] | sizes)
    convert(plain, model, tmp_path / "few.gguf", kind)
    convert(plain, model, tmp_path / "decoded.gguf", kind, decoded=True)
    few = open_model(tmp_path / "few.gguf", dtype=torch.float32)
    held = {one.tensor_type for one in gguf.GGUFReader(tmp_path / "few.gguf").tensors}
    assert isinstance(few, CompiledView)
    assert kind in held
    made = exact_logits(few, ROWS)
    _equal(made, exact_logits(open_model(tmp_path / "decoded.gguf"), ROWS))
    assert not torch.equal(made[0][:, 0], made[0][:, 1])


def test_what_a_file_does_not_say_is_asked_for(tmp_path: Path) -> None:
    """Old files of the large DeepSeek-V2 do not name its groups."""
    more = MORE["deepseek_v2"] | {"n_routed_experts": 160, "num_hidden_layers": 2}
    plain = zoo.write("deepseek_v2", tmp_path / "plain", **more)
    convert(plain, "deepseek_v2", tmp_path / "model.gguf", Kind.F32)
    with pytest.raises(UserError, match=r"by which groups experts are chosen; put .* beside it\."):
        open_model(tmp_path / "model.gguf")
