"""Calibration from disk: the profile of the whole model with the experts of one layer in memory."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import checkpoints
from public_configs import MIXTRAL_8X7B, QWEN15_MOE_A27B, cut
from tiny import write_tiny_checkpoint
from trimmoe.calibrate.run import calibrate
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.sweep import Sweep
from trimmoe.calibrate.trace import TraceSettings, record_trace
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.core.errors import UserError
from trimmoe.core.profile import Profile
from trimmoe.models.base import MoEView
from trimmoe.models.exact import exact_logits
from trimmoe.models.experts import ExpertStacks
from trimmoe.models.load import load_tokenizer, open_model

_WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "of", "many", "boats"]
_SETTINGS = CalibrationSettings(
    tokens=768,
    window=48,
    skip_samples=40,
    drop_samples=40,
    substitution_samples=40,
    bins=5,
    centroids=6,
    max_patterns=12,
    exit_agreement=0.0,
)
SWEEPS = 4
"""Recording, echoes, what-ifs and stand-ins."""


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(_WORDS, size=400)) for _ in range(3)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


class Letters:
    """A token for every letter, which any vocabulary has room for."""

    pad_token_id = 0

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 60 + 1 for letter in text]}


@pytest.fixture
def layers_used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers in the order in which experts were asked for; no other may be in memory then."""
    used: list[int] = []
    plain = ExpertStacks.__getitem__

    def watched(self: ExpertStacks, layer: int) -> Any:
        found = plain(self, layer)
        assert self.held == {layer}
        used.append(layer)
        return found

    monkeypatch.setattr(ExpertStacks, "__getitem__", watched)
    return used


def _profile(view: MoEView, texts: list[str], tokenizer: Any = None) -> Profile:
    return calibrate(view, tokenizer or Letters(), texts, _SETTINGS, progress=False)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "mixtral_window", "qwen2_moe", "switch"])
def test_streamed_calibration_gives_the_same_profile(
    family: str, fused: bool, texts: list[str], tmp_path: Path
) -> None:
    path = checkpoints.write(family, tmp_path, fused=fused)
    whole = _profile(open_model(path, hashed=True, compiled=False), texts)
    streamed = _profile(open_model(path, hashed=True, streamed=True), texts)
    assert streamed.hash == whole.hash


@pytest.mark.parametrize(("family", "sides"), [("mixtral", 1), ("switch", 2)])
def test_every_layer_is_read_once_a_sweep_and_alone_in_memory(
    family: str, sides: int, texts: list[str], tmp_path: Path, layers_used: list[int]
) -> None:
    """Where there is an encoder, its layers are met before the decoder's, but for stand-ins, of
    which it has none."""
    view = open_model(checkpoints.write(family, tmp_path), hashed=True, streamed=True)
    _profile(view, texts)
    turns = [layer for layer, _ in groupby(layers_used)]
    sweeps = (SWEEPS - 1) * sides + 1
    assert turns == sweeps * list(range(view.spec.layer_count))
    assert view.bytes_read.experts == sweeps * view.spec.total_expert_bytes


@pytest.mark.parametrize("config", [MIXTRAL_8X7B, QWEN15_MOE_A27B], ids=["mixtral", "qwen"])
def test_a_cut_published_model_calibrates_from_disk(
    config: dict[str, Any], texts: list[str], tmp_path: Path, layers_used: list[int]
) -> None:
    smaller = cut(config, layers=3, experts=8, shrink=32)
    kind = transformers.AutoConfig.for_model(**smaller, initializer_range=0.1)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    view = open_model(tmp_path, hashed=True, streamed=True)
    assert view.dtype == torch.bfloat16
    found = _profile(view, texts)
    assert found.layer_count == 3
    assert found.expert_count == 8
    assert (found.skip.samples.sum(axis=(1, 2)) >= 40).all()
    assert view.bytes_read.experts <= SWEEPS * view.spec.total_expert_bytes
    assert layers_used[0] == 0


@torch.inference_mode()
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_a_sweep_is_the_exact_model_with_the_keys_of_one_layer_at_a_time(
    tiny: Path, at_once: int, tmp_path: Path
) -> None:
    view = open_model(tiny)
    windows = Windows(ids=np.random.default_rng(3).integers(0, 250, size=(5, 24)))
    sweep = Sweep(view, windows, at_once=at_once, folder=tmp_path)
    parts, order, ended = -(-5 // at_once), [], []
    one_layer = None
    for visit in sweep.visits():
        order.append((visit.layer, visit.part))
        one_layer = one_layer or visit.cache.bytes
        assert visit.cache.bytes == one_layer
        routing = view.route(visit.layer, visit.attended, groups=visit.groups)
        after = run_layer(view, visit.layer, visit.attended, routing, routing.experts)
        sweep.leave(visit, after)
        if visit.is_last:
            ended.append(view.logits(sweep.tail(visit, after)))
    assert order == [(layer, part) for layer in range(4) for part in range(parts)]
    expected = torch.cat(exact_logits(view, windows.ids.tolist()))
    torch.testing.assert_close(torch.cat(ended), expected, atol=1e-4, rtol=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("family", "sides"), [("mixtral", 1), ("switch", 2)])
def test_recording_a_trace_reads_every_layer_once_however_many_windows(
    family: str, sides: int, texts: list[str], tmp_path: Path
) -> None:
    path = checkpoints.write(family, tmp_path)
    whole, view = (
        open_model(path, hashed=True, compiled=False),
        open_model(path, hashed=True, streamed=True),
    )
    profile = _profile(whole, texts)
    settings, done = TraceSettings(tokens=1400, length=40), list[int]()
    trace = record_trace(view, Letters(), 4 * texts, profile, settings, done.append)
    assert view.bytes_read.experts == sides * view.spec.total_expert_bytes
    assert len(done) == 2 * trace.layer_count, "too many windows to run at once"
    assert sum(done) == trace.layer_count * trace.token_count
    assert record_trace(whole, Letters(), 4 * texts, profile, settings).hash == trace.hash


def test_a_full_disk_is_said_in_one_sentence_and_leaves_nothing(
    tiny: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    view = open_model(tiny, hashed=True)
    with pytest.raises(
        UserError, match=r"needs 0\.00 GB more on the disk .*; make room, let TMPDIR"
    ):
        _profile(view, texts, load_tokenizer(tiny))
    assert list(tmp_path.iterdir()) == []


def test_one_exit_threshold_without_exits_is_a_whole_flip(tiny: Path, texts: list[str]) -> None:
    """All echoes share a sweep; a threshold that lets nobody leave takes no part."""
    strict = replace(_SETTINGS, exit_agreement=1.0)
    view = open_model(tiny, hashed=True, streamed=True)
    found = calibrate(view, load_tokenizer(tiny), texts, strict, progress=False)
    assert (found.exit_echo >= 1.0).all()
    assert (found.change_echo < 1.0).any()
    assert view.bytes_read.experts == SWEEPS * view.spec.total_expert_bytes
