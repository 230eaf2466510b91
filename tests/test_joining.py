"""Who a cluster is made of, and plans for those that are there, before and after measuring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from factories import random_cluster
from launching import cluster_yaml, write_files
from timed import timed_machines
from trimmoe.core.cluster_file import load_cluster
from trimmoe.core.machines import Machines
from trimmoe.experiments import joining
from trimmoe.experiments.joining import JoinedPlanner
from trimmoe.placement.moving import too_large_beside
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.deployment import Hello
from trimmoe.runtime.launch.whoever import Roll

NAMES = ("desk", "shelf", "attic")


def test_without_a_file_the_heads_own_come_first_and_nobody_known_changes_places() -> None:
    roll = Roll(own=("desk",), count=1)
    assert roll.call(["shelf", "attic"], ()) == ("desk", "attic", "shelf")
    assert roll.call(["cellar", "shelf"], ("desk", "shelf")) == ("desk", "shelf", "cellar")
    assert roll.call(["shelf"], ("desk", "attic", "shelf")) == ("desk", "shelf")


def test_with_a_file_they_stand_in_its_order_and_nobody_else_serves() -> None:
    roll = Roll(own=("shelf",), count=2, named=NAMES)
    assert roll.call(["stranger", "desk"], ("shelf",)) == ("desk", "shelf")


@given(seed=st.integers(0, 99), count=st.integers(1, 6), data=st.data())
def test_part_of_a_cluster_keeps_every_figure_of_its_servers(
    seed: int, count: int, data: st.DataObject
) -> None:
    whole = random_cluster(np.random.default_rng(seed), servers=count)
    names = data.draw(st.permutations(whole.server_names))[: data.draw(st.integers(1, count))]
    part = whole.among(names)
    assert part.server_names == tuple(names)
    assert part.access_share.sum() == pytest.approx(1.0)
    for a, name in enumerate(names):
        at = whole.server_index(name)
        assert part.memory_bytes[a] == whole.memory_bytes[at]
        assert part.flops_per_s[a] == whole.flops_per_s[at]
        for b, other in enumerate(names):
            to = whole.server_index(other)
            assert part.delay_s[a, b] == whole.delay_s[at, to]
            assert part.bandwidth_bytes_per_s[a, b] == whole.bandwidth_bytes_per_s[at, to]
    assert whole.among(whole.server_names).access_share == pytest.approx(whole.access_share)


def test_servers_of_one_machine_share_what_is_free_on_it() -> None:
    needed, machine = np.array([6, 5, 9]), np.array([0, 0, 1])
    assert too_large_beside(needed, np.array([11, 11, 9]), machine).tolist() == []
    assert too_large_beside(needed, np.array([10, 10, 9]), machine).tolist() == [0]
    # Who did not say is taken to have room.
    assert too_large_beside(needed, np.array([0, 0, 8]), machine).tolist() == [1]


def hello(*servers: str, at: str = "10.0.0.1", free: int = 2 * 10**9) -> Hello:
    return Hello(version="1", servers=servers, address=at, memory_bytes=free, cores=2)


@pytest.fixture
def planner_of(tmp_path: Path) -> Callable[[list[str]], JoinedPlanner]:
    """A planner by a cluster file of three, who adds to a list what it says."""
    files = write_files(tmp_path, NAMES)
    files.cluster.write_text(cluster_yaml(NAMES, ratio=3.0))

    def made(said: list[str]) -> JoinedPlanner:
        config = ServeConfig(
            cluster=files.cluster, model=str(files.model), profile=files.profile, plan_iterations=4
        )
        console = Console(quiet=True)
        return JoinedPlanner(config, said.append, console, load_cluster(files.cluster))

    return made


def test_a_cluster_file_is_planned_for_with_those_of_it_that_are_there(
    planner_of: Callable[[list[str]], JoinedPlanner],
) -> None:
    plan = planner_of([]).nominal({"desk": hello("desk"), "attic": hello("attic")}).plan
    assert plan.cluster.server_names == ("desk", "attic")
    assert plan.cluster.delay_s[0, 1] == pytest.approx(0.3e-3)


@pytest.mark.parametrize("free_bytes", [1 << 34, 1 << 10])
def test_it_is_known_whether_there_is_memory_for_a_measured_plan_beside_what_serves(
    free_bytes: int,
    planner_of: Callable[[list[str]], JoinedPlanner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = planner_of([])
    there = {name: hello(name) for name in NAMES}
    now = planner.nominal(there)

    def measured(*_: object) -> Machines:
        machines = timed_machines(now.plan.cluster, now.model, hop_s=1e-4)
        return replace(machines, free_bytes=np.full(len(NAMES), free_bytes))

    monkeypatch.setattr(joining, "measured", measured)
    found = planner.measured(now, (), ())
    assert found.plan.cluster.speeds is not None
    short = planner.short_beside(found, there)
    assert short == ("" if free_bytes == 1 << 34 else ", ".join(NAMES))


def test_of_who_was_never_measured_counts_what_was_free_when_it_joined(
    planner_of: Callable[[list[str]], JoinedPlanner],
) -> None:
    planner = planner_of([])
    there = {name: hello(name, at=f"10.0.0.{number}") for number, name in enumerate(NAMES)}
    made = planner.nominal(there)
    assert planner.short_beside(made, there) == ""
    little = there | {"shelf": hello("shelf", at="10.0.0.9", free=1 << 20)}
    assert planner.short_beside(made, little) == "shelf"
