"""Options that look back at an answer change nothing about who draws: nodes answer as one process
does, whatever they guess or draft ahead and whoever dies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nodes import (
    UnevenNetwork,
    answers,
    constant_routes,
    drafting,
    guessing,
    hybrid_routes,
    read,
    request,
    running,
    staircase_routes,
    tokens_of,
    world,
)
from questions import Questions
from serving import EOS, Tiny
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.guides import json_grammar, regex_grammar
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import GenerationRequest
from wires import soon

PENALTIES = Sampling(frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.2)
PARTS = regex_grammar("[a-f]{3,9}(-[0-9]{2}){2,40}")
OBJECT = json_grammar(
    {
        "type": "object",
        "properties": {"kind": {"enum": ["hop", "skip"]}, "ids": {"items": {"type": "integer"}}},
        "required": ["kind", "ids"],
    }
)
SAMPLINGS = {
    "regex": replace(PENALTIES, grammar=PARTS),
    "json": Sampling(temperature=1.1, seed=2, grammar=OBJECT, min_tokens=30, stop_ids=(EOS,)),
    "greedy": PENALTIES,
    "drawn": replace(PENALTIES, temperature=0.9, top_p=0.95, seed=4, min_tokens=5, stop_ids=(EOS,)),
}
POLICIES = {"guesses": guessing(3), "drafts": drafting(0.0)}
ROUTES = {"hybrid": hybrid_routes, "staircase": staircase_routes, "constant": constant_routes}


async def in_one_process(tiny: Tiny, asked: Sequence[GenerationRequest]) -> list[list[int]]:
    """What the model in one process answers."""
    service = tiny.exact(slots=len(asked))
    await service.start()
    try:
        streams = [service.submit(one) for one in asked]
        made = await soon(asyncio.gather(*(read(stream) for stream in streams)))
    finally:
        await service.close()
    return [tokens_of(events) for events in made]


def every_pair() -> list[tuple[str, str, str]]:
    """Policies, routes and samplings, every two of them together once at least."""
    policies = sorted(POLICIES)
    return [
        (policies[(i + j) % len(policies)], routes, how)
        for i, routes in enumerate(sorted(ROUTES))
        for j, how in enumerate(sorted(SAMPLINGS))
    ]


@pytest.mark.parametrize(("policy", "routes", "how"), every_pair())
async def test_nodes_answer_as_one_process_however_they_guess(
    tiny: Tiny, policy: str, routes: str, how: str
) -> None:
    asked = Questions(tiny=tiny, count=6).among(3, sampling=SAMPLINGS[how])
    expected = await in_one_process(tiny, [one for _, one in asked])
    plain = await in_one_process(tiny, [replace(one, sampling=Sampling()) for _, one in asked])
    profile, plan = world(tiny, servers=3, routes=ROUTES[routes](3))
    settings: dict[str, Any] = {"network": UnevenNetwork(3), "kv_slots": 8}
    async with running(
        tiny, profile=profile, plan=plan, policy=POLICIES[policy], **settings
    ) as servers:
        made = await answers(servers, asked)
        await servers.all_free()
    assert [tokens_of(events) for events in made] == expected
    assert expected != plain


async def test_a_prompt_is_scored_chunk_by_chunk_as_whole(tiny: Tiny) -> None:
    asked = request(list(range(40, 103)), 4, sampling=replace(PENALTIES, prompt_logprobs=3))
    service = tiny.exact()
    await service.start()
    expected = (await soon(read(service.submit(asked))))[0].prompt
    await service.close()
    profile, plan = world(tiny, servers=3, routes=staircase_routes(3))
    async with running(
        tiny, profile=profile, plan=plan, policy=guessing(2), prefill_chunk=8
    ) as servers:
        ((first, *_),) = await answers(servers, [(1, asked)])
    assert [one.token for one in first.prompt] == list(asked.prompt_ids[1:])
    assert [one.rank for one in first.prompt] == [one.rank for one in expected]
    ours, theirs = ([one.logprob for one in each] for each in (first.prompt, expected))
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("policy", [guessing(2), drafting(0.0)], ids=["guesses", "drafts"])
@pytest.mark.parametrize("how", ["greedy", "regex"])
async def test_an_answer_goes_on_after_a_loss_with_all_that_it_has(
    tiny: Tiny, policy: PolicySettings, how: str
) -> None:
    asked = request([70, 71, 72], 40, sampling=SAMPLINGS[how], stop_ids=frozenset({EOS}))
    (expected,) = await in_one_process(tiny, [asked])
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3), density=1.0)
    async with running(tiny, profile=profile, plan=plan, policy=policy) as servers:
        stream = servers.nodes[0].service.submit(asked)
        first = [await soon(anext(aiter(stream))) for _ in range(8)]
        await servers.kill(1)
        rest = await soon(read(stream))
        assert servers.nodes[0].front_end.restarts > 0
    assert tokens_of([*first, *rest]) == expected


@pytest.mark.parametrize("how", sorted(SAMPLINGS))
@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_what_is_kept_of_earlier_turns_changes_nothing(
    tiny: Tiny, policy: str, how: str
) -> None:
    """A second turn is not read anew, and what it is drawn after is all of it; where its tokens'
    scores are asked for, it is."""
    words = list(range(40, 80))
    first = request(words, 12, sampling=SAMPLINGS[how], stop_ids=frozenset({EOS}))
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    async with running(tiny, profile=profile, plan=plan, policy=POLICIES[policy]) as servers:
        said = await soon(read(servers.nodes[0].service.submit(first)))
        turn = (*first.prompt_ids, *tokens_of(said), 80, 81)
        second = replace(first, prompt_ids=turn, max_new_tokens=20)
        answered = await soon(read(servers.nodes[0].service.submit(second)))
        whole = replace(second, sampling=replace(second.sampling, prompt_logprobs=0))
        scored = await soon(read(servers.nodes[0].service.submit(whole)))
    assert answered[0].cached_tokens > 0
    expected = await in_one_process(tiny, [first, second])
    assert [tokens_of(said), tokens_of(answered)] == expected
    assert tokens_of(scored) == expected[1]
    assert [one.token for one in scored[0].prompt] == list(turn[1:])
