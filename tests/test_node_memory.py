"""Conversations that go on: what was read of a prompt and its answer is not read again, and answers
are the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from nodes import (
    Servers,
    answers,
    constant_routes,
    drafting,
    guessing,
    hybrid_routes,
    request,
    running,
    staircase_routes,
    tokens_of,
    world,
)
from serving import Tiny
from trimmoe.policy.settings import PRESETS, PolicySettings
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import TokenEvent

TOLD = Sampling(logprobs=3)
DRAWN = Sampling(temperature=0.8, top_p=0.95, seed=5, logprobs=3)


def words(length: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


async def ask(
    servers: Servers, access: int, prompt: Sequence[int], new: int = 8, **changes: Any
) -> list[TokenEvent]:
    (made,) = await answers(servers, [(access, request(prompt, new, **changes))])
    return made


async def talk(
    servers: Servers, access: int, turns: Sequence[Sequence[int]], new: int, sampling: Sampling
) -> list[list[TokenEvent]]:
    """What is said to each turn of a conversation, after all before it."""
    so_far: list[int] = []
    said = []
    for turn in turns:
        so_far += turn
        made = await ask(servers, access, so_far, new, sampling=sampling)
        said.append(made)
        so_far += tokens_of(made)
    return said


def cached(events: Sequence[TokenEvent]) -> int:
    """Tokens that were not read again, told with the first token alone."""
    assert not any(event.cached_tokens for event in events[1:])
    return events[0].cached_tokens


def told(events: Sequence[TokenEvent]) -> list[Any]:
    """All that a user sees of the tokens."""
    return [(event.token, event.logprob, event.top_logprobs) for event in events]


def read_rows(servers: Servers) -> int:
    """Chunks of prompts that passed a layer so far."""
    return sum(node.pump.batch_counts["CHUNK"] for node in servers.nodes.values())


@pytest.mark.parametrize("sampling", [TOLD, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("policy", [PRESETS["exact"](), guessing(3), drafting(0.0)])
@pytest.mark.parametrize("routes", [constant_routes, staircase_routes, hybrid_routes])
async def test_answers_are_the_same_bit_for_bit(
    tiny: Tiny,
    routes: Callable[[int], list[list[int]]],
    policy: PolicySettings,
    sampling: Sampling,
) -> None:
    profile, plan = world(tiny, servers=3, routes=routes(3))
    turns = [words(40), words(9, seed=4), words(21, seed=5)]
    told_of: list[list[list[Any]]] = []
    for prefix_cache in (True, False):
        async with running(
            tiny,
            profile=profile,
            plan=plan,
            policy=policy,
            prefill_chunk=8,
            prefix_cache=prefix_cache,
        ) as cluster:
            said = [await talk(cluster, access, turns, 10, sampling) for access in range(3)]
            await cluster.all_free()
            told_of.append([told(made) for each in said for made in each])
            counts = [[cached(made) for made in each] for each in said]
            if prefix_cache:
                # All that was said, but for the last token of each answer.
                assert counts == [[0, 49, 68]] * 3
            else:
                assert counts == [[0, 0, 0]] * 3
    assert told_of[0] == told_of[1]
