"""Checkpoints of families that run by their own modules, published quantised: what is stored is
what is computed with, of experts that lie apart and of those that are fused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import encoders
import zoo
from encoders import Encoder
from trimmoe.models.exact import exact_logits
from trimmoe.models.general.view import GeneralView
from trimmoe.models.load import open_model

PLAIN = ("lm_head", "embed", "router", ".gate.weight", "norm", "vision", "projector", ".bias")
"""Parts of names of what publishers leave as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    encoder: Encoder
    settings: dict[str, Any]
    multiple: int
    """What the number of inputs is to be divided by."""


def _packed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


FORMATS = {
    "awq": Format(
        encoder=encoders.awq(8),
        settings={"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"},
        multiple=8,
    ),
    "gptq": Format(
        encoder=encoders.gptq(4, 8, shuffled=True),
        settings={"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True},
        multiple=8,
    ),
    "packed": Format(
        encoder=encoders.packed(4, 8, symmetric=False),
        settings=_packed("pack-quantized", num_bits=4, type="int", group_size=8, symmetric=False),
        multiple=8,
    ),
    "int8": Format(
        encoder=encoders.int8(symmetric=True),
        settings=_packed("int-quantized", num_bits=8, type="int", strategy="channel"),
        multiple=1,
    ),
    "mxfp4": Format(encoder=encoders.mxfp4, settings={"quant_method": "mxfp4"}, multiple=32),
}
FAMILIES = ("glm4_moe", "llama4_text")
"""With experts apart; with fused and transposed ones."""
QUICK = {("awq", "glm4_moe"), ("packed", "glm4_moe"), ("mxfp4", "llama4_text")}
CASES = [
    (form, family)
    if (form, family) in QUICK
    else pytest.param(form, family, marks=pytest.mark.slow)
    for form in FORMATS
    for family in FAMILIES
]
ROWS = zoo.prompts(9, 4)


def written(plain: Path, coded: Path, form: Format) -> int:
    """Write the quantised checkpoint, and into `plain` what it stands for; how many matrices were
    coded."""
    tensors, stored, count = load_file(plain / "model.safetensors"), dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        if form.settings["quant_method"] == "mxfp4" and tensor.ndim == 3:
            # Outputs first, whatever way the experts lie in plain files.
            turned = [np.ascontiguousarray(one) for one in tensor.transpose(1, 2).numpy()]
            each = [form.encoder(one) for one in turned]
            stored |= {
                name + end: torch.stack([o.parts[end] for o in each]) for end in each[0].parts
            }
            values = torch.from_numpy(np.stack([one.values for one in each]))
            tensors[name] = values.transpose(1, 2).contiguous()
            count += len(each)
        elif not _is_coded(name, tensor, form):
            stored[name] = tensor
        else:
            encoded = form.encoder(tensor.numpy())
            for end, part in encoded.parts.items():
                base = name if end.startswith("_") else name.removesuffix("weight")
                stored[base + end] = part
            tensors[name] = torch.from_numpy(encoded.values)
            count += 1
    coded.mkdir()
    save_file({name: one.contiguous() for name, one in stored.items()}, coded / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = form.settings
    (coded / "config.json").write_text(json.dumps(config))
    return count


def _is_coded(name: str, tensor: Tensor, form: Format) -> bool:
    if tensor.ndim != 2 or any(part in name for part in PLAIN):
        return False
    return tensor.shape[1] % form.multiple == 0 and tensor.shape[0] % 8 == 0


def same(coded: Path, plain: Path) -> None:
    """Equal logits, compiled too where the family is, and experts by byte range."""
    for compiled in (True, False):
        ours = open_model(coded, dtype=torch.float32, compiled=compiled)
        theirs = open_model(plain, compiled=compiled)
        for our, their in zip(exact_logits(ours, ROWS), exact_logits(theirs, ROWS), strict=True):
            assert torch.equal(our, their)
    assert isinstance(ours, GeneralView)
    some = open_model(coded, dtype=torch.float32, compiled=False, experts={0: [3, 1]})
    experts = ours.spec.layer_count * ours.spec.expert_count
    assert some.bytes_read.experts * experts == 2 * ours.bytes_read.experts > 0
    assert some.bytes_read.dense == ours.bytes_read.dense


@pytest.mark.parametrize(("name", "family"), CASES)
def test_it_computes_with_what_the_numbers_stand_for(
    tmp_path: Path, name: str, family: str
) -> None:
    plain = zoo.write(family, tmp_path / "plain", intermediate_size=32, moe_intermediate_size=32)
    assert written(plain, tmp_path / "coded", FORMATS[name]) > 12
    same(tmp_path / "coded", plain)


@pytest.mark.parametrize(
    "family",
    ["llama4", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gemma4", "gpt_oss"))],
)
def test_experts_that_a_quantiser_took_apart_are_put_together(tmp_path: Path, family: str) -> None:
    """Models fuse them, transposed or with gate and up in turns; published quantised, each has
    matrices of its own."""
    plain = zoo.write(family, tmp_path / "plain", intermediate_size=32, moe_intermediate_size=32)
    apart = tmp_path / "apart"
    tensors = load_file(plain / "model.safetensors")
    fused = [name for name in tensors if "experts.gate_up_proj" in name]
    assert len(fused) > 1
    for name in fused:
        path, end = name.split("gate_up_proj")
        both, down = tensors.pop(name), tensors.pop(path + "down_proj" + end)
        if family != "gemma4" and both.ndim == 3:
            both, down = both.transpose(1, 2), down.transpose(1, 2)
        halves = (both[:, 0::2], both[:, 1::2]) if family == "gpt_oss" else both.chunk(2, 1)
        parts = {"gate_proj": halves[0], "up_proj": halves[1], "down_proj": down}
        for part, values in parts.items():
            for expert, one in enumerate(values):
                kind = "weight" if one.ndim == 2 else "bias"
                tensors[f"{path}{expert}.{part}.{kind}"] = one.contiguous()
    apart.mkdir()
    save_file(tensors, apart / "model.safetensors")
    (apart / "config.json").write_text((plain / "config.json").read_text())
    same(apart, plain)
    assert written(apart, tmp_path / "coded", FORMATS["packed"]) > 3 * 8
    same(tmp_path / "coded", apart)
