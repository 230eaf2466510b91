"""Servers that hold all that their users need: what a draft head offers is read along with the
token that is known, and never changes an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from draft_heads import Oracle
from nodes import Servers, answers, constant_routes, read, request, running, tokens_of, world
from questions import Questions
from serving import Tiny
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.models.compiled.view import CompiledView
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.head_drafts import HeadDrafts
from trimmoe.runtime.node.compute.home_drafts import HomeDrafts
from trimmoe.runtime.node.records.output import Offer
from trimmoe.runtime.sampling import Sampling

SPECULATIVE = replace(PRESETS["speculative"](), guess_chance=0.0)


def at_home(tiny: Tiny, servers: int = 1, density: float = 1.0) -> tuple[Profile, Plan]:
    """Every server runs all layers of its users, and all experts where the density is one."""
    return world(tiny, servers=servers, routes=constant_routes(servers), density=density)


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
    offers = HomeDrafts._offers

    def counted(*asked) -> list[Offer]:
        found = offers(*asked)
        counts.extend(len(one.tokens) for one in found)
        return found

    monkeypatch.setattr(HomeDrafts, "_offers", counted)
    return counts


@pytest.mark.parametrize("policy", [SPECULATIVE, PRESETS["auto"]()], ids=["speculative", "auto"])
@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "several at once"])
async def test_answers_are_those_of_transformers_whatever_a_head_of_random_weights_says(
    tiny: Tiny,
    offered: list[int],
    monkeypatch: pytest.MonkeyPatch,
    policy: PolicySettings,
    at_once: bool,
) -> None:
    questions = Questions(tiny=tiny, count=6)
    profile, plan = at_home(tiny, servers=2)
    monkeypatch.setattr(Oracle.draft, "__defaults__", (0.0,))
    async with running(tiny, profile=profile, plan=plan, policy=policy, prefill_chunk=8) as cluster:
        give_heads(cluster, [], monkeypatch)
        asked = questions.among(2)
        groups = [asked] if at_once else [[one] for one in asked]
        made = [events for group in groups for events in await answers(cluster, group)]
        await cluster.all_free()
        restarts = sum(node.front_end.restarts for node in cluster.nodes.values())
    assert [tokens_of(events) for events in made] == questions.answers
    assert offered
    assert not restarts


@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "several at once"])
@pytest.mark.parametrize("penalty", [1.0, 1.3], ids=["", "draws that look back"])
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
async def test_answers_are_the_same_with_drafts_that_are_right_more_often_than_not(
    tiny: Tiny,
    offered: list[int],
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    penalty: float,
    at_once: bool,
) -> None:
    """Tokens and their probabilities; what is right passes the layers in one batch."""
    sampling = Sampling(temperature=temperature, seed=3, stream=0, repetition_penalty=penalty)
    questions = Questions(tiny=tiny, count=6)
    asked = questions.among(1, new=24, sampling=sampling)
    profile, plan = at_home(tiny)
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
        guessing, restarts = node.front_end.answers.guessing, node.front_end.restarts
        largest = max(size for step, _, size in node.batch_loop.batches if step == "ATTEND")
    assert [tokens_of(events) for events in made] == [tokens_of(events) for events in plain]
    for with_drafts, without in zip(made, plain, strict=True):
        assert [one.logprob for one in with_drafts] == [one.logprob for one in without]
    assert 0 < guessing.right < guessing.made
    assert at_once or max(offered) == 4
    assert largest > (1 if at_once else 3)
    assert not restarts


async def test_the_more_streams_the_fewer_tokens_are_offered_to_each(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight rows at most: of four streams each gets one, of five none."""
    found: list[tuple[int, int]] = []
    offer = HeadDrafts.offer

    def seen(drafts: HeadDrafts, *asked: int, streams: int) -> tuple[int, ...]:
        drafted = offer(drafts, *asked, streams=streams)
        found.append((streams, len(drafted)))
        return drafted

    monkeypatch.setattr(HeadDrafts, "offer", seen)
    monkeypatch.setattr(Oracle.draft, "__defaults__", (0.0,))
    profile, plan = at_home(tiny)
    asked = Questions(tiny=tiny, count=5).among(1, new=16)
    async with running(tiny, profile=profile, plan=plan, policy=SPECULATIVE) as cluster:
        give_heads(cluster, [], monkeypatch)
        await answers(cluster, asked)
    assert {streams for streams, _ in found} >= {5, 1}
    assert all(drafted <= max(8 // streams - 1, 0) for streams, drafted in found)


async def test_nothing_is_offered_where_an_expert_is_elsewhere(
    tiny: Tiny, offered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = Questions(tiny=tiny, count=4)
    profile, plan = at_home(tiny, servers=2, density=0.5)
    async with running(tiny, profile=profile, plan=plan, policy=SPECULATIVE) as cluster:
        give_heads(cluster, [], monkeypatch)
        made = await answers(cluster, questions.among(2))
        readings = cluster.nodes[0].batch_loop.item_counts["GUESS"]
    assert [tokens_of(events) for events in made] == questions.answers
    assert not offered
    assert readings, "the server's own pass guesses there"


async def test_a_server_that_has_everything_makes_no_pass_of_its_own(
    tiny: Tiny, offered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, plan = at_home(tiny)
    async with running(tiny, profile=profile, plan=plan, policy=SPECULATIVE) as cluster:
        give_heads(cluster, [], monkeypatch)
        await answers(cluster, Questions(tiny=tiny, count=3).among(1))
        assert not cluster.nodes[0].batch_loop.item_counts["GUESS"]


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
