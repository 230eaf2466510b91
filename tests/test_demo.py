"""The demonstration, end to end: real servers of the embedded model, two ways of its three."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from launching import free_ports
from quick import nursery, run_quickly
from trimmoe.experiments import demo
from trimmoe.runtime.launch import family

pytestmark = pytest.mark.slow


def test_it_streams_from_four_servers_and_leaves_nothing_but_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SHOWN", demo.SHOWN[1:])
    console = Console(file=io.StringIO(), width=80)
    said: list[str] = []
    run_quickly(monkeypatch.setattr)
    nursery()
    before = family.descendants(os.getpid())
    exact, found = demo.demo(
        tmp_path / "out",
        said.append,
        console,
        question="Write one sentence about a lighthouse.",
        tokens=12,
        port_base=free_ports(120),
    )
    assert family.descendants(os.getpid()) == before, "servers are left behind"
    assert not any("Calibrating" in line for line in said)
    answer = found.answer
    assert answer.text == exact.answer.text
    for shown in (exact, found):
        assert shown.expected_s is not None, "nobody measured the servers"
        assert 0.0 < shown.expected_s < 10.0
    assert answer.tokens == 12
    assert answer.tokens_per_s is not None
    assert 0 < answer.ttft_s < answer.last_s
    assert answer.ledger["hops"] > 0
    assert answer.ledger["layers_executed"] == 11 * 30
    assert answer.guesses is not None, "nobody counts guesses under the name looked for"
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert answer.text in text
    assert max(map(len, [*said, *text.splitlines()])) <= 80
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "placement.png",
        "plan.trim",
        "profile.trim",
    }
