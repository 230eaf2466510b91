"""A head and a machine that joins it, both on this one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from launching import Serving, answers, await_answer, free_ports, write_files
from trimmoe.runtime.launch import family
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.several import own_address
from trimmoe.runtime.launch.watching import stop_servers
from trimmoe.runtime.wire.keys import generate_token

pytestmark = pytest.mark.slow
NAMES = ("desk", "attic")


def test_a_head_serves_with_those_that_join_and_ends_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes with another token is not let in, and disturbs nobody."""
    cluster = _Cluster(tmp_path, monkeypatch)
    with cluster.head() as first:
        first.said(f"Waiting at {cluster.at} for attic")
        with cluster.joined() as second, cluster.joined("wrong-token") as refused:
            second.said("Joined")
            first.said("Ready")
            assert refused.ended() == 2
            assert "does not let this machine in" in refused.text
            for index in range(len(NAMES)):
                await_answer(cluster.port + index)
            started = family.descendants(first.process.pid)
            below = family.descendants(second.process.pid)
            assert cluster.pid(1) in {process.pid for process in below}, "it runs where it joined"
            first.process.send_signal(signal.SIGINT)
            assert first.ended() == 0
            assert second.ended() == 0
            assert "The head ended the cluster." in second.text
    assert family.alive(started | below) == frozenset()


def test_no_machine_needs_the_head_to_go_on_or_to_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = _Cluster(tmp_path, monkeypatch)
    with cluster.joined() as second:
        with cluster.head() as first:
            first.said("Ready")
            pids = [cluster.pid(0), cluster.pid(1)]
            first.process.kill()
            first.ended()
        second.said("The head at")
        assert [answers(cluster.port + index) for index in range(len(NAMES))] == [200, 200]
        os.kill(pids[1], signal.SIGKILL)
        second.said("is back")
        with cluster.head() as first:
            first.said("The servers run already")
            first.said("Ready")
            assert cluster.pid(0) == pids[0]
            first.process.kill()
            first.ended()
        second.process.kill()
        second.ended()
    # Its machine starts anew: nothing is there but what is on disk.
    stop_servers(RunFolder.at(cluster.port + 1))
    with cluster.joined() as second:
        second.said("starting with what it gave before")
        await_answer(cluster.port + 1)
    stop_servers(RunFolder.at(cluster.port))


class _Cluster:
    """Two machines on one; the first is the head."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRIMMOE_TOKEN", raising=False)
        self._folder, self._files = folder, write_files(folder, NAMES)
        self.port, address = free_ports(330), own_address()
        self.at = f"{address}:{self.port + 220}"
        for name in ("token", "wrong-token"):
            (folder / name).write_text(generate_token())

    def head(self) -> Serving:
        files, (address, port) = self._files, self.at.split(":")
        return self._serving(
            *("--head", "--server", "desk", "--address", address, "--head-port", port),
            *("--host", "127.0.0.1", "--cluster", str(files.cluster), "--model", str(files.model)),
            *("--policy", "exact", "--profile", str(files.profile), "--plan", str(files.plan)),
            *("--port-base", str(self.port)),
        )

    def joined(self, token: str = "token") -> Serving:
        return self._serving("--join", self.at, "--server", "attic", token=token)

    def _serving(self, *options: str, token: str = "token") -> Serving:
        known = ("--token-file", str(self._folder / token))
        return Serving(
            ["-m", "trimmoe.cli", "serve", *known, *options], cache=self._folder / "cache"
        )

    def pid(self, index: int) -> int:
        pid = RunFolder.at(self.port + index).pid(index)
        assert pid is not None
        return pid
