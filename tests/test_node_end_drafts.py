"""What a draft head takes to follow where full depth ends is read along with the token that is
known, on whatever servers that is, and never changes an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from draft_heads import Oracle
from nodes import (
    Servers,
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
from questions import Questions
from serving import Tiny
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import straight_times
from trimmoe.cost.crowd import Crowd
from trimmoe.models.compiled.view import CompiledView
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.head_drafts import HeadDrafts
from trimmoe.runtime.node.compute import end_drafts
from trimmoe.runtime.node.compute.end_drafts import EndDrafts
from trimmoe.runtime.node.front import speculation as speculation_module
from trimmoe.runtime.node.outbox import Outbox
from trimmoe.runtime.node.records.messages import Parcel, Withdraw
from trimmoe.runtime.node.records.tokens import Token
from trimmoe.runtime.sampling import Sampling

SPECULATIVE = replace(PRESETS["speculative"](), guess_chance=0.0)


def at_home(tiny: Tiny, servers: int = 1, density: float = 1.0) -> tuple[Profile, Plan]:
    """Every server runs all layers of its users, and all experts where the density is one."""
    return world(tiny, servers=servers, routes=constant_routes(servers), density=density)


PLACES = {
    "at home": (2, constant_routes(2), 1.0),
    "some experts elsewhere": (2, constant_routes(2), 0.5),
    "ends elsewhere": (3, [[0, 0, 1, 2]] * 3, 1.0),
    "ends at home": (2, [[0, 1, 1, 0], [1, 0, 0, 1]], 0.5),
    "begins elsewhere": (3, staircase_routes(3), 0.5),
    "comes and goes": (3, hybrid_routes(3), 0.5),
}
"""Servers, routes of their users, and the density of experts."""


def placed(tiny: Tiny, place: str) -> tuple[int, Profile, Plan]:
    """As `PLACES` has it."""
    servers, routes, density = PLACES[place]
    return servers, *world(tiny, servers=servers, routes=routes, density=density)


@pytest.fixture(autouse=True)
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """However sure a head is, and whatever the cost model says of servers' own guesses."""
    monkeypatch.setattr(end_drafts, "WANTED_IN", math.inf)
    monkeypatch.setattr(Crowd, "own_s", lambda *_: np.inf)


