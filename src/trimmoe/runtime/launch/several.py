"""A cluster of several machines: one head, and those that join it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.addresses import endpoints, require_free
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.job import Pieces, server_specs
from trimmoe.runtime.launch.kernels import compile_decisions
from trimmoe.runtime.launch.local import Say, run_cluster
from trimmoe.runtime.launch.raylet import DEFAULT_PORT, head_ray, join_ray, machines_of
from trimmoe.runtime.launch.server import TOKEN_VARIABLE
from trimmoe.runtime.launch.signals import Stop, stop_on_signal
from trimmoe.runtime.wire.keys import SHORTEST_TOKEN, generate_token

_LOOK_S = 0.5


def serve_head(
    config: ServeConfig,
    artifacts: Artifacts,
    pieces: Pieces,
    say: Say,
    *,
    address: str,
    port: int,
    servers: Sequence[str],
    token: str | None,
) -> None:
    """Wait until every server's machine has joined, then serve until Ctrl-C or SIGTERM.

    `servers` run on this machine, which others reach at `address`. Without a `token` one is
    made and shown. Raises `UserError`.
    """
    names = artifacts.plan.cluster.server_names
    compile_decisions(artifacts, pieces.policy, pieces.maker)
    if token is None:
        token = generate_token()
        say(f"The cluster token, for {TOKEN_VARIABLE} on every machine that joins:\n{token}")
    with (
        stop_on_signal() as stop,
        head_ray(token, address=address, port=port, servers=tuple(servers)),
    ):
        stop.listen()
        machines = _wait_joined(names, f"{address}:{port}", stop, say)
        if machines is None:
            return
        where = endpoints(
            names,
            machines,
            http_host=config.host,
            port_base=config.port_base,
            wire_port_base=config.first_wire_port,
        )
        require_free(each for each in where if each.name in servers)
        specs = server_specs(config, artifacts, pieces, where, one_machine=False)
        run_cluster(config, specs, stop, say, pinned=True)


def serve_join(
    head: str, *, port_base: int, servers: Sequence[str], token: str | None, say: Say
) -> None:
    """Offer this machine as `servers` to the head at `host` or `host:port`. Raises `UserError`."""
    if not servers:
        raise UserError("A machine that joins must say which server it is; give --server.")
    if token is None:
        raise UserError(
            f"Joining needs the cluster token that the head shows; set {TOKEN_VARIABLE} to it, or "
            "give --token-file."
        )
    at = head if ":" in head else f"{head}:{DEFAULT_PORT}"
    with stop_on_signal() as stop:
        join_ray(
            token,
            head=at,
            port_base=port_base,
            servers=tuple(servers),
            stopping=stop.is_set,
            say=say,
        )


def cluster_token(path: Path | None) -> str | None:
    """The token in a file, or in the environment; None if there is neither.

    Raises `UserError` if the file cannot be read or what is found is too short to be secret.
    """
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
    else:
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"Cannot read the cluster token in {path} ({error}).") from error
    if not token and path is None:
        return None
    if len(token) < SHORTEST_TOKEN:
        raise UserError(
            f"The cluster token has {len(token)} characters; take the one the head shows, of at "
            f"least {SHORTEST_TOKEN}."
        )
    return token


def own_address() -> str:
    """The address of this machine as others on its network see it."""
    import ray.util

    return ray.util.get_node_ip_address()


def _wait_joined(names: tuple[str, ...], at: str, stop: Stop, say: Say) -> dict[str, str] | None:
    """Each server's machine, once all are there; None if told to stop before."""
    missing: tuple[str, ...] | None = None
    while not stop.is_set():
        machines = machines_of(names)
        still = tuple(name for name in names if name not in machines)
        if not still:
            return machines
        if still != missing:
            say(f"Waiting at {at} for {', '.join(still)} ...")
            missing = still
        time.sleep(_LOOK_S)
    return None
