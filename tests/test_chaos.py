"""`trimmoe chaos` on real processes of the tiny checkpoint, and what it says of runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from launching import Serving, cluster_yaml, free_ports, write_files
from trimmoe.cli import app
from trimmoe.cli.failing import KINDS, OF_MACHINES
from trimmoe.experiments.chaos import report
from trimmoe.experiments.chaos.failures import failures, schedule
from trimmoe.experiments.chaos.run import Outcome, Result
from trimmoe.experiments.chaos.stage import Usage
from trimmoe.experiments.chaos.streams import Seen


@pytest.mark.slow
def test_nothing_that_happens_to_servers_costs_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor and then a server that is the only host of experts, and clients who vanish:
    two servers show that, `test_serve_e2e.py` has four, and CI runs all there is for longer."""
    files, port = write_files(tmp_path, ("desk", "attic")), free_ports(110)
    command = [
        *("-m", "trimmoe.cli", "chaos", "--model", files.model),
        *("--cluster", files.cluster, "--profile", files.profile, "--plan", files.plan),
        *("--no-emulate", "--port-base", port, "--tokens", 80, "--minutes", 0, "--seed", 4),
        *("--failure", "supervisor", "--failure", "vanish"),
    ]
    monkeypatch.setenv("TRIMMOE_RUN", str(tmp_path / "run"))
    with Serving([str(part) for part in command], cache=tmp_path) as ran:
        assert ran.ended() == 0, ran.text
    told = [line for line in ran.lines if " of 8 " in line]
    assert all(" 8 of 8 " in line for line in told)
    assert {line.split("  ")[0] for line in told} == {
        "kill -9 supervisor, then a server", "200 clients vanish",
    }  # fmt: skip


@pytest.mark.slow
def test_a_machine_whose_cable_is_cut_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head and a machine that joins it, in a network of their own."""
    _require_lan()
    files = write_files(tmp_path, ("desk", "attic"))
    command = [
        *(Path(__file__).with_name("serve_soon.py"), "chaos", "--namespaces"),
        *("--model", files.model, "--cluster", files.cluster, "--profile", files.profile),
        *("--plan", files.plan, "--tokens", 40, "--minutes", 0, "--failure", "cut"),
    ]
    with Serving([str(part) for part in command], cache=tmp_path) as ran:
        assert ran.ended() == 0, ran.text
    (told,) = [line for line in ran.lines if " of 8 " in line]
    assert told.startswith("a machine's cable out")
    assert " 8 of 8 " in told


LAN = """
import socket, sys
from trimmoe.experiments.chaos.lan import Lan, NotAllowed, enter

def reach(path, address, timeout=0.5):
    enter(path)
    try:
        socket.create_connection((address, 8000), timeout=timeout).close()
        return True
    except OSError:
        return False
    finally:
        enter(here)

def reached(path, address):
    return any(reach(path, address, 10) for _ in range(9))

try:
    lan = Lan(3)
except NotAllowed as reason:
    sys.exit(f"not allowed: {reason}")
