"""A whole cluster in one process: real servers, links and machines emulated.

Everything a served request meets is there but sockets and encryption: admission, continuous
batching, messages in their wire format, the engine of every server. Emulated times have to be long
against what the tiny model really takes here.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, FloatArray, ModelSpec
from trimmoe.models.load import open_model
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.node.node import Node
from trimmoe.runtime.node.records.messages import MESSAGE_TYPES
from trimmoe.runtime.node.settings import NodeSettings
from trimmoe.runtime.service import GenerationRequest, ServedModel, TokenEvent
from trimmoe.runtime.wire.emulation import EmulatedCarrier, links_of
from trimmoe.runtime.wire.link import LinkSettings
from trimmoe.runtime.wire.memory import MemoryNetwork
from trimmoe.runtime.wire.transport import LinkTransport
from trimmoe.simulator.arrivals import Requests

T = TypeVar("T")

QUIET = LinkSettings(beat_s=2.0, silence_s=60.0, probe_s=float("inf"))
"""Nothing is measured, and a busy machine is not taken for a dead one."""
_LOOK_S = 1.0
_SWITCH_S = 5e-4
"""How long one thread may keep the others waiting; the default is a whole batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One request as its user saw it, by the clock of the rehearsal."""

    sequence: int
    """Its number among the requests of its server."""
    asked_s: float
    came_s: FloatArray
    """When each token came, [output]."""
    events: list[TokenEvent]

    @property
    def token_s(self) -> FloatArray:
        """Time of each decoded token: all but the one that the prompt predicts, [output - 1]."""
        return np.diff(self.came_s)


def rescaled(
    cluster: ClusterSpec, model: ModelSpec, *, expert_s: float, like: int, slow_motion: float
) -> ClusterSpec:
    """The cluster for a tiny model: an expert takes `expert_s` on average over the machines, and a
    hidden vector as long on a link as one of `like` bytes did; then all of it, delays included,
    `slow_motion` times as slow."""
    each_s = float(model.expert_flops.mean()) * (1.0 / cluster.flops_per_s).mean()
    return replace(
        cluster,
        flops_per_s=cluster.flops_per_s * each_s / expert_s / slow_motion,
        bandwidth_bytes_per_s=(
            cluster.bandwidth_bytes_per_s * model.hidden_bytes / like / slow_motion
        ),
        delay_s=cluster.delay_s * slow_motion,
    )


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """All servers, up and connected."""

    nodes: list[Node]

    async def closed(
        self, prompts: Sequence[Sequence[int]], asked: Requests, streams: int
    ) -> list[Answered]:
        """Answer the requests in order, `streams` at a time."""
        began_s, waiting = time.perf_counter(), iter(range(asked.count))
        answered: dict[int, Answered] = {}

        async def stream() -> None:
            for request in waiting:
                answered[request] = await self._answer(request, prompts, asked, began_s)

        await self._all([stream() for _ in range(streams)])
        return [answered[request] for request in range(asked.count)]

    async def open(self, prompts: Sequence[Sequence[int]], asked: Requests) -> list[Answered]:
        """Answer the requests as they arrive."""
        began_s = time.perf_counter()

        async def later(request: int) -> Answered:
            due_s = began_s + float(asked.arrival_s[request])
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            return await self._answer(request, prompts, asked, began_s)

        return await self._all([later(request) for request in range(asked.count)])

    async def _all(self, users: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """What they come to; raises `RuntimeError` if a server fails meanwhile."""
        asking = asyncio.gather(*users)
        while not asking.done():
            await asyncio.wait([asking], timeout=_LOOK_S)
            failed = [node.health().reason for node in self.nodes if not node.health().ok]
            if failed and not asking.done():
                asking.cancel()
                raise RuntimeError(f"a server failed: {failed[0]}")
        return await asking

    async def _answer(
        self, request: int, prompts: Sequence[Sequence[int]], asked: Requests, began_s: float
    ) -> Answered:
        access = int(asked.access[request])
        asked_s = time.perf_counter() - began_s
        stream = self.nodes[access].service.submit(
            GenerationRequest(
                request_id=str(request),
                prompt_ids=tuple(prompts[request]),
                max_new_tokens=int(asked.output[request]),
            )
        )
        came_s, events = [], []
        async for event in stream:
            came_s.append(time.perf_counter() - began_s)
            events.append(event)
        return Answered(sequence=request, asked_s=asked_s, came_s=np.array(came_s), events=events)


@asynccontextmanager
async def rehearsal(
    folder: str,
    *,
    profile: Profile,
    plan: Plan,
    policy: PolicySettings,
    model: ServedModel,
    batch_share: float,
    max_batch: int,
    kv_slots: int = 32,
) -> AsyncGenerator[Rehearsal]:
    """The servers of a plan for the checkpoint in `folder`, on the links and machines of its
    cluster; decisions are made with the cluster's figures, not with measured ones."""
    network, names = MemoryNetwork(), plan.cluster.server_names
    transports: list[LinkTransport] = []
    nodes: list[Node] = []
    with _brisk_threads():
        try:
            for name in names:
                carrier = EmulatedCarrier(network.carrier(name), links_of(plan.cluster, name))
                transports.append(LinkTransport(carrier, MESSAGE_TYPES, settings=QUIET))
                await transports[-1].start()
            for one in transports:
                for other in transports:
                    if other is not one:
                        one.connect(other.name, other.address)
            for one in transports:
                await one.wait_up(*(name for name in names if name != one.name))
            for server, transport in enumerate(transports):
                held = {
                    layer: np.flatnonzero(hosts).tolist()
                    for layer, hosts in enumerate(plan.hosts[server])
                }
                settings = NodeSettings(
                    server=server,
                    kv_slots=kv_slots,
                    max_batch=max_batch,
                    measures=False,
                    batch_share=batch_share,
                    prefix_cache=False,
                    log_events=True,
                )
                nodes.append(
                    Node(
                        view=open_model(folder, experts=held),
                        profile=profile,
                        plan=plan,
                        policy=policy,
                        transport=transport,
                        settings=settings,
                        model=model,
                    )
                )
            await asyncio.gather(*(node.start() for node in nodes))
            yield Rehearsal(nodes=nodes)
        finally:
            for node in nodes:
                await node.close()
            for transport in transports:
                await transport.close()


@contextmanager
def _brisk_threads() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