def give_heads(
    cluster: Servers, texts: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch
) -> list[Oracle]:
    """Every server gets a head that knows these texts, and is wrong now and then."""
    oracles = []
    for node in cluster.nodes.values():
        view = node.worker.view
        assert isinstance(view, CompiledView)
        oracles.append(oracle := Oracle(view, wrong_every=3))
        oracle.texts = [list(text) for text in texts]
        monkeypatch.setattr(view, "draft_head", oracle)
    return oracles


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens were offered each time."""
    counts: list[int] = []
    followed = EndDrafts._followed

    def counted(*asked) -> list[Token]:
        found = followed(*asked)
        counts.extend(len(one.follows) for one in found if one.follows)
        return found

    monkeypatch.setattr(EndDrafts, "_followed", counted)
    return counts


@pytest.mark.parametrize(
    ("place", "policy"),
    [*((place, SPECULATIVE) for place in PLACES), ("ends elsewhere", PRESETS["auto"]())],
    ids=[*PLACES, "auto"],
)
async def test_answers_are_those_of_transformers_whatever_a_head_of_random_weights_says(
    tiny: Tiny,
    offered: list[int],
    monkeypatch: pytest.MonkeyPatch,
    policy: PolicySettings,
    place: str,
) -> None:
    questions = Questions(tiny=tiny, count=6)
    servers, profile, plan = placed(tiny, place)
    async with running(tiny, profile=profile, plan=plan, policy=policy, prefill_chunk=8) as cluster:
        give_heads(cluster, [], monkeypatch)
        asked = questions.among(servers)
        made = await answers(cluster, asked[:3])
        made += [events for one in asked[3:] for events in await answers(cluster, [one])]
        await cluster.all_free()
        restarts = sum(node.front_end.restarts for node in cluster.nodes.values())
    assert [tokens_of(events) for events in made] == questions.answers
    assert offered
    assert not restarts


@pytest.mark.parametrize(
    ("place", "temperature", "penalty", "at_once"),
    [
        ("at home", 0.0, 1.0, False),
        ("at home", 0.0, 1.3, True),
        ("at home", 0.8, 1.0, True),
        ("at home", 0.8, 1.3, False),
        ("ends elsewhere", 0.0, 1.0, False),
        ("ends elsewhere", 0.8, 1.3, True),
        ("some experts elsewhere", 0.8, 1.3, True),
        ("ends at home", 0.8, 1.3, False),
        ("begins elsewhere", 0.8, 1.3, True),
        ("comes and goes", 0.8, 1.3, False),
    ],
)
async def test_answers_are_the_same_with_drafts_that_are_right_more_often_than_not(
    tiny: Tiny,
    offered: list[int],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    temperature: float,
    penalty: float,
    at_once: bool,
) -> None:
    """Tokens and their probabilities, greedy and sampled, where draws look back and where not; what
    is right passes the layers in one batch."""
    sampling = Sampling(temperature=temperature, seed=3, stream=0, repetition_penalty=penalty)
    questions = Questions(tiny=tiny, count=6)
    asked = questions.among(1, new=24, sampling=sampling)
    _, profile, plan = placed(tiny, place)
    groups = [asked] if at_once else [[one] for one in asked]
    async with running(tiny, profile=profile, plan=plan) as cluster:
        plain = await answers(cluster, asked)
    texts = [
        [*prompt, *tokens_of(events)]
        for prompt, events in zip(questions.prompts, plain, strict=True)
    ]
    async with running(tiny, profile=profile, plan=plan, policy=SPECULATIVE) as cluster:
        give_heads(cluster, texts, monkeypatch)
        made = [events for group in groups for events in await answers(cluster, group)]
        await cluster.all_free()
        node = cluster.nodes[0]
        guessing, restarts = node.front_end.speculation.guessing, node.front_end.restarts
        largest = max(size for step, _, size in node.batch_loop.batches if step == "ATTEND")
    assert [tokens_of(events) for events in made] == [tokens_of(events) for events in plain]
    for with_drafts, without in zip(made, plain, strict=True):
        assert [one.logprob for one in with_drafts] == [one.logprob for one in without]
    assert 0 < guessing.right < guessing.made
    assert at_once or max(offered) >= 3
    assert largest > (1 if at_once else 3)
    assert not restarts


async def test_the_more_streams_the_surer_a_token_has_to_be_to_be_offered(
    tiny: Tiny, offered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sure as the cost model says that makes it worth its row."""
    found: list[tuple[float, float]] = []
    along = Crowd.along

    def seen(crowd: Crowd, right: float) -> tuple[float, float]:
        told = along(replace(crowd, batch_times=straight_times(0.5)), right)
        found.append((crowd.here, told[0]))
        return told

    monkeypatch.setattr(Crowd, "along", seen)
    profile, plan = at_home(tiny)
    asked = Questions(tiny=tiny, count=5).among(1, new=16)
    async with running(tiny, profile=profile, plan=plan, policy=SPECULATIVE) as cluster:
        give_heads(cluster, [], monkeypatch)
        await answers(cluster, asked)
    least = {streams: min(each for n, each in found if n == streams) for streams, _ in found}
    assert least[1] < least[5]


