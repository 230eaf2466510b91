"""Processes that serve a stand-in: started, watched, ended, nothing left.

Of two servers each: every process takes seconds to import what it needs.
`test_serve_e2e.py` starts four.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launching import (
    PATIENCE_S,
    Files,
    Serving,
    answers,
    await_answer,
    free_ports,
    listening,
    write_files,
)
from trimmoe.experiments.serve_cluster import openings_here
from trimmoe.runtime.launch import family
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.watching import ask, stop_servers

SERVERS = ("desk", "attic")
STAND_IN = str(Path(__file__).with_name("serve_standin.py"))


ASKING = """
import torch
def asked(*_):
    raise AssertionError("a GPU was asked for")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = asked
from trimmoe.runtime.launch.forking import _warm
_warm(gently=False)
"""


@pytest.mark.slow
def test_what_servers_are_forked_from_asks_for_no_gpu() -> None:
    """None of them could use it then."""
    subprocess.run([sys.executable, "-c", ASKING], check=True)


def test_only_what_is_below_is_family_and_it_can_be_ended() -> None:
    sleeper = "import time; time.sleep(600)"
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleeper!r}])",
        ]
    )
    try:
        end_s = time.monotonic() + 60
        while len(below := family.descendants(child.pid)) == 0:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        assert {process.pid for process in below} != {child.pid}
        assert below < family.descendants()
        assert family.alive(below) == below
        family.end(below, patience_s=0.0)
        child.wait(60)  # It waited for its own child only.
        assert family.alive(below) == frozenset()
    finally:
        child.kill()
        child.wait()


def test_a_number_used_again_is_another_process() -> None:
    mine = family.Process(pid=os.getpid(), born="Thu Jan  1 00:00:00 1970")
    assert family.alive(frozenset({mine})) == frozenset()
    family.end(frozenset({mine}), patience_s=0.0)  # Would end this test.


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"), SERVERS)


def _serve(files: Files, factory: str, port: int, **more: object) -> Serving:
    given = {
        "cluster": files.cluster,
        "model": files.model,
        "profile": files.profile,
        "plan": files.plan,
        "port_base": port,
        "spare": False,
        **more,
    }
    pairs = [f"{key}={value}" for key, value in given.items()]
    return Serving([STAND_IN, factory, *pairs], cache=files.folder / "cache")


def _pids(port: int) -> list[int | None]:
    """Process numbers of the servers, None for one that is not there."""
    folder = RunFolder.at(port)
    return [folder.pid(i) if folder.is_alive(i) else None for i in range(len(SERVERS))]


def _all_free(port: int) -> None:
    """Every port of the cluster can be listened on again."""
    for offset in range(len(SERVERS)):
        for base in (port, port + 100):
            socket.create_server(("127.0.0.1", base + offset)).close()


FORKED = pytest.mark.skipif(sys.platform != "linux", reason="Servers are forked on Linux only.")


@FORKED
@pytest.mark.slow
def test_a_server_killed_comes_back_and_ctrl_c_leaves_nothing(files: Files) -> None:
    port = free_ports(110)
    with _serve(files, "echo", port, spare=True) as serving:
        serving.said("Ready")
        assert all(f"127.0.0.1:{port + index}/v1" in serving.text for index in range(len(SERVERS)))
        assert [answers(port + index) for index in range(len(SERVERS))] == [200] * len(SERVERS)
        pids = _pids(port)
        assert None not in pids
        assert len(set(pids)) == len(SERVERS), "one process per server"
        _opens_what_check_says(serving, files, port)
        parent = _parent(pids[0])
        assert parent == _parent(pids[1]) != serving.process.pid, "both are forked"
        os.kill(_number(pids[1]), signal.SIGKILL)
        serving.said("is lost and is being started again")
        serving.said("is back")
        for index in range(len(SERVERS)):
            await_answer(port + index)
        assert _pids(port)[0] == pids[0]
        assert _parent(_pids(port)[1]) == parent, "so is the one that takes its place"
        started = family.descendants(serving.process.pid)
        serving.process.send_signal(signal.SIGINT)
        assert serving.ended() == 0
        assert family.alive(started) == frozenset()
        _all_free(port)


@FORKED
@pytest.mark.slow
def test_servers_outlive_what_forked_them_and_are_then_started_without_it(files: Files) -> None:
    port = free_ports(110)
    with _serve(files, "echo", port, spare=True) as serving:
        serving.said("Ready")
        pids = _pids(port)
        parent = _number(_parent(pids[0]))
        assert len(list(Path(f"/proc/{parent}/task").iterdir())) == 1, "others would be cut off"
        os.kill(parent, signal.SIGKILL)
        assert [answers(port + index) for index in range(len(SERVERS))] == [200] * len(SERVERS)
        os.kill(_number(pids[1]), signal.SIGKILL)
        serving.said("is back")
        assert _pids(port)[0] == pids[0]
        assert _parent(_pids(port)[1]) != parent
        serving.process.send_signal(signal.SIGINT)
        assert serving.ended() == 0
    _all_free(port)


@FORKED
@pytest.mark.slow
def test_nothing_is_kept_for_servers_that_die_where_nobody_wants_it(files: Files) -> None:
    port = free_ports(110)
    with _serve(files, "echo", port, spare=False) as serving:
        serving.said("Ready")
        servers = set(_pids(port))

        def below() -> set[int | None]:
            return {each.pid for each in family.descendants(serving.process.pid)}

        _await(lambda: servers.isdisjoint(below()))
        assert [answers(port + index) for index in range(len(SERVERS))] == [200] * len(SERVERS)


def _parent(pid: int | None) -> int | None:
    """The process below which one is."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"PPid:\s+(\d+)", status)[0])


