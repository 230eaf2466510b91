"""Drafts on nodes: an answer goes on from a prediction that full depth has yet to confirm, nobody
is shown what it does not confirm, and what followed such a draft is as if it had never been."""

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
    request,
    running,
    staircase_routes,
    tokens_of,
    world,
)
from serving import EOS, Tiny, open_tiny
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.models.load import open_model
from trimmoe.policy.settings import PRESETS, PolicySettings
from trimmoe.runtime.node.drafts import Pending
from trimmoe.runtime.node.messages import After, Followed, Token
from trimmoe.runtime.node.passengers import pack_ledger
from trimmoe.runtime.node.reports import affected
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import TokenEvent
from trimmoe.runtime.wire.base import Frame
from trimmoe.runtime.wire.memory import MemoryNetwork

LENGTHS = [1, 40, 3, 17, 9, 2, 64, 5, 33, 12, 8, 21]
NEW = [3, 9, 14, 1, 20, 6, 11, 8, 5, 17, 2, 12]


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


def drafting(at: float, budget: float = 0.0) -> PolicySettings:
    """Drafts at this confidence, worth while or not; at 0 after the first layer of every token."""
    return replace(PRESETS["trimmoe"](), draft_confidence=at, budget=budget, exits_weighed=False)


def ledgers_of(events: list[TokenEvent]) -> list[Ledger]:
    return [event.ledger for event in events if event.ledger is not None]


def wrong(ledger: Ledger) -> bool:
    """Whether a token's draft was, so that all its layers were waited for."""
    return ledger.audits > 0 and not ledger.kinds[:, Kind.EXITED].any()


@pytest.mark.parametrize("at", [0.0, 0.6, 0.75])
@pytest.mark.parametrize("routes", [constant_routes, staircase_routes, hybrid_routes])
async def test_answers_are_those_of_transformers_however_bold_the_drafts(
    tiny: Tiny,
    prompts: list[list[int]],
    expected: list[list[int]],
    routes: Callable[[int], list[list[int]]],
    at: float,
) -> None:
    profile, plan = world(tiny, servers=3, routes=routes(3))
    asked = [
        (i % 3, request(prompt, new, stop_ids=frozenset({EOS})))
        for i, (prompt, new) in enumerate(zip(prompts, NEW, strict=True))
    ]
    async with running(
        tiny, profile=profile, plan=plan, policy=drafting(at), prefill_chunk=8
    ) as cluster:
        made = await answers(cluster, asked)
        await cluster.all_free()
    assert [tokens_of(events) for events in made] == expected
    told = [ledger for events in made for ledger in ledgers_of(events)]
    assert any(map(wrong, told))
    assert all(ledger.loss == 0 for ledger in told)
    assert all((ledger.kinds.sum(1) == ledger.tokens).all() for ledger in told)


