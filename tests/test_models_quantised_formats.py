"""Checkpoints that are published quantised: what is stored is what is computed with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import encoders
from checkpoints import write
from encoders import Encoder
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.exact import exact_logits
from trimmoe.models.family import GATE_UP_DOWN
from trimmoe.models.formats.choose import open_checkpoint
from trimmoe.models.load import memory_needs, model_hash, model_spec, open_model

ROWS = [[5, 9, 33, 2, 71], [8, 3]]
PROJECTIONS = tuple(f"{end}.weight" for end in ("_proj", ".w1", ".w2", ".w3", ".wi", ".wo"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A way to publish a model."""

    encoder: Encoder
    settings: dict[str, Any]
    model: str = "mixtral"
    encoded_size: float
    """Bytes that a weight takes, scales left out."""
    plain: tuple[str, ...] = field(default=("lm_head",))
    """Parts of names of what is not quantised."""


def _ct(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


FORMATS = {
    "fp8 blocks": Format(
        # Blocks that the last ones are cut off of.
        encoder=encoders.fp8((12, 20)),
        settings={"quant_method": "fp8", "weight_block_size": [12, 20]},
        model="qwen3_moe",
        encoded_size=1,
    ),
    "fp8 tensor": Format(
        encoder=encoders.fp8(None),
        settings={"quant_method": "fp8", "activation_scheme": "dynamic"},
        encoded_size=1,
        plain=("lm_head", "self_attn.v_proj"),
    ),
    "fp8 static": Format(
        encoder=encoders.fp8(None, end="weight_scale"),
        settings={"quant_method": "fp8", "activation_scheme": "static"},
        encoded_size=1,
    ),
    "awq": Format(
        encoder=encoders.awq(8),
        settings={"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"},
        model="qwen2_moe",
        encoded_size=0.5,
    ),
    "gptq 4": Format(
        encoder=encoders.gptq(4, 8),
        settings={"quant_method": "gptq", "bits": 4, "group_size": 8},
        encoded_size=0.5,
    ),
    "gptq 8 in order of activations": Format(
        encoder=encoders.gptq(8, 8, shuffled=True),
        settings={"quant_method": "gptq", "bits": 8, "group_size": 8, "desc_act": True},
        encoded_size=1,
    ),
    "gptq v2": Format(
        encoder=encoders.gptq(4, 8, form="gptq_v2", shuffled=True),
        settings={
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 8,
            "desc_act": True,
            "checkpoint_format": "gptq_v2",
        },
        model="olmoe",
        encoded_size=0.5,
    ),
    "packed int4": Format(
        encoder=encoders.packed(4, 8, symmetric=True),
        settings=_ct("pack-quantized", num_bits=4, type="int", group_size=8, symmetric=True),
        model="qwen3_moe",
        encoded_size=0.5,
    ),
    "packed int4 with zeros": Format(
        encoder=encoders.packed(4, 8, symmetric=False),
        settings=_ct("pack-quantized", num_bits=4, type="int", group_size=8, symmetric=False),
        encoded_size=0.5,
    ),
    "packed int8 in order of activations": Format(
        encoder=encoders.packed(8, 8, symmetric=True, shuffled=True),
        settings=_ct("pack-quantized", num_bits=8, type="int", group_size=8, actorder="group"),
        encoded_size=1,
    ),
    "int8": Format(
        encoder=encoders.int8(symmetric=True),
        settings=_ct("int-quantized", num_bits=8, type="int", strategy="channel"),
        encoded_size=1,
    ),
    "naive int8 with zeros": Format(
        encoder=encoders.int8(symmetric=False),
        settings=_ct("naive-quantized", num_bits=8, type="int", strategy="channel"),
        encoded_size=1,
    ),
    "float8": Format(
        encoder=encoders.fp8((1, 32), end="weight_scale"),
        settings=_ct("float-quantized", num_bits=8, type="float", strategy="channel"),
        encoded_size=1,
        plain=("lm_head", ".w2."),
    ),
}


OTHERS = {
    "gptq 2": Format(
        encoder=encoders.gptq(2, 8),
        settings={"quant_method": "gptq", "bits": 2, "group_size": 8},
        encoded_size=0.25,
    ),
    "awq with a short group": Format(
        encoder=encoders.awq(24),
        settings={"quant_method": "awq", "bits": 4, "group_size": 24, "version": "gemm"},
        encoded_size=0.5,
    ),
    "packed int2": Format(
        encoder=encoders.packed(2, 8, symmetric=False),
        settings=_ct("pack-quantized", num_bits=2, type="int", group_size=8, symmetric=False),
        encoded_size=0.25,
    ),
}
"""What the tiny models' widths do not allow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A quantised checkpoint, and one in float32 of what it stands for."""

    coded: Path
    plain: Path
    form: Format


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def find(name: str) -> Pair:
        if name not in made:
            form = FORMATS[name]
            plain = write(form.model, tmp_path_factory.mktemp("plain"))
            coded = tmp_path_factory.mktemp("coded")
            _encode(plain, coded, form)
            made[name] = Pair(coded=coded, plain=plain, form=form)
        return made[name]

    return find


def _encode(plain: Path, coded: Path, form: Format) -> None:
    """Write the quantised checkpoint, and into `plain` what it stands for."""
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if not name.endswith(PROJECTIONS) or any(part in name for part in form.plain):
            stored[name] = tensor
            continue
        encoded = form.encoder(tensor.numpy())
        base = name.removesuffix("weight")
        stored |= {base + end: part for end, part in encoded.parts.items()}
        # What quantises activations is no part of the model that is served here.
        stored[base + "input_scale"] = torch.ones(())
        tensors[name] = torch.from_numpy(encoded.values)
    _write(coded, plain, stored, form.settings)
    save_file(tensors, plain / "model.safetensors")


def _write(coded: Path, plain: Path, stored: dict[str, Tensor], settings: dict[str, Any]) -> None:
    coded.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in stored.items()}, coded / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def _equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our, their)


