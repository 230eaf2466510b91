"""A cluster of several machines: one head, and those that join it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import trimmoe
from trimmoe.core.cores import available_cores
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.deployment import Hello
from trimmoe.runtime.launch.head import Head
from trimmoe.runtime.launch.job import Pieces
from trimmoe.runtime.launch.local import Say, announce
from trimmoe.runtime.launch.machine import Assemble, Machine
from trimmoe.runtime.launch.member import kept_at
from trimmoe.runtime.launch.members import Members
from trimmoe.runtime.launch.naming import own_token
from trimmoe.runtime.launch.signals import Stop, stop_on_signal
from trimmoe.runtime.launch.tls import tls_of
from trimmoe.runtime.probe import free_bytes
from trimmoe.runtime.wire.protocol import WIRE_VERSION

_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """What only a head is told."""

    address: str
    """Where the other machines reach it."""
    port: int
    servers: tuple[str, ...]
    """Those that run on its own machine."""
    token: str | None
    """None: its own, made once and kept."""


def serve_head(
    config: ServeConfig, artifacts: Artifacts, pieces: Pieces, say: Say, options: HeadOptions
) -> None:
    """Wait until every server's machine has joined, then serve until Ctrl-C or SIGTERM.

    Raises `UserError`.
    """
    names = artifacts.plan.cluster.server_names
    with leading(config, lambda _: pieces, say, options, names) as (head, members, stop):
        if not _all_there(names, members, options, stop, say):
            return
        machines = {name: hello_of(members, options, name).address for name in names}
        if head.move(artifacts, machines):
            announce(config, head.endpoints(), pieces.title or pieces.policy.name, say)
            head.watch(stop)


@contextmanager
def leading(
    config: ServeConfig,
    assemble: Assemble,
    say: Say,
    options: HeadOptions,
    names: tuple[str, ...],
) -> Iterator[tuple[Head, Members, Stop]]:
    """A head with its members; all that was started has ended afterwards."""
    tls = tls_of(config.tls_certificate, config.tls_key)
    token = options.token or own_token(say)
    folder = kept_at("head", names)
    with (
        stop_on_signal() as stop,
        Members(token, options.address, options.port, own=options.servers) as members,
    ):
        machine = Machine(options.servers, token, folder, say, assemble, tls)
        try:
            yield Head(config, members, machine, folder, stop, say), members, stop
            say("Stopping ...")
        finally:
            members.end()
            with stop.hurried():
                machine.end()


def hello_of(members: Members, options: HeadOptions, name: str) -> Hello:
    """What is known of the machine of a server that is there."""
    if name not in options.servers:
        return members.joined()[name]
    return Hello(
        version=trimmoe.__version__,
        wire=WIRE_VERSION.major,
        servers=options.servers,
        address=options.address,
        memory_bytes=free_bytes(torch.device("cpu")),
        cores=available_cores(),
    )


def _all_there(
    names: tuple[str, ...], members: Members, options: HeadOptions, stop: Stop, say: Say
) -> bool:
    """Wait for the machine of each of the servers; False if told to stop before."""
    missing: tuple[str, ...] | None = None
    while not stop.is_set():
        there = {*members.joined(), *options.servers}
        still = tuple(name for name in names if name not in there)
        if not still:
            return True
        if still != missing:
            say(f"Waiting at {options.address}:{options.port} for {', '.join(still)} ...")
            missing = still
        stop.wait(_LOOK_S)
    return False
