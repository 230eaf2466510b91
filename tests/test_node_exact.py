"""Nodes together are the exact model, whatever the routes and however many ask at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from nodes import (
    answers,
    constant_routes,
    hybrid_routes,
    request,
    running,
    staircase_routes,
    tokens_of,
    world,
)
from serving import EOS, Tiny, open_tiny
from trimmoe.policy.settings import PRESETS

LENGTHS = [1, 40, 3, 17, 9, 2, 64, 5, 33, 12, 8, 21, 4, 90, 6, 13]
NEW = [3, 9, 14, 1, 20, 6, 11, 8, 5, 17, 2, 12, 10, 7, 16, 4]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return open_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 256, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(tiny: Tiny, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates."""
    return [tiny.greedy(prompt, new) for prompt, new in zip(prompts, NEW, strict=True)]


@pytest.mark.parametrize("servers", [2, 3, 4])
@pytest.mark.parametrize("routes", [constant_routes, staircase_routes, hybrid_routes])
async def test_concurrent_greedy_answers_are_those_of_transformers(
    tiny: Tiny,
    prompts: list[list[int]],
    expected: list[list[int]],
    routes: Callable[[int], list[list[int]]],
    servers: int,
) -> None:
    """Sixteen of unequal length at all servers at once; the prompts take up to twelve chunks."""
    profile, plan = world(tiny, servers=servers, routes=routes(servers))
    asked = [
        (i % servers, request(prompt, new, stop_ids=frozenset({EOS})))
        for i, (prompt, new) in enumerate(zip(prompts, NEW, strict=True))
    ]
    async with running(tiny, profile=profile, plan=plan, prefill_chunk=8) as cluster:
        made = await answers(cluster, asked)
        await cluster.all_free()
    assert [tokens_of(events) for events in made] == expected
    for events in made:
        last = "stop" if events[-1].token == EOS else "length"
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [last]
        assert events[0].ledger is None
        assert all(event.ledger.loss == 0 for event in events[1:] if event.ledger is not None)


async def test_ten_servers_answer_thirty_two_at_once(
    tiny: Tiny, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    profile, plan = world(tiny, servers=10, routes=hybrid_routes(10), density=0.15)
    asked = [
        (i % 10, request(prompt, new, stop_ids=frozenset({EOS})))
        for i, (prompt, new) in enumerate(zip(prompts * 2, NEW * 2, strict=True))
    ]
    async with running(tiny, profile=profile, plan=plan) as cluster:
        made = await answers(cluster, asked)
        await cluster.all_free()
    assert [tokens_of(events) for events in made] == expected * 2


async def test_exact_requests_stay_exact_under_a_trimming_policy(
    tiny: Tiny, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    asked = [
        (i % 3, request(prompt, new, stop_ids=frozenset({EOS}), exact=True))
        for i, (prompt, new) in enumerate(zip(prompts, NEW, strict=True))
    ]
    policy = PRESETS["trimmoe"]()
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        made = await answers(cluster, asked)
    assert [tokens_of(events) for events in made] == expected


async def test_over_real_sockets(
    tiny: Tiny, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    asked = [
        (i % 3, request(prompt, new, stop_ids=frozenset({EOS})))
        for i, (prompt, new) in enumerate(zip(prompts, NEW, strict=True))
    ]
    async with running(tiny, profile=profile, plan=plan, sockets=True) as cluster:
        made = await answers(cluster, asked)
        await cluster.all_free()
    assert [tokens_of(events) for events in made] == expected


async def test_frames_are_those_of_the_cost_model(tiny: Tiny, prompts: list[list[int]]) -> None:
    """What was sent on every link is what the ledgers charge, vector by vector."""
    profile, plan = world(tiny, servers=4, routes=hybrid_routes(4))
    asked = [(i % 4, request(prompts[i], 12, confidence=0.6)) for i in range(12)]
    policy = PRESETS["trimmoe"]()
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        made = await answers(cluster, asked)
        await cluster.all_free()
        sent = np.zeros((4, 4), dtype=int)
        for source, node in cluster.nodes.items():
            for destination, count in node.mail.vectors_sent.items():
                sent[source, destination] = count
    ledgers = [event.ledger for events in made for event in events if event.ledger is not None]
    np.testing.assert_array_equal(sent, sum(ledger.messages for ledger in ledgers))
    assert sent.sum() > 0
