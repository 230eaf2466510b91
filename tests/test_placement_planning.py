"""Planning against a clock that the test turns, and what the command line makes of its options."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from factories import random_cluster, random_model_spec, random_profile
from trimmoe.cli import app
from trimmoe.core.errors import UserError
from trimmoe.experiments.planning import Countdown, optimise_for, search_settings


def test_the_countdown_ends_by_share() -> None:
    now = [5.0]
    with Countdown(10.0, "x", clock=lambda: now[0]) as countdown:
        assert countdown.keep_going()
        now[0] = 10.9
        assert countdown.keep_going(0.6)
        now[0] = 11.0
        assert not countdown.keep_going(0.6)
        assert countdown.keep_going(0.7)
        now[0] = 99.0
        assert not countdown.keep_going()


def test_without_end_the_countdown_never_says_no() -> None:
    now = [0.0]
    with Countdown(float("inf"), "x", clock=lambda: now[0]) as countdown:
        now[0] = 1e12
        assert countdown.keep_going(0.01)


def test_time_or_iterations_end_a_search() -> None:
    by_time = search_settings({"seed": 3, "objective": "trimmed"}, seconds=20.0)
    assert by_time.iterations == by_time.trimmed_iterations == sys.maxsize
    assert (by_time.seed, by_time.objective, by_time.bound_seconds) == (3, "trimmed", 5.0)
    counted = search_settings({"iterations": 70}, seconds=None)
    assert counted.iterations == 70
    # The integer program's time is a clock's, so a counted search does without it.
    assert counted.bound_seconds == 0.0


def test_a_counted_search_does_not_look_at_the_clock() -> None:
    rng = np.random.default_rng(0)
    model = random_model_spec(rng, layers=3, experts=4, top_k=2)
    inputs = random_profile(rng, model), model, random_cluster(rng)
    search = search_settings({"iterations": 150, "seed": 2}, seconds=None)
    first, second = (optimise_for(None, *inputs, search, cluster_hash="c") for _ in range(2))
    assert first.hash == second.hash
    assert first.header.settings["iterations"] == 150


def test_seconds_end_a_search() -> None:
    rng = np.random.default_rng(0)
    model = random_model_spec(rng, layers=3, experts=4, top_k=2)
    inputs = random_profile(rng, model), model, random_cluster(rng, servers=3, memory_ratio=1.5)
    search = search_settings({}, seconds=1.0)
    plan = optimise_for(1.0, *inputs, search, cluster_hash="c")
    assert plan.header.settings["iterations"] < sys.maxsize
    assert plan.header.settings["value_s"] == pytest.approx(plan.header.settings["expected_s"])


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--seconds", "5"], "--optimise"),
        (["--objective", "trimmed"], "--optimise"),
        (["--seed", "1"], "--optimise"),
        (["--optimise", "--preset", "paper"], "--preset"),
        (["--optimise", "--seed-plan", "pipeline"], "--seed-plan"),
        (["--grow"], "--seed-plan"),
        (["--survive", "1", "--preset", "paper"], "--preset"),
        (["--survive", "1", "--seed-plan", "pipeline"], "--grow"),
    ],
)
def test_options_are_never_silently_dropped(
    options: list[str], advice: str, tmp_path: Path
) -> None:
    arguments = ["plan", "profile", "cluster", "-o", str(tmp_path / "plan"), *options]
    refused = CliRunner().invoke(app, arguments).exception
    assert isinstance(refused, UserError)
    assert advice in str(refused)