enter(lan.path(0))
listening = socket.create_server((lan.address(0), 8000))
enter(lan.path(None))
here, one, two = lan.path(None), lan.path(1), lan.path(2)
to = lan.address(0)
assert reached(here, to) and reached(one, to)
lan.cut(0)
assert not reach(here, to)
lan.mend(0)
assert reached(here, to)
lan.part(0, 1)
assert reached(here, to) and reached(two, to) and not reach(one, to)
lan.join(0, 1)
assert reached(one, to)
"""


def _require_lan() -> str:
    """What became of a network with cables; skips the test where the system has none."""
    ran = subprocess.run([sys.executable, "-c", LAN], capture_output=True, text=True, check=False)
    if "not allowed" in ran.stderr:
        pytest.skip(ran.stderr.strip())
    return ran.stderr


def test_cables_between_machines_are_cut_and_mended() -> None:
    assert _require_lan() == ""


def test_where_there_can_be_no_network_it_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(cluster_yaml(("desk", "attic")))
    ran = CliRunner().invoke(app, ["chaos", "--namespaces", "--cluster", str(cluster)])
    assert ran.exit_code == 0
    assert ran.output.startswith("Skipped: ")
    assert ran.output.rstrip().endswith("it lacks the command `ip`, of iproute2.")


@given(st.integers(0, 2**32), st.booleans())
def test_all_kinds_of_failures_come_before_any_comes_again(seed: int, networked: bool) -> None:
    """And of servers all are killed before any is again."""
    known = failures(("desk", "shelf", "attic"), networked=networked)
    kinds = {each.kind for each in known}
    assert kinds == {*KINDS, *OF_MACHINES} if networked else set(KINDS)
    drawn = list(islice(schedule(known, np.random.default_rng(seed)), 6 * len(kinds)))
    for start in range(0, len(drawn), len(kinds)):
        assert {each.kind for each in drawn[start : start + len(kinds)]} == kinds
    killed = [each.title for each in drawn if each.kind == "kill"]
    assert len(set(killed[:3])) == len(set(killed[3:])) == 3


def test_a_server_that_is_spared_is_not_killed() -> None:
    titles = [each.title for each in failures(("desk", "attic"), spared=1)]
    assert "kill -9 desk" in titles
    assert "kill -9 attic" not in titles


def outcome(**changes: object) -> Outcome:
    plain: dict[str, object] = {
        "title": "kill -9 desk", "right": 8, "silence_s": 1.25, "healthy_s": 4.5, "faults": (),
    }  # fmt: skip
    return Outcome(**(plain | changes))  # type: ignore[arg-type]


def test_a_run_is_well_only_if_every_answer_was_and_all_came_back() -> None:
    assert Result(outcomes=[outcome()]).ok
    for bad in ({"right": 7}, {"healthy_s": None}, {"faults": ("stuck",)}):
        assert not Result(outcomes=[outcome(), outcome(**bad)]).ok
    assert not Result(outcomes=[outcome()], faults=["1 requests were never let go of"]).ok
    told = " ".join(report.line(outcome()).split())
    assert told == "kill -9 desk 8 of 8 1.2 s 4.5 s"
    assert report.line(outcome(healthy_s=None, faults=("stuck",))).endswith("never  (stuck)")


def test_an_answer_counts_only_if_it_is_complete_and_the_same() -> None:
    wanted = Seen(text="ab", finished=True)
    assert Seen(text="ab", finished=True, events=9).is_like(wanted)
    for wrong in (
        Seen(text="ab"),
        Seen(text="abb", finished=True),
        Seen(text="ab", finished=True, error="more after its end"),
    ):
        assert not wrong.is_like(wanted)


def test_processes_that_grow_are_said_to() -> None:
    def used(*memory_mb: float, descriptors: int = 0) -> list[Usage]:
        return [
            Usage(memory_mb=mb, descriptors=30 + at * descriptors, threads=9, at_s=60.0 * at)
            for at, mb in enumerate((100, 500, *memory_mb))
        ]

    steady = (600, 604, 598, 603, 601)
    samples = {
        ("flat", 1): used(*steady),
        ("fat", 2): used(600, 620, 640, 660, 680),
        ("open", 3): used(*steady, descriptors=9),
        ("young", 4): used(600),
        ("late", 5): used(*[600] * 9, 620, 640, 660, 680),
    }
    told = list(report.growth(Result(samples=samples)))
    assert [line.split()[0] for line in told] == ["flat", "fat", "open", "late"]
    assert [line.rsplit(" ", 1)[1] for line in told] == ["flat", *["growing"] * 3]
    assert "+20.00 MB a minute" in told[1]
    # Clients have connections, and go again.
    quiet = used(*[600] * 20)
    busy = [replace(each, descriptors=530) for each in quiet[-2:]]
    (told_once,) = report.growth(Result(samples={("busy", 6): quiet[:-2] + busy}))
    assert told_once.endswith("flat")
    # Filling caches takes its time.
    told = list(report.growth(Result(samples=samples, settling_s=600)))
    assert [line.split()[0] for line in told] == ["late"]