@pytest.mark.parametrize("name", FORMATS)
def test_it_computes_with_what_the_numbers_stand_for(
    pair: Callable[[str], Pair], name: str
) -> None:
    both = pair(name)
    view = open_model(both.coded, dtype=torch.float32)
    assert isinstance(view, CompiledView)
    _equal(exact_logits(view, ROWS), exact_logits(open_model(both.plain), ROWS))
    half, expected = open_model(both.coded), open_model(both.plain, dtype=torch.bfloat16)
    _equal(exact_logits(half, ROWS), exact_logits(expected, ROWS))


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_those_of_what_is_held(pair: Callable[[str], Pair], name: str) -> None:
    both = pair(name)
    for quantise in (Precision.NONE, Precision.INT4):
        ours = model_spec(both.coded, dtype=torch.float32, quantise=quantise)
        theirs = model_spec(both.plain, quantise=quantise)
        assert (ours.expert_bytes == theirs.expert_bytes).all()
        assert ours.dense_bytes == theirs.dense_bytes
        assert (ours.expert_flops == theirs.expert_flops).all()
        assert (ours.layer_dense_flops == theirs.layer_dense_flops).all()
    assert model_spec(both.coded).activation_bytes == 2
    assert memory_needs(both.coded) == memory_needs(both.plain, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_chosen_experts_bytes_are_read(pair: Callable[[str], Pair], name: str) -> None:
    both = pair(name)
    stored = load_file(both.coded / "model.safetensors")
    sizes = {n: t.nbytes for n, t in stored.items() if not n.endswith("input_scale")}
    view = open_model(both.coded, experts={0: [1, 3]})
    block = min(int(n.split(".")[2]) for n in sizes if ".experts." in n)
    mine = [f"layers.{block}.{m}.experts.{e}." for e in (1, 3) for m in ("mlp", "block_sparse_moe")]
    experts = sum(size for n, size in sizes.items() if any(part in n for part in mine))
    assert view.bytes_read.experts == experts > 0
    assert view.bytes_read.dense == sum(s for n, s in sizes.items() if ".experts." not in n)
    assert view.loaded[0] == {1, 3}
    if ".w2." not in both.form.plain:
        # An expert's parameters are half its operations, and two experts are read.
        weights = int(view.spec.expert_flops[0, 0])
        assert weights * both.form.encoded_size <= experts < weights * 2


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), shift=st.sampled_from([-5.0, 0.0, 5.0]))
@pytest.mark.parametrize("name", [*FORMATS, *OTHERS])
def test_a_matrix_is_what_its_specification_says(name: str, seed: int, shift: float) -> None:
    # Shifted, all weights have one sign, and zeros are at the end of their range.
    weight = np.random.default_rng(seed).normal(shift, 1, (16, 32)).astype(np.float32)
    form = (FORMATS | OTHERS)[name]
    encoded = form.encoder(weight)
    with TemporaryDirectory() as folder:
        path = Path(folder)
        parts = {f"a.{end}": part.contiguous() for end, part in encoded.parts.items()}
        save_file(parts, path / "model.safetensors")
        raw = {"quantization_config": form.settings}
        with open_checkpoint(path, raw, GATE_UP_DOWN) as checkpoint:
            assert checkpoint.entry("a.weight").shape == (16, 32)
            read = checkpoint.tensor("a.weight")
    assert read.dtype == torch.float32
    assert (read.numpy() == encoded.values).all()


