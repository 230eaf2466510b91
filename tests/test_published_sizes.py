"""Models whose makers publish what they take have these sizes by their configurations alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from published import PUBLISHED, Published, sizes_of
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.models.from_config import ModelSizes, sizes_from_config

BILLION = 1e9


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A model that the installed transformers knows."""
    kind = PUBLISHED[request.param].config["model_type"]
    if kind != "kimi_k2" and kind not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {kind}")
    return request.param


def allowed(said: float, digit: float) -> float:
    """One per cent, and what rounding to the last digit leaves open."""
    return 0.01 * said + digit / 2


def counted_as_active(sizes: ModelSizes, published: Published) -> float:
    left_out = (2 - published.tables) * sizes.embedding_parameters
    return (sizes.active_parameters - left_out) / BILLION


@pytest.mark.parametrize("name", PUBLISHED, indirect=True)
def test_parameters_are_those_that_the_makers_publish(name: str) -> None:
    sizes, published = sizes_of(name), PUBLISHED[name]
    total = sizes.parameters / BILLION
    if name == "Llama-4-Scout":
        total += scouts_vision()
    assert total == pytest.approx(
        published.total, abs=allowed(published.total, published.total_digit), rel=0
    )
    active = counted_as_active(sizes, published)
    assert active == pytest.approx(
        published.active, abs=allowed(published.active, published.active_digit), rel=0
    )


@pytest.mark.parametrize(
    "name", [one for one, published in PUBLISHED.items() if published.by_hand], indirect=True
)
def test_parameters_are_those_counted_by_hand(name: str) -> None:
    """To one of them, where makers name a total in few digits."""
    assert sizes_of(name).parameters == PUBLISHED[name].by_hand


def scouts_vision() -> float:
    """Billions of parameters of Scout that are not its text part."""
    config = AutoConfig.for_model(
        "llama4",
        text_config=PUBLISHED["Llama-4-Scout"].config["text_config"] | {"num_hidden_layers": 1},
        vision_config={
            "hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34,
            "num_attention_heads": 16, "vision_output_dim": 4096, "projector_input_dim": 4096,
            "projector_output_dim": 4096, "image_size": 336, "patch_size": 14,
        },
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    names = ("vision_model", "multi_modal_projector")
    seen = [p.numel() for n, p in model.named_parameters() if any(part in n for part in names)]
    return sum(seen) / BILLION


@pytest.mark.parametrize("name", PUBLISHED, indirect=True)
def test_every_parameter_is_held_once_in_either_precision(name: str) -> None:
    for precision, bits in ((Precision.NONE, 16), (Precision.INT4, 4.5)):
        sizes = sizes_of(name, precision)
        held = sizes.spec.dense_bytes + sizes.spec.total_expert_bytes
        assert sizes.dtype == "bfloat16"
        assert held == pytest.approx(sizes.parameters * bits / 8, rel=1e-6)


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_mxfp4_checkpoints_take_what_their_makers_publish(name: str, gib: float) -> None:
    sizes = sizes_of(name)
    assert sizes.stored_as == "mxfp4"
    assert sizes.stored_bytes / 2**30 == pytest.approx(gib, abs=0.05)


def test_fp8_checkpoints_keep_what_is_not_quantised() -> None:
    sizes = sizes_of("DeepSeek-V3")
    vocabulary = 2 * 129280 * 7168  # embeddings and head stay in two bytes
    routers = 58 * 256 * 7168
    least = sizes.parameters + vocabulary + routers
    assert least < sizes.stored_bytes < 1.001 * least  # scales and norms on top
    assert sizes.stored_as == "fp8"


# Bytes by hand: 2 of each element, 4 of recurrent states; 2 x heads x width of keys and values a
# layer.
@pytest.mark.parametrize(
    ("name", "at_1", "at_8192"),
    [
        ("Qwen3-30B-A3B", 2 * 48 * 2 * 4 * 128, 8192 * 2 * 48 * 2 * 4 * 128),
        # Compressed keys and values: 512 and 64 that carry the position.
        ("DeepSeek-V3", 2 * 61 * 576, 8192 * 2 * 61 * 576),
        # Half of the layers forget after 128 positions.
        ("gpt-oss-20b", 2 * 24 * 1024, 2 * 12 * 1024 * (8192 + 128)),
        # 25 layers of 8 x 256 forget after 1024 positions, five of 2 x 512 do not.
        (
            "Gemma-4-26B-A4B",
            2 * 2 * (25 * 2048 + 5 * 1024),
            2 * 2 * (25 * 2048 * 1024 + 5 * 1024 * 8192),
        ),
        # Twelve layers attend; 36 have a state of 32 heads, 128 x 128, and four steps back of
        # 2 x 16 x 128 + 32 x 128 channels, 18 times to take tokens back.
        (
            "Qwen3-Next-80B-A3B",
            2 * 12 * 1024 + 18 * 36 * (4 * 32 * 128 * 128 + 2 * 4 * 8192),
            2 * 12 * 1024 * 8192 + 18 * 36 * (4 * 32 * 128 * 128 + 2 * 4 * 8192),
        ),
        # Four layers attend; 36 have a state of 48 heads, 64 x 128, and four steps back.
        (
            "Granite-4.0-H-Tiny",
            2 * 4 * 1024 + 18 * 36 * (4 * 48 * 64 * 128 + 2 * 4 * (3072 + 256)),
            2 * 4 * 1024 * 8192 + 18 * 36 * (4 * 48 * 64 * 128 + 2 * 4 * (3072 + 256)),
        ),
    ],
)
def test_what_is_kept_of_a_sequence(name: str, at_1: int, at_8192: int) -> None:
    sizes = sizes_of(name)
    assert sizes.cache_bytes(1) == at_1
    assert sizes.cache_bytes(8192) == at_8192


def test_an_unknown_quantisation_is_said_to_be_unknown(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = PUBLISHED["OLMoE"].config | {"quantization_config": {"quant_method": "tomorrows"}}
    path.write_text(json.dumps(config))
    sizes = sizes_from_config(path)
    assert sizes.stored_as == "tomorrows"
    assert not sizes.stored_is_known
    assert sizes.stored_bytes == 2 * sizes.parameters


def test_what_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "tomorrows_moe"}))
    with pytest.raises(UserError, match="'tomorrows_moe'"):
        sizes_from_config(path)
