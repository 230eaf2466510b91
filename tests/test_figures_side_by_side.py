"""Figures of several processes are those of one, and what goes wrong there is said here."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from test_figures_suite import but_for_the_clock, tiny_world
from trimmoe.core.errors import UserError
from trimmoe.experiments.figures.bench import Bench
from trimmoe.experiments.figures.side_by_side import _TOGETHER, run_side_by_side
from trimmoe.experiments.figures.suite import FIGURES, stem
from trimmoe.experiments.figures.world import Announce, World, quick


def _bench(world: World, announce: Announce) -> Bench:
    return Bench(world=world, effort=quick(), announce=announce)


def _no_bench(_: Announce) -> Bench:
    raise UserError("The text is too short; give more.")


@pytest.mark.slow
def test_two_processes_measure_what_one_does(tmp_path: Path) -> None:
    make, numbers = partial(_bench, tiny_world()), ("10", "7")
    said: list[str] = []
    done: list[str] = []
    one = run_side_by_side(make, numbers, tmp_path / "one", processes=1)
    two = run_side_by_side(
        make, numbers, tmp_path / "two", processes=2, announce=said.append, done=done.append
    )
    assert list(two) == list(one) == list(numbers)
    for number in numbers:
        assert but_for_the_clock(two[number]) == but_for_the_clock(one[number])
        for ending in ("json", "png"):
            assert (tmp_path / "two" / f"{stem(number)}.{ending}").is_file()
    assert sorted(done) == sorted(numbers)
    assert any("replay" in what for what in said)


@pytest.mark.slow
def test_what_the_user_did_wrong_is_said_as_in_one_process(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give more"):
        run_side_by_side(_no_bench, ("7", "10"), tmp_path, processes=2)


def test_every_figure_has_one_group() -> None:
    assert sorted(number for group in _TOGETHER for number in group) == sorted(FIGURES)
