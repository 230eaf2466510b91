"""Servers on any carrier, connected with one another, and waiting for what must come."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from typing import TypeVar

import msgspec

from trimmoe.runtime.wire.base import Carrier, PeerChange, Transport
from trimmoe.runtime.wire.keys import keyring_from_token
from trimmoe.runtime.wire.link import LinkSettings
from trimmoe.runtime.wire.memory import MemoryNetwork
from trimmoe.runtime.wire.sockets import SocketCarrier
from trimmoe.runtime.wire.transport import LinkTransport
from trimmoe.runtime.wire.zmq_transport import ZmqCarrier

T = TypeVar("T")

PATIENCE_S = 60.0
"""What a test waits for must come; how soon depends on the machine."""
BRISK = LinkSettings(beat_s=0.03, silence_s=0.3, window_messages=8, probe_s=0.1)
TOKEN = "a token that is long enough to be one"
NAMES = ("a", "b", "c")


class Note(msgspec.Struct, tag="note", frozen=True, forbid_unknown_fields=True):
    text: str


class Cluster:
    """Servers by name, connected with one another, on one kind of carrier."""

    def __init__(self, kind: str, settings: LinkSettings = BRISK) -> None:
        self.kind = kind
        self.settings = settings
        self.network = MemoryNetwork()
        self.servers: dict[str, LinkTransport] = {}
        self.changes: dict[str, list[PeerChange]] = {}
        self.stack = AsyncExitStack()
        self._folder: str | None = None

    def carrier(self, name: str, bind: str = "tcp://127.0.0.1:0") -> Carrier:
        if self.kind == "memory":
            return self.network.carrier(name)
        if self.kind == "socket":
            return SocketCarrier(name, bind if bind.startswith("unix") else self.socket(name))
        keyring = keyring_from_token(TOKEN, name, NAMES) if self.kind == "curve" else None
        return ZmqCarrier(name, bind, keyring=keyring)

    def socket(self, name: str) -> str:
        """Where a server on sockets listens."""
        if self._folder is None:
            # Not pytest's, whose paths are too long for sockets.
            self._folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        return f"unix://{self._folder}/{name}"

    async def add(self, name: str, carrier: Carrier | None = None) -> LinkTransport:
        """Start a server and connect it with all others, both ways."""
        server = LinkTransport(carrier or self.carrier(name), (Note,), settings=self.settings)
        await self.stack.enter_async_context(server)
        server.on_peer_change(self.changes.setdefault(name, []).append)
        for other in self.servers.values():
            if other.name != name:
                server.connect(other.name, other.address)
                other.connect(name, server.address)
        self.servers[name] = server
        return server

    async def up(self, names: Iterable[str] = ("a", "b")) -> None:
        for name in names:
            await soon(self.servers[name].wait_up(*(set(names) - {name})))


async def soon(awaitable: Awaitable[T]) -> T:
    """What must come."""
    return await asyncio.wait_for(awaitable, PATIENCE_S)


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that is not announced."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        await asyncio.sleep(0.005)


async def texts(server: Transport, count: int) -> list[str]:
    received = [await soon(server.receive()) for _ in range(count)]
    return [each.message.text for each in received if isinstance(each.message, Note)]
