"""Processes under Ray that serve a stand-in: started, watched, ended, nothing left.

Of two servers each: every process takes seconds to import what it needs.
`test_serve_e2e.py` starts four.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launching import Files, Serving, answers, await_answer, free_ports, write_files
from trimmoe.runtime.launch import family

SERVERS = ("desk", "attic")
STAND_IN = str(Path(__file__).with_name("serve_standin.py"))


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


def _serve(files: Files, factory: str, port: int) -> Serving:
    given = {
        "cluster": files.cluster,
        "model": files.model,
        "profile": files.profile,
        "plan": files.plan,
        "port_base": port,
    }
    pairs = [f"{key}={value}" for key, value in given.items()]
    return Serving([STAND_IN, factory, *pairs], cache=files.folder / "cache")


def _server_pids(serving: Serving) -> list[int]:
    """Process numbers of the actors below a launcher."""
    found = []
    for process in family.descendants(serving.process.pid):
        try:
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"ray::ServerActor"):
            found.append(process.pid)
    return sorted(found)


def _all_free(port: int) -> None:
    """Every port of the cluster can be listened on again."""
    for offset in range(len(SERVERS)):
        for base in (port, port + 100):
            socket.create_server(("127.0.0.1", base + offset)).close()


@pytest.mark.slow
def test_a_server_killed_comes_back_and_ctrl_c_leaves_nothing(files: Files) -> None:
    port = free_ports(110)
    with _serve(files, "echo", port) as serving:
        serving.said("Ready")
        assert all(f"127.0.0.1:{port + index}/v1" in serving.text for index in range(len(SERVERS)))
        assert [answers(port + index) for index in range(len(SERVERS))] == [200] * len(SERVERS)
        pids = _server_pids(serving)
        assert len(pids) == len(SERVERS), "one process per server"
        os.kill(pids[1], signal.SIGKILL)
        serving.said("is lost and is being started again")
        serving.said("is back")
        for index in range(len(SERVERS)):
            await_answer(port + index)
        # A listing is taken process by process, and may miss a family that is just growing.
        now = _server_pids(serving)
        for _ in range(50):
            if len(now) == len(SERVERS):
                break
            time.sleep(0.2)
            now = _server_pids(serving)
        assert set(pids) - set(now) == {pids[1]}, f"one is replaced:\n{serving.text}"
        started = family.descendants(serving.process.pid)
        serving.process.send_signal(signal.SIGINT)
        assert serving.ended() == 0
        assert family.alive(started) == frozenset()
        _all_free(port)


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
def test_a_launcher_killed_outright_takes_its_servers_with_it(files: Files) -> None:
    """Nobody is left to clear up, so each server notices by itself, and Ray's raylet too. Two small
    helpers of Ray's own look for their head for a few minutes more, as docs/deploy.md says."""
    port = free_ports(110)
    with _serve(files, "echo", port) as serving:
        serving.said("Ready")
        started = family.descendants(serving.process.pid)
        helpers = frozenset(one for one in started if _is_rays_helper(one.pid))
        serving.process.kill()
        serving.ended()
        end_s = time.monotonic() + 60
        # Ray may yet start a server anew before its raylet ends: its port tells.
        while family.alive(started - helpers) or _is_taken(port):
            assert time.monotonic() < end_s, "processes were left behind"
            time.sleep(0.2)
        for one in family.alive(helpers):
            os.kill(one.pid, signal.SIGKILL)


def _is_taken(port: int) -> bool:
    try:
        _all_free(port)
    except OSError:
        return True
    return False


def _is_rays_helper(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    helpers = (b"DashboardAgent", b"RuntimeEnvAgent", b"dashboard/agent", b"runtime_env/agent")
    return any(name in command for name in helpers)
