"""All servers of a cluster on this machine, one process each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trimmoe.runtime.launch.addresses import LOOPBACK, Endpoint, endpoints, is_loopback
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.job import Pieces, server_specs
from trimmoe.runtime.launch.kernels import compile_decisions
from trimmoe.runtime.launch.raylet import private_ray
from trimmoe.runtime.launch.server import ServerSpec
from trimmoe.runtime.launch.signals import Stop, stop_on_signal
from trimmoe.runtime.launch.supervise import Patience, Supervisor
from trimmoe.runtime.wire.keys import generate_token

if TYPE_CHECKING:
    from trimmoe.runtime.launch.actor import RayHandle

Say = Callable[[str], None]
Meanwhile = Callable[[Sequence["RayHandle"]], None]
"""What is done with servers that are up."""


def local_endpoints(config: ServeConfig, names: Sequence[str]) -> tuple[Endpoint, ...]:
    """Where the servers listen when all are on this machine. Raises `UserError`."""
    return endpoints(
        names,
        dict.fromkeys(names, LOOPBACK),
        http_host=config.host,
        port_base=config.port_base,
        wire_port_base=config.first_wire_port,
    )


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

    Raises `UserError` if a server does not start.
    """
    where = local_endpoints(config, artifacts.plan.cluster.server_names)
    specs = server_specs(config, artifacts, pieces, where, one_machine=True)
    compile_decisions(artifacts, pieces.policy, pieces.maker)
    with stop_on_signal() as stop:
        say(f"Starting {len(specs)} servers ...")
        with private_ray(generate_token()):
            run_cluster(config, specs, stop, say, pinned=False, meanwhile=meanwhile)


def run_cluster(
    config: ServeConfig,
    specs: Sequence[ServerSpec],
    stop: Stop,
    say: Say,
    *,
    pinned: bool,
    meanwhile: Meanwhile | None = None,
) -> None:
    """Start the servers on the Ray instance at hand and watch them until `stop`, or do something
    with them and end."""
    from trimmoe.runtime.launch.actor import start_actors

    stop.listen()  # Ray has put a handler of its own in place.
    handles = start_actors(specs, pinned=pinned)
    supervisor = Supervisor(
        handles,
        say=say,
        stopping=stop,
        patience=Patience(ready_s=config.ready_s),
    )
    try:
        ready = supervisor.wait_ready()
        if ready and meanwhile is not None:
            meanwhile(handles)
        elif ready:
            announce(config, specs, say)
            supervisor.watch()
        say("Stopping ...")
    finally:
        with stop.hurried():
            supervisor.stop()


def announce(config: ServeConfig, specs: Sequence[ServerSpec], say: Say) -> None:
    """Say where each server answers, and to whom."""
    widest = max(len(spec.name) for spec in specs)
    for spec in specs:
        say(f"{spec.name:<{widest}}  {spec.endpoint.url}")
    exposed = [spec for spec in specs if not is_loopback(spec.endpoint.http_host)]
    if exposed and not config.api_keys:
        say("Whoever reaches these ports may use them; give --api-key to ask for a key.")
    say(f"Ready: model `{specs[0].served_name}`, {specs[0].title}. Ctrl-C ends it.")
