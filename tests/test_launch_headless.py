"""A machine that joined, without its head."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from joining import NAMES, Cluster
from launching import answers, await_answer
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.watching import stop_servers

pytestmark = pytest.mark.slow


def test_no_machine_needs_the_head_to_go_on_or_to_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, monkeypatch)
    with cluster.joined() as second:
        with cluster.head() as first:
            first.said("Ready")
            pids = [cluster.pid(0), cluster.pid(1)]
            first.process.kill()
            first.ended()
        second.said("is away")
        assert [answers(cluster.port + index) for index in range(len(NAMES))] == [200, 200]
        os.kill(pids[1], signal.SIGKILL)
        second.said("Server attic is back")
        with cluster.head() as first:
            first.said("The servers run already")
            first.said("Ready")
            assert cluster.pid(0) == pids[0]
            first.process.kill()
            first.ended()
        second.process.kill()
        second.ended()
    # Its machine starts anew: nothing is there but what is on disk.
    assert stop_servers(RunFolder.at(cluster.port + 1))
    with cluster.joined() as second:
        second.said("starting with what it gave before")
        await_answer(cluster.port + 1)
    assert stop_servers(RunFolder.at(cluster.port))
