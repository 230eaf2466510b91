"""Nodes together are the exact model, whatever the routes."""

from __future__ import annotations

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
from serving import Tiny, open_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return open_tiny(tmp_path_factory.mktemp("tiny"))


async def test_one_sequence_over_two_servers(tiny: Tiny) -> None:
    profile, plan = world(tiny, servers=2, routes=[[0, 1, 1, 0], [1, 1, 0, 0]])
    prompt = list(range(40, 47))
    async with running(tiny, profile=profile, plan=plan) as servers:
        (made,) = await answers(servers, [(0, request(prompt, 12))])
        await servers.all_free()
    assert tokens_of(made) == tiny.greedy(prompt, 12, eos=None)
