"""Nodes together are the exact model, whatever the routes and however many ask at once."""

from __future__ import annotations

from collections.abc import Callable
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
    vectors_sent,
    world,
)
from questions import Questions
from serving import EOS, Tiny
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Kind
from trimmoe.experiments.method_engines import make_engine
from trimmoe.models.load import open_model
from trimmoe.policy.presets import PRESETS
from trimmoe.runtime.decoder import PlannedDecoder
from trimmoe.runtime.local_service import LocalService
from wires import soon


@pytest.fixture(scope="module")
def questions(tiny: Tiny) -> Questions:
    return Questions(tiny=tiny)


@pytest.mark.parametrize("servers", [2, 3, 4])
@pytest.mark.parametrize("routes", [constant_routes, staircase_routes, hybrid_routes])
async def test_concurrent_greedy_answers_are_those_of_transformers(
    tiny: Tiny,
    questions: Questions,
    routes: Callable[[int], list[list[int]]],
    servers: int,
) -> None:
    """Sixteen of unequal length at all servers at once; the prompts take up to twelve chunks."""
    profile, plan = world(tiny, servers=servers, routes=routes(servers))
    async with running(tiny, profile=profile, plan=plan, prefill_chunk=8) as cluster:
        made = await answers(cluster, questions.among(servers))
        await cluster.all_free()
    assert [tokens_of(events) for events in made] == questions.answers
    for events in made:
        last = "stop" if events[-1].token == EOS else "length"
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [last]
        assert events[0].ledger is None
        assert all(event.ledger.loss == 0 for event in events[1:] if event.ledger is not None)


async def test_ten_servers_answer_thirty_two_at_once(tiny: Tiny, questions: Questions) -> None:
    """Sixteen twice, the second time at other servers."""
    profile, plan = world(tiny, servers=10, routes=hybrid_routes(10), density=0.15)
    asked = questions.among(10)
    again = [((access + 6) % 10, one) for access, one in asked]
    async with running(tiny, profile=profile, plan=plan) as cluster:
        made = await answers(cluster, asked + again)
        await cluster.all_free()
    assert [tokens_of(events) for events in made] == questions.answers * 2


async def test_exact_requests_stay_exact_under_a_trimming_policy(
    tiny: Tiny, questions: Questions
) -> None:
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    policy = PRESETS["trimmoe"]()
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        made = await answers(cluster, questions.among(3, exact=True))
    assert [tokens_of(events) for events in made] == questions.answers


async def test_over_real_sockets(tiny: Tiny, questions: Questions) -> None:
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    async with running(tiny, profile=profile, plan=plan, sockets=True) as cluster:
        made = await answers(cluster, questions.among(3))
        await cluster.all_free()
    assert [tokens_of(events) for events in made] == questions.answers


@pytest.mark.parametrize("state", ExitState)
async def test_later_tokens_find_what_exited_ones_leave_as_in_one_process(
    tmp_path: Path, tiny: Tiny, state: ExitState
) -> None:
    """On a model with a dense block after its last MoE layer, some tokens at full depth."""
    folder = checkpoints.write("qwen2_moe", tmp_path)
    deep = Tiny(folder=folder, view=open_model(folder), tokenizer=tiny.tokenizer)
    routes = [[server, (server + 1) % 3, server] for server in range(3)]
    profile, plan = world(deep, servers=3, routes=routes)
    policy = PRESETS["final-exits"]().but(
        exit_state=state, exit_risk=None, exits_charged=False,
        exits_weighed=False, budget=0.0, audit_share=0.0, window_tokens=10**9,
    )  # fmt: skip
    asked = [request([1 + i, 7, 3 * i + 2], 24, confidence=0.7) for i in range(9)]
    engine = make_engine(plan, profile, deep.view.spec, policy)
    decoder = PlannedDecoder(
        deep.view, profile, engine, slots=4, server_names=plan.cluster.server_names
    )
    local = LocalService(decoder, deep.model())
    await local.start()
    alone = [await soon(read(local.submit(one))) for one in asked]
    await local.close()
    async with running(deep, profile=profile, plan=plan, policy=policy) as cluster:
        made = await answers(cluster, [(i % 3, one) for i, one in enumerate(asked)])
    assert [tokens_of(events) for events in made] == [tokens_of(events) for events in alone]
    shares = [one.ledger.share(Kind.EXITED) for events in made for one in events if one.ledger]
    assert 0 < np.count_nonzero(shares) < len(shares)


@pytest.mark.parametrize("state", ExitState)
async def test_frames_are_those_of_the_cost_model(
    tiny: Tiny, questions: Questions, state: ExitState
) -> None:
    """What was sent on every link is what the ledgers charge, vector by vector; but what a
    request's last token leaves behind need not go all the way once the request is over."""
    profile, plan = world(tiny, servers=4, routes=hybrid_routes(4))
    asked = questions.among(4, new=12, confidence=0.6)[:12]
    policy = PRESETS["final-exits"]().but(exit_state=state)
    if state is ExitState.WHOLE:
        often = {"exit_risk": None, "exits_charged": False, "exits_weighed": False}
        policy = policy.but(**often)
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        made = await answers(cluster, asked)
        await cluster.all_free()
        sent = vectors_sent(cluster)
    by_request = [[one.ledger for one in events if one.ledger is not None] for events in made]
    unsent = sum(ledger.messages for ledgers in by_request for ledger in ledgers) - sent
    exits = sum(ledger.share(Kind.EXITED) > 0 for ledgers in by_request for ledger in ledgers)
    assert exits > 1
    if state is ExitState.WHOLE:
        # What goes on whole is told of with a later answer of its request, if there is one.
        untold = exits - sum(ledger.audits for ledgers in by_request for ledger in ledgers)
        assert 0 <= untold < exits
        assert (unsent <= 0).all()
        assert -unsent.sum() <= untold * tiny.view.spec.layer_count * (2 * tiny.view.spec.top_k + 1)
        return
    last = [ledgers[-1] for ledgers in by_request]
    may_end = [one.messages for one in last if one.share(Kind.EXITED) and state is ExitState.DENSE]
    assert (unsent >= 0).all()
    assert (unsent <= sum(may_end, np.zeros_like(sent))).all()
    assert sent.sum() > 0
