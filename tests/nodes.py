"""Clusters of nodes in one process, every node with a view of only its own experts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from devices import DEVICE
from factories import random_cluster, random_profile
from serving import Tiny
from synthetic import random_plan
from tiny import LAYERS
from trimmoe.core.events import Complete
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.core.plan import Plan
from trimmoe.core.precision import Precision
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray
from trimmoe.models.base import MoEView
from trimmoe.models.draft import DraftModel
from trimmoe.models.load import open_model
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.node.node import Node
from trimmoe.runtime.node.records.messages import MESSAGE_TYPES, Message, Parcel
from trimmoe.runtime.node.settings import NodeSettings
from trimmoe.runtime.service import GenerationRequest, TokenEvent, TokenStream
from trimmoe.runtime.wire.base import Carrier, Frame
from trimmoe.runtime.wire.link import LinkSettings
from trimmoe.runtime.wire.memory import MemoryNetwork
from trimmoe.runtime.wire.transport import LinkTransport
from trimmoe.runtime.wire.zmq_transport import ZmqCarrier
from wires import soon, until

LINKS = LinkSettings(beat_s=0.05, silence_s=1.5, probe_s=0.5, probe_bytes=20 << 10)


def world(
    tiny: Tiny,
    *,
    servers: int,
    routes: Sequence[Sequence[int]] | None = None,
    density: float = 0.4,
    copied: float = 0.0,
) -> tuple[Profile, Plan]:
    """A random profile and plan; `routes` by access server instead of random ones."""
    rng = np.random.default_rng(1)
    profile = random_profile(rng, tiny.view.spec)
    cluster = random_cluster(rng, servers=servers)
    plan = random_plan(rng, tiny.view.spec, cluster, density=density, copied=copied)
    if routes is not None:
        plan = replace(plan, routes=np.array(routes))
    return profile, plan


def constant_routes(servers: int) -> list[list[int]]:
    return [[server] * LAYERS for server in range(servers)]


def staircase_routes(servers: int) -> list[list[int]]:
    """Everybody's tokens pass the servers one after the other, whoever their user is."""
    return [[layer * servers // LAYERS for layer in range(LAYERS)]] * servers


def hybrid_routes(servers: int) -> list[list[int]]:
    """Routes that leave, return and end elsewhere."""
    return [
        [(access + step) % servers for step in (0, 0, 1, 0)][:LAYERS] for access in range(servers)
    ]


def drafting(at: float, budget: float = 0.0) -> PolicySettings:
    """Drafts at this confidence, worth while or not; at 0 after the first layer of every token."""
    return PRESETS["trimmoe"]().but(draft_confidence=at, budget=budget, exits_weighed=False)


def guessing(guesses: int, confidence: float = 0.0) -> PolicySettings:
    """So many guesses ahead, however improbable."""
    return replace(
        PRESETS["speculative"](), guesses=guesses, guess_confidence=confidence, guess_chance=0.0
    )


class UnevenNetwork(MemoryNetwork):
    """Every link takes its own time, so that word of one token may overtake that of another."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)
        self._delay_s: dict[tuple[str, str], float] = {}

    def deliver(self, source: str, destination: str, frames: list[Frame]) -> None:
        link = source, destination
        if link not in self._delay_s:
            self._delay_s[link] = float(self._rng.choice([0.0, 0.002, 0.02]))
        hand_over = super().deliver
        asyncio.get_running_loop().call_later(
            self._delay_s[link], lambda: hand_over(source, destination, frames)
        )


_FREE: dict[tuple[Any, ...], MoEView] = {}
"""Views of clusters that have ended, by what they were opened by: they keep nothing of sequences,
and to open one takes as long as a few tokens on all servers."""
_MOST_FREE = 100


@dataclass(kw_only=True)
class Servers:
    """Nodes by index on a network."""

    tiny: Tiny
    profile: Profile
    plan: Plan
    policy: PolicySettings
    settings: dict[str, Any]
    sockets: bool = False
    quantise: Precision = Precision.NONE
    draft: Callable[[], DraftModel] | None = None
    """Opens every server's own."""
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    transports: dict[int, LinkTransport] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    views: dict[int, MoEView] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return self.plan.cluster.server_names

    def view(self, server: int) -> MoEView:
        """The model with only this server's experts."""
        if server not in self.views:
            free = _FREE.pop(self._needs(server), None)
            if free is None or free.draft_head is not None:
                # A test that took a head from it has given it back.
                free = self._open(server)
            self.views[server] = free
        return self.views[server]

    def release(self) -> None:
        """Leave the views to clusters of other tests, if nobody gave them anything."""
        for server, view in self.views.items():
            if view.draft_head is None:
                _FREE[self._needs(server)] = view
        while len(_FREE) > _MOST_FREE:
            del _FREE[next(iter(_FREE))]

    def _needs(self, server: int) -> tuple[Any, ...]:
        """What a view is opened by. Servers of one cluster that hold the same have one each."""
        held, bits = self.plan.hosts[server], self._bits(server)
        copied = None if bits is None else bits.tobytes()
        return self.tiny.folder, held.shape, held.tobytes(), copied, self.quantise, server

    def _bits(self, server: int) -> IntArray | None:
        """Of the copies that it has."""
        bits = self.plan.stand_in_bits
        return None if bits is None else bits[server]

    def _open(self, server: int) -> MoEView:
        held = {
            layer: np.flatnonzero(self.plan.hosts[server, layer]).tolist()
            for layer in range(self.plan.hosts.shape[1])
        }
        return open_model(
            self.tiny.folder,
            experts=held,
            device=DEVICE,
            quantise=self.quantise,
            stand_ins=self._bits(server),
            input_squares=self.profile.input_squares,
        )

    async def connect(self, server: int) -> LinkTransport:
        """Start a server's transport and link it with all that run."""
        carrier: Carrier
        if self.sockets:
            carrier = ZmqCarrier(self.names[server])
        else:
            carrier = self.network.carrier(self.names[server])
        transport = LinkTransport(carrier, MESSAGE_TYPES, settings=LINKS)
        await transport.start()
        self.transports[server] = transport
        for other, there in self.transports.items():
            if other != server:
                transport.connect(there.name, there.address)
                there.connect(transport.name, transport.address)
        return transport

    async def start(self, server: int) -> Node:
        """Start a node on a connected transport."""
        node = Node(
            view=self.view(server),
            profile=self.profile,
            plan=self.plan,
            policy=self.policy,
            transport=self.transports[server],
            settings=NodeSettings(server=server, **self.settings),
            model=self.tiny.model(),
            draft=None if self.draft is None else self.draft(),
        )
        self.nodes[server] = node
        await node.start()
        return node

    async def kill(self, server: int) -> None:
        """The server is gone without a word; what is left of it here is cleaned up."""
        self.network.kill(self.names[server])
        transport, node = self.transports.pop(server), self.nodes.pop(server)
        await transport.close()
        await node.close()

    async def revive(self, server: int) -> Node:
        """A new process in place of a dead one."""
        await self.connect(server)
        return await self.start(server)

    async def all_free(self) -> None:
        """Wait until no server keeps anything of any sequence."""
        await until(lambda: all(_is_idle(node) for node in self.nodes.values()))


def _is_idle(node: Node) -> bool:
    now = node.snapshot()
    return not (now.sequences or now.queued or now.gathering or node.worker.state.accounts)


@asynccontextmanager
async def running(
    tiny: Tiny,
    *,
    profile: Profile,
    plan: Plan,
    policy: PolicySettings | None = None,
    sockets: bool = False,
    network: MemoryNetwork | None = None,
    quantise: Precision = Precision.NONE,
    draft: Callable[[], DraftModel] | None = None,
    **settings: Any,
) -> AsyncGenerator[Servers]:
    """All servers of a plan, up and connected."""
    chosen = {"measures": False, "log_events": True, "report_every_s": 0.2} | settings
    servers = Servers(
        tiny=tiny,
        profile=profile,
        plan=plan,
        policy=policy or PRESETS["exact"](),
        settings=chosen,
        sockets=sockets,
        network=network or MemoryNetwork(),
        quantise=quantise,
        draft=draft,
    )
    try:
        for server in range(len(servers.names)):
            await servers.connect(server)
        for transport in servers.transports.values():
            await soon(transport.wait_up(*(set(servers.names) - {transport.name})))
        for server in range(len(servers.names)):
            await servers.start(server)
        yield servers
    finally:
        for node in servers.nodes.values():
            await node.close()
        for transport in servers.transports.values():
            await transport.close()
        servers.release()


def delay(node: Node, wait_s: Callable[[Message], float]) -> None:
    """Messages come so much later, each by itself, and those that wait 0 s at once."""
    deliver = node._deliver

    def later(sender: int, parcel: Parcel) -> None:
        if seconds := wait_s(parcel.message):
            asyncio.get_running_loop().call_later(seconds, deliver, sender, parcel)
        else:
            deliver(sender, parcel)

    node._deliver = later  # type: ignore[method-assign]


def request(prompt: Sequence[int], new: int = 8, **changes: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="r", prompt_ids=tuple(prompt), max_new_tokens=new, **changes
    )


async def read(stream: TokenStream) -> list[TokenEvent]:
    return [event async for event in stream]


async def answers(
    servers: Servers, asked: Sequence[tuple[int, GenerationRequest]]
) -> list[list[TokenEvent]]:
    """All requests at once, each to its server."""
    streams = [servers.nodes[access].service.submit(one) for access, one in asked]
    return await soon(asyncio.gather(*(read(stream) for stream in streams)))


def tokens_of(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token for event in events]


def ledgers_of(events: list[TokenEvent]) -> list[Ledger]:
    return [event.ledger for event in events if event.ledger is not None]


def spent_within(budget: float, made: list[list[TokenEvent]]) -> float:
    """What answers spent, of which no prefix spent more than it was credited."""
    spent = 0.0
    for events in made:
        loss = np.cumsum([ledger.loss for ledger in ledgers_of(events)])
        assert (loss <= budget * np.arange(1, loss.size + 1) + 1e-9).all()
        spent += float(loss[-1])
    return spent


def wrong(ledger: Ledger) -> bool:
    """Whether a token's draft was, so that all its layers were waited for."""
    return ledger.audits > 0 and not ledger.kinds[:, Kind.EXITED].any()


def vectors_sent(servers: Servers) -> IntArray:
    """Hidden vectors over every link so far, [M, M]."""
    sent = np.zeros((len(servers.names), len(servers.names)), dtype=np.int64)
    for source, node in servers.nodes.items():
        for destination, count in node.outbox.vectors_sent.items():
            sent[source, destination] = count
    return sent


def replayed(node: Node) -> int:
    """Check a node's log event by event; rows that completed."""
    log, engines = node.worker.log, node.worker.engines
    assert log is not None
    state, completed = engines[0].start(), 0
    for entry in log:
        state, again = engines[entry.engine].step(state, entry.event)
        assert repr(again) == repr(entry.commands)
        completed += sum(one.rows.size for one in again if isinstance(one, Complete))
    assert not state.waves
    return completed
