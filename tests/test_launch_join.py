"""A head and a machine that joins it, both on this one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from launching import Serving, await_answer, free_ports, write_files
from trimmoe.runtime.launch import family
from trimmoe.runtime.launch.several import own_address
from trimmoe.runtime.wire.keys import generate_token

pytestmark = pytest.mark.slow
NAMES = ("desk", "attic")


def test_a_head_serves_with_those_that_join_and_ends_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes with another token is not let in, and disturbs nobody."""
    files, cache = write_files(tmp_path, NAMES), tmp_path / "cache"
    ports, address = free_ports(440), own_address()
    head_ray, join_ray, strange_ray = (ports + 110 * each for each in (1, 2, 3))
    token, wrong_token = tmp_path / "token", tmp_path / "wrong-token"
    for file in (token, wrong_token):
        file.write_text(generate_token())
    monkeypatch.delenv("TRIMMOE_TOKEN", raising=False)
    trimmoe = ["-m", "trimmoe.cli", "serve"]
    head = [
        *(*trimmoe, "--token-file", str(token), "--head", "--server", "desk"),
        *("--address", address, "--ray-port", str(head_ray), "--port-base", str(ports)),
        *("--host", "127.0.0.1", "--cluster", str(files.cluster), "--model", str(files.model)),
        *("--policy", "exact", "--profile", str(files.profile), "--plan", str(files.plan)),
    ]
    join = [*trimmoe, "--join", f"{address}:{head_ray}", "--server", "attic"]
    known = [*join, "--token-file", str(token), "--ray-port", str(join_ray)]
    stranger = [*join, "--token-file", str(wrong_token), "--ray-port", str(strange_ray)]
    with Serving(head, cache=cache) as first:
        first.said(f"Waiting at {address}:{head_ray} for attic")
        with Serving(known, cache=cache) as second, Serving(stranger, cache=cache) as refused:
            second.said("Joined")
            first.said("Ready")
            assert refused.ended() == 2
            assert "Ray does not start here" in refused.text
            folders = [f"trimmoe-{one.process.pid}-*" for one in (first, second)]
            assert all(list(Path("/tmp").glob(mine)) for mine in folders)
            for index in range(len(NAMES)):
                await_answer(ports + index)
            log = (cache / "logs" / f"attic-{ports + 1}.log").read_text()
            pid = int(log.split("Started server process [")[1].split("]")[0])
            below = family.descendants(second.process.pid)
            assert pid in {process.pid for process in below}, "it runs where it joined"
            started = below | family.descendants(first.process.pid)
            assert os.getpid() not in {process.pid for process in started}
            first.process.send_signal(signal.SIGINT)
            assert first.ended() == 0
            second.process.send_signal(signal.SIGINT)
            assert second.ended() in (0, 2), second.text  # 2: it saw the head go first.
    assert family.alive(started) == frozenset()
    assert not any(list(Path("/tmp").glob(mine)) for mine in folders)
