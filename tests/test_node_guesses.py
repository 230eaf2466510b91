"""Guesses on nodes: a user's server guesses what its answer goes on with, several tokens ahead, and
nobody is shown what full depth does not confirm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import checkpoints
from nodes import (
    answers,
    constant_routes,
    hybrid_routes,
    read,
    request,
    running,
    staircase_routes,
    tokens_of,
    world,
)
from serving import EOS, Tiny, open_tiny
from test_node_drafts import LENGTHS, NEW, UnevenNetwork, ledgers_of
from trimmoe.models.load import open_model
from trimmoe.policy.settings import PRESETS, PolicySettings
from trimmoe.runtime.node import guesses as guesses_module
from trimmoe.runtime.node.drafts import Pending
from trimmoe.runtime.node.messages import Token
from trimmoe.runtime.node.scheduler import Scheduler, Step
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import Unavailable
from wires import soon, until


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


def guessing(guesses: int, confidence: float = 0.0) -> PolicySettings:
    """So many guesses ahead, however improbable."""
    return replace(PRESETS["speculative"](), guesses=guesses, guess_confidence=confidence)


@pytest.mark.parametrize("guesses", [1, 2, 5])
@pytest.mark.parametrize("routes", [constant_routes, staircase_routes, hybrid_routes])
async def test_answers_are_those_of_transformers_however_many_are_guessed(
    tiny: Tiny,
    prompts: list[list[int]],
    expected: list[list[int]],
    routes: Callable[[int], list[list[int]]],
    guesses: int,
) -> None:
    profile, plan = world(tiny, servers=3, routes=routes(3))
    asked = [
        (i % 3, request(prompt, new, stop_ids=frozenset({EOS})))
        for i, (prompt, new) in enumerate(zip(prompts, NEW, strict=True))
    ]
    async with running(
        tiny, profile=profile, plan=plan, policy=guessing(guesses), prefill_chunk=8
    ) as cluster:
        made = await answers(cluster, asked)
        await cluster.all_free()
        desks = [node.desk for node in cluster.nodes.values()]
        said = [desk.answers.guessing for desk in desks]
    assert [tokens_of(events) for events in made] == expected
    assert 0 < sum(each.right for each in said) < sum(each.made for each in said)
    assert sum(desk.restarts for desk in desks) == 0


@pytest.mark.parametrize("seed", range(4))
async def test_it_does_not_matter_whose_word_comes_first(
    tiny: Tiny, prompts: list[list[int]], expected: list[list[int]], seed: int
) -> None:
    profile, plan = world(tiny, servers=4, routes=staircase_routes(4))
    asked = [
        (i % 4, request(prompt, new, stop_ids=frozenset({EOS})))
        for i, (prompt, new) in enumerate(zip(prompts, NEW, strict=True))
    ]
    async with running(
        tiny, profile=profile, plan=plan, policy=guessing(3), network=UnevenNetwork(seed)
    ) as cluster:
        made = await answers(cluster, asked)
        await cluster.all_free()
        assert sum(node.desk.restarts for node in cluster.nodes.values()) == 0
    assert [tokens_of(events) for events in made] == expected


async def test_the_layers_after_the_last_router_are_those_of_what_was_confirmed(
    tmp_path: Path, tiny: Tiny
) -> None:
    folder = checkpoints.write("qwen2_moe", tmp_path)
    deep = Tiny(folder=folder, view=open_model(folder), tokenizer=tiny.tokenizer)
    routes = [[server, (server + 1) % 3, server] for server in range(3)]
    profile, plan = world(deep, servers=3, routes=routes)
    prompts = [[1 + i, 7, 3 * i + 2] for i in range(9)]
    async with running(deep, profile=profile, plan=plan, policy=guessing(3)) as cluster:
        made = await answers(
            cluster, [(i % 3, request(prompt, 24)) for i, prompt in enumerate(prompts)]
        )
    assert [tokens_of(events) for events in made] == [deep.greedy(one, 24) for one in prompts]


async def test_sampled_answers_are_those_without_guesses(
    tiny: Tiny, prompts: list[list[int]]
) -> None:
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    asked = [
        (
            i % 3,
            replace(
                request(prompt, new),
                sampling=Sampling(temperature=0.8, top_p=0.9, seed=i, stream=0, logprobs=2),
            ),
        )
        for i, (prompt, new) in enumerate(zip(prompts, NEW, strict=True))
    ]
    made = []
    for policy in (PRESETS["exact"](), guessing(3)):
        async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
            made.append(await answers(cluster, asked))
    without, guessed = made
    assert [tokens_of(events) for events in guessed] == [tokens_of(events) for events in without]
    for one, other in zip(without, guessed, strict=True):
        for event, same in zip(one, other, strict=True):
            assert event.logprob == pytest.approx(same.logprob, abs=1e-4)


async def test_a_server_with_all_experts_is_always_right(
    tiny: Tiny, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Then nothing is withdrawn, and what is sent is what is sent without guesses."""
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    plan = replace(plan, hosts=np.ones_like(plan.hosts))
    pairs = enumerate(zip(prompts, NEW, strict=True))
    asked = [(i % 2, request(prompt, new)) for i, (prompt, new) in pairs]
    sent = []
    for policy in (PRESETS["exact"](), guessing(4)):
        async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
            made = await answers(cluster, asked)
            await cluster.all_free()
            nodes = list(cluster.nodes.values())
            sent.append([dict(node.mail.vectors_sent) for node in nodes])
    said = [node.desk.answers.guessing for node in nodes]
    assert sum(each.made for each in said) > 0
    assert all(each.made == each.right for each in said)
    assert sent[0] == sent[1]
    answered = [tokens_of(events) for events in made]
    assert [one[: len(full)] for one, full in zip(answered, expected, strict=True)] == expected


