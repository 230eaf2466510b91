"""GGUF files as llama.cpp writes them: the same model as the checkpoint they were made of."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from kquants import K_QUANTS, random_blocks
from tiny import byte_tokenizer
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.exact import exact_logits
from trimmoe.models.family import GATE_UP_DOWN
from trimmoe.models.formats.choose import open_checkpoint
from trimmoe.models.load import (
    load_tokenizer,
    memory_needs,
    model_hash,
    model_spec,
    open_model,
)

ROWS = [[5, 9, 33, 2, 71], [8, 3]]
HEADS, KEY_HEADS, EXPERTS = 4, 2, 4

ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
}
ENCODED = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.MXFP4, Kind.F16, Kind.BF16]


# A model whose widths are multiples of 256, which K-quants need.


def _common(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 96,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "rms_norm_eps": 1e-5,
    } | more


def _model(name: str) -> Any:
    if name == "mixtral":
        config = transformers.MixtralConfig(
            **_common(intermediate_size=256, num_local_experts=EXPERTS)
        )
        return transformers.MixtralForCausalLM(config)
    if name == "olmoe":
        more = {"intermediate_size": 256, "num_experts": EXPERTS, "clip_qkv": 1.0}
        return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**_common(**more)))
    qwen = {"moe_intermediate_size": 256, "intermediate_size": 512, "num_experts": EXPERTS}
    if name == "qwen2_moe":
        more = {"shared_expert_intermediate_size": 512, "tie_word_embeddings": True}
        config = transformers.Qwen2MoeConfig(**_common(**qwen, **more, mlp_only_layers=[1]))
        return transformers.Qwen2MoeForCausalLM(config)
    more = {"head_dim": 64, "norm_topk_prob": True}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_common(**qwen, **more)))


Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Checkpoints in float32, with biases and norms that are not all alike."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            logging.disable_progress_bar()
            torch.manual_seed(0)
            made[name] = tmp_path_factory.mktemp(name)
            model = _model(name).eval()
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.data += 0.1 * torch.randn_like(parameter)
            model.save_pretrained(made[name])
        return made[name]

    return find


# llama.cpp's side: names, settings, order of rotary rows, experts together.

NAMES = [
    (r"model\.embed_tokens\.", "token_embd."),
    (r"model\.norm\.", "output_norm."),
    (r"lm_head\.", "output."),
    (r"model\.layers\.", "blk."),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"(mlp|block_sparse_moe)\.gate\.", "ffn_gate_inp."),
    (r"mlp\.shared_expert_gate", "ffn_gate_inp_shexp"),
    (r"mlp\.shared_expert\.(gate|up|down)_proj", r"ffn_\1_shexp"),
    (r"mlp\.experts\.(\d+)\.(gate|up|down)_proj", r"ffn_\2_exps"),
    (r"block_sparse_moe\.experts\.(\d+)\.w1", "ffn_gate_exps"),
    (r"block_sparse_moe\.experts\.(\d+)\.w3", "ffn_up_exps"),
    (r"block_sparse_moe\.experts\.(\d+)\.w2", "ffn_down_exps"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
]


def _their_name(name: str) -> str:
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _their_order(name: str, model: str, rows: int) -> NDArray[np.int64]:
    """The rows of a tensor in the order in which llama.cpp stores them."""
    order = np.arange(rows)
    match = re.search(r"\.([qk])_proj\.", name)
    if model != "mixtral" or match is None:
        return order
    heads = HEADS if match[1] == "q" else KEY_HEADS
    return order.reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)


def _settings(writer: gguf.GGUFWriter, model: str, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if model == "mixtral":
        writer.add_rope_dimension_count(64)
    if model == "qwen3_moe":
        writer.add_key_length(64)
    if model == "olmoe":
        writer.add_clamp_kqv(config["clip_qkv"])


def _store(values: NDArray[np.float32], kind: Kind) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """What the file holds of a tensor, and what that stands for; vectors are stored plain."""
    if values.ndim == 1 or kind is Kind.F32:
        return values, values
    is_random = kind in K_QUANTS
    stored = random_blocks(kind, values.shape) if is_random else gguf.quantize(values, kind)
    return stored, gguf.dequantize(stored, kind).reshape(values.shape)


def convert(
    folder: Path,
    model: str,
    file: Path,
    kind: Kind,
    *,
    add: Callable[[gguf.GGUFWriter], None] | None = None,
    apart: bool = False,
    split: int = 0,
) -> dict[str, Tensor]:
    """Write a checkpoint as llama.cpp does, and return what it stands for by our names."""
    tensors = {n: t.numpy() for n, t in load_file(folder / "model.safetensors").items()}
    groups: dict[str, list[str]] = {}
    for name in tensors:
        expert = re.search(r"experts\.(\d+)\.", name)
        their = _their_name(name)
        if apart and expert:
            their = their.replace("_exps", f".{expert[1]}")
        groups.setdefault(their, []).append(name)
    writer = gguf.GGUFWriter(
        file, ARCHITECTURES[model], split_max_tensors=split, small_first_shard=False
    )
    _settings(writer, model, json.loads((folder / "config.json").read_text()))
    if add is not None:
        add(writer)
    stands_for: dict[str, Tensor] = {}
    for their, names in groups.items():
        names.sort(key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
        order = _their_order(names[0], model, len(tensors[names[0]]))
        theirs = [tensors[name][order] for name in names]
        is_vector = names[0].endswith("shared_expert_gate.weight")
        whole = np.stack(theirs) if their.endswith("_exps.weight") else theirs[0]
        stored, values = _store(whole[0] if is_vector else whole, kind)
        plain_kind = stored.dtype == np.float32
        writer.add_tensor(their, stored, raw_dtype=None if plain_kind else kind)
        for index, name in enumerate(names):
            ours = np.empty_like(tensors[name])
            ours[order] = values[index] if their.endswith("_exps.weight") else values
            stands_for[name] = torch.from_numpy(ours)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stands_for


def _equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our, their)


def _decoded(folder: Path, tensors: dict[str, Tensor], where: Path) -> Path:
    """The checkpoint of the same model with these weights."""
    where.mkdir()
    shutil.copy(folder / "config.json", where)
    save_file(tensors, where / "model.safetensors")
    return where


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_a_file_alone_is_the_checkpoint_it_was_made_of(
    plain: Models, tmp_path: Path, model: str
) -> None:
    convert(plain(model), model, tmp_path / "model.gguf", Kind.F32)
    ours, theirs = open_model(tmp_path), open_model(plain(model))
    assert isinstance(ours, CompiledView)
    _equal(exact_logits(ours, ROWS), exact_logits(theirs, ROWS))
    assert ours.bytes_read == theirs.bytes_read
    for name in ("family", "top_k", "context_length", "gates_renormalised", "dense_bytes"):
        assert getattr(ours.spec, name) == getattr(theirs.spec, name)
    for name in ("expert_bytes", "layer_dense_flops"):
        assert (getattr(ours.spec, name) == getattr(theirs.spec, name)).all()


@pytest.mark.parametrize("kind", [*ENCODED, *K_QUANTS], ids=lambda kind: kind.name)
def test_it_computes_with_what_the_blocks_stand_for(
    plain: Models, tmp_path: Path, kind: Kind
) -> None:
    model = "mixtral" if kind in (Kind.Q4_0, Kind.Q4_K) else "qwen2_moe"
    file = tmp_path / "model.gguf"
    values = convert(plain(model), model, file, kind)
    decoded = _decoded(plain(model), values, tmp_path / "decoded")
    ours = open_model(file, dtype=torch.float32)
    _equal(exact_logits(ours, ROWS), exact_logits(open_model(decoded), ROWS))
    half, expected = open_model(file), open_model(decoded, dtype=torch.bfloat16)
    _equal(exact_logits(half, ROWS), exact_logits(expected, ROWS))
    assert half.spec.dense_bytes == expected.spec.dense_bytes
    assert (half.spec.expert_bytes == expected.spec.expert_bytes).all()
    assert memory_needs(file) == memory_needs(decoded, dtype=torch.bfloat16)


def test_only_the_chosen_experts_bytes_are_read(plain: Models, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    values = convert(plain("mixtral"), "mixtral", file, Kind.Q4_K)
    view = open_model(file, experts={0: [1, 3], 1: [0]})
    assert view.bytes_read.experts == 3 * 3 * 256 * 256 // 256 * 144
    assert view.loaded == (frozenset({1, 3}), frozenset({0}))
    # What others' experts hold makes no difference, whatever it is.
    reader = gguf.GGUFReader(file, "r+")
    for tensor in reader.tensors:
        if "_exps" in tensor.name:
            mine = [1, 3] if tensor.name.startswith("blk.0.") else [0]
            tensor.data[[e for e in range(EXPERTS) if e not in mine]] = 255
    decoded = _decoded(plain("mixtral"), values, tmp_path / "decoded")
    spoiled = open_model(file, experts={0: [1, 3], 1: [0]})
    whole = open_model(decoded, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 256, generator=generator).bfloat16()
    chosen = torch.tensor([[3, 1], [1, -1], [3, -1]])
    gates = torch.rand(3, 2, generator=generator)
    assert torch.equal(
        spoiled.experts(0, hidden, chosen, gates), whole.experts(0, hidden, chosen, gates)
    )


def test_a_row_of_a_tensor_is_read_alone(plain: Models, tmp_path: Path) -> None:
    values = convert(plain("olmoe"), "olmoe", tmp_path / "model.gguf", Kind.Q8_0)
    with open_checkpoint(tmp_path, {}, GATE_UP_DOWN) as checkpoint:
        row = checkpoint.row("model.embed_tokens.weight", 7)
        assert checkpoint.bytes_read == 256 // 32 * 34
    assert torch.equal(row, values["model.embed_tokens.weight"][7])


def test_streamed_and_quantised_again(plain: Models, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    decoded = _decoded(
        plain("mixtral"), convert(plain("mixtral"), "mixtral", file, Kind.Q8_0), tmp_path / "plain"
    )
    streamed = open_model(file, dtype=torch.float32, streamed=True)
    _equal(exact_logits(streamed, ROWS), exact_logits(open_model(decoded, compiled=False), ROWS))
    ours, theirs = (
        open_model(path, dtype=torch.float32, quantise=Precision.INT8) for path in (file, decoded)
    )
    _equal(exact_logits(ours, ROWS), exact_logits(theirs, ROWS))


def test_old_files_hold_each_expert_by_itself(plain: Models, tmp_path: Path) -> None:
    convert(plain("mixtral"), "mixtral", tmp_path / "model.gguf", Kind.F32, apart=True)
    _equal(
        exact_logits(open_model(tmp_path), ROWS), exact_logits(open_model(plain("mixtral")), ROWS)
    )


def test_a_split_model_is_one(
    plain: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMMOE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    convert(plain("olmoe"), "olmoe", folder / "small.gguf", Kind.F32, split=9)
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [f"small-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    expected = exact_logits(open_model(plain("olmoe")), ROWS)
    for path in (folder, files[2]):
        _equal(exact_logits(open_model(path), ROWS), expected)
    assert model_spec(files[0]).name == "small"
    first = model_hash(folder)
    assert model_spec(folder).model_hash == first
    files[1].touch()
    assert model_spec(folder).model_hash == ""
    files[2].unlink()
    with pytest.raises(UserError, match=r"00003-of-00003\.gguf is missing; fetch"):
        open_model(folder)


def test_positions_are_scaled_as_the_file_says(plain: Models, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    convert(plain("qwen3_moe"), "qwen3_moe", tmp_path / "model.gguf", Kind.F32, add=add)
    folder = tmp_path / "scaled"
    shutil.copytree(plain("qwen3_moe"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _equal(exact_logits(open_model(tmp_path), ROWS), exact_logits(open_model(folder), ROWS))


def test_config_json_beside_the_file_counts(plain: Models, tmp_path: Path) -> None:
    convert(plain("olmoe"), "olmoe", tmp_path / "model.gguf", Kind.F32)
    config = json.loads((plain("olmoe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    assert model_spec(tmp_path).context_length == 32
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    with pytest.raises(UserError, match=r"'mixtral' but .*model\.gguf holds a olmoe; take"):
        model_spec(tmp_path)


def _vocabulary(writer: gguf.GGUFWriter) -> None:
    tokens = byte_tokenizer().get_vocab()
    by_id = sorted(tokens, key=lambda token: tokens[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*by_id, "ab"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(258)


def test_the_tokenizer_is_the_files_own_or_the_folders(plain: Models, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    convert(plain("qwen2_moe"), "qwen2_moe", file, Kind.F32, add=_vocabulary)
    own = load_tokenizer(file)
    assert own.eos_token_id == 257
    ids = own("cab", add_special_tokens=False)["input_ids"]
    assert ids[-1] == 259
    assert own.decode(ids) == "cab"
    byte_tokenizer().save_pretrained(tmp_path)
    beside = load_tokenizer(tmp_path)
    assert len(beside("cab", add_special_tokens=False)["input_ids"]) == 3


# Refusals.


def _write(file: Path, architecture: str, tensors: dict[str, tuple[Kind, int]], **numbers: int):
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for name, (kind, size) in tensors.items():
        writer.add_tensor(name, np.zeros((1, size), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "tensors", "numbers", "sentence"),
    [
        (
            "llama",
            {"blk.0.ffn_up_exps.weight": (Kind.IQ2_XS, 74)},
            {"expert_count": 4},
            "blk.0.ffn_up_exps.weight in the GGUF encoding IQ2_XS, which .*; use",
        ),
        ("gemma3", {}, {"expert_count": 4}, "architecture 'gemma3', which .*; use"),
        ("llama", {}, {}, "architecture 'llama' without experts, which .*; use"),
        ("qwen3moe", {}, {"expert_count": 4}, "lacks the setting qwen3moe.attention.head_count;"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_sentence(
    tmp_path: Path,
    architecture: str,
    tensors: dict[str, tuple[Kind, int]],
    numbers: dict[str, int],
    sentence: str,
) -> None:
    _write(tmp_path / "model.gguf", architecture, tensors, **numbers)
    with pytest.raises(UserError, match=sentence) as caught:
        open_model(tmp_path)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_damage_and_doubt(plain: Models, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))

    convert(plain("olmoe"), "olmoe", file, Kind.F32, add=add)
    with pytest.raises(UserError, match=r"blk\.0\.attn_sinks\.weight that .* no place for .*; use"):
        open_model(file)
    convert(plain("olmoe"), "olmoe", file, Kind.F32)
    view = open_model(file, streamed=True)
    whole = file.read_bytes()
    shutil.copy(file, tmp_path / "other.gguf")
    with pytest.raises(UserError, match="holds several GGUF models; give the path of one"):
        open_model(tmp_path)
    assert open_model(tmp_path / "other.gguf").spec.name == "other"
    file.write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"is truncated, damaged or of a newer GGUF .*; fetch"):
        open_model(file)
    file.unlink()
    with pytest.raises(UserError, match="can no longer be read; leave"):
        exact_logits(view, ROWS)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="is a file but no GGUF; give the directory"):
        open_model(tmp_path / "notes.txt")
    assert load_missing(tmp_path / "other.gguf").endswith("files there.")


def load_missing(path: Path) -> str:
    with pytest.raises(UserError, match="has no tokenizer that transformers can load") as caught:
        load_tokenizer(path)
    return str(caught.value)
