"""What the demonstration expects of its servers: the cost model's price, less what guesses save."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from launching import written_artifacts
from timed import timed_machines
from trimmoe.core.machines import Machines
from trimmoe.experiments import demo_expected, measuring, overheads
from trimmoe.experiments.demo_expected import USER, expected_s, measured_servers
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig

_TOKENS = 16


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    return written_artifacts(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def machines(artifacts: Artifacts) -> Machines:
    return timed_machines(artifacts.plan.cluster, artifacts.model, hop_s=1e-3, token_s=1e-3)


def test_exact_answers_are_expected_as_the_cost_model_has_them(
    artifacts: Artifacts, machines: Machines
) -> None:
    """At the server that is asked, whoever else is."""
    found = expected_s("exact", machines, artifacts, tokens=_TOKENS, right=None)
    assert found == pytest.approx(overheads.exact_s(machines, artifacts)[USER])
    slower = replace(machines, work_s=2 * machines.work_s, hop_s=2 * machines.hop_s)
    assert expected_s("exact", slower, artifacts, tokens=_TOKENS, right=None) > found


def test_right_guesses_save_what_wrong_ones_do_not(
    artifacts: Artifacts, machines: Machines
) -> None:
    """Guesses that cost next to nothing: the more are right, the less a token takes."""
    quick = machines.work_s.copy()
    quick[:, -1] *= 1e-2
    machines = replace(machines, work_s=quick, low_s=quick, high_s=quick)
    exact = expected_s("exact", machines, artifacts, tokens=_TOKENS, right=None)
    found = [
        expected_s("speculative", machines, artifacts, tokens=_TOKENS, right=right)
        for right in (0.0, 0.5, 1.0)
    ]
    assert found[0] > found[1] > found[2]
    assert found[2] < 0.8 * exact


def test_nobody_to_ask_is_nothing_expected(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_expected, "running_processes", lambda _: [])
    assert measured_servers(ServeConfig(), artifacts) is None


def test_one_server_speaks_for_all_but_of_its_own_links(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of one machine: the work of each is what one said, and its clock is met."""
    names = artifacts.plan.cluster.server_names
    work_s = np.full((3, 4, 6), 1e-3)
    link = measuring.LinkReport(peer=names[1], delay_s=0.5, bandwidth_bytes_per_s=1e9, jitter_s=0.0)
    report = measuring.MachineReport(
        server=names[0], machine="one", device="cpu", threads=1, free_bytes=1, software_s=1e-3,
        work_s=work_s, links=(link,),
    )  # fmt: skip

    class Handle:
        def begin_measuring(self) -> None: ...

        def measured(self, patience_s: float) -> measuring.MachineReport:
            return report

    async def clocked(*_: object) -> np.ndarray:
        return np.array([0.7, *[np.nan] * (len(names) - 1)])

    monkeypatch.setattr(measuring, "_clocked", clocked)
    config = ServeConfig(emulate_machines=False)
    found = measuring.measured_by_one(config, artifacts, [None] * len(names), Handle(), 0)  # type: ignore[list-item]
    assert (found.work_s == 1e-3).all()
    assert found.delay_s[0, 1] == 0.5
    assert np.isnan(found.delay_s[1, 0])
    assert found.machine.tolist() == [0] * len(names)
    assert overheads.exact_s(found, artifacts)[0] == pytest.approx(0.7, rel=0.01)
