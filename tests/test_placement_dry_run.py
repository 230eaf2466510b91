"""Sizes from config.json alone are those of the weights, and what fits is what the planner says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import checkpoints
import zoo
from factories import random_cluster, random_model_spec
from public_configs import MIXTRAL_8X7B, QWEN15_MOE_A27B, SWITCH_BASE_8
from trimmoe.cli import app
from trimmoe.core.errors import UserError
from trimmoe.models.checkpoint import Listing
from trimmoe.models.family import build_spec
from trimmoe.models.from_config import sizes_from_config
from trimmoe.models.general.catalogue import SERVED, TEXT_PARTS
from trimmoe.models.load import family_of, model_spec, open_model
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.dry_run import dry_run

HOME = Path(__file__).parent.parent / "clusters" / "home3.yaml"
GB = 1e9


def written(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("family", [*checkpoints.DECODERS, "switch"])
@pytest.mark.parametrize("fused", [False, True])
def test_sizes_from_the_configuration_are_those_of_the_weight_files(
    tmp_path: Path, family: str, fused: bool
) -> None:
    folder = checkpoints.write(family, tmp_path, fused=fused)
    sizes, spec = sizes_from_config(folder / "config.json"), model_spec(folder)
    assert sizes.dtype == "float32"
    for name in ("family", "layer_count", "expert_count", "top_k", "dense_bytes", "head_flops"):
        assert getattr(sizes.spec, name) == getattr(spec, name), name
    for name in ("expert_bytes", "expert_flops", "layer_dense_flops"):
        np.testing.assert_array_equal(getattr(sizes.spec, name), getattr(spec, name))
    in_encoder = 2 * 4 * 2 * 32 * 24 * 4  # layers, experts, matrices, their elements, bytes
    assert sizes.encoder_expert_bytes == (in_encoder if family == "switch" else 0)
    # Everything is either dense, as an encoder's experts are, or a placed expert, once.
    assert sizes.stored_bytes == spec.dense_bytes + spec.total_expert_bytes


@pytest.mark.parametrize("family", [*SERVED, *TEXT_PARTS])
def test_sizes_from_the_configuration_are_those_that_are_served(
    tmp_path: Path, family: str
) -> None:
    """Of what sees or hears too only what reads and writes text, in any way a head is tied."""
    zoo.config_of(family).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    adapter: Any = family_of(family)
    geometry = adapter.geometry(adapter.config(json.loads(path.read_text())))
    nothing = Listing(tmp_path, {})
    served = build_spec(geometry, nothing, name="", model_hash="", dtype=torch.float32)
    sizes = sizes_from_config(path)
    for name in ("layer_count", "top_k", "dense_bytes", "head_flops", "context_length"):
        assert getattr(sizes.spec, name) == getattr(served, name), name
    for name in ("expert_bytes", "expert_flops", "layer_dense_flops"):
        np.testing.assert_array_equal(getattr(sizes.spec, name), getattr(served, name))
    assert 4 * sizes.parameters == served.dense_bytes + served.total_expert_bytes


@pytest.mark.parametrize("family", [*checkpoints.DECODERS, "switch"])
def test_a_position_of_the_cache_takes_what_the_view_takes(tmp_path: Path, family: str) -> None:
    folder = checkpoints.write(family, tmp_path)
    # Compiled views pad heads to sixteen, as those of published models are.
    view = open_model(folder, compiled=False)
    cache = view.new_cache(slots=1)
    slot = cache.alloc()
    if family == "switch":
        view.attach(cache, slot, view.encode([[5]])[0])  # type: ignore[attr-defined]
    batch = view.batch(cache, [slot], [[0]])
    hidden = view.embed(batch.pad([[5]]), batch)
    for layer in range(view.spec.layer_count):
        view.propagate(layer, hidden, batch, cache)
    view.propagate_tail(hidden, batch, cache)
    slabs = cache._slabs.values()
    taken = sum((keys[0, :, 0].nbytes + values[0, :, 0].nbytes) for keys, values in slabs)
    assert sizes_from_config(folder / "config.json").kv_bytes_per_token == taken


@pytest.mark.parametrize(
    ("config", "billions", "gigabytes", "kv_bytes"),
    [
        # Parameters as their makers publish them: 46.7 and 14.3 billion, 0.62 billion.
        (MIXTRAL_8X7B, 46.7, 93.4, 2 * 32 * 8 * 128 * 2),
        (QWEN15_MOE_A27B, 14.3, 28.6, 2 * 24 * 16 * 128 * 2),
        (SWITCH_BASE_8, 0.62, 2.48, 2 * 12 * 12 * 64 * 4),
    ],
)
def test_published_models_have_their_published_sizes(
    tmp_path: Path, config: dict[str, Any], billions: float, gigabytes: float, kv_bytes: int
) -> None:
    sizes = sizes_from_config(written(tmp_path, config))
    per_parameter = 4 if sizes.dtype == "float32" else 2
    assert sizes.stored_bytes / per_parameter / 1e9 == pytest.approx(billions, rel=0.005)
    assert sizes.stored_bytes / GB == pytest.approx(gigabytes, rel=0.005)
    assert sizes.kv_bytes_per_token == kv_bytes
    assert sizes.spec.model_hash == ""


@given(seed=st.integers(0, 2**32 - 1), extra=st.integers(0, 10**6))
def test_what_is_said_to_fit_fits_and_one_expert_more_does_not(seed: int, extra: int) -> None:
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng, unequal=True)
    cluster = random_cluster(rng, servers=3)
    # About as large as the model, so that all, some and none of it fits.
    scarce = (cluster.memory_bytes / cluster.memory_bytes.max() * model.total_expert_bytes).round()
    cluster = replace(cluster, memory_bytes=(scarce * rng.uniform(0.05, 1.5)).astype(np.int64))
    fit = dry_run(cluster, model, kv_reserve_bytes=extra)
    smallest = np.sort(model.expert_bytes, axis=None)
    for server in range(3):
        held = int(fit.experts[server])
        needed = model.dense_bytes + extra + smallest[:held].sum()
        if fit.holds_dense[server]:
            assert needed <= cluster.memory_bytes[server]
        if held < smallest.size:
            assert needed + smallest[held] > cluster.memory_bytes[server]
        assert bool(fit.holds_all[server]) == (held == smallest.size)
    if fit.refusal is None:
        assert fit.copies >= 1.0
    if fit.holds_all.any():
        assert fit.refusal is None
        everything = np.ones((1, *model.expert_bytes.shape), dtype=bool)
        assert used_bytes(everything, model)[0] <= fit.room_bytes.max()


def shown(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_the_command_says_what_fits_where_without_weights_or_profile(tmp_path: Path) -> None:
    path = str(written(tmp_path, QWEN15_MOE_A27B))
    told = shown("--dry-run", "--config", path, str(HOME))
    assert "28.63 GB of weights" in told
    assert "24 MoE layers of 60 experts" in told
    assert "It fits: room for 1.29 copies" in told
    assert "No server holds it alone." in told


def test_the_command_says_what_to_expect_where_memory_has_a_speed(tmp_path: Path) -> None:
    path = str(written(tmp_path, QWEN15_MOE_A27B))
    told = shown("--dry-run", "--config", path, "mini3", "--quantise", "int4")
    assert "as int4 all of it takes 8.05 GB" in told
    assert "tokens a second for one sequence" in told
    assert "nobody has run it" in told
    assert "has a gb_per_s" in shown("--dry-run", "--config", path, str(HOME))


def test_what_serve_refuses_is_not_planned(tmp_path: Path) -> None:
    """With the sentence that opening the model would end in."""
    path = written(tmp_path, {"model_type": "dbrx"})
    with pytest.raises(UserError) as served:
        open_model(tmp_path)
    done = CliRunner().invoke(app, ["plan", "--dry-run", "--config", str(path), str(HOME)])
    assert isinstance(done.exception, UserError)
    assert str(done.exception) == str(served.value)
    assert "cannot serve this dbrx model: it joins norms and attention" in str(served.value)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_decoders_are_planned_in_few_bits_without_a_remark(tmp_path: Path, family: str) -> None:
    zoo.config_of(family).save_pretrained(tmp_path)
    arguments = ("--dry-run", "--config", str(tmp_path / "config.json"), str(HOME))
    told = shown(*arguments, "--quantise", "int4")
    assert "as int4 all of it takes" in told
    assert "not served quantised" not in told


def test_models_with_an_encoder_are_not_served_quantised(tmp_path: Path) -> None:
    path = str(written(tmp_path, SWITCH_BASE_8))
    told = shown("--dry-run", "--config", path, str(HOME), "--quantise", "int4")
    assert "Models with an encoder are not served quantised so far." in told


def test_the_command_says_what_is_short(tmp_path: Path) -> None:
    told = shown("--dry-run", "--config", str(written(tmp_path, MIXTRAL_8X7B)), str(HOME))
    assert "It does not fit." in told
    assert "55.05 GB are short" in told


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "give a model's config.json"),
        ("{", "not valid JSON"),
        ('{"model_type": "nosuch"}', "its model_type is 'nosuch'"),
        ('{"model_type": "gpt2"}', "no block with a module `experts`"),
        ('{"model_type": "inkling2_text"}', "How much Inkling2KeyValueProjection makes of"),
        ('{"model_type": "mixtral", "hidden_size": "wide"}', "not a valid mixtral configuration"),
    ],
)
def test_a_bad_configuration_is_refused_in_a_sentence(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=complaint):
        sizes_from_config(path)


@pytest.mark.parametrize(
    "arguments", [["--dry-run", "x.yaml"], ["--config", "c.json", "x.yaml"], ["profile.trim"]]
)
def test_half_a_command_is_refused(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(done.exception, UserError)
