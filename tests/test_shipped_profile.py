"""The profile that comes with the package: of the model as it is built now, found by whoever
serves or plans it, and left aside, with the reason, where it will not do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from factories import random_profile
from launching import Files, write_files
from trimmoe.core.errors import UserError
from trimmoe.core.profile import load_profile
from trimmoe.core.sample_clusters import sample_path
from trimmoe.core.specs import ModelSpec
from trimmoe.experiments import preparation
from trimmoe.experiments.opening import profile_path
from trimmoe.experiments.sample_text import sample_text
from trimmoe.models.embedded import ensure_embedded_model
from trimmoe.models.embedded.shipped import (
    SHIPPED_PATH,
    pack_profile,
    shipped_profile,
    unpack_profile,
)
from trimmoe.models.load import model_spec
from trimmoe.runtime.launch import artifacts
from trimmoe.runtime.launch.config import ServeConfig

HIDDEN_AXIS = {"centroids": 2, "stand_in_read": 1, "stand_in_give": 3}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def embedded() -> ModelSpec:
    return model_spec(ensure_embedded_model(progress=False), hashed=True)


def test_it_is_of_the_model_that_ships(embedded: ModelSpec, tmp_path: Path) -> None:
    profile = load_profile(shipped_profile(tmp_path))
    profile.require_model(embedded)
    assert profile.layer_count == embedded.layer_count
    assert profile.header.settings["tokens"] >= 20_000
    assert profile.header.extra["dtype"] == "float32"
    assert profile.stand_in_bytes > 0
    assert SHIPPED_PATH.stat().st_size < 5e6


def test_it_is_unpacked_once_and_again_if_that_is_damaged(tmp_path: Path) -> None:
    first = shipped_profile(tmp_path)
    before, written = load_profile(first).hash, first.stat().st_mtime_ns
    assert shipped_profile(tmp_path) == first
    assert first.stat().st_mtime_ns == written
    first.write_bytes(first.read_bytes()[:1000])
    assert load_profile(shipped_profile(tmp_path)).hash == before
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_packing_keeps_all_but_rounds_what_is_large(files: Files, tmp_path: Path) -> None:
    spec = model_spec(files.model, hashed=True)
    plain, packed, back = (tmp_path / name for name in ("plain", "packed", "back"))
    random_profile(np.random.default_rng(5), spec).save(plain)
    pack_profile(plain, packed)
    unpack_profile(packed, back)
    before, after = load_profile(plain), load_profile(back)
    for name in before.__slots__:
        was, now = getattr(before, name), getattr(after, name)
        if name in HIDDEN_AXIS and was is not None:
            assert now.dtype == was.dtype
            wide = was.astype(np.float64)
            size = np.sqrt((wide**2).mean(axis=HIDDEN_AXIS[name], keepdims=True))
            assert (np.abs(now.astype(np.float64) - wide) <= 0.11 * size + 1e-3).all()
        elif isinstance(was, np.ndarray):
            np.testing.assert_array_equal(now, was)
    assert after.model_hash == before.model_hash


def test_a_damaged_one_is_one_sentence(tmp_path: Path) -> None:
    torn = tmp_path / "torn.xz"
    torn.write_bytes(SHIPPED_PATH.read_bytes()[:5000])
    with pytest.raises(UserError, match="install TrimMoE again"):
        unpack_profile(torn, tmp_path / "profile")
    assert [path.name for path in tmp_path.iterdir()] == ["torn.xz"]


def test_commands_find_it_for_the_embedded_model_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMMOE_CACHE", str(tmp_path))
    given = tmp_path / "mine.trim"
    assert profile_path(given, "embedded") == given
    assert profile_path(None, "embedded") == shipped_profile(tmp_path)
    with pytest.raises(UserError, match="only the embedded model"):
        profile_path(None, "mistralai/Mixtral-8x7B-v0.1")
    with pytest.raises(UserError, match="--dtype bfloat16"):
        profile_path(None, "embedded", "bfloat16")


def _served(tmp_path: Path, **more: object) -> tuple[str, list[str]]:
    """Text or settings of the profile that is served with, and what was said."""
    given = {"cluster": sample_path("local4"), "plan_iterations": 0} | more
    said: list[str] = []
    made = preparation.prepare(
        ServeConfig.model_validate(given),
        sample=lambda: sample_text("calibration"),
        say=said.append,
        cache_dir=tmp_path,
    )
    return made.profile.hash, said


@pytest.mark.parametrize("more", [{}, {"budget": 0.1, "confidence": 0.8}, {"quantise": "int8"}])
def test_serving_calibrates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, object]
) -> None:
    monkeypatch.setattr(preparation, "model_folder", lambda _: str(ensure_embedded_model()))
    found, said = _served(tmp_path, **more)
    assert found == load_profile(shipped_profile(tmp_path)).hash
    assert said == ["Planning for local4 ..."]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"text": ("mine.txt",)}, "not made from your text"),
        ({"dtype": "bfloat16"}, "not for bfloat16"),
        ({"calibration_tokens": 1500}, "not made from 1500 tokens"),
    ],
)
def test_where_it_will_not_do_it_is_said_why(
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, object],
    why: str,
) -> None:
    """What is made instead stands in: calibrating takes minutes."""
    (tmp_path / "mine.txt").write_text("Mine.")
    monkeypatch.chdir(tmp_path)
    spare = load_profile(shipped_profile(tmp_path))
    monkeypatch.setattr(preparation, "model_folder", lambda _: str(ensure_embedded_model()))
    monkeypatch.setattr(preparation, "_calibrated", lambda *_: spare)
    _, said = _served(tmp_path, **more)
    assert why in said[0]
    assert said[1].startswith("Calibrating embedded")


def test_another_build_of_the_model_is_calibrated(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (preparation, artifacts):
        monkeypatch.setattr(module, "model_folder", lambda _: str(files.model))
    monkeypatch.setattr(preparation, "_calibrated", lambda *_: load_profile(files.profile))
    found, said = _served(tmp_path, cluster=files.cluster)
    assert "another build" in said[0]
    assert found == load_profile(files.profile).hash