async def test_what_was_sent_in_vain_is_in_the_ledgers_too(
    tiny: Tiny, prompts: list[list[int]]
) -> None:
    """But for what is still on its way when a request ends."""
    guesses = 3
    profile, plan = world(tiny, servers=4, routes=hybrid_routes(4))
    asked = [(i % 4, request(prompt, 16)) for i, prompt in enumerate(prompts)]
    async with running(tiny, profile=profile, plan=plan, policy=guessing(guesses)) as cluster:
        made = await answers(cluster, asked)
        await cluster.all_free()
        sent = np.zeros((4, 4), dtype=int)
        for source, node in cluster.nodes.items():
            for destination, count in node.mail.vectors_sent.items():
                sent[source, destination] = count
    told = [ledger for events in made for ledger in ledgers_of(events)]
    charged = sum((ledger.messages for ledger in told), np.zeros_like(sent))
    spec = tiny.view.spec
    assert (charged <= sent).all()
    left = guesses * len(asked) * spec.layer_count * (2 * spec.top_k + 1)
    assert (sent - charged).sum() <= left
    assert charged.sum() > 0.8 * sent.sum()
    assert all(ledger.tokens == 1 for ledger in told)
    assert all((ledger.kinds.sum(1) == 1).all() for ledger in told)


async def test_a_user_that_leaves_frees_everything(tiny: Tiny) -> None:
    """Also what the server has read by itself; places are there for the next."""
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    async with running(tiny, profile=profile, plan=plan, policy=guessing(3), kv_slots=2) as cluster:
        for _ in range(3):
            streams = [cluster.nodes[0].service.submit(request([1, 2, 3], 60)) for _ in range(2)]
            for stream in streams:
                await anext(stream)
                await stream.aclose()
        await cluster.all_free()
        homes = cluster.nodes[0].executor.homes
        for _ in range(100):
            if homes.free == 2:
                break
            await asyncio.sleep(0.01)
        assert homes.free == 2


def guess(position: int, which: int) -> Token:
    return Token(1, position, which, 0.0, [], None, None, None, draft=True)


def test_a_wrong_guess_takes_those_behind_it_along() -> None:
    pending = Pending()
    for position in (5, 6, 7):
        pending.add(guess(position, 10 * position), None)
    assert pending.drafts == 3
    right = Token(1, 5, 50, 0.0, [], None, None, None)
    assert pending.check(right, None) is None
    withdrawn = pending.check(replace_token(right, 6, 61), None)
    assert withdrawn is not None
    assert [entry.token.token for entry in withdrawn] == [70]
    assert [entry.token.token for entry in pending.shown()] == [50, 61]


def replace_token(token: Token, position: int, which: int) -> Token:
    import msgspec

    return msgspec.structs.replace(token, position=position, token=which)


async def test_guesses_pass_a_layer_at_a_time_where_layers_take_long(
    tiny: Tiny,
    prompts: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that others are not held up for longer; what was read of withdrawn tokens is forgotten."""
    monkeypatch.setattr(guesses_module, "SLICE_S", 0.0)
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    pairs = enumerate(zip(prompts, NEW, strict=True))
    asked = [(i % 3, request(prompt, new, stop_ids=frozenset({EOS}))) for i, (prompt, new) in pairs]
    async with running(tiny, profile=profile, plan=plan, policy=guessing(3)) as cluster:
        made = await answers(cluster, asked)
        await cluster.all_free()
        counts = [node.pump.batch_counts["GUESS"] for node in cluster.nodes.values()]
        rows = sum(node.pump.item_counts["GUESS"] for node in cluster.nodes.values())
    assert [tokens_of(events) for events in made] == expected
    assert all(counts)
    layers = tiny.view.spec.layer_count
    # Every prompt is read in all layers at least.
    assert rows >= layers * len(prompts)


def test_guesses_come_after_prompts_too() -> None:
    ready = Scheduler(max_rows=8, now=lambda: 0.0, waited=lambda _: None)
    for item in range(3):
        ready.put(Step.CHUNK, 0, item)
    for layer in range(3):
        ready.put(Step.GUESS, layer, "guess")
    steps = [work.step for _ in range(6) if (work := ready.next()) is not None]
    assert steps == [Step.CHUNK] * 3 + [Step.GUESS] * 3


async def test_a_wrong_guess_that_needs_a_lost_expert_ends_no_answer(tiny: Tiny) -> None:
    """What exact execution answers while a server is lost is answered with guesses, too."""
    profile, plan = world(tiny, servers=3, routes=[[0] * 4, [1] * 4, [0] * 4])
    hosts = np.zeros_like(plan.hosts)
    hosts[2] = True
    hosts[0, :, 0] = True
    hosts[:, 1, 2] = [False, True, False]
    plan = replace(plan, hosts=hosts)
    asked = [request([7 * i % 251], 5) for i in range(60)]

    async def ended(policy: PolicySettings) -> list[list[int] | None]:
        async with running(
            tiny,
            profile=profile,
            plan=plan,
            policy=policy,
            patience_s=0.0,
            network=UnevenNetwork(0),
        ) as cluster:
            await cluster.kill(1)
            await until(lambda: all(1 in node.planner.lost for node in cluster.nodes.values()))
            streams = [cluster.nodes[0].service.submit(one) for one in asked]
            made = await soon(
                asyncio.gather(*(read(one) for one in streams), return_exceptions=True)
            )
        assert all(isinstance(one, (list, Unavailable)) for one in made)
        return [tokens_of(one) if isinstance(one, list) else None for one in made]

    guessing = replace(PRESETS["speculative"](), guess_confidence=0.0)
    exact = await ended(PRESETS["exact"]())
    assert any(one is not None for one in exact)
    got = await ended(guessing)
    assert got == exact
