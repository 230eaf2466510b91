"""A cluster of several machines: one head, and those that join it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from trimmoe.core.errors import UserError
from trimmoe.models.embedded.materialise import default_cache_dir
from trimmoe.runtime.launch.addresses import require_free
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.deployment import (
    DEFAULT_PORT,
    Deployment,
    deployed_endpoints,
    deployment_of,
    open_deployment,
)
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.handles import ServerHandle
from trimmoe.runtime.launch.job import Job, Pieces, server_spec
from trimmoe.runtime.launch.kernels import compile_decisions
from trimmoe.runtime.launch.local import Say, announce, watch
from trimmoe.runtime.launch.member import ALONE_S, Membership, keep, kept, kept_at
from trimmoe.runtime.launch.members import Members, remote_handles
from trimmoe.runtime.launch.processes import importable, start_processes
from trimmoe.runtime.launch.server import TOKEN_VARIABLE, ServerSpec
from trimmoe.runtime.launch.signals import Stop, stop_on_signal
from trimmoe.runtime.launch.supervise import Patience, Supervisor
from trimmoe.runtime.launch.watching import supervising
from trimmoe.runtime.wire.keys import SHORTEST_TOKEN, generate_token

_LOOK_S = 0.5
_ELSEWHERE = ("192.0.2.1", 9)
"""An address of nobody: the way to it shows which of its own a machine uses."""
Assemble = Callable[[ServeConfig], Pieces]


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
    made, kept and shown. Raises `UserError`.
    """
    names = artifacts.plan.cluster.server_names
    compile_decisions(artifacts, pieces.policy, pieces.maker)
    if token is None:
        token = _kept_token(say)
    with stop_on_signal() as stop, Members(token, address, port, own=servers) as members:
        own = dict.fromkeys(servers, address)
        machines = _joined(names, members, own, f"{address}:{port}", stop, say)
        if machines is None:
            members.end()
            return
        where = deployed_endpoints(config, names, machines)
        spec = server_spec(config, artifacts, pieces, where, one_machine=False)
        with ExitStack() as stack:
            handles: list[ServerHandle] = []
            if servers:
                job = _job(spec, servers, token, config)
                folder = RunFolder.at(_first_port(spec, servers))
                if not folder.alive():
                    require_free(each for each in where if each.name in servers)
                folder, job = stack.enter_context(supervising(folder, job, stop, say))
                handles += start_processes(folder, job)
            members.deploy(deployment_of(config, artifacts, machines))
            handles += remote_handles(members, machines, servers)
            watch(config, handles, stop, say, lambda: announce(config, spec, say))


def serve_join(
    head: str, *, servers: Sequence[str], token: str | None, say: Say, assemble: Assemble
) -> None:
    """Offer this machine as `servers` to the head at `host` or `host:port`, until Ctrl-C or until
    the head ends the cluster. Raises `UserError`."""
    if not servers:
        raise UserError("A machine that joins must say which server it is; give --server.")
    if token is None:
        raise UserError(
            f"Joining needs the cluster token that the head shows; set {TOKEN_VARIABLE} to it, or "
            "give --token-file."
        )
    at, names = head if ":" in head else f"{head}:{DEFAULT_PORT}", tuple(servers)
    with stop_on_signal() as stop, Membership(token, at, names, say) as membership:
        while not stop.is_set() and not membership.is_over:
            deployment = _given(membership, at, names, stop, say)
            if deployment is not None:
                _run(deployment, membership, names, token, at, stop, say, assemble)
        if membership.refused:
            raise UserError(membership.refused)
        if membership.ended:
            say("The head ended the cluster.")


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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)  # Sends nothing.
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _kept_token(say: Say) -> str:
    """This machine's own, so that a head that starts again is the same to its members."""
    path = default_cache_dir() / "cluster-token"
    token = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    if len(token) < SHORTEST_TOKEN:
        token = generate_token()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(token, encoding="utf-8")
    say(f"The cluster token, for {TOKEN_VARIABLE} on every machine that joins:\n{token}")
    return token


def _joined(
    names: tuple[str, ...], members: Members, own: dict[str, str], at: str, stop: Stop, say: Say
) -> dict[str, str] | None:
    """Each server's machine, once all are there; None if told to stop before."""
    missing: tuple[str, ...] | None = None
    while not stop.is_set():
        machines = members.machines() | own
        still = tuple(name for name in names if name not in machines)
        if not still:
            return {name: machines[name] for name in names}
        if still != missing:
            say(f"Waiting at {at} for {', '.join(still)} ...")
            missing = still
        stop.wait(_LOOK_S)
    return None


def _job(spec: ServerSpec, servers: Sequence[str], token: str, config: ServeConfig) -> Job:
    names = [each.name for each in spec.endpoints]
    here = tuple(index for index, name in enumerate(names) if name in servers)
    return Job(spec=spec, here=here, token=token, import_path=importable(), spare=config.spare)


def _first_port(spec: ServerSpec, servers: Sequence[str]) -> int:
    return min(each.http_port for each in spec.endpoints if each.name in servers)


def _given(
    membership: Membership, head: str, names: tuple[str, ...], stop: Stop, say: Say
) -> Deployment | None:
    """What to run: the head's, or what it gave before if it is silent; None after a while."""
    waited_s = 0.0
    while not stop.is_set() and not membership.is_over:
        if membership.given is not None:
            return membership.given
        if not membership.heard and waited_s >= ALONE_S:
            before = kept(kept_at(head, names))
            if before is not None:
                say(f"The head at {head} does not answer; starting with what it gave before.")
                return before
        membership.wait(_LOOK_S)
        waited_s += _LOOK_S
    return None


def _run(
    deployment: Deployment,
    membership: Membership,
    names: tuple[str, ...],
    token: str,
    head: str,
    stop: Stop,
    say: Say,
    assemble: Assemble,
) -> None:
    """Serve that until told to stop or to serve something else."""
    folder = kept_at(head, names)
    leaving = threading.Event()

    def changed() -> None:
        given = membership.given
        if membership.is_over or (given is not None and given.identity != deployment.identity):
            leaving.set()

    stop.also(leaving)
    membership.on_change(changed)
    changed()
    opened = open_deployment(deployment, folder)
    keep(deployment, folder)
    pieces = assemble(opened.config)
    spec = server_spec(opened.config, opened.artifacts, pieces, opened.endpoints, one_machine=False)
    compile_decisions(opened.artifacts, pieces.policy, pieces.maker)
    job = _job(spec, names, token, opened.config)
    with supervising(RunFolder.at(_first_port(spec, names)), job, stop, say) as (run_folder, job):
        supervisor = Supervisor(
            start_processes(run_folder, job),
            say=say,
            stopping=leaving,
            patience=Patience(ready_s=opened.config.ready_s),
        )
        membership.running(deployment, lambda: supervisor.statuses)
        try:
            if supervisor.wait_ready():
                supervisor.watch()
        except UserError as error:
            membership.failed(str(error))
            membership.wait(2 * _LOOK_S + 2.0)
            raise
        finally:
            with stop.hurried():
                supervisor.stop()
