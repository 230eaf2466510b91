"""Drafts on nodes: an answer goes on from a prediction that full depth has yet to confirm, nobody
is shown what it does not confirm, and what followed such a draft is as if it had never been."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from nodes import (
    answers,
    constant_routes,
    drafting,
    hybrid_routes,
    ledgers_of,
    running,
    spent_within,
    staircase_routes,
    tokens_of,
    vectors_sent,
    world,
    wrong,
)
from questions import Questions
from serving import Tiny
from trimmoe.core.ledger import Ledger
from trimmoe.runtime.node.front.drafts import Pending
from trimmoe.runtime.node.records.contents import affected
from trimmoe.runtime.node.records.messages import Followed
from trimmoe.runtime.node.records.packing import pack_ledger
from trimmoe.runtime.node.records.tokens import After, Token
from trimmoe.runtime.service import Ahead


@pytest.fixture(scope="module")
def questions(tiny: Tiny) -> Questions:
    return Questions(tiny=tiny, count=12)


@pytest.mark.parametrize("at", [0.0, 0.6, 0.75])
@pytest.mark.parametrize("routes", [constant_routes, staircase_routes, hybrid_routes])
async def test_answers_are_those_of_transformers_however_bold_the_drafts(
    tiny: Tiny,
    questions: Questions,
    routes: Callable[[int], list[list[int]]],
    at: float,
) -> None:
    profile, plan = world(tiny, servers=3, routes=routes(3))
    async with running(
        tiny, profile=profile, plan=plan, policy=drafting(at), prefill_chunk=8
    ) as cluster:
        made = await answers(cluster, questions.among(3))
        await cluster.all_free()
    assert [tokens_of(events) for events in made] == questions.answers
    told = [ledger for events in made for ledger in ledgers_of(events)]
    assert any(map(wrong, told))
    assert all(ledger.loss == 0 for ledger in told)
    assert all((ledger.kinds.sum(1) == ledger.tokens).all() for ledger in told)


async def test_budgets_hold_at_every_prefix_although_tokens_are_withdrawn(
    tiny: Tiny, questions: Questions
) -> None:
    budget = 0.2
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    asked = questions.among(3, new=16)
    policy = drafting(0.3, budget)
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        made = await answers(cluster, asked)
    assert spent_within(budget, made) > 0
    assert any(wrong(ledger) for events in made for ledger in ledgers_of(events))


async def test_what_was_sent_in_vain_is_in_the_ledgers_too(
    tiny: Tiny, questions: Questions
) -> None:
    """But for what is still on its way when a request ends, at most what came after one draft."""
    profile, plan = world(tiny, servers=4, routes=hybrid_routes(4))
    asked = questions.among(4, new=16)
    async with running(tiny, profile=profile, plan=plan, policy=drafting(0.5)) as cluster:
        made = await answers(cluster, asked)
        await cluster.all_free()
        sent = vectors_sent(cluster)
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
    entries = list(pending.shown())
    assert [entry.token.token for entry in entries] == [50, 61]
    right, wrong = Ahead(kind="draft", right=True), Ahead(kind="draft", right=False)
    assert [entry.ahead for entry in entries] == [right, replace(wrong, withdrawn=(60, 70))]


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
