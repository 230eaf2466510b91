"""Servers in one process: the carrier for tests of whatever is built on a transport.

A `MemoryNetwork` holds the servers' carriers by name; links can be stalled and servers killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trimmoe.runtime.wire.base import Arrived, Dropped, Frame


class MemoryNetwork:
    """Delivers frames between the carriers made by `carrier`, in order per link."""

    def __init__(self) -> None:
        self._running: dict[str, MemoryCarrier] = {}
        self._stalled: dict[tuple[str, str], list[list[Frame]]] = {}

    def carrier(self, name: str) -> MemoryCarrier:
        """A carrier for a server; one that is started under a name in use takes its place."""
        return MemoryCarrier(name, self)

    def stall(self, source: str, destination: str) -> None:
        """Hold what is sent on a link from now on."""
        self._stalled.setdefault((source, destination), [])

    def resume(self, source: str, destination: str) -> None:
        """Deliver what was held, in order."""
        for frames in self._stalled.pop((source, destination), []):
            self.deliver(source, destination, frames)

    def drop(self, source: str, destination: str) -> None:
        """Lose what is held on a stalled link."""
        if (source, destination) in self._stalled:
            self._stalled[source, destination].clear()

    def kill(self, name: str) -> None:
        """A server vanishes without a word: nothing leaves it or reaches it any more."""
        self._running.pop(name, None)

    def joined(self, carrier: MemoryCarrier) -> None:
        """A carrier was started."""
        self._running[carrier.name] = carrier

    def left(self, carrier: MemoryCarrier) -> None:
        """A carrier was closed."""
        if self._running.get(carrier.name) is carrier:
            del self._running[carrier.name]

    def is_running(self, carrier: MemoryCarrier) -> bool:
        """Whether a carrier was started and neither closed, killed nor replaced."""
        return self._running.get(carrier.name) is carrier

    def deliver(self, source: str, destination: str, frames: list[Frame]) -> None:
        """Hand frames to the destination in the next turn of the event loop."""
        held = self._stalled.get((source, destination))
        if held is not None:
            held.append(frames)
        elif destination in self._running:
            carrier = self._running[destination]
            asyncio.get_running_loop().call_soon(carrier.take, source, frames)


class MemoryCarrier:
    """One server of a `MemoryNetwork`."""

    def __init__(self, name: str, network: MemoryNetwork) -> None:
        self._name = name
        self._network = network

    @property
    def name(self) -> str:
        return self._name

    @property
    def address(self) -> str:
        return f"memory:{self._name}"

    async def start(self, arrived: Arrived, dropped: Dropped) -> None:
        self._arrived = arrived
        self._network.joined(self)

    def connect(self, peer: str, address: str) -> None:
        """Nothing to do: the network knows everybody by name."""

    def post(self, peer: str, frames: Sequence[Frame]) -> bool:
        if self._network.is_running(self):
            # Copies, and writable ones: as if they had come out of a socket.
            self._network.deliver(self._name, peer, [bytearray(frame) for frame in frames])
        return True

    def reset(self, peer: str) -> None:
        self._network.drop(self._name, peer)

    async def close(self) -> None:
        self._network.left(self)

    def take(self, source: str, frames: Sequence[Frame]) -> None:
        """Frames have come."""
        if self._network.is_running(self):
            self._arrived(source, frames)
