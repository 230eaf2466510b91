"""`trimmoe probe` on real processes, and a plan made with what it measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launching import SERVERS, Serving, free_ports, write_files
from trimmoe.core.machines import load_machines
from trimmoe.core.plan import load_plan


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