@pytest.mark.parametrize("place", ["at home", "comes and goes"])
async def test_a_server_makes_no_pass_of_its_own_while_a_head_drafts(
    tiny: Tiny, offered: list[int], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    _, profile, plan = placed(tiny, place)
    async with running(tiny, profile=profile, plan=plan, policy=SPECULATIVE) as cluster:
        give_heads(cluster, [], monkeypatch)
        await answers(cluster, Questions(tiny=tiny, count=3).among(1))
        assert not cluster.nodes[0].batch_loop.item_counts["GUESS"]
    assert offered


async def test_what_comes_back_with_a_wrong_draft_needs_not_be_withdrawn(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever set out on it passed all layers with it. What sets out next says so by itself."""
    sent: list[Withdraw] = []
    post = Outbox.post

    def seen(self: Outbox, parcel: Parcel) -> None:
        if isinstance(parcel.message, Withdraw) and parcel.to != 0:
            sent.append(parcel.message)
        post(self, parcel)

    monkeypatch.setattr(Outbox, "post", seen)
    questions = Questions(tiny=tiny, count=3)
    profile, plan = world(tiny, servers=3, routes=[[0, 0, 1, 1]] * 3, density=1.0)
    async with running(tiny, profile=profile, plan=plan, policy=SPECULATIVE) as cluster:
        give_heads(cluster, [], monkeypatch)
        made = [await answers(cluster, [one]) for one in questions.among(1, new=24)]
        guessing = cluster.nodes[0].front_end.speculation.guessing
    greedy = [tiny.greedy(prompt, 24, eos=None) for prompt in questions.prompts]
    assert [tokens_of(events) for (events,) in made] == greedy
    # What was copied from the prompt may be on its way by itself.
    assert 3 * len(sent) < guessing.made - guessing.right


async def test_a_server_guesses_by_itself_where_that_is_sooner(
    tiny: Tiny, offered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Crowd, "own_s", lambda *_: 0.0)
    questions = Questions(tiny=tiny, count=4)
    servers, profile, plan = placed(tiny, "some experts elsewhere")
    async with running(tiny, profile=profile, plan=plan, policy=SPECULATIVE) as cluster:
        give_heads(cluster, [], monkeypatch)
        made = await answers(cluster, questions.among(servers))
        readings = cluster.nodes[0].batch_loop.item_counts["GUESS"]
    assert [tokens_of(events) for events in made] == questions.answers
    assert readings
    assert not offered, "nobody asks for it"


async def test_a_stream_does_without_a_head_that_never_says_anything(
    tiny: Tiny, offered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last server of the route has none. Others guess by themselves then."""
    monkeypatch.setattr(speculation_module, "MOST_UNDRAFTED", 3)
    questions = Questions(tiny=tiny, count=3)
    _, profile, plan = placed(tiny, "ends elsewhere")
    async with running(tiny, profile=profile, plan=plan, policy=SPECULATIVE) as cluster:
        give_heads(cluster, [], monkeypatch)
        monkeypatch.setattr(cluster.nodes[2].worker.view, "draft_head", None)
        made = await answers(cluster, questions.among(1, new=24))
        readings = cluster.nodes[0].batch_loop.item_counts["GUESS"]
    greedy = [tiny.greedy(prompt, 24, eos=None) for prompt in questions.prompts]
    assert [tokens_of(events) for events in made] == greedy
    assert readings
    assert not offered


@pytest.mark.parametrize("place", ["ends elsewhere", "ends at home", "comes and goes"])
async def test_a_head_reads_the_whole_sequence_and_the_same_states_wherever_it_ends(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Whatever was drafted wrongly in between."""
    found: list[list[tuple[int, Tensor, list[int]]]] = []
    read = HeadDrafts.read

    def seen(self: HeadDrafts, slot: int, start: int, states: Tensor, tokens: list[int]) -> None:
        found[-1].append((start, states.clone(), list(tokens)))
        read(self, slot, start, states, tokens)

    monkeypatch.setattr(HeadDrafts, "read", seen)
    prompt = np.random.default_rng(8).integers(0, 256, 30).tolist()
    expected = [*prompt, *tiny.greedy(prompt, 20, eos=None)]
    for here in ("at home", place):
        found.append([])
        _, profile, plan = placed(tiny, here)
        world_ = {"profile": profile, "plan": plan, "policy": SPECULATIVE, "prefill_chunk": 8}
        async with running(tiny, **world_) as cluster:
            give_heads(cluster, [expected], monkeypatch)
            await read_whole(cluster, prompt, 20)
    for pieces in found:
        assert [start for start, *_ in pieces] == np.cumsum(
            [0, *(len(tokens) for *_, tokens in pieces[:-1])]
        ).tolist()
        known = [token for *_, tokens in pieces for token in tokens]
        assert known == expected[: len(known)]
        assert len(known) >= len(expected) - 5
    plain, other = (torch.cat([states for _, states, _ in pieces]) for pieces in found)
    assert torch.equal(plain[:45], other[:45])


async def read_whole(cluster: Servers, prompt: list[int], new: int) -> None:
    """An answer of the first server's."""
    await read(cluster.nodes[0].service.submit(request(prompt, new)))


async def test_a_turn_that_goes_on_from_another_one_is_drafted_for_too(
    tiny: Tiny, offered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first answer left is right, though wrong drafts were written behind it."""
    prompt = np.random.default_rng(4).integers(0, 256, 40).tolist()
    plain = tiny.greedy(prompt, 40, eos=None)
    longer = [*prompt, *plain, 7, 8]
    expected = tiny.greedy(longer, 24, eos=None)
    profile, plan = at_home(tiny)
    async with running(tiny, profile=profile, plan=plan, policy=SPECULATIVE) as cluster:
        give_heads(cluster, [[*prompt, *plain], [*longer, *expected]], monkeypatch)
        service = cluster.nodes[0].service
        first = await read(service.submit(request(prompt, 40)))
        offered.clear()
        again = await read(service.submit(request(longer, 24)))
    assert tokens_of(first) == plain
    assert tokens_of(again) == expected
    assert again[0].cached_tokens > len(prompt)
    assert sum(offered) > 8
