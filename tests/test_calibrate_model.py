"""Calibration of a tiny random model from end to end, and what-ifs against really doing it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoints
from tiny import EXPERTS, LAYERS, TOP_K, write_tiny_checkpoint
from trimmoe.calibrate import whatif
from trimmoe.calibrate.echoes import Trimmed, flipped_behind
from trimmoe.calibrate.exits import split_windows
from trimmoe.calibrate.head import greedy
from trimmoe.calibrate.record import Recording, record
from trimmoe.calibrate.run import calibrate
from trimmoe.calibrate.sampling import DROP, KEEP, Changes
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.steadiness import NO_CLASS, fit_steadiness
from trimmoe.calibrate.sweep import Known
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.core.errors import UserError
from trimmoe.core.exit_states import ECHOING_STATES
from trimmoe.core.profile import Profile, load_profile
from trimmoe.models.base import MoEView
from trimmoe.models.exact import exact_logits
from trimmoe.models.exit_head import (
    confidence,
    nearest_centroid,
    steadiness,
    steadiness_class,
)
from trimmoe.models.load import load_tokenizer, open_model

_WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "of", "many", "boats"]
_SETTINGS = CalibrationSettings(
    tokens=768,
    window=48,
    skip_samples=120,
    drop_samples=120,
    substitution_samples=120,
    pair_samples=10,
    bins=5,
    centroids=6,
    max_patterns=12,
    exit_agreement=0.0,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[MoEView, Any]:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return open_model(folder, hashed=True), load_tokenizer(folder)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(_WORDS, size=400)) for _ in range(3)]


@pytest.fixture(scope="module")
def profile(model: tuple[MoEView, Any], texts: list[str]) -> Profile:
    return calibrate(*model, texts, _SETTINGS, progress=False)


@pytest.fixture(scope="module")
def windows() -> Windows:
    return Windows(ids=np.random.default_rng(3).integers(0, 250, size=(3, 24)))


def _recorded(view: MoEView, windows: Windows, folder: Path, **asked: Any) -> Recording:
    rest: dict[str, Any] = {"importance": "softmax_mass", "advance": lambda _: None}
    return record(view, windows, folder=folder, **rest, **asked)


def test_recording_is_the_exact_model(
    model: tuple[MoEView, Any], windows: Windows, tmp_path: Path
) -> None:
    view, _ = model
    recording = _recorded(view, windows, tmp_path, least_agreement=0.0, keep_attended=True)
    expected = torch.cat(exact_logits(view, windows.ids.tolist())).argmax(dim=1).numpy()
    assert np.array_equal(recording.predictions, expected)
    assert recording.agrees[-1].all()
    assert recording.hidden.shape == (LAYERS, 72, view.spec.hidden_size)
    np.testing.assert_allclose(recording.importance, recording.masses.sum(axis=2), rtol=1e-5)


def _changes(tokens: list[int], layers: list[int], slots: list[list[int]]) -> Changes:
    return Changes(
        token=np.array(tokens, dtype=np.int64),
        layer=np.array(layers, dtype=np.int64),
        slots=np.array(slots, dtype=np.int64),
    )


def test_what_if_nothing_changes_the_prediction_is_the_full_depth_one(
    model: tuple[MoEView, Any], windows: Windows
) -> None:
    view, _ = model
    expected = torch.cat(exact_logits(view, windows.ids.tolist())).argmax(dim=1).numpy()
    every = list(range(windows.tokens))
    changes = _changes(every, [t % LAYERS for t in every], [[KEEP] * TOP_K] * len(every))
    flipped, measured = _flips(view, windows, changes, expected[changes.token])
    assert measured.all()
    assert not flipped.any()


def test_what_was_recorded_need_not_be_computed_again(
    model: tuple[MoEView, Any], windows: Windows, tmp_path: Path
) -> None:
    """What-ifs and echoes go on from it and find the same."""
    view, _ = model
    recording = _recorded(view, windows, tmp_path, least_agreement=1.1, keep_attended=False)
    every, clean = np.arange(windows.tokens), recording.hidden
    tokens = every.tolist()
    changes = _changes(tokens, [t % LAYERS for t in tokens], [[KEEP, DROP]] * every.size)
    # Half of them are told what is not expected, so that either answer is right somewhere.
    told = recording.predictions + every % 2
    asked = partial(whatif.flips, view, windows, changes, told, advance=lambda _: None)
    assert np.array_equal(asked(clean=clean), asked())

    nothing = Trimmed.nothing(windows.tokens, layers=LAYERS, top_k=TOP_K)
    layer = np.where((every % 5 == 0) & (every >= windows.length), 1 + every % (LAYERS - 1), -1)
    slots = np.full((windows.tokens, TOP_K), DROP)
    trimmed = replace(nothing, layer=layer, slots=slots)
    start = trimmed.start(LAYERS).reshape(windows.count, -1).min(axis=1)
    assert start.tolist() == [LAYERS, 1, 1]
    own = np.arange(windows.count)
    known = Known(hidden=clean, windows=own, first=start, last=start)
    expected = recording.predictions
    whole = flipped_behind(view, windows, trimmed, expected, lambda _: None)
    assert np.array_equal(
        flipped_behind(view, windows, trimmed, expected, lambda _: None, known=known), whole
    )


def _flips(
    view: MoEView, windows: Windows, changes: Changes, expected: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    return whatif.flips(view, windows, changes, expected, advance=lambda _: None)


@torch.inference_mode()
def _really(view: MoEView, ids: np.ndarray, layer: int, slots: list[int]) -> int:
    """Prediction after the sequence when its last token really runs `slots` at `layer`."""
    cache = view.new_cache(slots=1)
    batch = view.batch(cache, [cache.alloc()], [range(ids.size)])
    hidden = view.embed(torch.from_numpy(ids[None]), batch)
    for at in range(view.spec.layer_count):
        flat = batch.pack(view.attend(at, hidden, batch, cache))
        routing = view.route(at, flat)
        experts = routing.experts.clone()
        if at == layer and slots == [DROP] * TOP_K:
            rest = run_layer(view, at, flat[:-1], view.route(at, flat[:-1]), experts[:-1])
            skipped = view.finish(at, flat[-1:], view.shared(at, flat[-1:]), None)
            hidden = batch.unpack(torch.cat([rest, skipped]))
            continue
        if at == layer:
            forced = torch.tensor(slots)
            experts[-1] = torch.where(forced == KEEP, experts[-1], forced)
        hidden = batch.unpack(run_layer(view, at, flat, routing, experts))
    return int(greedy(view, batch.pack(view.tail(hidden, batch, cache))[-1:])[0])


@pytest.mark.parametrize("slots", [[DROP, DROP], [KEEP, DROP], [0, KEEP]])
def test_a_what_if_is_what_really_happens(
    model: tuple[MoEView, Any], windows: Windows, slots: list[int]
) -> None:
    view, _ = model
    tokens = [1, 5, 23, 24, 40, 71]
    pairs = [(token, layer) for token in tokens for layer in range(LAYERS)]
    changes = _changes([t for t, _ in pairs], [at for _, at in pairs], [slots] * len(pairs))
    length = windows.length
    really = np.array(
        [_really(view, windows.ids[t // length, : t % length + 1], at, slots) for t, at in pairs]
    )
    assert not _flips(view, windows, changes, really)[0].any()
    assert _flips(view, windows, changes, really + 1)[0].all()


def test_models_without_what_ifs_are_measured_by_sparse_passes(
    model: tuple[MoEView, Any], windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, _ = model

    def refuse(*_: object) -> None:
        raise NotImplementedError

    last = [23, 47, 71]
    changes = _changes(last * 2, [0, 0, 0, 2, 2, 2], [[DROP] * TOP_K] * 6)
    full = torch.cat(exact_logits(view, windows.ids.tolist())).argmax(dim=1).numpy()
    expected, _ = _flips(view, windows, changes, full[changes.token])
    monkeypatch.setattr(view, "attend_whatif", refuse)
    found, measured = _flips(view, windows, changes, full[changes.token])
    assert measured.all()
    # A window's last token meets only clean neighbours when nothing else changes in its pass.
    assert np.array_equal(found, expected)
    many = _changes(list(range(24)) * 9, [1] * 216, [[DROP] * TOP_K] * 216)
    _, measured = _flips(view, windows, many, full[many.token])
    assert 0 < measured.sum() < 216


def test_an_exit_is_charged_its_echo_too(profile: Profile) -> None:
    own = profile.exit_error_upper
    assert ((own >= 0) & (own <= 1)).all()
    assert (profile.exit_echo > 0).all()
    for state, echo in zip(ECHOING_STATES, profile.exit_echo, strict=True):
        assert np.array_equal(profile.exit_bound(state), own + echo)


def test_changes_cost_their_echo_too_unless_nothing_is_changed(profile: Profile) -> None:
    skip, drop, substitution = profile.change_echo.T
    assert (profile.change_echo > 0).all()
    assert (np.diff(profile.change_echo, axis=0) <= 0).all()
    echoing = profile.echoing()
    assert np.array_equal(
        echoing.skip.upper, np.minimum(profile.skip.upper + skip[:, None, None], 1.0)
    )
    assert np.array_equal(
        echoing.drop.upper, np.minimum(profile.drop.upper + drop[:, None, None], 1.0)
    )
    raised = echoing.substitution_loss - profile.substitution_loss
    same = np.eye(EXPERTS, dtype=bool)
    assert (raised[..., same] == 0).all()
    apart = np.broadcast_to(substitution[:, None, None, None], raised[..., ~same].shape)
    uncapped = echoing.substitution_loss[..., ~same] < 1.0
    assert np.allclose(raised[..., ~same][uncapped], apart[uncapped])
    assert np.array_equal(echoing.echoing().skip.upper, echoing.skip.upper)


def test_the_profile_is_whole(profile: Profile) -> None:
    assert profile.layer_count == LAYERS
    assert profile.expert_count == EXPERTS
    assert profile.top_k == TOP_K
    for curves in (profile.skip, profile.drop):
        assert curves.edges.shape == curves.upper.shape == (LAYERS, 4, 5)
        assert (np.diff(curves.upper, axis=2) >= 0).all()
        assert (curves.upper >= curves.mean).all()
        assert (np.diff(curves.upper, axis=1) <= 0).all()
        assert (curves.samples.sum(axis=(1, 2)) >= 120).all()
    assert profile.substitution_loss.shape == (LAYERS, 4, 2, EXPERTS, EXPERTS)
    for layer, rank in np.ndindex(LAYERS, 2):
        losses = profile.substitution_loss[layer, :, rank]
        seen = profile.substitution_samples[layer, :, rank].any(axis=(1, 2))
        assert (np.diff(losses[seen], axis=0) <= 0).all(), "the steadier, the less is lost"
        assert (losses[~seen][:, ~np.eye(EXPERTS, dtype=bool)] == 1).all(), "nothing is known"
    assert profile.steady_edges.shape == (LAYERS, 3)
    assert (np.diff(profile.steady_edges, axis=1) > 0).all()
    np.testing.assert_allclose(profile.class_share, [[0.6, 0.24, 0.096, 0.064]] * LAYERS, atol=0.01)
    assert profile.exit_hazard.shape == (LAYERS + 1, LAYERS)
    assert (profile.exit_hazard[:, -1] == 1.0).all()
    assert profile.draft_hazard is not None
    assert profile.draft_hazard.shape == profile.exit_hazard.shape
    assert (profile.draft_hazard[:, -1] == 1.0).all()
    for rows in (
        profile.expert_transitions,
        profile.pattern_transitions,
        profile.pattern_share,
    ):
        np.testing.assert_allclose(rows.sum(axis=-1), 1.0)
    np.testing.assert_allclose(profile.activated.sum(axis=1), TOP_K)
    assert (np.diff(profile.active) <= 0).all()
    assert np.isfinite(profile.exit_weight).all()
    norms = np.linalg.norm(profile.centroids, axis=2)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-5)
    assert profile.header.extra["control_flip_rate"] == 0.0
    assert profile.header.extra["tokens"] == 768
    assert profile.header.extra["exit_table"][0][0] == 0.5


def test_profiles_survive_the_disk_and_refuse_other_models(
    profile: Profile, model: tuple[MoEView, Any], tmp_path: Path
) -> None:
    profile.save(tmp_path / "p.safetensors")
    loaded = load_profile(tmp_path / "p.safetensors")
    assert loaded.hash == profile.hash
    loaded.require_model(model[0].spec)
    with pytest.raises(UserError, match="trimmoe calibrate"):
        loaded.require_model(replace(model[0].spec, model_hash="0" * 64))


def test_calibration_is_determined_by_its_seed(
    profile: Profile, model: tuple[MoEView, Any], texts: list[str], tmp_path: Path
) -> None:
    again = calibrate(*model, texts, _SETTINGS, work_dir=tmp_path / "kept", progress=False)
    assert again.hash == profile.hash
    assert (tmp_path / "kept" / "hidden").is_file()
    other = calibrate(*model, texts, replace(_SETTINGS, seed=1), progress=False)
    assert other.hash != profile.hash


def test_one_class_is_the_letter(model: tuple[MoEView, Any], texts: list[str]) -> None:
    letter = replace(_SETTINGS, steadiness_classes=1, neighbour_layers=0)
    found = calibrate(*model, texts, letter, progress=False)
    assert found.class_count == 1
    assert found.skip.upper.shape == (LAYERS, 1, 5)
    assert (found.class_share == 1.0).all()
    assert (found.skip.samples.sum(axis=(1, 2)) >= 120).all()
    assert (found.skip.samples.sum(axis=(1, 2)) < 130).all()


@torch.inference_mode()
def test_heads_find_what_foretells_certainty_and_cut_classes_by_it(
    model: tuple[MoEView, Any], tmp_path: Path
) -> None:
    view, _ = model
    ids = np.random.default_rng(5).integers(0, 250, size=(24, 24))
    windows = Windows(ids=ids)
    recording = _recorded(view, windows, tmp_path, least_agreement=0.0, keep_attended=True)
    assert recording.attended is not None
    # A random model says nothing of how sure it will be; let what the last router reads say it.
    direction = torch.randn(view.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    sure = steadiness(recording.attended[-1], direction, -20.0).numpy()
    sure += np.random.default_rng(6).normal(size=sure.size, scale=sure.std() / 4)
    recording = replace(recording, log_probability=sure.astype(np.float32))
    splits = split_windows(recording.windows, 0)
    found = fit_steadiness(recording, splits, 4, lambda _: None)
    assert recording.attended is not None
    assert (found.class_of[:, splits.train] == NO_CLASS).all()
    held = np.concatenate([splits.calibration, splits.test])
    assert (found.class_of[:, held] >= 0).all()
    for layer in range(LAYERS):
        # The runtime scores one state at a time by the same function.
        weight, bias = torch.from_numpy(found.weight[layer]), float(found.bias[layer])
        edges = torch.from_numpy(found.edges[layer])
        for token in held[:5]:
            score = steadiness(recording.attended[layer, token : token + 1], weight, bias)
            assert steadiness_class(score, edges).item() == found.class_of[layer, token]
    assert found.explained[-1] > 0.7
    means = [sure[held][found.class_of[-1, held] == index].mean() for index in range(4)]
    assert (np.diff(means) > 0).all()


def test_gates_as_importance_follow_the_letter(
    model: tuple[MoEView, Any], texts: list[str], profile: Profile
) -> None:
    found = calibrate(*model, texts, replace(_SETTINGS, importance="gates"), progress=False)
    # This model does not renormalise, so both readings agree but for rounding.
    np.testing.assert_allclose(found.importance_quantiles, profile.importance_quantiles, atol=1e-3)


def test_too_little_text_and_unwritable_folders_are_refused(
    model: tuple[MoEView, Any], texts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="the least"):
        calibrate(*model, ["too short"], _SETTINGS, progress=False)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="working directory"):
        calibrate(*model, texts, _SETTINGS, work_dir=tmp_path / "file", progress=False)


def test_temporary_files_go_also_when_calibration_fails(
    model: tuple[MoEView, Any],
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("stopped")

    monkeypatch.setattr("trimmoe.calibrate.run.calibrate_exits", fail)
    with pytest.raises(RuntimeError, match="stopped"):
        calibrate(*model, texts, _SETTINGS, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_exit_confidence_and_centroids_read_the_direction_alone() -> None:
    hidden = torch.randn(9, 8)
    weight = torch.randn(8)
    one, many = confidence(hidden[:1], weight, 0.3), confidence(hidden, weight, 0.3)
    assert torch.equal(one, many[:1])
    torch.testing.assert_close(confidence(5 * hidden, weight, 0.3), many)
    centroids = torch.nn.functional.normalize(hidden[:4], dim=1)
    assert nearest_centroid(3 * hidden[:4], centroids).tolist() == [0, 1, 2, 3]
    assert confidence(torch.zeros(1, 8), weight, 0.0).item() == 0.5


@pytest.mark.slow
def test_the_embedded_model_calibrates(texts: list[str]) -> None:
    from trimmoe.models.embedded import ensure_embedded_model

    path = ensure_embedded_model(progress=False)
    prose = Path(np.__file__).parent.joinpath("__init__.py").read_text(encoding="utf-8")
    settings = CalibrationSettings(
        tokens=96,
        window=32,
        rung_tokens=0,
        stand_in_rank=0,
        skip_samples=8,
        drop_samples=4,
        substitution_samples=4,
        exit_agreement=0.3,
    )
    view = open_model(path, hashed=True, dtype=torch.float32)
    found = calibrate(view, load_tokenizer(path), [prose * 2, *texts], settings, progress=False)
    assert found.model_hash == view.spec.model_hash
    assert found.header.extra["control_flip_rate"] < 0.005
    mean = np.average(found.skip.mean, weights=found.skip.samples)
    assert found.class_count == 4
    assert 0.0 < mean < 0.3


@pytest.mark.parametrize("family", ["switch", "mixtral"])
def test_other_families_calibrate(
    family: str, model: tuple[MoEView, Any], texts: list[str], tmp_path: Path
) -> None:
    class Folded:
        """The byte tokenizer, its ids folded into the small vocabulary."""

        pad_token_id = 0

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            ids = model[1](text)["input_ids"]
            return {"input_ids": [token % 60 + 1 for token in ids]}

    view = open_model(checkpoints.write(family, tmp_path), hashed=True)
    settings = replace(_SETTINGS, tokens=480, window=32, skip_samples=40, drop_samples=40)
    found = calibrate(view, Folded(), texts, settings, progress=False)
    assert found.layer_count == view.spec.layer_count
    assert (found.skip.samples.sum(axis=(1, 2)) > 0).all()
    if view.spec.top_k == 1:
        assert np.array_equal(found.drop.upper, found.skip.upper)
    if view.spec.gates_renormalised:
        assert (found.importance_quantiles < 1.0).all()
