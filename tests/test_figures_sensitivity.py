"""The sweep over the generator's parameters: every one of them, one at a time, still valid."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest

from factories import random_model_spec
from test_figures_suite import tiny_world
from trimmoe.experiments.figures.bench import Bench
from trimmoe.experiments.figures.sensitivity import (
    PLACES,
    Sensitivity,
    base_parameters,
    variations,
)
from trimmoe.experiments.figures.world import generated_world, quick
from trimmoe.experiments.random_clusters import paper_cluster
from trimmoe.simulator.fit import fit_parameters
from trimmoe.simulator.generate import Parameters
from trimmoe.simulator.generated_profile import generate_profile

NAMES = [item.name for item in fields(Parameters)]


def test_every_parameter_is_changed_both_ways_and_alone() -> None:
    base = asdict(Parameters())
    for name, factor, changed in variations(Parameters()):
        differing = [key for key, value in asdict(changed).items() if value != base[key]]
        assert differing == [name], (name, factor)
    assert [name for name, _, _ in variations(Parameters())] == [n for n in NAMES for _ in "hd"]


@pytest.mark.parametrize(
    ("name", "halved", "doubled"),
    [
        ("skip_flip", 0.15, 0.6),
        ("change_echo", (6.65, 0.47), (26.6, 1.88)),
        ("classes", 2, 8),
        ("affinity", 0.2, 0.8),
        ("exit_confidence", 0.45, 0.95),  # A share can be no more than one.
        ("bound_excess", 1.15, 1.6),  # A bound can be no less than the mean.
    ],
)
def test_values_are_halved_and_doubled_as_far_as_they_can_be(
    name: str, halved: object, doubled: object
) -> None:
    found = [getattr(p, name) for _, _, p in variations(Parameters(), (name,))]
    assert found == [pytest.approx(halved), pytest.approx(doubled)]


def test_every_changed_parameter_makes_a_profile() -> None:
    model = random_model_spec(np.random.default_rng(0), layers=4, experts=6, top_k=2, hidden=8)
    for name, _, changed in variations(Parameters()):
        profile = generate_profile(model, changed, seed=1, tokens=256)
        for bounds in (profile.skip.upper, profile.drop.upper, profile.substitution_loss):
            assert bounds.min() >= 0.0, name
            assert bounds.max() <= 1.0, name
        assert np.isfinite(profile.change_echo).all(), name


def test_dearer_echoes_leave_less_to_save() -> None:
    effort = replace(quick(), sensitivity_sequences=6, sensitivity_length=12)
    world = generated_world("switch-base-8e", paper_cluster(0), effort, seed=0)
    content = Sensitivity().measure(Bench(world=world, effort=effort))
    assert not content["fitted"]
    assert content["parameters"] == asdict(Parameters())
    halved, doubled = (row for row in content["rows"] if row["parameter"] == "change_echo")
    assert halved["home"]["exact_ms"] == doubled["home"]["exact_ms"]
    assert halved["home"]["ratio"] < doubled["home"]["ratio"] <= 1.0 + 1e-9
    for row in content["rows"]:
        for place in PLACES:
            assert row[place]["charged_loss_per_token"] <= 0.02 + 1e-12


def test_recorded_tokens_are_fitted_and_their_stand_in_is_planned_anew(tmp_path: Path) -> None:
    world = tiny_world()
    assert base_parameters(world) == fit_parameters(world.trace, world.profile)
    bench = Bench(world=world, effort=quick())
    content, again = Sensitivity().measure(bench), Sensitivity().measure(bench)
    assert content["fitted"]
    assert json.dumps(content) == json.dumps(again)
    (first, second), said = Sensitivity().grids(content).values(), Sensitivity().findings(content)
    assert [row[0] for row in first.rows] == [row[0] for row in second.rows]
    assert "fitted to the recorded tokens" in said[0]
    Sensitivity().plot(content, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_what_moves_nothing_is_not_said_to_move_most() -> None:
    def row(name: str | None, ours: float, home: float) -> dict:
        return {"parameter": name, "factor": 2.0, "ours": {"ratio": ours}, "home": {"ratio": home}}

    rows = [row(None, 1.0, 0.9), row("skew", 0.9999, 0.95), row("classes", 1.0, 0.7)]
    content = {"fitted": False, "parameters": {}, "rows": rows}
    _, ours, home = Sensitivity().findings(content)
    assert "no parameter halved or doubled moves that" in ours
    assert "between 70.0% and 95.0%" in home
    assert "`classes` times 2 moves it most" in home