def _opens_what_check_says(serving: Serving, files: Files, port: int) -> None:
    """All of it, nothing else, and none of it for another account or machine, but HTTP."""
    config = ServeConfig(cluster=files.cluster, port_base=port)
    said = openings_here(config)
    below = [each.pid for each in family.descendants(serving.process.pid)]
    assert listening(serving.process.pid, *below) == {each.at for each in said}
    ports = {each.at for each in said if not each.at.startswith("/")}
    assert ports == {f"127.0.0.1:{port + index}" for index in range(len(SERVERS))}
    run = RunFolder.at(port).path
    assert {Path(each.at).parent for each in said if each.at not in ports} == {run}
    assert stat.S_IMODE(run.stat().st_mode) == stat.S_IMODE(run.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((run / "job").stat().st_mode) == 0o600


@pytest.mark.slow
def test_a_server_that_cannot_start_ends_everything(files: Files) -> None:
    """Two clusters beside each other, which know nothing of one another."""
    port = free_ports(330)
    other = port + 220
    with _serve(files, "broken", port) as dying, _serve(files, "failing", other) as failing:
        for serving, sentence in (
            (dying, "process of server attic ended while it was starting"),
            (failing, "attic failed (RuntimeError: a defect); see"),
        ):
            serving.said("Starting 2 servers")
            assert serving.ended() == 2
            assert sentence in serving.text
            assert "Traceback" not in serving.text
    _all_free(port)
    _all_free(other)


@pytest.mark.slow
def test_a_port_taken_is_refused_before_anything_starts(files: Files) -> None:
    port = free_ports(110)
    with (
        socket.create_server(("127.0.0.1", port + 1)),
        _serve(files, "echo", port) as serving,
    ):
        assert serving.ended() == 2
        assert serving.text.startswith(f"trimmoe: The port {port + 1} on 127.0.0.1")
        assert "Starting" not in serving.text


@pytest.mark.slow
def test_servers_outlive_who_started_them_and_are_still_watched(files: Files) -> None:
    """Whoever comes next with the same command takes them over; another one is refused."""
    port = free_ports(110)
    with _serve(files, "echo", port) as serving:
        serving.said("Ready")
        pids = _pids(port)
        serving.process.kill()
        serving.ended()
    assert [answers(port + index) for index in range(len(SERVERS))] == [200] * len(SERVERS)
    os.kill(_number(pids[0]), signal.SIGKILL)
    _await(lambda: _pids(port)[0] not in (None, pids[0]))
    await_answer(port)
    with _serve(files, "echo", port, max_waiting=3) as other:
        assert other.ended() == 2
        assert "Other servers run at port" in other.text
    with _serve(files, "echo", port) as serving:
        serving.said("taking them over")
        serving.said("Ready")
        assert _pids(port)[1] == pids[1]
        with _serve(files, "echo", port) as other:
            assert other.ended() == 2
            assert "Another `trimmoe serve` runs" in other.text
        serving.process.send_signal(signal.SIGINT)
        assert serving.ended() == 0
    assert _pids(port) == [None] * len(SERVERS)
    _all_free(port)


@pytest.mark.slow
def test_servers_that_nobody_watches_in_a_terminal_end_when_told(files: Files) -> None:
    port = free_ports(110)
    with _serve(files, "echo", port) as serving:
        serving.said("Ready")
        serving.process.kill()
        serving.ended()
    folder = RunFolder.at(port)
    _await(lambda: ask(folder, "leave") is not None)
    # Nobody took them over from the one that left: a server starts another.
    _await(lambda: stop_servers(folder, patience_s=1.0))
    _await(lambda: folder.read() is None)
    _all_free(port)


def _await(done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.1)


def _number(pid: int | None) -> int:
    assert pid is not None
    return pid
