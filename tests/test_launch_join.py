"""A head and a machine that joins it, both on this one."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from pathlib import Path

import pytest

from launching import (
    PATIENCE_S,
    Serving,
    answers,
    await_answer,
    free_ports,
    listening,
    write_files,
)
from trimmoe.core.private import write_private
from trimmoe.experiments.serve_cluster import openings_of_head
from trimmoe.models.exact import greedy
from trimmoe.models.load import open_model
from trimmoe.runtime.launch import family
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.naming import own_address
from trimmoe.runtime.launch.several import HeadOptions
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
            cluster.opens_what_check_says(first)
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


def test_whoever_joins_is_planned_for_and_no_answer_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cluster file. Answers are under way while machines join and the plan changes twice."""
    cluster = _Cluster(tmp_path, monkeypatch)
    prompt, length = [5, 9, 77, 31], 200
    with cluster.open_head() as first:
        first.said("until 2 servers are there")
        with cluster.joined() as second:
            first.said("Ready")
            streams = [_Stream(cluster.port, prompt, length)]
            first.said("Serving by what was measured of desk, attic")
            streams.append(_Stream(cluster.port + 1, prompt, length))
            with cluster.joined(server="cellar") as third:
                first.said("Serving by what was measured of desk, attic, cellar")
                streams.append(_Stream(cluster.port + 2, prompt, length))
                answers = [stream.tokens() for stream in streams]
                first.process.send_signal(signal.SIGINT)
                assert [each.ended() for each in (first, second, third)] == [0, 0, 0]
    assert answers == [cluster.greedy(prompt, length)] * len(streams)
    assert not any(RunFolder.at(cluster.port, turn).alive() for turn in (0, 1))


class _Stream:
    """An answer that is read from when this is made."""

    def __init__(self, port: int, prompt: list[int], length: int) -> None:
        self._ids: list[int] = []
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": length, "temperature": 0,
            "stream": True, "return_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        self._request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def tokens(self) -> list[int]:
        self._thread.join()
        return self._ids

    def _read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=PATIENCE_S) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self._ids += choice.get("token_ids") or []


class _Cluster:
    """Two machines on one; the first is the head."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRIMMOE_TOKEN", raising=False)
        self._folder, self._files = folder, write_files(folder, NAMES)
        self.port, address = free_ports(330), own_address()
        self.at = f"{address}:{self.port + 220}"
        for name in ("token", "wrong-token"):
            write_private(folder / name, generate_token().encode())

    def head(self) -> Serving:
        files, (address, port) = self._files, self.at.split(":")
        return self._serving(
            *("--head", "--server", "desk", "--address", address, "--head-port", port),
            *("--host", "127.0.0.1", "--cluster", str(files.cluster), "--model", str(files.model)),
            *("--policy", "exact", "--profile", str(files.profile), "--plan", str(files.plan)),
            *("--port-base", str(self.port), "--no-spare"),
        )

    def opens_what_check_says(self, head: Serving) -> None:
        """All of it but what is for moving to another plan, and nothing else."""
        address, port = self.at.split(":")
        config = ServeConfig(
            cluster=self._files.cluster, port_base=self.port, host="127.0.0.1", spare=False
        )
        options = HeadOptions(address=address, port=int(port), servers=("desk",), token=None)
        said = {each.at for each in openings_of_head(config, options)}
        below = [each.pid for each in family.descendants(head.process.pid)]
        turns = (f":{self.port + 150}", f"/{self.port}-1/")
        later = {at for at in said if any(turn in at for turn in turns)}
        assert len(later) == 3
        assert listening(head.process.pid, *below) == said - later

    def open_head(self) -> Serving:
        files, (address, port) = self._files, self.at.split(":")
        return self._serving(
            *("--head", "--server", "desk", "--address", address, "--head-port", port),
            *("--host", "127.0.0.1", "--servers", "2", "--model", str(files.model)),
            *("--policy", "exact", "--profile", str(files.profile)),
            *("--port-base", str(self.port), "--no-spare"),
        )

    def joined(self, token: str = "token", server: str = "attic") -> Serving:
        return self._serving("--join", self.at, "--server", server, token=token)

    def greedy(self, prompt: list[int], length: int) -> list[int]:
        """What transformers' model says."""
        return greedy(open_model(str(self._files.model)), [prompt], length)[0]

    def _serving(self, *options: str, token: str = "token") -> Serving:
        known = ("--token-file", str(self._folder / token))
        return Serving(
            ["-m", "trimmoe.cli", "serve", *known, *options], cache=self._folder / "cache"
        )

    def pid(self, index: int) -> int:
        pid = RunFolder.at(self.port + index).pid(index)
        assert pid is not None
        return pid
