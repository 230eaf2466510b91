"""What experts read: measured in calibration, kept in profiles, and what copies are fitted to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from factories import random_profile
from test_calibrate_stand_ins import recorded
from tiny import write_tiny_checkpoint
from trimmoe.calibrate.inputs import input_squares, measures_inputs, routed
from trimmoe.calibrate.windows import Windows
from trimmoe.core.errors import UserError
from trimmoe.core.profile import load_profile
from trimmoe.core.stand_ins import ASCENDING, numbered
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.load import open_model

IDS = np.random.default_rng(0).integers(0, 250, size=(6, 32))


@pytest.fixture
def view(tmp_path: Path) -> CompiledView:
    opened = open_model(write_tiny_checkpoint(tmp_path / "tiny"))
    assert isinstance(opened, CompiledView)
    return opened


def copies_of(view: CompiledView, bits: int) -> torch.Tensor:
    """What copies of all experts of the second layer give for some states."""
    shape = (view.spec.layer_count, view.spec.expert_count)
    assert view.have_copies(np.full(shape, bits))
    states = torch.randn(5, view.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    number = torch.from_numpy(numbered(np.full(shape, bits))[1])
    slots = number.expand(5, -1)
    return view.experts(1, states, slots, torch.ones(slots.shape))


def squares_of(view: CompiledView) -> np.ndarray:
    profile = random_profile(np.random.default_rng(0), view.spec)
    assert profile.input_squares is not None
    return profile.input_squares


def test_squares_are_those_of_what_experts_read(view: CompiledView, tmp_path: Path) -> None:
    recording, told = recorded(view, Windows(ids=IDS), tmp_path), []
    assert measures_inputs(view, recording)
    assert not measures_inputs(view, replace(recording, attended=None))
    found = input_squares(view, recording, told.append)
    assert sum(told) == view.spec.layer_count
    attended, routing = routed(view, recording, 2)
    norm = attended / attended.square().mean(1, keepdim=True).sqrt()
    ratio = routing.normed / norm
    assert ratio.std(0).max() < 0.02 * ratio.abs().mean(), "what the norm before experts gives"
    counts = routing.gates.square().sum(1)
    by_hand = sum(c * row.square() for c, row in zip(counts, routing.normed, strict=True))
    np.testing.assert_allclose(found[2], (by_hand / counts.sum()).numpy(), rtol=1e-3)


def test_profiles_keep_them_and_those_before_have_none(view: CompiledView, tmp_path: Path) -> None:
    profile, path = random_profile(np.random.default_rng(0), view.spec), tmp_path / "p.trim"
    profile.save(path)
    again = load_profile(path).input_squares
    assert again is not None
    np.testing.assert_array_equal(again, squares_of(view))
    replace(profile, input_squares=None).save(path)
    assert load_profile(path).input_squares is None
    replace(profile, input_squares=-squares_of(view)).save(path)
    with pytest.raises(UserError, match="damaged"):
        load_profile(path)


@pytest.mark.parametrize("bits", ASCENDING)
def test_copies_are_the_same_whoever_makes_them(
    view: CompiledView, tmp_path: Path, bits: int
) -> None:
    """Of experts that are loaded, and by a server that was opened without them."""
    plain, squares = copies_of(view, bits), squares_of(view)
    view.fit_copies(squares)
    fitted = copies_of(view, bits)
    assert torch.equal(fitted, plain) == (bits == 8), "eight bits are rounded to nearest"
    shape = (view.spec.layer_count, view.spec.expert_count)
    server = open_model(
        tmp_path / "tiny",
        experts={layer: [] for layer in range(view.spec.layer_count)},
        stand_ins=np.full(shape, bits),
        input_squares=squares,
    )
    assert isinstance(server, CompiledView)
    assert torch.equal(copies_of(server, bits), fitted)


def test_who_computes_with_copies_keeps_those_that_he_has(view: CompiledView) -> None:
    shape = (view.spec.layer_count, view.spec.expert_count)
    nothing, bits = np.zeros(shape, dtype=bool), np.full(shape, 2)
    cache = view.new_cache(slots=1)
    batch = view.batch(cache, [cache.alloc()], [range(3)])
    states = torch.randn(3, view.spec.hidden_size, generator=torch.Generator().manual_seed(0))

    def through(hand: object) -> torch.Tensor:
        return view.run_home(0, 2, states, batch, cache, hand)  # type: ignore[arg-type]

    before = view.at_hand(nothing, bits)
    found = through(before)
    view.fit_copies(squares_of(view))
    held = view._tables.size_bytes
    after = view.at_hand(nothing, bits)
    assert view._tables.size_bytes > held
    assert torch.equal(through(before), found)
    assert not torch.equal(through(after), found)
    view.fit_copies(squares_of(view).copy())
    assert view._tables.experts[0, numbered(bits)[0, 0], 0] != 0, "the same as before"
