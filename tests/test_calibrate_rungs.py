"""What copies in few bits lose that stand in for experts: how it is counted and bounded."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from factories import random_profile
from test_calibrate_stand_ins import recorded
from tiny import write_tiny_checkpoint
from trimmoe.calibrate.rungs import bounded, measure_rungs, measures_rungs, rung_steps
from trimmoe.calibrate.sampling import Classes
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.windows import Windows
from trimmoe.core.artifact import load_artifact, save_artifact
from trimmoe.core.errors import UserError
from trimmoe.core.loss_curves import LossCurves, Rung
from trimmoe.core.profile import PROFILE_FORMAT, PROFILE_KIND, load_profile
from trimmoe.core.stand_ins import ASCENDING, RUNGS
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.load import open_model


@given(seed=st.integers(0, 10**6))
def test_bounds_are_in_order_and_never_below_what_the_data_refute(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = rng.integers(0, 4000, size=(3, 2))
    flips = rng.binomial(slots, rng.choice([0.0, 1e-3, 0.05], size=(3, 2)))
    upper = bounded(flips, slots, 0.95)
    assert ((upper > 0) & (upper <= 1)).all()
    assert (np.diff(upper, axis=1) >= 0).all()
    seen = slots.sum(1).cumsum() > 0
    assert (np.diff(upper[seen], axis=0) <= 0).all()
    assert (upper[~seen] == 1).all()


def test_a_class_of_few_leans_on_those_that_flip_more_easily() -> None:
    slots = np.array([[50_000, 50_000], [10, 10]])
    alone = bounded(np.zeros((1, 2), dtype=int), slots[1:], 0.95)
    upper = bounded(np.array([[5, 20], [0, 0]]), slots, 0.95)
    assert (alone > 0.1).all()
    assert (upper[1] < 0.001).all()
    assert upper[0, 0] < upper[0, 1]


def test_a_class_out_of_order_is_bounded_by_its_own_count() -> None:
    slots = np.array([[50_000, 50_000], [1000, 1000]])
    assert (bounded(np.array([[5, 20], [50, 50]]), slots, 0.95)[1] > 0.05).all()


def test_fewer_bits_lose_more_and_profiles_keep_it(tmp_path: Path) -> None:
    view = open_model(write_tiny_checkpoint(tmp_path / "tiny"))
    ids = np.random.default_rng(0).integers(0, 250, size=(24, 32))
    recording = recorded(view, Windows(ids=ids), tmp_path)
    settings, steps = CalibrationSettings(rung_tokens=20 * 32), []
    classes = Classes(class_of=np.zeros((4, ids.size), dtype=np.int64), count=2)
    assert measures_rungs(view, settings)
    assert not measures_rungs(view, replace(settings, rung_tokens=0))
    assert isinstance(view, CompiledView)
    held = view._tables.size_bytes
    rungs = measure_rungs(view, recording, classes, settings, steps.append)
    assert view._tables.size_bytes == held, "copies are let go of"
    assert sum(steps) == rung_steps(recording, settings)
    assert [rung.bits for rung in rungs] == list(ASCENDING)
    lost = [float(rung.curves.mean[:, 0].mean()) for rung in rungs]
    assert all(few > more for few, more in pairwise(lost))
    assert lost[-1] > 0
    for rung in rungs:
        curves = rung.curves
        assert (curves.mean <= curves.upper).all()
        assert (curves.samples[:, 0] > 0).all()
        assert not curves.samples[:, 1].any()
        assert (curves.upper[:, 1] <= curves.upper[:, 0]).all()
    profile = replace(random_profile(np.random.default_rng(0), view.spec), rungs=rungs)
    profile.save(tmp_path / "p.trim")
    again = load_profile(tmp_path / "p.trim")
    assert again.hash == profile.hash != replace(profile, rungs=()).hash
    np.testing.assert_array_equal(again.rungs[1].curves.upper, rungs[1].curves.upper)


def test_half_a_rung_is_refused(tmp_path: Path) -> None:
    view = open_model(write_tiny_checkpoint(tmp_path / "tiny"))
    path = tmp_path / "p.trim"
    random_profile(np.random.default_rng(0), view.spec).save(path)
    header, arrays = load_artifact(path, kind=PROFILE_KIND, format_version=PROFILE_FORMAT)
    for bits in RUNGS:
        save_artifact(path, header, {n: a for n, a in arrays.items() if n != f"rung{bits}.upper"})
        with pytest.raises(UserError, match="damaged"):
            load_profile(path)


def rung_of(loss: float, *, layers: int = 5) -> Rung:
    """Of slots that all flip as much, in two classes and two bins of mass."""
    shape = layers, 2, 2
    edges = np.broadcast_to([0.5, 1.0], shape)
    losses, samples = np.full(shape, loss), np.ones(shape, dtype=np.int64)
    curves = LossCurves(edges=edges, mean=losses, upper=losses, samples=samples)
    return Rung(bits=4, curves=curves)


def test_a_copy_is_charged_what_it_flips_where_the_budget_is_run_up() -> None:
    """Five layers of four slots, half of which flip 0.2 together; a budget of 0.1 are a quarter of
    those, each of which flips twice as much."""
    rung, share = rung_of(0.02), np.full((5, 2), 0.5)
    assert rung.within(0.1, share, 4).upper == pytest.approx(0.04)
    assert rung.within(0.05, share, 4).upper == pytest.approx(0.08)
    for enough in (0.2, 0.5, 0.0):
        assert rung.within(enough, share, 4).upper == pytest.approx(0.02)
    assert rung.within(0.1, share, 4).mean == pytest.approx(0.02)


@given(loss=st.floats(1e-5, 0.05), budget=st.floats(1e-4, 1.0), width=st.integers(1, 8))
def test_what_the_charges_allow_flips_no_more_than_the_budget(
    loss: float, budget: float, width: int
) -> None:
    """By the law that noise adds up as its root, of which half of all slots are measured."""
    layers, half = 5, 5 * width / 2
    charged = rung_of(loss).within(budget, np.full((layers, 2), 0.5), width)
    assume(float(charged.upper.max()) < 1)  # More than that nobody is charged, nor can pay.
    copies = min(budget / float(charged.upper.flat[0]), half)
    assert loss * half * np.sqrt(copies / half) <= budget * (1 + 1e-9)
