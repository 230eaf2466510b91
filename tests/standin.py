"""A stand-in for nodes, to test what starts and watches them without what they do.

Server processes import this by name, so it imports little.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import msgspec
import numpy as np

from trimmoe.core.machines import BATCHES, Work
from trimmoe.runtime.launch.server import NodeFactory, NodeParts
from trimmoe.runtime.machine_report import MachineReport
from trimmoe.runtime.picture import Picture
from trimmoe.runtime.service import (
    GenerationRequest,
    Health,
    ServedModel,
    ServiceStats,
    TokenEvent,
    TokenStream,
)
from trimmoe.runtime.wire.transport import LinkTransport


class Ping(msgspec.Struct, tag="ping", frozen=True, forbid_unknown_fields=True):
    """What stand-ins could tell each other."""


class EchoStream:
    """The prompt's tokens, the last one as the end."""

    def __init__(self, request: GenerationRequest) -> None:
        self._left = list(request.prompt_ids[-request.max_new_tokens :])

    def __aiter__(self) -> EchoStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if not self._left:
            raise StopAsyncIteration
        token = self._left.pop(0)
        return TokenEvent(token=token, finish_reason=None if self._left else "length")

    async def aclose(self) -> None:
        self._left.clear()


class EchoService:
    """Answers every prompt with itself; healthy once it has met all other servers.

    Not only as long as they are there: like real servers, it is not to be replaced because another
    one takes its time to come back.
    """

    def __init__(
        self, model: ServedModel, transport: LinkTransport, others: frozenset[str]
    ) -> None:
        self.model, self._transport, self._unmet = model, transport, others
        self.leaving = False

    @property
    def transport_name(self) -> str:
        return self._transport.name

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def submit(self, request: GenerationRequest) -> TokenStream:
        return EchoStream(request)

    def health(self) -> Health:
        self._unmet -= self._transport.peers_up()
        missing = ", ".join(sorted(self._unmet))
        return Health(ok=not missing, reason=f"waits for {missing}" if missing else "")

    def stats(self) -> ServiceStats:
        return ServiceStats(running=0, waiting=0, kv_cache_usage=0.0)

    def picture(self) -> Picture:
        raise NotImplementedError  # Nobody looks.

    def leave(self) -> None:
        self.leaving = True


@dataclass(frozen=True)
class EchoNode:
    service: EchoService

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def measure(self) -> MachineReport:
        """Everything takes a millisecond."""
        return MachineReport(
            server=self.service.transport_name,
            machine="here",
            device="cpu",
            threads=1,
            free_bytes=1 << 30,
            software_s=1e-3,
            work_s=np.full((3, len(Work), len(BATCHES)), 1e-3),
            links=(),
        )


def make_echo(parts: NodeParts) -> EchoNode:
    names = frozenset(each.name for each in parts.spec.endpoints)
    others = names - {parts.spec.name}
    return EchoNode(EchoService(parts.model, parts.transport, others))


def _is_last(parts: NodeParts) -> bool:
    return parts.spec.index == len(parts.spec.endpoints) - 1


def make_broken(parts: NodeParts) -> EchoNode:
    """The last server's process dies at the start, as one that runs out of memory does."""
    if _is_last(parts):
        os.kill(os.getpid(), signal.SIGKILL)
    return make_echo(parts)


def make_failing(parts: NodeParts) -> EchoNode:
    """The last server's code is wrong."""
    if _is_last(parts):
        raise RuntimeError("a defect")
    return make_echo(parts)


def echo_messages() -> tuple[type[msgspec.Struct], ...]:
    return (Ping,)


ECHO = NodeFactory(make=make_echo, message_types=echo_messages)
BROKEN = NodeFactory(make=make_broken, message_types=echo_messages)
FAILING = NodeFactory(make=make_failing, message_types=echo_messages)
FACTORIES = {"echo": ECHO, "broken": BROKEN, "failing": FAILING}
