"""A server that sends nonsense in the midst of answers takes no other server down."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from hostile import Mutator
from nodes import Servers, answers, read, request, running, staircase_routes, tokens_of, world
from serving import Tiny
from tiny import HIDDEN, LAYERS
from trimmoe.core.plan import Plan
from trimmoe.policy.presets import PRESETS
from trimmoe.runtime.node.records.messages import (
    MESSAGE_TYPES,
    Followed,
    Partial,
    Propagate,
    Tokens,
)
from trimmoe.runtime.node.records.rows import Rows
from trimmoe.runtime.node.records.tokens import After, LedgerSpec, Token
from trimmoe.runtime.wire.base import Frame, Received
from trimmoe.runtime.wire.codec import MalformedFrame, decode
from trimmoe.runtime.wire.memory import MemoryNetwork
from trimmoe.runtime.wire.protocol import open_envelope

SERVERS = 3


class Liar(MemoryNetwork):
    """Has every server hear, beside what it is sent, changed copies of it."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__()
        self.mutator, self.share = Mutator(seed), share
        self.cluster: Servers | None = None
        self.told: Counter[str] = Counter()
        """Copies that could be decoded, by type."""
        self.malformed = 0

    def deliver(self, source: str, destination: str, frames: list[Frame]) -> None:
        super().deliver(source, destination, frames)
        rng = self.mutator.rng
        if self.cluster is None or rng.random() > self.share:
            return
        if open_envelope(frames, destination, None).is_beat:
            return
        header, *tensors = (bytes(frame) for frame in frames[1:])
        if not tensors or rng.random() < 0.7:
            header = self.mutator.message(header)
        if tensors and rng.random() < 0.5:
            at = self.mutator.upto(len(tensors))
            tensors[at] = self.mutator.tensor(tensors[at])
        try:
            message, arrived = decode(
                [bytearray(each) for each in (header, *tensors)], MESSAGE_TYPES
            )
        except MalformedFrame:
            self.malformed += 1
            return
        node = self.cluster.nodes[self.cluster.names.index(destination)]
        self.told[type(message).__name__] += 1
        received = Received(peer=source, message=message, tensors=arrived)
        asyncio.get_running_loop().call_soon(node._heard, received)


async def storm(tiny: Tiny, policy: str, seed: int, told: int) -> Liar:
    """Answers under way while so many changed messages are told; then all is as it was."""
    profile, plan = world(tiny, servers=SERVERS, routes=staircase_routes(SERVERS))
    network = Liar(seed, share=0.3)
    loop = asyncio.get_running_loop()
    failures: list[dict] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    async with running(
        tiny, profile=profile, plan=plan, policy=PRESETS[policy](), network=network, stall_s=0.5
    ) as cluster:
        network.cluster = cluster
        round_ = 0
        while network.told.total() < told:
            round_ += 1
            streams = [
                cluster.nodes[access].service.submit(request([3 + access, 4, 5], 24))
                for access in range(SERVERS)
            ]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await asyncio.gather(*(read(one) for one in streams), return_exceptions=True)
            for one in streams:
                await one.aclose()
            for index, node in cluster.nodes.items():
                assert node.health().ok, (index, node.health(), dict(network.told), round_)
            assert not failures, failures[0]
        network.cluster = None
        for index, node in cluster.nodes.items():
            for liar in set(cluster.nodes) - {index}:
                # Places that it asked for are its own, and freed once it is gone.
                node.inbox.peer_down(liar)
        await cluster.all_free()
        # With a budget, what is trimmed may hang on the loads that were lied about.
        exact = request([3, 4, 5], 8, quality_budget=0.0)
        made = await answers(cluster, [(at, exact) for at in range(SERVERS)])
    assert [tokens_of(one) for one in made] == [tiny.greedy([3, 4, 5], 8, eos=None)] * SERVERS
    return network


@pytest.mark.parametrize("policy", ["speculative", "trimmoe"])
async def test_a_server_that_sends_nonsense_takes_nobody_down(tiny: Tiny, policy: str) -> None:
    network = await storm(tiny, policy, seed=1, told=200)
    assert len(network.told) > 5


def _experts_on(plan: Plan, *servers: int) -> Plan:
    """All experts on these servers only."""
    hosts = np.zeros_like(plan.hosts)
    hosts[list(servers)] = True
    return replace(plan, hosts=hosts)


async def test_who_was_not_asked_has_no_say(tiny: Tiny) -> None:
    """Neither tokens nor partial sums nor rows of a server that an answer does not pass."""
    profile, plan = world(tiny, servers=SERVERS, routes=[[0, 1, 0, 1]] * SERVERS)
    plan = _experts_on(plan, 0, 1)
    async with running(tiny, profile=profile, plan=plan) as cluster:
        stream = cluster.nodes[0].service.submit(request([3, 4, 5], 24))
        events = [await anext(stream)]
        (sequence,) = cluster.nodes[0].front_end._by_sequence
        rows = torch.full((1, HIDDEN), 100.0)
        for position in range(3, 27):
            at = Rows([sequence], [position], [1], [])
            token = Token(sequence, position, 7, None, [], None, None, None)
            for server in (0, 1):
                for layer in range(LAYERS):
                    told = Partial(layer=layer, rows=at, decoding=True)
                    cluster.transports[2].post(cluster.names[server], told, [rows])
                told = Propagate(layer=1, rows=at, frozen=True)
                cluster.transports[2].post(cluster.names[server], told, [rows])
            cluster.transports[2].post(cluster.names[0], Tokens([token]))
            cluster.transports[2].post(cluster.names[0], Followed([After(sequence, FREE, True)]))
        events += await read(stream)
        await cluster.all_free()
    assert tokens_of(events) == tiny.greedy([3, 4, 5], 24, eos=None)


FREE = LedgerSpec(b"", 0, 0, bytes(2 * SERVERS**2), 0.0, 0.0, 0.0, 0)


class Falsifier(MemoryNetwork):
    """One server's partial sums arrive as others."""

    def deliver(self, source: str, destination: str, frames: list[Frame]) -> None:
        if self.liar == source and len(frames) > 2 and b"partial" in bytes(frames[1]):
            # Sums that others are added to are wider, and come behind the rest.
            kinds = (np.float32, np.float64)
            sums = [np.frombuffer(f, kind) for f, kind in zip(frames[2:], kinds, strict=False)]
            frames = [*frames[:2], *(bytearray((-3 * each).tobytes()) for each in sums)]
        super().deliver(source, destination, frames)

    liar = ""


async def test_a_server_that_lies_is_believed(tiny: Tiny) -> None:
    """What it says of experts that only it has is not computed twice: see docs/security.md."""
    profile, plan = world(tiny, servers=2, routes=[[0] * LAYERS] * 2)
    network = Falsifier()
    async with running(
        tiny, profile=profile, plan=_experts_on(plan, 1), network=network
    ) as cluster:
        network.liar = cluster.names[1]
        (made,) = await answers(cluster, [(0, request([3, 4, 5], 12))])
        await cluster.all_free()
        assert not cluster.nodes[0].malformed
    assert tokens_of(made) != tiny.greedy([3, 4, 5], 12, eos=None)
