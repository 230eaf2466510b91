"""Messages on their way out, and whose work is lost when one does not get through."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

from trimmoe.runtime.node.records.contents import affected, vectors_of
from trimmoe.runtime.node.records.messages import (
    ANY_POSITION,
    Lost,
    Parcel,
    Partial,
    Release,
    Retain,
    access_of,
)
from trimmoe.runtime.node.records.packing import sealed
from trimmoe.runtime.wire.base import PeerUnreachable, Transport, TransportClosed

REMEMBERED = 4096
"""Units whose partial sums went to a server last, so many are remembered."""
RETRY_S = 0.01


class Outbox:
    """The way out of a server; `deliver` takes what is addressed to the server itself."""

    def __init__(
        self,
        transport: Transport,
        names: Sequence[str],
        *,
        server: int,
        deliver: Callable[[Parcel], None],
    ) -> None:
        self._transport, self._names, self._server = transport, names, server
        self._deliver = deliver
        self._returned: dict[int, deque[tuple[int, int]]] = {}
        self.vectors_sent: Counter[int] = Counter()
        """Hidden vectors of generated tokens sent to each server."""

    def post(self, parcel: Parcel) -> None:
        """Send a message; to this server itself it is delivered at once."""
        if parcel.to == self._server:
            self._deliver(parcel)
        else:
            self._send(parcel)

    def tell_lost(self, sequence: int, position: int, disputed: bool = False) -> None:
        """What was under way for a position of a sequence may be lost; `disputed` as in `Lost`."""
        self.post(Parcel(to=access_of(sequence), message=Lost(sequence, position, disputed)))

    def returned_to(self, server: int) -> set[tuple[int, int]]:
        """(sequence, start) of units whose partial sums went there of late, and forget them.

        Who gathers a unit may not know yet that it awaits a partial sum that was lost.
        """
        return set(self._returned.pop(server, ()))

    def _send(self, parcel: Parcel) -> None:
        message = parcel.message
        try:
            self._transport.post(self._names[parcel.to], sealed(parcel), parcel.tensors)
        except TransportClosed:
            # The server is going; whoever listens to the transport ends it.
            return
        except PeerUnreachable as error:
            loop = asyncio.get_running_loop()
            if isinstance(message, (Release, Retain)) and error.reason != "not up":
                # A peer that is up would keep the places for ever; one that is down frees them.
                loop.call_later(RETRY_S, self.post, parcel)
                return
            # Not at once: whoever posts is in the middle of something.
            for sequence in affected(message):
                loop.call_soon(self.tell_lost, sequence, ANY_POSITION)
            return
        self.vectors_sent[parcel.to] += vectors_of(parcel)
        if isinstance(message, Partial):
            sent = self._returned.setdefault(parcel.to, deque(maxlen=REMEMBERED))
            sent.extend(zip(message.rows.sequences, message.rows.starts, strict=True))
