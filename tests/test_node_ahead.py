"""Tokens that set out on nodes before full depth has confirmed what they follow, be it a draft or a
guess: in whatever order word comes, and however tokens are drawn, answers are the model's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import checkpoints
from nodes import (
    UnevenNetwork,
    answers,
    delay,
    drafting,
    guessing,
    hybrid_routes,
    ledgers_of,
    request,
    running,
    staircase_routes,
    tokens_of,
    world,
    wrong,
)
from questions import Questions
from serving import Tiny
from trimmoe.models.load import open_model
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.node.node import Node
from trimmoe.runtime.node.records.messages import Message, Onward, Partial
from trimmoe.runtime.sampling import Sampling

either = pytest.mark.parametrize("early", [drafting(0.5), guessing(3)], ids=["drafts", "guesses"])


@pytest.fixture(scope="module")
def questions(tiny: Tiny) -> Questions:
    return Questions(tiny=tiny, count=12)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "early", [drafting(0.0), drafting(0.6), guessing(3)], ids=["bold drafts", "drafts", "guesses"]
)
async def test_it_does_not_matter_whose_word_comes_first(
    tiny: Tiny, questions: Questions, early: PolicySettings, seed: int
) -> None:
    """Drafts come from the middle of a route, guesses from the user's server, what full depth says
    from the route's end."""
    profile, plan = world(tiny, servers=4, routes=staircase_routes(4))
    async with running(
        tiny, profile=profile, plan=plan, policy=early, network=UnevenNetwork(seed)
    ) as cluster:
        made = await answers(cluster, questions.among(4))
        await cluster.all_free()
        assert sum(node.front_end.restarts for node in cluster.nodes.values()) == 0
    assert [tokens_of(events) for events in made] == questions.answers


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("early", [drafting(0.6), guessing(3)], ids=["drafts", "guesses"])
async def test_rows_of_one_sequence_may_overtake_each_other(
    tiny: Tiny, questions: Questions, early: PolicySettings, seed: int
) -> None:
    """Behind withdrawn tokens too, where what comes first is not what follows the last right one:
    some rows wait for an expert elsewhere, and others do not."""
    rng = np.random.default_rng(seed)
    profile, plan = world(tiny, servers=3, routes=staircase_routes(3))
    async with running(tiny, profile=profile, plan=plan, policy=early) as cluster:
        for node in cluster.nodes.values():
            shuffle(node, rng)
        made = await answers(cluster, questions.among(3))
        await cluster.all_free()
        assert sum(node.front_end.restarts for node in cluster.nodes.values()) == 0
    assert [tokens_of(events) for events in made] == questions.answers


def shuffle(node: Node, rng: np.random.Generator) -> None:
    """Rows of generated tokens and what experts made of them come up to 20 ms late, each message by
    itself."""

    def wait_s(message: Message) -> float:
        moves = isinstance(message, (Onward, Partial)) and message.decoding
        return float(rng.choice([0.0, 0.005, 0.02])) if moves else 0.0

    delay(node, wait_s)


@either
async def test_the_layers_after_the_last_router_are_those_of_what_was_confirmed(
    tmp_path: Path, tiny: Tiny, early: PolicySettings
) -> None:
    """A model with a dense block after its last MoE layer, whose keys and values a withdrawn token
    may have written."""
    folder = checkpoints.write("qwen2_moe", tmp_path)
    deep = Tiny(folder=folder, view=open_model(folder), tokenizer=tiny.tokenizer)
    routes = [[server, (server + 1) % 3, server] for server in range(3)]
    profile, plan = world(deep, servers=3, routes=routes)
    prompts = [[1 + i, 7, 3 * i + 2] for i in range(9)]
    async with running(deep, profile=profile, plan=plan, policy=early) as cluster:
        made = await answers(
            cluster, [(i % 3, request(prompt, 24)) for i, prompt in enumerate(prompts)]
        )
        guessed = [node.front_end.speculation.guessing for node in cluster.nodes.values()]
    assert [tokens_of(events) for events in made] == [deep.greedy(one, 24) for one in prompts]
    told = [ledger for events in made for ledger in ledgers_of(events)]
    drafts, guesses = any(map(wrong, told)), any(each.right < each.made for each in guessed)
    assert guesses if early.guesses else drafts


@either
async def test_sampled_answers_are_those_with_nothing_ahead(
    tiny: Tiny, questions: Questions, early: PolicySettings
) -> None:
    """What is drawn hangs on the position and on what full depth says, on nothing before."""
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    drawn = Sampling(temperature=0.8, top_p=0.9, seed=0, stream=0, logprobs=2)
    asked = [
        (access, replace(one, sampling=replace(drawn, seed=i)))
        for i, (access, one) in enumerate(questions.among(3, stop_ids=frozenset()))
    ]
    made = []
    for policy in (PRESETS["exact"](), early):
        async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
            made.append(await answers(cluster, asked))
    without, drafted = made
    assert [tokens_of(events) for events in drafted] == [tokens_of(events) for events in without]
    for one, other in zip(without, drafted, strict=True):
        for event, same in zip(one, other, strict=True):
            assert event.logprob == pytest.approx(same.logprob, abs=1e-4)
