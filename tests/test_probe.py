"""`trimmoe probe` on real processes, and a plan made with what it measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from launching import SERVERS, free_ports, write_files
from trimmoe.core.machines import load_machines
from trimmoe.core.plan import load_plan


@pytest.mark.slow
def test_machines_are_measured_and_planned_with(tmp_path: Path) -> None:
    files = write_files(tmp_path)

    def run(*arguments: object) -> str:
        command = [sys.executable, "-m", "trimmoe.cli", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

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
