"""Results of experts elsewhere that are computed twice: who lies is found and left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nodes import Servers, answers, read, request, running, tokens_of, world
from serving import Tiny
from test_hostile_nodes import Falsifier
from tiny import LAYERS
from trimmoe.core.plan import Plan
from trimmoe.runtime.node.compute.shipping import Cargo, Split
from trimmoe.runtime.node.compute.verifying import Verifier
from trimmoe.runtime.node.picture import picture_of
from trimmoe.runtime.node.records.packing import MalformedMessage
from trimmoe.runtime.node.records.units import Part
from trimmoe.runtime.node.records.verdict import judged
from trimmoe.runtime.node.stats import service_stats
from trimmoe.runtime.picture import State
from trimmoe.runtime.service import Unavailable
from trimmoe.runtime.wire.protocol import VERIFIES_SINCE, Version
from wires import soon, until

SERVERS = 4


def _held_by(plan: Plan, *servers: int) -> Plan:
    hosts = np.zeros_like(plan.hosts)
    hosts[list(servers)] = True
    return replace(plan, hosts=hosts)


def _asked_first(cluster: Servers, at: int = 0) -> int:
    """Whom a server asks for experts of rows that it gathers itself."""
    exact_hosts = cluster.nodes[at].planner.in_force.exact_hosts
    return int(exact_hosts.server[0, at, at, 0])


async def test_a_server_that_lies_is_found_by_a_third_and_left_out(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one wrong token, since the right result is known; then nobody asks it any more."""
    profile, plan = world(tiny, servers=SERVERS, routes=[[0] * LAYERS] * SERVERS)
    network, expected = Falsifier(), tiny.greedy([3, 4, 5], 12, eos=None)
    async with running(
        tiny, profile=profile, plan=_held_by(plan, 1, 2, 3), network=network, verify_share=1.0
    ) as cluster:
        node = cluster.nodes[0]
        (honest,) = await answers(cluster, [(0, request([3, 4, 5], 12))])
        assert tokens_of(honest) == expected
        assert node.jury.verified > 0
        assert not node.jury.left_out
        liar = _asked_first(cluster)
        network.liar = cluster.names[liar]
        made = await answers(cluster, [(0, request([3, 4, 5], 12)), (0, request([7, 4], 12))])
        assert tokens_of(made[0]) == expected
        assert tokens_of(made[1]) == tiny.greedy([7, 4], 12, eos=None)
        assert node.jury.left_out == {liar}
        await until(lambda: node.planner.settled and _asked_first(cluster) != liar)
        stats = service_stats(node.parts, 0, 0)
        assert (stats.left_out, stats.wrong_results > 0) == (1, True)
        assert node._peers.verifying().all()
        before = Version(VERIFIES_SINCE.major, VERIFIES_SINCE.minor - 1)
        monkeypatch.setattr(cluster.transports[0], "version_of", lambda peer: before)
        assert node._peers.verifying().tolist() == [True, False, False, False]