class UnevenNetwork(MemoryNetwork):
    """Every link takes its own time, so that word of one token may overtake that of another."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)
        self._delay_s: dict[tuple[str, str], float] = {}

    def deliver(self, source: str, destination: str, frames: list[Frame]) -> None:
        link = source, destination
        if link not in self._delay_s:
            self._delay_s[link] = float(self._rng.choice([0.0, 0.002, 0.02]))
        hand_over = super().deliver
        asyncio.get_running_loop().call_later(
            self._delay_s[link], lambda: hand_over(source, destination, frames)
        )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("at", [0.0, 0.6])
async def test_it_does_not_matter_whose_word_comes_first(
    tiny: Tiny, prompts: list[list[int]], expected: list[list[int]], at: float, seed: int
) -> None:
    """Drafts come from the middle of a route, what full depth says from its end."""
    profile, plan = world(tiny, servers=4, routes=staircase_routes(4))
    asked = [
        (i % 4, request(prompt, new, stop_ids=frozenset({EOS})))
        for i, (prompt, new) in enumerate(zip(prompts, NEW, strict=True))
    ]
    network = UnevenNetwork(seed)
    async with running(
        tiny, profile=profile, plan=plan, policy=drafting(at), network=network
    ) as cluster:
        made = await answers(cluster, asked)
        await cluster.all_free()
        assert sum(node.desk.restarts for node in cluster.nodes.values()) == 0
    assert [tokens_of(events) for events in made] == expected


async def test_the_layers_after_the_last_router_are_those_of_what_was_confirmed(
    tmp_path: Path, tiny: Tiny
) -> None:
    """A model with a dense block after its last MoE layer, whose keys and values a withdrawn token
    may have written."""
    folder = checkpoints.write("qwen2_moe", tmp_path)
    deep = Tiny(folder=folder, view=open_model(folder), tokenizer=tiny.tokenizer)
    routes = [[server, (server + 1) % 3, server] for server in range(3)]
    profile, plan = world(deep, servers=3, routes=routes)
    prompts = [[1 + i, 7, 3 * i + 2] for i in range(9)]
    async with running(deep, profile=profile, plan=plan, policy=drafting(0.5)) as cluster:
        made = await answers(
            cluster, [(i % 3, request(prompt, 24)) for i, prompt in enumerate(prompts)]
        )
    assert [tokens_of(events) for events in made] == [deep.greedy(one, 24) for one in prompts]
    assert any(wrong(ledger) for events in made for ledger in ledgers_of(events))


async def test_sampled_answers_are_those_without_drafts(
    tiny: Tiny, prompts: list[list[int]]
) -> None:
    """What is drawn hangs on the position and on what full depth says, not on any draft."""
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
    for policy in (PRESETS["exact"](), drafting(0.5)):
        async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
            made.append(await answers(cluster, asked))
    without, drafted = made
    assert [tokens_of(events) for events in drafted] == [tokens_of(events) for events in without]
    for one, other in zip(without, drafted, strict=True):
        for event, same in zip(one, other, strict=True):
            assert event.logprob == pytest.approx(same.logprob, abs=1e-4)


async def test_budgets_hold_at_every_prefix_although_tokens_are_withdrawn(
    tiny: Tiny, prompts: list[list[int]]
) -> None:
    budget = 0.2
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    asked = [(i % 3, request(prompt, 16)) for i, prompt in enumerate(prompts)]
    policy = drafting(0.3, budget)
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        made = await answers(cluster, asked)
    spent = 0.0
    for events in made:
        loss = np.cumsum([ledger.loss for ledger in ledgers_of(events)])
        assert (loss <= budget * np.arange(1, loss.size + 1) + 1e-9).all()
        spent += float(loss[-1])
    assert spent > 0
    assert any(wrong(ledger) for events in made for ledger in ledgers_of(events))


async def test_what_was_sent_in_vain_is_in_the_ledgers_too(
    tiny: Tiny, prompts: list[list[int]]
) -> None:
    """But for what is still on its way when a request ends, at most what came after one draft."""
    profile, plan = world(tiny, servers=4, routes=hybrid_routes(4))
    asked = [(i % 4, request(prompt, 16)) for i, prompt in enumerate(prompts)]
    async with running(tiny, profile=profile, plan=plan, policy=drafting(0.5)) as cluster:
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
    assert (sent - charged).sum() <= 2 * len(asked) * spec.layer_count * (2 * spec.top_k + 1)
    drafts = sum(ledger.audits for ledger in told)
    assert drafts > len(asked)
    assert charged.sum() > 0.8 * sent.sum()


def token(position: int, which: int, *, draft: bool = False) -> Token:
    return Token(1, position, which, None, [], None, None, None, draft=draft)


COST = Ledger.empty(2, 2, 4)


def shown(pending: Pending) -> list[int]:
    return [entry.token.token for entry in pending.shown()]


def test_nothing_is_shown_before_what_comes_first_is_confirmed() -> None:
    pending = Pending()
    pending.add(token(5, 50, draft=True), COST)
    pending.add(token(6, 60), COST)
    assert shown(pending) == []
    assert pending.unconfirmed == 5
    assert pending.check(token(5, 50), COST) is None
    assert pending.unconfirmed is None
    assert shown(pending) == [50, 60]
    assert len(pending) == 0


def test_what_came_after_a_wrong_draft_is_withdrawn() -> None:
    pending = Pending()
    for position in (5, 6, 7):
        pending.add(token(position, 10 * position, draft=True), COST)
    assert pending.check(token(5, 50), COST) is None
    withdrawn = pending.check(token(6, 61), COST)
    assert withdrawn is not None
    assert [entry.token.token for entry in withdrawn] == [70]
    assert shown(pending) == [50, 61]


def test_word_from_full_depth_may_overtake_the_draft() -> None:
    """Then the answer goes on from that at once."""
    pending = Pending()
    assert pending.check(token(5, 51), replace(COST, delay_s=1.0)) is None
    followed = pending.add(token(5, 50, draft=True), replace(COST, delay_s=2.0))
    assert followed.token == 51
    (entry,) = pending.shown()
    assert entry.ledger is not None
    assert entry.ledger.delay_s == 3.0


def test_an_answer_does_not_hang_on_word_that_got_lost() -> None:
    """What full depth says of a draft is awaited; what a token cost after its answer is not."""
    cost = pack_ledger(COST)
    awaited = After(7, cost, agrees=True, token=token(5, 50))
    assert affected(Followed([awaited, After(8, cost, agrees=True)])) == [7]
