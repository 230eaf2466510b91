"""The other servers of a cluster, by number: who can be reached, and who can verify."""

from __future__ import annotations

import numpy as np

from trimmoe.core.specs import BoolArray
from trimmoe.runtime.wire.base import Transport
from trimmoe.runtime.wire.protocol import VERIFIES_SINCE


class Peers:
    """Those of one server, as its transport sees them."""

    def __init__(self, transport: Transport, names: tuple[str, ...], server: int) -> None:
        assert names[server] == transport.name
        self.names = names
        self.index = {name: index for index, name in enumerate(names)}
        self._transport, self._server = transport, server

    def others(self) -> frozenset[int]:
        """All but the server itself."""
        return frozenset(range(len(self.names))) - {self._server}

    def down(self) -> frozenset[int]:
        """Those that cannot be reached."""
        up = {self.index[peer] for peer in self._transport.peers_up() if peer in self.index}
        return self.others() - up

    def verifying(self) -> BoolArray:
        """Servers that can be asked to verify, [M]: those that know what that is."""
        able = np.zeros(len(self.names), dtype=bool)
        able[self._server] = True
        for peer in self._transport.peers_up() & self.index.keys():
            version = self._transport.version_of(peer)
            able[self.index[peer]] = version is not None and version >= VERIFIES_SINCE
        return able