def test_an_encoder_and_its_decoder_are_read_too(tmp_path: Path) -> None:
    plain, coded = write("switch", tmp_path / "plain"), tmp_path / "coded"
    _encode(plain, coded, FORMATS["int8"])
    ours, theirs = open_model(coded, dtype=torch.float32), open_model(plain)
    assert isinstance(ours, EncoderDecoderView)
    assert isinstance(theirs, EncoderDecoderView)
    _equal(ours.encode(ROWS), theirs.encode(ROWS))
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    chosen, gates = torch.tensor([[3], [0], [1], [2]]), torch.ones(4, 1)
    assert torch.equal(
        ours.experts(1, hidden, chosen, gates), theirs.experts(1, hidden, chosen, gates)
    )
    assert memory_needs(coded, dtype=torch.float32) == memory_needs(plain)


def test_streamed_and_quantised_again(pair: Callable[[str], Pair]) -> None:
    both = pair("awq")
    streamed = exact_logits(open_model(both.coded, dtype=torch.float32, streamed=True), ROWS)
    expected = exact_logits(open_model(both.plain, compiled=False), ROWS)
    _equal(streamed, expected)
    again, theirs = (
        open_model(path, dtype=torch.float32, quantise=Precision.INT8)
        for path in (both.coded, both.plain)
    )
    _equal(exact_logits(again, ROWS), exact_logits(theirs, ROWS))


