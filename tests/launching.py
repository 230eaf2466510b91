"""Cluster files, artifacts and `trimmoe serve` as a process, for tests of launching."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from factories import random_profile
from quick import popen
from tiny import write_tiny_checkpoint
from trimmoe.core.artifact import file_hash
from trimmoe.core.cluster_file import load_cluster
from trimmoe.experiments.preparation import prepare
from trimmoe.models.load import model_spec
from trimmoe.placement.make import make_plan
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.status import Phase, ServerStatus

PATIENCE_S = 180.0
"""What a test waits for must come; how soon depends on the machine."""
SERVERS = ("desk", "shelf", "attic", "cellar")


@dataclass(frozen=True, kw_only=True)
class Files:
    """What `trimmoe serve` is given, on disk."""

    folder: Path
    model: Path
    cluster: Path
    profile: Path
    plan: Path


def write_files(folder: Path, servers: Sequence[str] = SERVERS, **profiled: Any) -> Files:
    """A tiny random checkpoint, a fast cluster, a random profile but for what is `profiled`, and a
    plan that fits them."""
    model = folder / "tiny"
    model.mkdir()
    write_tiny_checkpoint(model)
    cluster = folder / "cluster.yaml"
    cluster.write_text(cluster_yaml(servers))
    files = Files(
        folder=folder,
        model=model,
        cluster=cluster,
        profile=folder / "profile.safetensors",
        plan=folder / "plan.safetensors",
    )
    spec = model_spec(model, hashed=True)
    profile = replace(random_profile(np.random.default_rng(3), spec), **profiled)
    profile.save(files.profile)
    plan = make_plan(profile, spec, load_cluster(cluster), cluster_hash=file_hash(cluster))
    plan.save(files.plan)
    return files


def written_artifacts(folder: Path) -> Artifacts:
    """What `serve` makes of the files of `write_files`."""
    files = write_files(folder)
    config = ServeConfig.model_validate(
        {"cluster": files.cluster, "model": str(files.model), "profile": files.profile,
         "plan": files.plan}
    )  # fmt: skip
    return prepare(config, sample=str, say=lambda _: None, cache_dir=folder)


def cluster_yaml(servers: Sequence[str], ratio: float = 1.5) -> str:
    """Unequal servers whose links are quick, so that tests are."""
    lines = [
        f"  - {{name: {name}, tflops: {40 - 5 * (index % 3)}, memory_gb: {24 - 2 * (index % 3)}}}"
        for index, name in enumerate(servers)
    ]
    return "\n".join(
        [
            f"name: test{len(servers)}",
            f"memory_ratio: {ratio}",
            "servers:",
            *lines,
            "links: {default: {gbps: 2, ms: 0.3}}",
            "",
        ]
    )


_BLOCK = 500
"""Ports that a process is given at once; it listens on the last one."""


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody uses now, below those the system gives.

    They are this process's until it ends: tests run side by side, and would find the same ones free
    before either listens on them. Who listens on a block's last port has the block.
    """
    assert count < _BLOCK
    for first in np.random.default_rng().permutation(np.arange(10_000, 32_000, _BLOCK)).tolist():
        try:
            # Open until the process ends, and nobody's to close.
            socket.create_server(("127.0.0.1", first + _BLOCK - 1)).detach()
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def listening(*pids: int) -> set[str]:
    """Where processes listen, says the kernel: host:port (TCP and UDP) or the path of a socket."""
    own = {
        os.readlink(link)
        for pid in pids
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink()
    }
    found = set()
    for kind, wanted in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == wanted and f"socket:[{parts[9]}]" in own:
                host, port = parts[1].split(":")
                # Each word of an address is in the order of this machine.
                words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
                found.add(f"{ipaddress.ip_address(b''.join(words))}:{int(port, 16)}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        parts = line.split(maxsplit=7)
        accepts = int(parts[3], 16) & 0x10000
        if accepts and f"socket:[{parts[6]}]" in own:
            found.add(parts[7])
    return found


class Serving:
    """`trimmoe serve`, or a stand-in for it, as a process with all it starts."""

    def __init__(
        self, command: Sequence[str], *, cache: Path | None = None, quickly: bool = True
    ) -> None:
        """`quickly`: forked from what has imported everything; else as users start it."""
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
        before = os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), before])
        if cache is not None:
            environment["TRIMMOE_CACHE"] = str(cache)
        start: Any = popen if quickly else subprocess.Popen
        self.process: subprocess.Popen[str] = start(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def said(self, what: str, times: int = 1) -> None:
        """Wait until a line says `what` so many times; fails if the process ends before."""
        end_s = time.monotonic() + PATIENCE_S
        while self.text.count(what) < times:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end_s, self.text
            time.sleep(0.05)

    def ended(self) -> int:
        """Its exit code, once it has ended by itself."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(5)
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)


def answers(port: int, path: str = "/health") -> int | None:
    """The status of a GET; None where nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as got:
            return got.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def await_answer(port: int, wanted: int | None = 200) -> None:
    """Wait until the health of the server on a port is `wanted`."""
    end_s = time.monotonic() + PATIENCE_S
    while answers(port) != wanted:
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)


def status(phase: Phase = Phase.SERVING, pid: int = 1, *, healthy: bool = True) -> ServerStatus:
    return ServerStatus(phase=phase, pid=pid, healthy=healthy and phase is Phase.SERVING)
