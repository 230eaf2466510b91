"""Opening checkpoints: only the bytes that are needed, and errors that say what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoints import LAYOUTS, Folder, reference, written_once
from trimmoe.core.errors import UserError
from trimmoe.models import hashing
from trimmoe.models.base import ExpertNotLoaded
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.load import load_tokenizer, model_hash, model_spec, open_model

CHOICE = {0: [1, 3], 2: [0]}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return written_once(tmp_path_factory.mktemp)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMMOE_CACHE", str(tmp_path / "cache"))


def _stored(folder: Path) -> dict[str, int]:
    """Bytes of every tensor in the files."""
    sizes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            sizes |= {name: handle.get_tensor(name).nbytes for name in handle.keys()}  # noqa: SIM118
    return sizes


@pytest.mark.parametrize(("fused", "sharded"), LAYOUTS)
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_reads_only_the_bytes_of_its_own_experts(
    folder: Folder, name: str, fused: bool, sharded: bool
) -> None:
    path = folder(name, fused, sharded)
    sizes = _stored(path)
    view = open_model(path, experts=CHOICE)
    dense = sum(size for stored, size in sizes.items() if ".experts." not in stored)
    assert view.bytes_read.dense == dense == view.spec.dense_bytes
    per_expert = 3 * 32 * (24 if name == "mixtral" else 16) * 4
    assert view.bytes_read.experts == 3 * per_expert
    assert view.spec.expert_bytes[0, 0] == per_expert
    assert view.spec.total_expert_bytes == sum(sizes.values()) - dense
    assert view.loaded == (frozenset({1, 3}), frozenset(), frozenset({0}))


@pytest.mark.parametrize(("fused", "sharded"), LAYOUTS)
def test_a_subset_computes_what_all_compute_and_raises_beyond(
    folder: Folder, fused: bool, sharded: bool
) -> None:
    full = open_model(folder("mixtral"))
    some = open_model(
        folder("mixtral", fused, sharded), experts=lambda layer: CHOICE.get(layer, ())
    )
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([[3, 1], [1, -1], [-1, 3], [1, 3], [3, -1]])
    gates = torch.rand(5, 2, generator=torch.Generator().manual_seed(1))
    expected = full.experts(0, hidden, chosen, gates)
    assert torch.equal(some.experts(0, hidden, chosen, gates), expected)
    for row in range(5):
        alone = some.experts(0, *(t[row : row + 1] for t in (hidden, chosen, gates)))
        torch.testing.assert_close(alone[0], expected[row], atol=1e-5, rtol=0)
    for missing in (chosen.clamp(min=0), torch.tensor([[2, -1]])):
        with pytest.raises(ExpertNotLoaded, match="layer 0"):
            some.experts(0, hidden[: len(missing)], missing, gates[: len(missing)])
    with pytest.raises(ExpertNotLoaded, match="layer 1"):
        some.experts(1, hidden, chosen, gates)


def test_switch_loads_both_sides_by_subset(folder: Folder) -> None:
    view = open_model(folder("switch"), experts={0: [2]}, encoder_experts={1: [0, 3]})
    assert isinstance(view, EncoderDecoderView)
    assert view.loaded == (frozenset({2}), frozenset())
    assert view.encoder.loaded == (frozenset(), frozenset({0, 3}))
    assert view.bytes_read.experts == 3 * 2 * 32 * 24 * 4
    with pytest.raises(ExpertNotLoaded):
        view.encoder.experts(1, torch.zeros(1, 32), torch.tensor([[1]]), torch.ones(1, 1))


def test_spec_counts_what_the_modules_hold(folder: Folder) -> None:
    spec = model_spec(folder("qwen2_moe"))
    layers = reference(folder("qwen2_moe")).model.layers
    matrices: list[int] = [
        sum(p.numel() for n, p in layer.named_parameters() if p.dim() == 2 and "experts." not in n)
        for layer in layers
    ]
    # Blocks 1 and 4 are dense: the first belongs to the second MoE layer, the last to the head.
    expected = [matrices[0], matrices[1] + matrices[2], matrices[3]]
    assert (spec.layer_dense_flops == 2.0 * np.array(expected)).all()
    assert spec.head_flops == 2.0 * (96 * 32 + matrices[4])
    assert (spec.expert_flops == 2.0 * 3 * 16 * 32).all()
    assert spec.expert_flops.shape == (3, 6)
    assert (spec.family, spec.top_k, spec.gates_renormalised) == ("qwen2_moe", 3, False)
    assert model_spec(folder("mixtral")).gates_renormalised
    half = model_spec(folder("qwen2_moe"), dtype=torch.bfloat16)
    assert half.dense_bytes * 2 == spec.dense_bytes
    assert half.hidden_bytes == 64


def test_switch_specs_of_both_sides(folder: Folder) -> None:
    view = open_model(folder("switch"))
    assert isinstance(view, EncoderDecoderView)
    attention = 4 * 32 * 32
    dense, router = 2 * 32 * 24, 4 * 32
    assert (view.encoder.spec.layer_dense_flops == 2.0 * (2 * attention + dense + router)).all()
    # Of cross attention a decoded token only meets the query and output projections.
    per_layer = 2 * (attention + 2 * 32 * 32) + dense + router
    assert (view.spec.layer_dense_flops == 2.0 * per_layer).all()
    trailing = attention + 2 * 32 * 32 + dense
    assert view.spec.head_flops == 2.0 * (96 * 32 + trailing)


def test_hash_is_kept_and_follows_the_files(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    shutil.copytree(folder("mixtral", False, True), path)
    assert model_spec(path).model_hash == ""
    first = model_hash(path)
    assert model_spec(path).model_hash == first == open_model(path, hashed=True).spec.model_hash
    with monkeypatch.context() as patched:
        patched.setattr(hashing, "_digest", lambda *_: pytest.fail("read again"))
        assert model_hash(path) == first
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert model_spec(path).model_hash == ""
    assert model_hash(path) != first
    assert {file.name for file in path.iterdir()} == {
        file.name for file in folder("mixtral", False, True).iterdir()
    }


def _remove_all(path: Path) -> None:
    shutil.rmtree(path)


def _drop_config(path: Path) -> None:
    (path / "config.json").unlink()


def _spoil_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changes))

    return edit


def _truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _truncate_header(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def _drop_tensor(part: str) -> Callable[[Path], None]:
    def drop(path: Path) -> None:
        file = path / "model.safetensors"
        tensors = {name: t for name, t in load_file(file).items() if part not in name}
        save_file(tensors, file)

    return drop


def _drop_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _point_elsewhere(path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_remove_all, "There is no directory .*; give a checkpoint's directory or a hub id"),
        (_drop_config, "has no config.json; give a directory"),
        (_spoil_config, "is not valid JSON; fetch"),
        (
            _edit_config(model_type="llama"),
            "cannot serve this llama model: it has no routed experts",
        ),
        (
            _edit_config(quantization_config={"bits": 4}),
            "quantised by an unnamed method, which TrimMoE cannot read; use",
        ),
        (_edit_config(hidden_size="wide"), "is not a valid mixtral configuration"),
        (_truncate, "model.safetensors is truncated or damaged; fetch"),
        (_truncate_header, "model.safetensors is truncated or damaged; fetch"),
        (_drop_tensor("layers.1.self_attn.q_proj"), "lacks the tensor .*q_proj.weight; fetch"),
        (_drop_tensor("layers.0.input"), "lacks the tensor model.layers.0.input_layernorm.weight"),
        (_drop_tensor("experts.2.w3"), r"lacks the tensor .*experts\.2\.w3"),
        (_drop_weights, "has no safetensors weights and no GGUF file; convert"),
        (_point_elsewhere, "00002.safetensors is missing; fetch"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    folder: Folder, tmp_path: Path, spoil: Callable[[Path], None], sentence: str
) -> None:
    path = tmp_path / "model"
    shutil.copytree(folder("mixtral"), path)
    spoil(path)
    with pytest.raises(UserError, match=sentence) as caught:
        open_model(path)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text


def test_dtype_and_device_errors(folder: Folder) -> None:
    with pytest.raises(UserError, match="float16; choose float32 or bfloat16"):
        open_model(folder("mixtral"), dtype=torch.float16)
    with pytest.raises(UserError, match="is not a device"):
        open_model(folder("mixtral"), device="teapot")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            open_model(folder("mixtral"), device="cuda")


def test_hub_id(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(name: str, **_: object) -> str:
        asked.append(name)
        if name == "some/model":
            return str(folder("mixtral"))
        raise OSError("no such model\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert model_spec("some/model").name == "some/model"
    with pytest.raises(UserError, match=r"Cannot fetch other/model .*no such model.; check"):
        open_model("other/model")
    assert asked == ["some/model", "other/model"]


def test_tokenizer(folder: Folder, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(folder("mixtral"))
    path = tmp_path / "model"
    shutil.copytree(folder("mixtral"), path)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(path)
    assert load_tokenizer(path)("b a c")["input_ids"] == [1, 0, 2]