def test_the_hash_is_of_the_files_as_stored(
    pair: Callable[[str], Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMMOE_CACHE", str(tmp_path))
    both = pair("awq")
    assert model_hash(both.coded) != model_hash(both.plain)
    assert model_spec(both.coded).model_hash == model_hash(both.coded)


# Widths that are multiples of 32, which FP4 needs.


def _wide(folder: Path, *, fused: bool) -> Path:
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    more: dict[str, Any] = {"head_dim": 16}
    config = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.15,
        **more,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder, save_original_format=not fused)
    return folder


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
def test_fp4_of_compressed_tensors(tmp_path: Path, scheme: str) -> None:
    encoder = {"mxfp4": encoders.packed_mxfp4, "nvfp4": encoders.packed_nvfp4}[scheme]
    form = Format(
        encoder=encoder,
        settings=_ct(f"{scheme}-pack-quantized", num_bits=4, type="float"),
        encoded_size=0.5,
    )
    plain = _wide(tmp_path / "plain", fused=False)
    _encode(plain, tmp_path / "coded", form)
    ours = exact_logits(open_model(tmp_path / "coded", dtype=torch.float32), ROWS)
    _equal(ours, exact_logits(open_model(plain), ROWS))


def _fuse(plain: Path, coded: Path, scheme: str) -> None:
    """Quantise experts that are stored in one tensor, as gpt-oss's are, or those of FP8."""
    encoder = encoders.mxfp4 if scheme == "mxfp4" else encoders.fp8((16, 24))
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        encoded = [encoder(matrix.numpy()) for matrix in tensor]
        for end in encoded[0].parts:
            together = torch.stack([one.parts[end].view(torch.uint8) for one in encoded])
            stored[name + end.removeprefix("weight")] = together.view(encoded[0].parts[end].dtype)
        tensors[name] = torch.stack([torch.from_numpy(one.values) for one in encoded])
    settings = {"quant_method": scheme, "weight_block_size": [16, 24]}
    _write(coded, plain, stored, settings)
    save_file(tensors, plain / "model.safetensors")


@pytest.mark.parametrize("scheme", ["mxfp4", "fp8"])
def test_of_fused_experts_rows_are_read(tmp_path: Path, scheme: str) -> None:
    plain, coded = _wide(tmp_path / "plain", fused=True), tmp_path / "coded"
    _fuse(plain, coded, scheme)
    ours = exact_logits(open_model(coded, dtype=torch.float32), ROWS)
    _equal(ours, exact_logits(open_model(plain), ROWS))
    view = open_model(coded, experts={1: [2]})
    stored = load_file(coded / "model.safetensors")
    layer = sum(t.nbytes for n, t in stored.items() if ".layers.1.mlp.experts." in n)
    assert view.bytes_read.experts == layer // 4
    assert (view.spec.expert_bytes == model_spec(plain, dtype=torch.bfloat16).expert_bytes).all()


# Refusals.


def _settings(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] |= changes
        (path / "config.json").write_text(json.dumps(config))

    return edit


def _tensors(edit: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        edit(tensors)
        save_file(tensors, path / "model.safetensors")

    return change


EXPERT = "model.layers.0.block_sparse_moe.experts.0."


def _without(end: str) -> Callable[[Path], None]:
    return _tensors(lambda tensors: tensors.pop(EXPERT + "w1." + end))  # pyright: ignore[reportArgumentType]


def _with(end: str, tensor: Tensor, of: str = "w1.") -> Callable[[Path], None]:
    return _tensors(lambda tensors: tensors.update({EXPERT + of + end: tensor}))


@pytest.mark.parametrize(
    ("name", "spoil", "sentence"),
    [
        *(
            ("gptq 4", _settings(quant_method=method), f"quantised by {method}, which .*; use")
            for method in ("bitsandbytes", "hqq", "eetq", "quark")
        ),
        ("awq", _settings(version="gemv"), "4-bit AWQ weights of version gemv, .*; use"),
        ("awq", _settings(bits=3), "3-bit AWQ weights .*; use"),
        ("gptq 4", _settings(checkpoint_format="marlin"), "in the format marlin, .*; use"),
        (
            "gptq 4",
            _with("qzeros", torch.zeros((3, 3), dtype=torch.int32), of="w2."),
            "3-bit GPTQ weights .*w2.qweight.*; use",
        ),
        ("gptq 4", _without("scales"), "lacks the tensor .*w1.scales; fetch"),
        (
            "gptq 4",
            _with("scales", torch.ones(3, 24)),
            "w1.scales: 3 groups do not fit 32 inputs; fetch",
        ),
        (
            "gptq 4",
            _with("secret", torch.zeros(2, dtype=torch.int32)),
            "w1.secret: a tensor of I32 of this name is not gptq; fetch",
        ),
        ("fp8 static", _without("weight_scale"), "w1.weight: it has no scales beside it; fetch"),
        (
            "fp8 static",
            _with("weight_scale", torch.ones(7)),
            r"scales \[7\] do not fit weights \[24, 32\]; fetch",
        ),
        ("int8", _settings(format="marlin-24"), "in the format marlin-24, .*; use"),
        (
            "int8",
            _settings(sparsity_config={"format": "sparse-24-bitmask"}),
            "in the format sparse-24-bitmask, .*; use",
        ),
        (
            "int8",
            _with("weight", torch.ones(24, 32)),
            "w1.weight: it is not compressed but has scales; fetch",
        ),
        (
            "packed int4 with zeros",
            _settings(config_groups={"a": {"weights": {"num_bits": 3, "type": "int"}}}),
            "packed in 3 bits .*; use a checkpoint of 4 or 8 bits",
        ),
        (
            "packed int4 with zeros",
            _with("weight_shape", torch.tensor([24, 31])),
            "w1.weight_packed: .*; fetch",
        ),
    ],
)
def test_what_cannot_be_read_is_said_in_one_sentence(
    pair: Callable[[str], Pair],
    tmp_path: Path,
    name: str,
    spoil: Callable[[Path], None],
    sentence: str,
) -> None:
    both = pair(name)
    for file in both.coded.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil(tmp_path)
    with pytest.raises(UserError, match=sentence) as caught:
        open_model(tmp_path)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
