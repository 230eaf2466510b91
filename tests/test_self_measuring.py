"""`trimmoe serve` on one machine measures once, and again when that is long ago."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import trimmoe
from launching import free_ports, write_files
from timed import timed_machines
from trimmoe.core.errors import UserError
from trimmoe.core.machines import Machines
from trimmoe.experiments.preparation import prepare
from trimmoe.experiments.self_measuring import RECENT_S, with_machines
from trimmoe.runtime.launch.artifacts import cluster_of, model_spec_of
from trimmoe.runtime.launch.config import ServeConfig

NOW_S = 1e9


@dataclass
class _World:
    """A cluster of four, and a probe that is asked for it."""

    config: ServeConfig
    folder: Path
    probed: int = 0
    fails: bool = False
    stopped: bool = False
    said: list[str] = field(default_factory=list)

    def probe(self, config: ServeConfig, _: object) -> Machines | None:
        self.probed += 1
        if self.fails:
            raise UserError("No server answered.")
        return None if self.stopped else timed_machines(cluster_of(config), model_spec_of(config))

    def found(self, now_s: float = NOW_S, **more: object) -> ServeConfig | None:
        config = self.config.model_copy(update=more)
        return with_machines(
            config, self.said.append, probe=self.probe, folder=self.folder, now_s=lambda: now_s
        )

    def measured_at(self, now_s: float) -> None:
        for path in (self.folder / "machines").iterdir():
            os.utime(path, (now_s, now_s))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ServeConfig:
    made = write_files(tmp_path_factory.mktemp("files"))
    given = {
        "cluster": made.cluster, "model": str(made.model), "profile": made.profile,
        "port_base": free_ports(10), "plan_iterations": 5,
    }  # fmt: skip
    return ServeConfig.model_validate(given)


@pytest.fixture
def world(files: ServeConfig, tmp_path: Path) -> _World:
    return _World(config=files, folder=tmp_path)


def test_what_nobody_has_measured_is_measured_once_and_planned_with(world: _World) -> None:
    first = world.found()
    assert first is not None
    assert first.machines is not None
    assert "nobody has lately" in world.said[0]
    plan = prepare(first, sample=str, say=lambda _: None, cache_dir=world.folder).plan
    assert plan.cluster.speeds is not None
    world.measured_at(NOW_S)
    again = world.found(NOW_S + RECENT_S / 2)
    assert again is not None
    assert again.machines == first.machines
    assert "before" in world.said[-1]
    assert world.probed == 1


@pytest.mark.parametrize("away_s", [2 * RECENT_S, -2 * RECENT_S])
def test_long_ago_is_measured_again_and_so_is_a_clock_that_jumped(
    world: _World, away_s: float
) -> None:
    world.found()
    world.measured_at(NOW_S)
    world.found(NOW_S + away_s)
    assert world.probed == 2


def test_what_another_version_measured_is_measured_again(
    world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.found()
    world.measured_at(NOW_S)
    monkeypatch.setattr(trimmoe, "__version__", "9.9")
    world.found(NOW_S)
    assert world.probed == 2


def test_other_settings_are_other_machines(world: _World) -> None:
    world.found()
    world.found(threads=1)
    assert world.probed == 2


def test_damaged_figures_are_measured_again(world: _World) -> None:
    first = world.found()
    assert first is not None
    assert first.machines is not None
    first.machines.write_bytes(b"nothing")
    world.measured_at(NOW_S)
    world.found()
    assert world.probed == 2


def test_a_plan_or_figures_that_are_given_are_not_doubted(world: _World) -> None:
    many: list[dict[str, Any]] = [{"plan": Path("p")}, {"machines": Path("m")}, {"method": "exact"}]
    for given in many:
        found = world.found(**given)
        assert found == world.config.model_copy(update=given)
    assert world.probed == 0


def test_servers_that_cannot_be_measured_are_served_all_the_same(world: _World) -> None:
    world.fails = True
    assert world.found() == world.config
    assert "nominal figures: No server answered." in world.said[-1]


def test_who_is_told_to_stop_stops(world: _World) -> None:
    world.stopped = True
    assert world.found() is None
