"""The sweep over the generator's parameters: every one of them, one at a time, still valid."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest

from factories import random_model_spec
from test_figures_suite import tiny_world
from trimmoe.experiments.figures.agreement import (
    AGREEMENTS,
    agreement_grid,
    agreement_sentence,
    measure_agreement,
)
from trimmoe.experiments.figures.bench import Bench
from trimmoe.experiments.figures.contenders import EXACT, GUESSED, Contender, pinned_best
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
GUESS_ROWS = [
    {"agreement": 0.2, "speculative_ms": 7.2, "ratio": 0.9, "hops_ratio": 2.5},
    {"agreement": 0.9, "speculative_ms": 2.4, "ratio": 0.3, "hops_ratio": 1.25},
]


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
    first, second, _ = Sensitivity().grids(content).values()
    said = Sensitivity().findings(content)
    assert [row[0] for row in first.rows] == [row[0] for row in second.rows]
    assert "fitted to the recorded tokens" in said[0]
    Sensitivity().plot(content, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_what_moves_nothing_is_not_said_to_move_most() -> None:
    def row(name: str | None, ours: float, home: float) -> dict:
        return {"parameter": name, "factor": 2.0, "ours": {"ratio": ours}, "home": {"ratio": home}}

    rows = [row(None, 1.0, 0.9), row("skew", 0.9999, 0.95), row("classes", 1.0, 0.7)]
    guesses = {"exact_ms": 8.0, "recorded": None, "assumed": 0.6, "rows": GUESS_ROWS}
    content = {"fitted": False, "parameters": {}, "rows": rows, "guesses": guesses}
    _, ours, home, _ = Sensitivity().findings(content)
    assert "no parameter halved or doubled moves that" in ours
    assert "between 70.0% and 95.0%" in home
    assert "`classes` times 2 moves it most" in home


def contender(of: str) -> Contender:
    return next(one for one in pinned_best() if one.of == of)


@pytest.fixture(scope="module")
def generated() -> Bench:
    effort = replace(quick(), sequences=12, length=24)
    world = generated_world("switch-base-8e", paper_cluster(0), effort, seed=0)
    return Bench(world=world, effort=effort)


def test_guesses_that_are_right_more_often_save_more_and_send_less(generated: Bench) -> None:
    content = measure_agreement(generated, Parameters(), recorded=False)
    assert [row["agreement"] for row in content["rows"]] == list(AGREEMENTS)
    for key in ("ratio", "hops_ratio"):
        values = [row[key] for row in content["rows"]]
        assert values == sorted(values, reverse=True)
        assert values[0] - values[-1] > 0.1
    assert all(row["ratio"] <= 1.0 + 1e-9 for row in content["rows"])
    assert all(row["hops_ratio"] >= 1.0 for row in content["rows"])


def test_at_the_assumed_agreement_the_sweep_has_the_delays_of_the_other_figures(
    generated: Bench,
) -> None:
    content = measure_agreement(generated, Parameters(), recorded=False)
    assert content["assumed"] == Parameters().home_agreement
    assert content["recorded"] is None
    (row,) = (row for row in content["rows"] if row["agreement"] == content["assumed"])
    for key, of in (("speculative_ms", GUESSED), ("exact_ms", EXACT)):
        delay_ms = generated.replayed(contender(of)).ledger.mean_delay_s * 1e3
        assert (row | content)[key] == pytest.approx(delay_ms, rel=1e-12)


def test_recorded_guesses_stand_beside_those_drawn_at_random() -> None:
    bench = Bench(world=tiny_world(), effort=quick())
    base = base_parameters(bench.world)
    content = measure_agreement(bench, base, recorded=True)
    assert content["assumed"] is None
    assert content["recorded"]["agreement"] == pytest.approx(2 / 3)
    delay_ms = bench.replayed(contender(GUESSED)).ledger.mean_delay_s * 1e3
    assert content["recorded"]["speculative_ms"] == delay_ms
    assert agreement_grid(content).rows[-1][0] == "0.67, recorded"
    silent = replace(bench.world.trace, home_wrong=None, home_confidence=None)
    bench = Bench(world=replace(bench.world, trace=silent), effort=quick())
    without = measure_agreement(bench, base, recorded=True)
    assert without["recorded"] is None
    assert without["rows"] == content["rows"]


def test_what_is_assumed_of_guesses_is_called_so() -> None:
    content = {"exact_ms": 8.0, "recorded": None, "assumed": 0.6, "rows": GUESS_ROWS}
    said = agreement_sentence(content)
    assert "takes 90.0% of exact execution's delay" in said
    assert "elsewhere 60.0% are assumed, and nobody has measured it" in said
    recorded = {"agreement": 0.65, "speculative_ms": 4.0, "ratio": 0.5, "hops_ratio": 1.5}
    said = agreement_sentence(content | {"recorded": recorded, "assumed": None})
    assert "recorded, servers agree on 65.0% of the tokens and it takes 50.0%" in said
    assert "assumed" not in said
