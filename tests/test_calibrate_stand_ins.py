"""The linear maps that stand in for experts: what they find, and what they must not make up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from factories import random_profile
from tiny import write_tiny_checkpoint
from trimmoe.calibrate.record import Recording, record
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.stand_ins import StandIns, fit_stand_ins, linear_map
from trimmoe.calibrate.text import token_windows
from trimmoe.calibrate.windows import Windows
from trimmoe.core.profile import Profile, load_profile
from trimmoe.experiments.sample_text import sample_text
from trimmoe.models.base import MoEView
from trimmoe.models.load import load_tokenizer, open_model
from trimmoe.runtime.home import Own, home_pass, stand_ins

WIDTH = 12


def recorded(view: MoEView, windows: Windows, folder: Path) -> Recording:
    return record(
        view,
        windows,
        importance="softmax_mass",
        least_agreement=1.1,
        keep_attended=True,
        folder=folder,
        advance=lambda _: None,
    )


def fitted(view: MoEView, windows: Windows, folder: Path, rank: int) -> StandIns:
    settings = CalibrationSettings(stand_in_rank=rank)
    return fit_stand_ins(view, recorded(view, windows, folder), settings, lambda _: None)


def with_them(view: MoEView, found: StandIns) -> Profile:
    return replace(
        random_profile(np.random.default_rng(0), view.spec),
        stand_in_read=found.stand_in_read,
        stand_in_give=found.stand_in_give,
    )


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_linear_map_of_the_rank_asked_for_is_found() -> None:
    read, unseen = draw(400, WIDTH, seed=0), torch.arange(400) % 4 == 3
    truth = draw(WIDTH, 2, seed=1) @ draw(2, WIDTH, seed=2)
    first, second = linear_map(read, read @ truth, unseen, 2)
    assert first.shape == second.shape == (2, WIDTH)
    torch.testing.assert_close(first.T @ second, truth, rtol=0.02, atol=0.02)


def test_of_a_map_of_more_directions_the_strongest_are_kept() -> None:
    read, unseen = draw(4000, WIDTH, seed=0), torch.arange(4000) % 4 == 3
    left, _, right = torch.linalg.svd(draw(WIDTH, WIDTH, seed=1))
    strong = left[:, :2] @ right[:2] * 5.0
    weak = left[:, 2:5] @ right[2:5] * 0.5
    first, second = linear_map(read, read @ (strong + weak), unseen, 2)
    torch.testing.assert_close(first.T @ second, strong, rtol=0.0, atol=0.2)


def test_what_holds_only_where_it_was_fitted_is_not_believed() -> None:
    """As many tokens as numbers: noise is fitted to the letter, and predicts nothing."""
    read, noise = draw(16, WIDTH, seed=0), draw(16, WIDTH, seed=1)
    first, second = linear_map(read, noise, torch.arange(16) % 4 == 3, WIDTH)
    assert (read @ first.T @ second).norm() < 0.3 * noise.norm()


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_is_made_of_next_to_no_tokens(count: int) -> None:
    read = draw(count, WIDTH, seed=0)
    first, second = linear_map(read, read, torch.zeros(count, dtype=torch.bool), 3)
    assert first.shape == second.shape == (3, WIDTH)
    assert not first.any()
    assert not second.any()


def test_few_tokens_say_little_whatever_the_rank() -> None:
    """Directions that they do not have are zeros."""
    read = draw(6, WIDTH, seed=0)
    unseen = torch.arange(6) % 4 == 3
    first, second = linear_map(read, 2.0 * read, unseen, 10)
    assert first.shape == second.shape == (10, WIDTH)
    assert second[:5].any(dim=1).all()
    assert not second[5:].any()


def test_every_expert_has_one_and_it_comes_near_to_it(tmp_path: Path) -> None:
    """On what was recorded: nearer to what the experts give than nothing is."""
    view = open_model(write_tiny_checkpoint(tmp_path / "tiny"))
    ids = np.random.default_rng(0).integers(0, 250, size=(16, 48))
    recording = recorded(view, Windows(ids=ids), tmp_path)
    found = fit_stand_ins(view, recording, CalibrationSettings(stand_in_rank=4), lambda _: None)
    spec = view.spec
    assert found.stand_in_read.shape == (spec.layer_count, spec.hidden_size, spec.expert_count, 4)
    assert found.stand_in_give.shape == (spec.layer_count, spec.expert_count, 4, spec.hidden_size)
    stands_in = stand_ins(view, with_them(view, found))
    assert stands_in is not None
    assert recording.attended is not None
    for layer, attended in enumerate(recording.attended.float()):
        routing = view.route(layer, attended)
        given = view.experts(layer, attended, routing.experts, routing.gates)
        nowhere = torch.zeros_like(routing.experts, dtype=torch.bool)
        taken = stands_in.add(layer, routing, nowhere)
        assert (given - taken).norm() < 0.97 * given.norm()


def test_profiles_keep_them_or_do_without(tmp_path: Path) -> None:
    view = open_model(write_tiny_checkpoint(tmp_path / "tiny"))
    ids = np.random.default_rng(0).integers(0, 250, size=(4, 24))
    profile = with_them(view, fitted(view, Windows(ids=ids), tmp_path, rank=2))
    without = replace(profile, stand_in_read=None, stand_in_give=None)
    for one in (profile, without):
        one.save(tmp_path / "profile")
        assert load_profile(tmp_path / "profile").hash == one.hash
    assert load_profile(tmp_path / "profile").stand_in_read is None
    assert without.hash != profile.hash


@pytest.mark.slow
def test_the_embedded_model_guesses_better_with_them(tmp_path: Path) -> None:
    """With one expert of eight in each layer, on text that nothing was fitted on."""
    from trimmoe.models.embedded import ensure_embedded_model

    path = ensure_embedded_model(progress=False)
    view, tokenizer = open_model(path, dtype=torch.float32), load_tokenizer(path)
    cut = partial(token_windows, tokenizer=tokenizer, window=128, seed=0)
    fitting = cut([sample_text("calibration")], tokens=128)
    unseen = cut([sample_text("held-out")], tokens=256)
    found = fitted(view, Windows(ids=fitting), tmp_path, rank=16)
    held = torch.zeros(view.spec.layer_count, view.spec.expert_count, dtype=torch.bool)
    right = {}
    for name, here, others in (
        ("whole", ~held, None),
        ("alone", held.index_fill(1, torch.tensor([0]), True), None),
        ("with", held.index_fill(1, torch.tensor([0]), True), found),
    ):
        stands_in = None if others is None else stand_ins(view, with_them(view, others))
        cache = view.new_cache(slots=len(unseen))
        batch = view.batch(cache, range(len(unseen)), [range(unseen.shape[1])] * len(unseen))
        made = home_pass(view, unseen.tolist(), batch, cache, Own.of(view, here, stands_in))
        right[name] = np.array([guess.token for guess in made])
    alone, helped = (np.mean(right[name] == right["whole"]) for name in ("alone", "with"))
    assert helped > alone + 0.01