async def test_where_it_gathers_a_lie_is_found_too(tiny: Tiny) -> None:
    """Rows that pass from one server to the other; each of the two finds out by itself."""
    profile, plan = world(tiny, servers=5, routes=[[0, 1] * (LAYERS // 2)] * 5)
    network = Falsifier()
    async with running(
        tiny, profile=profile, plan=_held_by(plan, 2, 3, 4), network=network, verify_share=1.0
    ) as cluster:
        exact_hosts = cluster.nodes[0].planner.in_force.exact_hosts
        liar = int(exact_hosts.server[0, 0, 1, 0])
        network.liar = cluster.names[liar]
        (made,) = await answers(cluster, [(0, request([3, 4, 5], 12))])
        assert tokens_of(made) == tiny.greedy([3, 4, 5], 12, eos=None)
        assert cluster.nodes[1].jury.left_out == {liar}
        assert picture_of(cluster.nodes[1].parts).servers[liar].state is State.LEFT_OUT


async def test_of_two_who_differ_nobody_knows_which_lies(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    """The model cannot do without them: no wrong token, an alarm and an error, and answers once
    they agree."""
    profile, plan = world(tiny, servers=3, routes=[[0] * LAYERS] * 3)
    network = Falsifier()
    async with running(
        tiny, profile=profile, plan=_held_by(plan, 1, 2), network=network, verify_share=1.0
    ) as cluster:
        node = cluster.nodes[0]
        network.liar = cluster.names[1]
        stream = node.service.submit(request([3, 4, 5], 6))
        with pytest.raises(Unavailable, match="different results"):
            await soon(read(stream))
        assert node.jury.wrong > 0
        assert not node.jury.left_out
        assert caplog.text.count("Look after them") == 1
        network.liar = ""
        (made,) = await answers(cluster, [(0, request([3, 4, 5], 6))])
    assert tokens_of(made) == tiny.greedy([3, 4, 5], 6, eos=None)


def test_who_is_asked_a_second_time() -> None:
    experts, servers = np.array([[0, 1]]), np.array([[1, 1]])
    split = Split.of(experts, servers, np.array([0]), here=0, server_count=4)
    hosts = np.ones((4, 1, 2), dtype=bool)
    hosts[0] = False

    def asked(share: float = 1.0, old: tuple[int, ...] = ()) -> list[tuple[int, int]]:
        knows, rows = np.array([server not in old for server in range(4)]), torch.zeros(1, 2)
        at = np.zeros(1, dtype=np.int64)
        cargo = Cargo(
            layer=0, units=(), unit_of=at, offset=at, attended=rows, output=rows, gates=rows
        )
        Verifier(share, hosts, knows).choose(cargo, split, at)
        return sorted(cargo.checks.get(0, []))

    assert asked(0.0) == []
    assert asked() == [(1, 2), (1, 3)]
    # Nor is anybody who would not know what it is asked for, or whom it gathers at.
    assert asked(old=(1, 2)) == [(1, 3)]
    assert asked(old=(0,)) == []
    hosts[0] = True
    assert asked() == [(1, 0)]


def _part(*rows: float, offsets: tuple[int, ...] = ()) -> Part:
    return Part(offsets=offsets, states=torch.tensor([[row, 1.0] for row in rows]))


def test_verdicts() -> None:
    right, verdict = judged({1: _part(5.0)}, {(1, 2): _part(5.0)}, (), 1)
    assert (verdict.checked, verdict.liars, verdict.suspects) == (1, set(), set())
    # Who is trusted decides; what is right takes the place of what is wrong.
    right, verdict = judged({1: _part(5.0, 7.0)}, {(1, 0): _part(6.0, offsets=(1,))}, (0,), 2)
    assert (verdict.liars, right[1].states[:, 0].tolist()) == ({1}, [5.0, 6.0])
    # Two of three.
    seconds = {(1, 2): _part(6.0), (1, 3): _part(5.0)}
    right, verdict = judged({1: _part(5.0)}, seconds, (), 1)
    assert (verdict.liars, right[1].states[0, 0].item()) == ({2}, 5.0)
    # One against one, and three that all differ.
    assert judged({1: _part(5.0)}, {(1, 2): _part(6.0)}, (), 1)[1].suspects == {1, 2}
    seconds = {(1, 2): _part(6.0), (1, 3): _part(4.0)}
    assert judged({1: _part(5.0)}, seconds, (), 1)[1].suspects == {1, 2, 3}
    # What differs by rounding is the same, and nothing takes its place; what is infinite is not.
    near, by = {1: _part(5.0)}, {(1, 0): _part(5.01)}
    right, verdict = judged(near, by, (0,), 1, rounding=0.01)
    assert (verdict.liars, right[1]) == (set(), near[1])
    assert judged(near, by, (0,), 1, rounding=0.001)[1].liars == {1}
    for far in (float("inf"), float("nan"), 5e30):
        assert judged({1: _part(far)}, by, (0,), 1, rounding=0.01)[1].liars == {1}
    with pytest.raises(MalformedMessage):
        judged({1: _part(5.0, offsets=(0,))}, {(1, 2): _part(5.0, offsets=(1,))}, (), 2)
