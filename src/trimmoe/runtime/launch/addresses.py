"""Where each server listens, and whether it can."""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimmoe.core.errors import UserError

LOOPBACK = "127.0.0.1"
_HIGHEST_PORT = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where one server listens."""

    name: str
    machine: str
    """Address under which others reach its machine."""
    http_host: str
    http_port: int
    wire_port: int
    link: str = ""
    """The socket that peers connect to instead of `wire_port`, where all are on this machine."""
    tls: bool = False
    """Whether HTTP is encrypted."""

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients."""
        host = self.machine if _is_any(self.http_host) else self.http_host
        scheme = "https" if self.tls else "http"
        return f"{scheme}://{_bracketed(host)}:{self.http_port}/v1"

    @property
    def wire_address(self) -> str:
        """Where peers connect to."""
        if self.link:
            return f"unix://{self.link}"
        return f"tcp://{_bracketed(self.machine)}:{self.wire_port}"


def endpoints(
    names: Sequence[str],
    machines: Mapping[str, str],
    *,
    http_host: str | None,
    port_base: int,
    wire_port_base: int,
    links: Path | None = None,
    tls: bool = False,
) -> tuple[Endpoint, ...]:
    """One endpoint per server; the n-th server of a machine listens on base + n.

    `machines` gives each server's machine by its address; `http_host` None listens on that. With
    `links` peers meet in that folder instead of at ports. Raises `UserError` where the ports run
    out or the two ranges meet.
    """
    seen: Counter[str] = Counter()
    made = []
    for index, name in enumerate(names):
        machine = machines[name]
        made.append(
            Endpoint(
                name=name,
                machine=machine,
                http_host=http_host or machine,
                http_port=port_base + seen[machine],
                wire_port=wire_port_base + seen[machine],
                link="" if links is None else str(links / f"{index}.link"),
                tls=tls,
            )
        )
        seen[machine] += 1
    most = max(seen.values())
    highest = port_base if links is not None else max(port_base, wire_port_base)
    if highest + most - 1 > _HIGHEST_PORT:
        raise UserError(
            f"There are not {most} ports from {highest} on; choose a lower --port-base."
        )
    if links is None and abs(port_base - wire_port_base) < most:
        raise UserError(
            f"{most} servers on a machine need HTTP ports from {port_base} and link ports from "
            f"{wire_port_base}, which meet; move them apart."
        )
    return tuple(made)


def require_free(wanted: Iterable[Endpoint]) -> None:
    """Raise `UserError` if a port on this machine is in use."""
    for endpoint in wanted:
        ports = [(endpoint.http_host, endpoint.http_port, "--port-base")]
        if not endpoint.link:
            ports.append((endpoint.machine, endpoint.wire_port, "--wire-port-base"))
        for host, port, option in ports:
            try:
                listener(host, port).close()
            except OSError as error:
                raise UserError(
                    f"The port {port} on {host}, meant for server {endpoint.name}, cannot be used "
                    f"({error.strerror}); stop what uses it or choose another {option}."
                ) from error


KEEP_ALIVE_S = 75
"""How long an HTTP connection that nothing is asked on is kept. Clients give them up after 5 s, as
those on httpx, or after 60; where a server does so first, a request now and then fails."""


def listener(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A TCP socket that listens there; raises `OSError`. Only those that are `shared` may listen
    there at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024, reuse_port=shared)


def is_loopback(host: str) -> bool:
    """Whether an address cannot be reached from other machines."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_any(host: str) -> bool:
    return host in ("0.0.0.0", "::", "")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
