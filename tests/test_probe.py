"""`trimmoe probe` on real processes, and a plan made with what it measured."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from launching import PATIENCE_S, SERVERS, Serving, free_ports, write_files
from quick import run_quickly
from trimmoe.core.errors import UserError
from trimmoe.core.machines import BATCHES, Work, load_machines
from trimmoe.core.plan import load_plan
from trimmoe.experiments.measuring import timed
from trimmoe.experiments.serve_cluster import artifacts_of, pieces_of
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.local import serve_local
from trimmoe.runtime.launch.processes import ProcessHandle
from trimmoe.runtime.launch.signals import Stop
from trimmoe.runtime.machine_report import MachineReport

REPORT = MachineReport(
    server="desk", machine="one", device="cpu", threads=1, free_bytes=1, software_s=1e-3,
    work_s=np.ones((3, len(Work), len(BATCHES))), links=(),
)  # fmt: skip


@pytest.mark.slow
def test_machines_are_measured_and_planned_with(tmp_path: Path) -> None:
    files = write_files(tmp_path)

    def run(*arguments: object) -> str:
        with Serving(["-m", "trimmoe.cli", *map(str, arguments)]) as done:
            assert done.ended() == 0, done.text
            return done.text

    measured, planned = tmp_path / "machines.trim", tmp_path / "measured.trim"
    with_model = "--model", files.model
    said = run(
        "probe", files.cluster, "-o", measured, *with_model, "--profile", files.profile,
        "--plan", files.plan, "--port-base", free_ports(110),
    )  # fmt: skip
    machines = load_machines(measured)
    assert machines.server_names == tuple(SERVERS)
    assert np.isfinite(machines.work_s).all()
    assert (machines.delay_s[~np.eye(4, dtype=bool)] > 0).all(), "every link is known"
    assert (machines.hop_s + machines.token_s > 0).all(), "software takes its time"
    assert "software takes" in " ".join(said.split())
    run("plan", files.profile, files.cluster, "-o", planned, *with_model, "--machines", measured)
    speeds = load_plan(planned).cluster.speeds
    assert speeds is not None
    assert np.array_equal(speeds.hop_s, machines.hop_s)


def _config(folder: Path, servers: Sequence[str]) -> ServeConfig:
    files = write_files(folder, servers)
    return ServeConfig.model_validate(
        {"cluster": files.cluster, "model": str(files.model), "profile": files.profile,
         "plan": files.plan, "policy": "exact", "port_base": free_ports(110), "spare": False}
    )  # fmt: skip


def _say(_: str) -> None:
    pass


@pytest.mark.slow
def test_a_server_that_dies_while_it_is_measured_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_quickly(monkeypatch.setattr)
    config = _config(tmp_path, SERVERS)
    came_back: list[bool] = []

    def kill(handles: Sequence[ProcessHandle], _: Stop) -> None:
        killed = handles[1].pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        end_s = time.monotonic() + PATIENCE_S
        while handles[1].pid in (None, killed) and time.monotonic() < end_s:
            time.sleep(0.05)
        came_back.append(timed(handles[1], Stop()) is not None)

    artifacts, said = artifacts_of(config, _say), list[str]()
    serve_local(config, artifacts, pieces_of(config), said.append, meanwhile=kill)
    assert came_back == [True]
    assert any("shelf was lost" in each or "shelf is lost" in each for each in said), said


@pytest.mark.slow
def test_whoever_is_told_to_stop_while_measuring_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_quickly(monkeypatch.setattr)
    config = _config(tmp_path, ["desk"])

    def fail(_: Sequence[ProcessHandle], stop: Stop) -> None:
        stop.set()
        raise UserError("No server answered.")

    serve_local(config, artifacts_of(config, _say), pieces_of(config), _say, meanwhile=fail)


class _Away:
    """A server that is away for the first questions."""

    def __init__(self, answers: list[MachineReport | None]) -> None:
        self._answers, self.asked = answers, 0

    def begin_measuring(self) -> None:
        self.asked += 1

    def measured(self, patience_s: float) -> MachineReport | None:
        return self._answers.pop(0) if self._answers else None


def test_a_server_that_went_away_is_timed_once_it_is_back() -> None:
    server = _Away([None, REPORT])
    assert timed(server, threading.Event()) is REPORT
    assert server.asked == 2


def test_nobody_waits_for_a_server_when_told_to_stop() -> None:
    server, stop = _Away([None, REPORT]), threading.Event()
    stop.set()
    assert timed(server, stop) is None
    assert server.asked == 1


def test_a_server_that_never_answers_is_waited_for_as_long_as_was_said() -> None:
    assert timed(_Away([]), threading.Event(), patience_s=0.0) is None
