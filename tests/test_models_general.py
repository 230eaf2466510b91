"""What the general adapter finds, keeps and refuses."""

from __future__ import annotations

import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers.models
from safetensors.torch import load_file, save_file
from transformers.masking_utils import create_causal_mask
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from typer.testing import CliRunner

import encoders
import zoo
from trimmoe.cli import app
from trimmoe.core.errors import UserError
from trimmoe.models.base import MoEView
from trimmoe.models.cache import SNAPSHOTS, KVCache
from trimmoe.models.compiled.forms import FORMS
from trimmoe.models.exact import exact_logits, full_depth, greedy
from trimmoe.models.from_config import require_served, sizes_from_config
from trimmoe.models.general import attention, catalogue
from trimmoe.models.general.catalogue import (
    COMPILED_TEXT_PARTS,
    ENCODER_DECODERS,
    FAST,
    SERVED,
    TEXT_PARTS,
    UNSERVED,
    class_names,
    keeps_states,
)
from trimmoe.models.general.view import GeneralView
from trimmoe.models.load import open_model
from trimmoe.runtime.probe import time_work

KNOWN = {*FAST, *ENCODER_DECODERS, *SERVED, *TEXT_PARTS, *UNSERVED}


@pytest.fixture(scope="module", params=zoo.families(("qwen3_next",), of=keeps_states))
def recurrent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with recurrent states."""
    return zoo.write(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=[True, False], ids=["compiled", "modules"])
def delta(request: pytest.FixtureRequest, recurrent: Path) -> MoEView:
    """A view of it."""
    return open_model(recurrent, compiled=request.param)


def _stepped(view: MoEView, cache: KVCache, tokens: list[int], start: int) -> torch.Tensor:
    """Logits [T, V] after each token, fed one by one."""
    made = []
    for at, token in enumerate(tokens, start):
        batch = view.batch(cache, [0], [[at]])
        made.append(
            view.logits(full_depth(view, view.embed(batch.pad([[token]]), batch), batch, cache))
        )
    return torch.cat(made)


@torch.inference_mode()
def test_withdrawn_tokens_are_taken_back_from_snapshots(delta: MoEView) -> None:
    cache = delta.new_cache(slots=1)
    cache.alloc()
    (right, wrong) = zoo.prompts(20, 9)
    expected = exact_logits(delta, [right])[0]
    _stepped(delta, cache, right[:8], 0)
    _stepped(delta, cache, wrong, 8)
    ours = _stepped(delta, cache, right[8:], 8)
    close = 2e-4 * float(expected.abs().max())
    torch.testing.assert_close(ours, expected[8:], rtol=0, atol=close)
    kept = cache.bytes
    _stepped(delta, cache, wrong, 20)
    assert cache.bytes == kept, "snapshots are bounded in number"
    with pytest.raises(UserError, match="no longer kept"):
        _stepped(delta, cache, right, 28 - SNAPSHOTS)


def test_no_sequence_begins_with_states_of_another(delta: MoEView) -> None:
    assert not delta.rewinds
    cache = delta.new_cache(slots=1)
    first, second = zoo.prompts(7, 5)
    with torch.inference_mode():
        _stepped(delta, cache, first, 0) if cache.alloc() == 0 else None
        cache.free(0)
        cache.alloc()
        ours = _stepped(delta, cache, second, 0)
    torch.testing.assert_close(ours, exact_logits(delta, [second])[0], rtol=1e-3, atol=1e-4)


def test_work_is_timed_where_states_cannot_be_cut_back(delta: MoEView) -> None:
    assert (time_work(delta) > 0).all()


@pytest.mark.parametrize(
    "family",
    zoo.families(
        ("deepseek_v32", "qwen3_next", "mimo_v2_flash", "kimi_linear"),
        "bailing_hybrid",
        "granitemoehybrid",
        "jamba",
        "lfm2_moe",
        "nemotron_h",
    ),
)
def test_what_attention_keeps_is_what_a_configuration_says(tmp_path: Path, family: str) -> None:
    """Compressed keys and those of an indexer, as many states as can be gone back to, in float32
    whatever the rest is, heads of unequal sizes."""
    folder = zoo.write(family, tmp_path)
    _keeps_what_is_said(folder, torch.float32)
    if keeps_states(family):
        _keeps_what_is_said(folder, torch.bfloat16)


def _keeps_what_is_said(folder: Path, dtype: torch.dtype) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config") or {}):
        part |= {"dtype": str(dtype).removeprefix("torch.")}
    path.write_text(json.dumps(config))
    view = open_model(folder, compiled=False, dtype=dtype)
    sizes = sizes_from_config(path)
    cache = view.new_cache(slots=2)
    cache.alloc()
    (tokens,) = zoo.prompts(SNAPSHOTS + 2)
    with torch.inference_mode():
        _stepped(view, cache, tokens, 0)
    places = 2 * 64
    assert cache.bytes == places * sizes.kv_bytes_per_token + sizes.state_bytes
    assert sizes.spec.dense_bytes == view.spec.dense_bytes
    if dtype is torch.float32:
        assert sizes.spec.dense_bytes == view.bytes_read.dense


def test_a_state_of_unknown_size_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.config_of("kimi_linear").save_pretrained(tmp_path)
    built = KimiLinearDeltaAttention.__init__

    def build(self: Any, *args: Any) -> None:
        built(self, *args)
        del self.head_dim

    monkeypatch.setattr(KimiLinearDeltaAttention, "__init__", build)
    with pytest.raises(UserError, match=r"large a state KimiLinearDeltaAttention keeps .* cannot"):
        sizes_from_config(tmp_path / "config.json")


def test_masks_of_others_are_what_they_were() -> None:
    """Only where positions are in force are masks made for them."""
    config = zoo.config_of("mellum")
    config._attn_implementation = "sdpa"
    states = torch.zeros(1, 3, 32)
    padded = torch.tensor([[0, 1, 1]])
    before = create_causal_mask(config, states, padded, None)
    attention.register()
    after = create_causal_mask(config, states, padded, None)
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)
    positions = attention.Positions(queries=torch.tensor([[1, 3, 4]]), length=5)
    with attention.at(positions):
        ours = create_causal_mask(config, states, None, None)
    assert ours is not None
    assert ours[0, 0].tolist() == [[k <= q for k in range(5)] for q in (1, 3, 4)]


def test_gpt_oss_is_read_as_it_is_published(tmp_path: Path) -> None:
    """Experts in MXFP4, transposed and fused, are those that the same numbers are in float32."""
    plain = zoo.write("gpt_oss", tmp_path / "plain", intermediate_size=32)
    coded = zoo.write("gpt_oss", tmp_path / "coded", intermediate_size=32)
    tensors = load_file(plain / "model.safetensors")
    stored, exact = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim != 3:
            stored[name] = exact[name] = tensor
            continue
        turned = tensor.transpose(1, 2).numpy()
        encoded = [encoders.mxfp4(np.ascontiguousarray(expert)) for expert in turned]
        for end in encoded[0].parts:
            stored[name + end] = torch.stack([one.parts[end] for one in encoded])
        values = torch.from_numpy(np.stack([one.values for one in encoded]))
        exact[name] = values.transpose(1, 2).contiguous()
    save_file(stored, coded / "model.safetensors")
    save_file(exact, plain / "model.safetensors")
    config = json.loads((coded / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (coded / "config.json").write_text(json.dumps(config))
    asked = zoo.prompts(9, 4)
    ours = open_model(coded, dtype=torch.float32)
    by_modules = open_model(coded, dtype=torch.float32, compiled=False)
    assert isinstance(by_modules, GeneralView)
    exact_tokens = greedy(open_model(plain), asked, 8)
    assert greedy(ours, asked, 8) == greedy(by_modules, asked, 8) == exact_tokens
    streamed = open_model(coded, dtype=torch.float32, streamed=True)
    assert greedy(streamed, asked, 8) == exact_tokens


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("deepseek_v3", {}),
        # Fused and transposed experts, which quantisers skip; with a matrix that is square.
        ("gpt_oss", {"intermediate_size": 32}),
        *(
            pytest.param(one, {}, marks=pytest.mark.slow)
            for one in ("aria", "gemma4_text", "glm4_moe", "gpt_oss", "llama4", "llama4_text")
        ),
    ],
)
def test_blocks_of_fp8_are_read_of_any_family(
    family: str, more: dict[str, int], tmp_path: Path
) -> None:
    """As DeepSeek and GLM publish them, of projections and experts apart; fused ones stay plain."""
    plain = zoo.write(family, tmp_path / "plain", **more)
    coded = zoo.write(family, tmp_path / "coded", **more)
    stored = load_file(plain / "model.safetensors")
    exact = dict(stored)
    for name in [one for one in stored if one.endswith("_proj.weight")]:
        encoded = encoders.fp8((16, 8))(stored.pop(name).numpy())
        for end, part in encoded.parts.items():
            stored[name.removesuffix("weight") + end] = part
        exact[name] = torch.from_numpy(encoded.values)
    save_file(stored, coded / "model.safetensors")
    save_file(exact, plain / "model.safetensors")
    config = json.loads((coded / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    (coded / "config.json").write_text(json.dumps(config))
    asked = zoo.prompts(9, 4)
    ours, theirs = open_model(coded, dtype=torch.float32), open_model(plain)
    for our, their in zip(exact_logits(ours, asked), exact_logits(theirs, asked), strict=True):
        assert torch.equal(our, their)


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("zaya", {}, "hands what a router knows on"),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 8},
            "has embeddings of its tokens in every",
        ),
        ("glm_moe_dsa", {"indexer_types": ["full", "full", "shared"]}, "earlier ones"),
        ("gemma4_text", {"enable_moe_block": False}, "has no routed experts"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(
    tmp_path: Path, family: str, changes: dict[str, object], sentence: str
) -> None:
    zoo.config_of(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"cannot serve this {family} model: it.*{sentence}"):
        require_served(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("family", "shape"), [("deepseek_v4", "1, 8, 4, 32"), ("qwen4_exp_text", "1, 8, 128")]
)
def test_what_no_table_knows_is_refused_by_what_its_layers_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, shape: str
) -> None:
    monkeypatch.delitem(catalogue.UNSERVED, family)
    zoo.write(family, tmp_path)
    with pytest.raises(UserError, match=rf"states of shape \[{shape}\] where one .* \[1, 8, 32\]"):
        open_model(tmp_path)


def test_a_layer_that_fails_by_itself_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.write("glm4_moe", tmp_path)

    def fails(*_: object, **__: object) -> None:
        raise KeyError("what its neighbour made\nand more")

    monkeypatch.setattr(Glm4MoeDecoderLayer, "forward", fails)
    sentence = "layers of Glm4MoeForCausalLM do not run one by one .KeyError.*; TrimMoE cannot"
    with pytest.raises(UserError, match=sentence):
        open_model(folder, compiled=False)


def test_the_table_has_every_family_of_transformers() -> None:
    """Whatever marks its experts as such is served, or it is said why not."""
    with_experts = set()
    for module in pkgutil.iter_modules(transformers.models.__path__):
        file = Path(next(iter(transformers.models.__path__))) / module.name
        source = file / f"modeling_{module.name}.py"
        if source.is_file() and "@use_experts_implementation" in source.read_text("utf-8"):
            with_experts.add(module.name)
    missing = {name for name in with_experts if not any(_of(family) == name for family in KNOWN)}
    assert len(with_experts) > 50
    assert not missing
    assert not {family for family in (*SERVED, *TEXT_PARTS) if family not in class_names()}


def _of(family: str) -> str:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    return model_type_to_module_name(family)


def test_kimi_k2_is_deepseek_v3_under_another_name(tmp_path: Path) -> None:
    view = open_model(zoo.write("deepseek_v3", tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    asked = zoo.prompts(5)
    assert greedy(open_model(tmp_path), asked, 4) == greedy(view, asked, 4)


def test_the_command_lists_families_and_memory(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["models", "--all"]).output
    assert all(family in listed for family in KNOWN)
    texts = {family: zoo.config_of(family).get_text_config().model_type for family in TEXT_PARTS}
    assert {one for one, text in texts.items() if text in FORMS} == set(COMPILED_TEXT_PARTS)
    assert re.search(r"glm4_moe +compiled", listed)
    assert re.search(r"switch_transformers +its own modules, encoder included", listed)
    zoo.config_of("granitemoehybrid").save_pretrained(tmp_path)
    shown = " ".join(CliRunner().invoke(app, ["models", str(tmp_path)]).output.split())
    assert "3 MoE layers of 8 experts, 2 a token" in shown
    assert "221.18 kB" in shown
    assert "119.81 kB a sequence" in shown
