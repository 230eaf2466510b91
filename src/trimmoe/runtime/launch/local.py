"""All servers of a cluster on this machine, one process each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import trimmoe
from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.addresses import (
    LOOPBACK,
    Endpoint,
    endpoints,
    is_loopback,
    require_free,
)
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.fork_server import importable
from trimmoe.runtime.launch.handles import ServerHandle
from trimmoe.runtime.launch.job import Job, Pieces, server_spec
from trimmoe.runtime.launch.kernels import compile_decisions
from trimmoe.runtime.launch.model import served_name
from trimmoe.runtime.launch.processes import (
    ProcessHandle,
    running_processes,
    start_processes,
)
from trimmoe.runtime.launch.signals import Stop, stop_on_signal
from trimmoe.runtime.launch.supervise import Patience, Supervisor
from trimmoe.runtime.launch.tls import tls_of
from trimmoe.runtime.launch.watching import supervising
from trimmoe.runtime.wire.keys import generate_token

Say = Callable[[str], None]
Meanwhile = Callable[[Sequence[ProcessHandle], Stop], None]
"""What is done with servers that are up, in a thread of its own while they are watched, until it is
through or told to stop."""


def local_endpoints(config: ServeConfig, names: Sequence[str]) -> tuple[Endpoint, ...]:
    """Where the servers listen when all are on this machine. Raises `UserError`.

    Unless ports or encryption are asked for, links are sockets that no other account can reach.
    """
    ported = config.encrypt or config.wire_port_base is not None
    return endpoints(
        names,
        dict.fromkeys(names, LOOPBACK),
        http_host=config.host,
        port_base=config.port_base,
        wire_port_base=config.first_wire_port,
        links=None if ported else RunFolder.named(config.port_base).path,
        tls=config.tls,
    )


def require_startable(config: ServeConfig, names: Sequence[str]) -> None:
    """Raise `UserError` if a port is in use, but by servers whose supervisor was killed, or if the
    certificate cannot be served with."""
    tls_of(config.tls_certificate, config.tls_key)
    if not RunFolder.at(config.port_base).alive():
        require_free(local_endpoints(config, names))


def serve_local(
    config: ServeConfig,
    artifacts: Artifacts,
    pieces: Pieces,
    say: Say,
    *,
    meanwhile: Meanwhile | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM, or until `meanwhile` is through; nothing that was started is
    left afterwards.

    Raises `UserError` if a server does not start, and what `meanwhile` raises before it is told to
    stop.
    """
    names = artifacts.plan.cluster.server_names
    where = local_endpoints(config, names)
    tls = tls_of(config.tls_certificate, config.tls_key)
    job = Job(
        spec=server_spec(config, artifacts, pieces, where, one_machine=True, tls=tls),
        here=tuple(range(len(names))),
        token=generate_token(),
        import_path=importable(),
        spare=config.spare,
    )
    compile_decisions(artifacts, pieces.policy, pieces.maker)
    with (
        stop_on_signal() as stop,
        supervising(RunFolder.at(config.port_base), job, stop, say) as (folder, job),
        ThreadPoolExecutor(1) as beside,
    ):
        say(f"Starting {len(names)} servers ...")
        begun: list[Future[None]] = []

        def ready() -> None:
            if meanwhile is None:
                announce(config, where, job.spec.title, say)
            else:
                # Handles of its own: those of the supervisor are for one thread.
                handles = running_processes(folder)
                begun.append(beside.submit(_until_through, meanwhile, handles, stop))

        watch(config, start_processes(folder, job), stop, say, ready)
        for each in begun:
            each.result()


def _until_through(meanwhile: Meanwhile, handles: Sequence[ProcessHandle], stop: Stop) -> None:
    """Servers end with it; that it fails once they do is nobody's fault."""
    try:
        meanwhile(handles, stop)
    except UserError:
        if not stop.is_set():
            raise
    finally:
        stop.set()


def watch(
    config: ServeConfig,
    handles: Sequence[ServerHandle],
    stop: Stop,
    say: Say,
    ready: Callable[[], None],
) -> None:
    """Watch servers from their start until `stop`, and end them; `ready` is called once all are.

    Raises `UserError` if one does not start.
    """
    patience = Patience(ready_s=config.ready_s)
    supervisor = Supervisor(handles, say=say, stopping=stop, patience=patience)
    try:
        if supervisor.wait_ready():
            ready()
            supervisor.renew(trimmoe.__version__)
            supervisor.watch()
        say("Stopping ...")
    finally:
        with stop.hurried():
            supervisor.stop()


def announce(config: ServeConfig, where: Sequence[Endpoint], title: str, say: Say) -> None:
    """Say where each server answers, and to whom."""
    widest = max(len(each.name) for each in where)
    for each in where:
        say(f"{each.name:<{widest}}  {each.url}")
    if config.page:
        say(f"Chat and watch in a browser: {where[0].url.removesuffix('v1')}")
    exposed = [each for each in where if not is_loopback(each.http_host)]
    if exposed and not config.api_keys:
        say("Whoever reaches these ports may use them; give --api-key to ask for a key.")
    model = config.served_name or served_name(config.model)
    say(f"Ready: model `{model}`, {title}. Ctrl-C ends it.")
