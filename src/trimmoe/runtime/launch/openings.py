"""What `trimmoe serve` opens: every port and socket, who may use it and what keeps others out.

Said before anything is started, and by the same functions that say where servers listen
(`addresses`), so that it is what will be; `tests/test_launch_processes.py` compares it with what
the kernel says of processes that run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from trimmoe.runtime.launch.addresses import Endpoint, is_loopback
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.deployment import TURN_PORTS
from trimmoe.runtime.launch.folder import RunFolder

CURVE = "Encrypted, and both ends prove that they have the cluster token"
FOLDER = "In a folder that only its user can enter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """One port or socket that is listened at."""

    what: str
    whose: str
    """Name of the server or process that listens."""
    at: str
    """host:port, or the path of a socket."""
    who: str
    """Who may use it."""
    kept: str
    """What keeps others out, and others from reading."""


def local_openings(config: ServeConfig, where: Sequence[Endpoint]) -> tuple[Opening, ...]:
    """Those of all servers on this machine."""
    links = [_link(each, each.wire_port, encrypted=config.encrypt is not False) for each in where]
    folder = RunFolder.named(config.port_base)
    servers = {index: each.name for index, each in enumerate(where)}
    return (*_http(config, where), *links, *_controls(config, [folder], servers))


def head_openings(
    config: ServeConfig, own: Sequence[tuple[int, Endpoint]], address: str, port: int
) -> tuple[Opening, ...]:
    """Those of a head on its own machine; `own` are its servers with their indices."""
    members = Opening(
        what="Machines that join",
        whose="the head",
        at=f"{address}:{port}",
        who="machines that have the cluster token",
        kept=CURVE,
    )
    where = [endpoint for _, endpoint in own]
    links = [
        _link(each, each.wire_port + turn * TURN_PORTS, encrypted=config.encrypt is not False)
        for turn in (0, 1)
        for each in where
    ]
    folders = []
    if where:
        first = min(each.http_port for each in where)
        folders = [RunFolder.named(first, turn) for turn in (0, 1)]
    controls = _controls(config, folders, {index: each.name for index, each in own})
    return (members, *_http(config, where), *links, *controls)


def told(openings: Sequence[Opening]) -> list[str]:
    """Lines for the operator; what is alike comes under one heading."""
    width = max((len(each.at) for each in openings), default=0)
    lines: list[str] = []
    for (what, who, kept), group in groupby(
        openings, lambda each: (each.what, each.who, each.kept)
    ):
        lines.append(f"{what}: for {who}. {kept}.")
        lines += [f"  {each.at:<{width}}  {each.whose}" for each in group]
    return lines


def _http(config: ServeConfig, where: Sequence[Endpoint]) -> list[Opening]:
    kept = "TLS" if config.tls else "Plain, without TLS"
    made = []
    for each in where:
        who = "whoever reaches it"
        if is_loopback(each.http_host):
            who = "all accounts of this machine"
        if config.api_keys:
            who += ", with an API key (/health without)"
        at = f"{each.http_host}:{each.http_port}"
        made.append(Opening(what="HTTP", whose=each.name, at=at, who=who, kept=kept))
    return made


def _link(each: Endpoint, port: int, *, encrypted: bool) -> Opening:
    at, who, kept = f"{each.machine}:{port}", "this cluster's servers", CURVE
    if each.link:
        at, kept = each.link, FOLDER
    elif not encrypted:
        # Beyond loopback such servers do not start.
        who, kept = "all accounts of this machine", "Not kept, by --no-encrypt"
    return Opening(what="Links between servers", whose=each.name, at=at, who=who, kept=kept)


def _controls(
    config: ServeConfig, folders: Sequence[RunFolder], servers: Mapping[int, str]
) -> list[Opening]:
    """Those that supervisors and servers of a machine are asked at."""
    who = "supervisors and servers of this machine"
    made = []
    for folder in folders:
        paths = {folder.supervisor_socket: "supervisor"}
        paths |= {folder.socket(index): name for index, name in servers.items()}
        made += [
            Opening(what="Control", whose=whose, at=str(path), who=who, kept=FOLDER)
            for path, whose in paths.items()
        ]
    return made
