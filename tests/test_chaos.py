"""`trimmoe chaos` on real processes of the tiny checkpoint, and what it says of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from launching import Serving, free_ports, write_files
from trimmoe.experiments.chaos import report
from trimmoe.experiments.chaos.run import Outcome, Result
from trimmoe.experiments.chaos.stage import Usage
from trimmoe.experiments.chaos.streams import Seen


@pytest.mark.slow
def test_nothing_that_happens_to_servers_costs_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor and then a server that is the only host of experts, clients, and a burst as
    far as time allows: two servers show that, and `test_serve_e2e.py` has four."""
    files, port = write_files(tmp_path, ("desk", "attic")), free_ports(110)
    command = [
        *("-m", "trimmoe.cli", "chaos", "--model", files.model),
        *("--cluster", files.cluster, "--profile", files.profile, "--plan", files.plan),
        *("--no-emulate", "--port-base", port, "--tokens", 80, "--minutes", 0.2, "--seed", 4),
        *(part for kind in ("supervisor", "vanish", "burst") for part in ("--failure", kind)),
    ]
    monkeypatch.setenv("TRIMMOE_RUN", str(tmp_path / "run"))
    with Serving([str(part) for part in command], cache=tmp_path) as ran:
        assert ran.ended() == 0, ran.text
    told = [line for line in ran.lines if " of 8 " in line]
    assert told, ran.text
    assert all(" 8 of 8 " in line for line in told)
    assert told[0].startswith("kill -9 supervisor, then a server")


def outcome(**changes: object) -> Outcome:
    plain: dict[str, object] = {
        "title": "kill -9 desk", "right": 8, "silence_s": 1.25, "healthy_s": 4.5, "faults": (),
    }  # fmt: skip
    return Outcome(**(plain | changes))  # type: ignore[arg-type]


def test_a_run_is_well_only_if_every_answer_was_and_all_came_back() -> None:
    assert Result(outcomes=[outcome()]).ok
    for bad in ({"right": 7}, {"healthy_s": None}, {"faults": ("stuck",)}):
        assert not Result(outcomes=[outcome(), outcome(**bad)]).ok
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
    def usage(memory_mb: float, descriptors: int) -> Usage:
        return Usage(memory_mb=memory_mb, descriptors=descriptors, threads=9)

    warm = [usage(100, 10), usage(500, 30)]
    samples = {
        ("flat", 1): [*warm, usage(600, 40), usage(604, 41)],
        ("fat", 2): [*warm, usage(600, 40), usage(700, 40)],
        ("open", 3): [*warm, usage(600, 40), usage(600, 60)],
        ("young", 4): warm,
    }
    told = list(report.growth(Result(samples=samples)))
    assert [line.split()[0] for line in told] == ["flat", "fat", "open"]
    assert [line.rsplit(" ", 1)[1] for line in told] == ["flat", "growing", "growing"]
