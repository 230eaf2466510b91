"""Ray on this machine: a private instance, a head for others to join, or one that joins.

Ray places the servers, starts them again and carries configuration and health; tokens never pass
through it. An instance has a temporary folder and a token of its own, so that others on the
same machine are neither found nor disturbed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trimmoe.core.errors import UserError
from trimmoe.runtime.launch import family
from trimmoe.runtime.launch.server import TOKEN_VARIABLE

NAMESPACE = "trimmoe"
DEFAULT_PORT = 6379
"""First of Ray's ports between machines; see `docs/deploy.md`."""
_STORE_BYTES = 100 << 20
"""Ray's object store holds profile and plan once, nothing else."""
_CPUS = 1
"""What Ray is told; the servers ask for none, so that any number fits on a machine."""
_FIRST_WORKER, _WORKERS = 21, 60
_END_S = 10.0


def server_resource(name: str) -> str:
    """What the machine of a server offers to Ray, so that the server is placed there."""
    return f"trimmoe-server:{name}"


def ray_token(token: str) -> str:
    """Ray's own token, from which the cluster token cannot be told."""
    digest = hashlib.blake2b(token.encode(), digest_size=32, person=b"trimmoe-ray")
    return digest.hexdigest()


@contextmanager
def private_ray(token: str) -> Iterator[None]:
    """A Ray instance for this process alone; everything it started is gone afterwards."""
    with _environment(token), _folder() as folder, _ending():
        _init(
            address="local",
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
            object_store_memory=_STORE_BYTES,
            num_cpus=_CPUS,
            num_gpus=0,
            include_dashboard=False,
        )
        yield


@contextmanager
def head_ray(token: str, *, address: str, port: int, servers: tuple[str, ...]) -> Iterator[None]:
    """A Ray head that others can join at `address`, and this process as its driver.

    `servers` are those this machine is to run. Raises `UserError` if it does not start.
    """
    with _environment(token), _folder() as folder, _ending():
        command = [
            *_start_command(port, servers, folder),
            "--head",
            f"--port={port}",
            f"--node-ip-address={address}",
            "--include-dashboard=false",
        ]
        process = _spawn(command, folder)
        try:
            _wait_started(process, folder)
            _init(address=f"{address}:{port}", _node_ip_address=address)
            yield
        finally:
            _shutdown()
            process.terminate()


def join_ray(
    token: str,
    *,
    head: str,
    port_base: int,
    servers: tuple[str, ...],
    stopping: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """Offer this machine to the head until told to stop.

    Raises `UserError` if the head cannot be joined or goes away.
    """
    with _environment(token), _folder() as folder, _ending():
        process = _spawn([*_start_command(port_base, servers, folder), f"--address={head}"], folder)
        try:
            _wait_started(process, folder, stopping)
            say(f"Joined {head} as {', '.join(servers)}.")
            while process.poll() is None and not stopping():
                time.sleep(0.2)
        finally:
            process.terminate()
        if not stopping():
            raise UserError(f"The head at {head} is gone; start it, then join again.")


def machines_of(names: tuple[str, ...]) -> dict[str, str]:
    """The address of the machine that offers each server, for those that are there."""
    import ray

    found = {}
    for node in ray.nodes():
        for name in names:
            if node["Alive"] and server_resource(name) in node["Resources"]:
                found[name] = node["NodeManagerAddress"]
    return found


def _init(**settings: Any) -> None:
    import ray

    ray.init(namespace=NAMESPACE, log_to_driver=False, configure_logging=False, **settings)
    _quieten()


def _quieten() -> None:
    """Ray prints a page for every process that ends; the supervisor says it in a sentence."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def _shutdown() -> None:
    import ray

    ray.shutdown()


def _start_command(port: int, servers: tuple[str, ...], folder: Path) -> list[str]:
    """`ray start` with every port in a narrow range from `port` on, for the firewall's sake."""
    first = port + _FIRST_WORKER
    resources = {server_resource(name): 1 for name in servers}
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
        "--disable-usage-stats",
        f"--temp-dir={folder}",
        f"--num-cpus={_CPUS}",
        "--num-gpus=0",
        f"--object-store-memory={_STORE_BYTES}",
        f"--resources={json.dumps(resources)}",
        f"--node-manager-port={port + 1}",
        f"--object-manager-port={port + 2}",
        f"--runtime-env-agent-port={port + 3}",
        f"--dashboard-agent-grpc-port={port + 4}",
        f"--dashboard-agent-listen-port={port + 5}",
        f"--metrics-export-port={port + 6}",
        f"--dashboard-port={port + 7}",
        f"--min-worker-port={first}",
        f"--max-worker-port={first + _WORKERS - 1}",
    ]


def _spawn(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Started outside the terminal's foreground group: Ctrl-C is ours to pass on."""
    with (folder / "start.log").open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            process_group=0,
        )  # fmt: skip


def _wait_started(
    process: subprocess.Popen[bytes], folder: Path, stopping: Callable[[], bool] = lambda: False
) -> None:
    log = folder / "start.log"
    while process.poll() is None and not stopping():
        if b"--block" in log.read_bytes():
            return
        time.sleep(0.1)
    if not stopping():
        lines = log.read_text(errors="replace").strip().splitlines() or ["no reason given"]
        raise UserError(
            f"Ray does not start here ({lines[-1].strip()}); check the address and the cluster "
            "token, and that the ports are free (docs/deploy.md)."
        )


@contextmanager
def _environment(token: str) -> Iterator[None]:
    """What Ray and the servers read from the environment; as before afterwards."""
    chosen = {
        TOKEN_VARIABLE: token,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": ray_token(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Servers are what the machine is for, no background work: by default they are at 15.
        "RAY_worker_niceness": "0",
        # Ray would hide accelerators from servers that it does not count them for.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # The servers end before Ray is told to: there is nothing to wait for.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # A machine short of memory is the operator's to see, not a reason to end a server.
        "RAY_memory_monitor_refresh_ms": "0",
        # One thread per server: on one machine they share the cores.
        "OMP_NUM_THREADS": "1",
    }
    removed = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_RUNTIME_ENV_HOOK")
    before = {name: os.environ.get(name) for name in (*chosen, *removed)}
    for name in removed:
        os.environ.pop(name, None)
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for Ray's sockets and logs; under /tmp, because socket paths must be short.

    Its name says which process it belongs to: that of one which was killed can be told from
    that of one which runs.
    """
    parent = "/tmp" if Path("/tmp").is_dir() else None
    folder = tempfile.mkdtemp(prefix=f"trimmoe-{os.getpid()}-", dir=parent)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _ending() -> Iterator[None]:
    """Whatever this process started meanwhile has ended afterwards."""
    before = family.descendants()
    try:
        yield
    finally:
        ours = family.descendants() - before
        _shutdown()
        family.end(ours, patience_s=_END_S)
