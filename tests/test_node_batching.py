"""Batches: what runs together, what takes turns, and that logs replay."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nodes import (
    answers,
    constant_routes,
    hybrid_routes,
    read,
    replayed,
    request,
    running,
    staircase_routes,
    tokens_of,
    world,
)
from serving import Tiny
from trimmoe.cost.batching import SLICE_S, prompt_turn_s
from trimmoe.cost.guessing import visits
from trimmoe.policy.presets import PRESETS
from trimmoe.runtime.node.compute import prefill
from trimmoe.runtime.node.compute.worker import Worker
from trimmoe.runtime.node.front.lengths import FIRST_TOKENS, Lengths
from trimmoe.runtime.node.records.output import BatchOutput
from trimmoe.runtime.node.records.work import Step, Work
from trimmoe.runtime.node.schedule.batch_loop import BatchLoop
from trimmoe.runtime.node.schedule.scheduler import PATIENCE, Scheduler
from trimmoe.runtime.node.watch.reports import LEAST_S, Reporter
from trimmoe.runtime.service import Overloaded, TokenEvent, TokenStream
from wires import soon, until

PROMPTS = [[5 + i, 70 + i, 9, 31 + i] for i in range(16)]


def scheduler(max_rows: int = 8) -> tuple[Scheduler, list[float]]:
    waits: list[float] = []
    clock = iter(range(10**6))
    return Scheduler(max_rows=max_rows, now=lambda: next(clock), waited=waits.append), waits


def test_what_is_ready_for_the_same_step_of_a_layer_runs_together_up_to_the_limit() -> None:
    ready, _ = scheduler()
    for item in range(10):
        ready.put(Step.ATTEND, item % 2, item)
    ready.put(Step.ATTEND, 0, "large", rows=7)
    batches = []
    while (work := ready.next()) is not None:
        batches.append((work.layer, work.items))
    assert batches == [(0, [0, 2, 4, 6, 8]), (0, ["large"]), (1, [1, 3, 5, 7, 9])]
    assert len(ready) == 0


async def test_what_comes_while_a_batch_runs_is_heard_before_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many are ready, and whoever says meanwhile that there is more to do."""
    loop, happened = asyncio.get_running_loop(), list[str]()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop.add_reader(ours, lambda: happened.append(ours.recv(16).decode()))
    ready, _ = scheduler()
    for layer in range(5):
        ready.put(Step.ATTEND, layer, "one")
    made = BatchLoop(threads=1, slowdown=1.0, emulated=False, log_batches=False)

    def compute(controls: object, work: Work | None) -> BatchOutput:
        happened.append("batch")
        theirs.send(b"heard")
        made.wake()
        return BatchOutput()

    monkeypatch.setattr(made, "_compute", compute)
    monkeypatch.setattr(made, "_is_short", lambda work: True)
    nothing = SimpleNamespace(
        scheduler=ready, worked=lambda _: 0, absorb=lambda _: 0, read_on=lambda _: 0
    )
    context: Any = SimpleNamespace(intake=nothing, worker=SimpleNamespace(), worked=lambda *_: 0)
    running_on = asyncio.create_task(made.run(context))
    await until(lambda: happened.count("heard") == 5)
    assert happened == ["batch", "heard"] * 5
    loop.remove_reader(ours)
    running_on.cancel()
    await made.close()
    ours.close()
    theirs.close()


def test_slots_come_before_own_layers_and_low_layers_before_high_ones() -> None:
    ready, _ = scheduler()
    ready.put(Step.ATTEND, 3, "a")
    ready.put(Step.ATTEND, 0, "b")
    ready.put(Step.SLOTS, 5, "c")
    ready.put(Step.PROPAGATE, 1, "d")
    ready.put(Step.ATTEND, 3, "e")
    order = [work.items for _ in range(4) if (work := ready.next()) is not None]
    assert order == [["c"], ["b"], ["d"], ["a", "e"]]


def test_tokens_that_set_out_later_catch_up_and_go_on_together() -> None:
    """Whatever layers they are at to begin with."""
    ready, _ = scheduler()
    for token, layer in enumerate([5, 0, 3, 5, 2]):
        ready.put(Step.ATTEND, layer, token)
    while (work := ready.next()) is not None and work.layer < 5:
        for token in work.items:
            ready.put(Step.ATTEND, work.layer + 1, token)
    assert work is not None
    assert sorted(work.items) == [0, 1, 2, 3, 4]


def test_nothing_is_passed_over_for_ever() -> None:
    """Neither by low layers that always find more to do, nor by other servers' slots."""
    ready, _ = scheduler()
    ready.put(Step.ATTEND, 9, "high")
    passed_over = 0
    while passed_over <= PATIENCE:
        ready.put(Step.SLOTS, 4, "slot")
        ready.put(Step.ATTEND, 0, "low")
        work = ready.next()
        assert work is not None
        if "high" in work.items:
            break
        passed_over += 1
    assert passed_over == PATIENCE


def test_prompts_keep_their_order() -> None:
    ready, _ = scheduler()
    ready.put(Step.CHUNK, 3, "first")
    ready.put(Step.CHUNK_SLOTS, 0, "second")
    ready.put(Step.CHUNK, 0, "third")
    order = [work.items for _ in range(3) if (work := ready.next()) is not None]
    assert order == [["first"], ["second"], ["third"]]


def test_prompts_are_read_one_after_the_other() -> None:
    """What has come furthest goes on, unless something was passed over for too long."""
    ready, _ = scheduler()
    ready.put(Step.CHUNK, 0, "behind")
    ready.put(Step.CHUNK, 1, "ahead")
    order = []
    for layer in range(2, 10):
        work = ready.next()
        assert work is not None
        order.append(work.items)
        ready.put(Step.CHUNK, layer, "ahead")
    assert order == [["ahead"]] * 8
    while (work := ready.next()) is not None and work.items == ["ahead"]:
        ready.put(Step.CHUNK, 9, "ahead")
        order.append(work.items)
    assert work is not None
    assert (work.items, len(order)) == (["behind"], PATIENCE)


@pytest.mark.parametrize(
    ("token_turn_s", "visits", "prompt_turn"),
    [(0.0, 1.0, SLICE_S), (SLICE_S / 2, 1.0, SLICE_S), (0.03, 1.0, 0.03), (0.03, 3.0, 0.01)],
)
def test_prompts_have_as_much_time_as_tokens_over_all_servers_that_these_come_to(
    token_turn_s: float, visits: float, prompt_turn: float
) -> None:
    assert prompt_turn_s(token_turn_s, visits) == pytest.approx(prompt_turn)


def test_a_token_comes_to_a_server_for_every_stretch_of_layers() -> None:
    assert visits(np.array([[0, 0, 1, 1], [0, 1, 0, 2]])) == 3.0
    assert visits(np.array([[1, 1, 1, 1]])) == 1.0


async def test_a_server_knows_how_long_tokens_took_in_their_last_turn(tiny: Tiny) -> None:
    profile, plan = world(tiny, servers=2, routes=constant_routes(2))
    async with running(tiny, profile=profile, plan=plan) as cluster:
        assert [node.worker.token_turn_s for node in cluster.nodes.values()] == [0.0, 0.0]
        await answers(cluster, [(0, request(PROMPTS[0], 8))])
        took_s, idle_s = (node.worker.token_turn_s for node in cluster.nodes.values())
    assert took_s > 0.0
    assert idle_s == 0.0


def test_prompts_and_tokens_take_turns() -> None:
    ready, _ = scheduler()
    for item in range(3):
        ready.put(Step.CHUNK, 0, item, rows=64)
        ready.put(Step.ATTEND, item, item)
    steps = [work.step for _ in range(6) if (work := ready.next()) is not None]
    assert sorted(steps[0:2]) == sorted(steps[2:4]) == sorted(steps[4:6])
    assert set(steps) == {Step.CHUNK, Step.ATTEND}


def test_quick_steps_come_first_and_take_nobodys_turn() -> None:
    ready, _ = scheduler()
    ready.put(Step.ATTEND, 1, "token")
    ready.put(Step.CHUNK, 0, "prompt")
    ready.put(Step.FINISH, 0, "gathered")
    ready.put(Step.ARRIVE, 0, "arrived")
    order = [work.items for _ in range(4) if (work := ready.next()) is not None]
    assert order == [["gathered"], ["arrived"], ["token"], ["prompt"]]


def test_only_slots_of_generated_tokens_report_how_long_they_waited() -> None:
    ready, waits = scheduler()
    ready.put(Step.FINISH, 0, "a")
    ready.put(Step.SLOTS, 0, "b")
    ready.put(Step.ATTEND, 0, "c")
    ready.put(Step.CHUNK, 0, "d")
    ready.put(Step.CHUNK_SLOTS, 0, "e")
    reported = {}
    while (work := ready.next()) is not None:
        reported[work.step] = len(waits)
        waits.clear()
    assert len(reported) == 5
    assert [step for step, count in reported.items() if count] == [Step.SLOTS]


def test_slots_wait_from_their_arrival_until_they_are_begun() -> None:
    """For the process to read them, then in its queue."""
    transport: Any = SimpleNamespace(reading_wait_s=lambda: 0.25, link_estimates=dict)
    now_s = [0.0]
    reporter = Reporter(transport, ("a", "b"), now=lambda: now_s[0])

    def told_at(at_s: float) -> float:
        now_s[0] = at_s
        return reporter.load_report(0.0, frozenset(), [], 0).waiting_s

    now_s[0] = 1.0
    reporter.waited(1.0)
    assert told_at(1.0) == 1.25
    assert told_at(1.0 + LEAST_S / 2) == 1.25, "that nobody came in so little time says nothing"
    # Nobody came since: nobody would have waited in the queue.
    assert told_at(1.0 + LEAST_S) == pytest.approx(0.25 + 0.5, rel=0.05)


def test_a_server_tells_what_prompts_take_it_and_what_its_users_are_shown() -> None:
    """Of two seconds a quarter, with 30 tokens, and half of the time was work."""
    counters: Any = SimpleNamespace(sent={})
    transport: Any = SimpleNamespace(
        reading_wait_s=lambda: 0.0, link_estimates=dict, counters=counters
    )
    now_s = [0.0]
    reporter = Reporter(transport, ("a", "b"), now=lambda: now_s[0])
    reporter.worked(0.5, True)
    reporter.worked(0.5, False)
    now_s[0] = 2.0
    vitals = reporter.vitals(queued=0, tokens=30, memory_bytes=0)
    told = reporter.load_report(0.0, frozenset(), [], 0, vitals)
    assert (told.busy, told.prompts, told.tokens_per_s) == (0.5, 0.25, 15.0)
    now_s[0] = 1000.0
    vitals = reporter.vitals(queued=0, tokens=30, memory_bytes=0)
    told = reporter.load_report(0.0, frozenset(), [], 0, vitals)
    assert (told.prompts, told.tokens_per_s) == pytest.approx((0.0, 0.0), abs=1e-6)


def test_tokens_count_when_their_answers_begin() -> None:
    """Prompts of ten answers are read at once, for the 1,000 tokens that such answers come to by
    those before them; when nobody has come since, it is what users are shown that counts."""
    transport: Any = SimpleNamespace(
        reading_wait_s=lambda: 0.0,
        link_estimates=dict,
        counters=SimpleNamespace(sent={}),
    )
    now_s = [0.0]
    reporter = Reporter(transport, ("a", "b"), now=lambda: now_s[0])
    lengths = Lengths()

    def told_at(after_s: float, tokens: int) -> float:
        now_s[0] = after_s
        vitals = reporter.vitals(queued=0, tokens=tokens, memory_bytes=0)
        return reporter.load_report(0.0, frozenset(), [], 10, vitals, lengths.due).tokens_per_s

    for _ in range(10):
        lengths.began()
    assert told_at(2.0, tokens=20) == 10 * FIRST_TOKENS / 2.0
    assert told_at(1000.0, tokens=20 + 9980) == pytest.approx(10.0, rel=0.01)


def test_how_long_an_answer_is_says_what_the_next_one_comes_to() -> None:
    lengths = Lengths()
    for _ in range(40):
        lengths.ended(20)
    lengths.began()
    assert lengths.due == pytest.approx(20.0, rel=0.02)


def test_the_first_answer_says_half_of_what_the_second_one_comes_to() -> None:
    lengths = Lengths()
    lengths.ended(20)
    lengths.began()
    assert lengths.due == (FIRST_TOKENS + 20) / 2


def test_dropped_items_never_run() -> None:
    ready, _ = scheduler()
    for item in range(4):
        ready.put(Step.ATTEND, item % 2, item)
    ready.drop(lambda item: item != 3)
    work = ready.next()
    assert work is not None
    assert work.items == [3]
    assert ready.next() is None


async def test_concurrent_requests_share_batches(tiny: Tiny) -> None:
    """Sixteen in lockstep: rows per attention batch are far more than one."""
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    async with running(tiny, profile=profile, plan=plan) as cluster:
        made = await answers(cluster, [(0, request(prompt, 24)) for prompt in PROMPTS])
        for node in cluster.nodes.values():
            now = node.snapshot()
            # Every generated token but each answer's last is decoded, in half of the layers, which
            # it passes one by one or in one go.
            assert 16 * 23 <= now.items["ATTEND"] <= 16 * 23 * 2
            assert now.items["ATTEND"] > 3 * now.batches["ATTEND"]
        lengths = cluster.nodes[0].front_end.lengths
        assert lengths.due == 16 * FIRST_TOKENS, "none was over when they began"
        await answers(cluster, [(0, request(PROMPTS[0], 24))])
        assert lengths.due == pytest.approx(16 * FIRST_TOKENS + 24, abs=4)
    for prompt, events in zip(PROMPTS, made, strict=True):
        assert tokens_of(events) == tiny.greedy(prompt, 24, eos=None)


async def test_no_batch_is_larger_than_the_limit(tiny: Tiny) -> None:
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    async with running(tiny, profile=profile, plan=plan, max_batch=3) as cluster:
        await answers(cluster, [(0, request(prompt, 12)) for prompt in PROMPTS])
        sizes = {
            size for node in cluster.nodes.values() for step, _, size in node.batch_loop.batches
            if step in ("ATTEND", "FINISH")
        }  # fmt: skip
    assert max(sizes) == 3


@pytest.mark.parametrize(("slice_s", "turns"), [(SLICE_S, 14), (0.0, 15 * 3)])
async def test_a_long_prompt_does_not_stall_decoding(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, slice_s: float, turns: int
) -> None:
    """While its chunks pass, tokens of others are decoded: never two chunks in a row without."""
    monkeypatch.setattr(prefill, "prompt_turn_s", lambda *_: slice_s)
    profile, plan = world(tiny, servers=2, routes=constant_routes(2))
    long = np.random.default_rng(3).integers(0, 256, 240).tolist()
    async with running(tiny, profile=profile, plan=plan, prefill_chunk=16, kv_slots=4) as cluster:
        node = cluster.nodes[0]
        decoding = node.service.submit(request([3, 4, 5], 240))
        for _ in range(3):
            await soon(anext(decoding))
        begun = len(node.batch_loop.batches)
        made = await soon(read(node.service.submit(request(long, 2))))
        steps = [step for step, _, _ in node.batch_loop.batches[begun:]]
        await decoding.aclose()
    assert tokens_of(made) == tiny.greedy(long, 2, eos=None)
    first = steps.index("CHUNK")
    last = len(steps) - 1 - steps[::-1].index("CHUNK")
    between = steps[first:last]
    assert between.count("CHUNK") >= turns
    # Decoding goes on all the while, a batch or more for every few of the prompt's.
    assert between.count("ATTEND") > between.count("CHUNK") / 4


@pytest.mark.parametrize(("slice_s", "batches"), [(600.0, 1), (0.0, 4)])
async def test_a_chunk_passes_layers_at_once_for_as_long_as_others_may_wait(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, slice_s: float, batches: int
) -> None:
    """All of them here where there is time, else one after another in turns."""
    monkeypatch.setattr(prefill, "prompt_turn_s", lambda *_: slice_s)
    profile, plan = world(tiny, servers=2, routes=constant_routes(2), density=1.0)
    prompt = PROMPTS[0]
    async with running(tiny, profile=profile, plan=plan) as cluster:
        (made,) = await answers(cluster, [(0, request(prompt, 3))])
        steps = [step for step, _, _ in cluster.nodes[0].batch_loop.batches]
    assert tiny.view.spec.layer_count == 4
    assert steps.count("CHUNK") == batches
    assert tokens_of(made) == tiny.greedy(prompt, 3, eos=None)


async def test_logs_replay_through_a_fresh_engine(tiny: Tiny) -> None:
    policy = PRESETS["final-exits"]().but(budget=0.2, exit_risk=None, audit_share=0.3)
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        asked = [(i % 3, request(prompt, 16, confidence=0.6)) for i, prompt in enumerate(PROMPTS)]
        await answers(cluster, asked)
        await cluster.all_free()
        nodes = list(cluster.nodes.values())
    completed = sum(replayed(node) for node in nodes)
    assert completed == 16 * 15


async def test_a_cancelled_request_is_freed_on_every_server_of_its_route(tiny: Tiny) -> None:
    profile, plan = world(tiny, servers=4, routes=staircase_routes(4))
    async with running(tiny, profile=profile, plan=plan) as cluster:
        stream = cluster.nodes[2].service.submit(request([3, 4, 5], 240))
        for _ in range(5):
            await soon(anext(stream))
        assert [node.snapshot().sequences for node in cluster.nodes.values()] == [1, 1, 1, 1]
        await stream.aclose()
        await cluster.all_free()
        (made,) = await answers(cluster, [(2, request([5, 6], 4))])
    assert tokens_of(made) == tiny.greedy([5, 6], 4, eos=None)


async def test_requests_wait_for_places_on_other_servers_in_any_order(tiny: Tiny) -> None:
    """One place per server and routes that take them in opposite directions: no deadlock."""
    profile, plan = world(tiny, servers=3, routes=[[0, 1, 2, 0], [2, 1, 0, 2], [1, 0, 1, 2]])
    async with running(tiny, profile=profile, plan=plan, kv_slots=1) as cluster:
        asked = [(i % 3, request(PROMPTS[i], 6)) for i in range(12)]
        made = await answers(cluster, asked)
        await cluster.all_free()
    for prompt, events in zip(PROMPTS, made, strict=False):
        assert tokens_of(events) == tiny.greedy(prompt, 6, eos=None)


async def test_a_route_that_others_fill_makes_requests_wait_and_then_refused(tiny: Tiny) -> None:
    """The place that is missing is on another server than the user's."""
    profile, plan = world(tiny, servers=3, routes=[[0, 0, 1, 1], [1] * 4, [2] * 4])
    async with running(tiny, profile=profile, plan=plan, kv_slots=2, max_waiting=2) as cluster:
        hogs = [cluster.nodes[1].service.submit(request([3, i], 240)) for i in range(2)]
        for hog in hogs:
            await soon(anext(hog))
        service = cluster.nodes[0].service
        waiting = [service.submit(request([4, 5, 6], 4)) for _ in range(3)]
        await until(lambda: cluster.nodes[0].front_end.reservations.blocked)
        assert service.stats().waiting == 3
        with pytest.raises(Overloaded):
            service.submit(request([7], 2))
        for hog in hogs:
            await hog.aclose()
        made = await soon(asyncio.gather(*(read(stream) for stream in waiting)))
        await cluster.all_free()
    assert {tuple(tokens_of(events)) for events in made} == {
        tuple(tiny.greedy([4, 5, 6], 4, eos=None))
    }


async def test_a_token_is_with_its_user_before_the_next_one_is_made(tiny: Tiny) -> None:
    """Three tasks take it to the socket, and whoever makes tokens is in the same event loop."""
    profile, plan = world(tiny, servers=1)
    async with running(tiny, profile=profile, plan=plan, policy=PRESETS["exact"]()) as servers:
        node = servers.nodes[0]
        await read(node.service.submit(request(range(2, 8))))
        queues: list[asyncio.Queue[TokenEvent]] = [asyncio.Queue() for _ in range(2)]

        async def hand_on(at: int) -> None:
            while True:
                queues[at + 1].put_nowait(await queues[at].get())

        async def take(stream: TokenStream) -> None:
            async for event in stream:
                queues[0].put_nowait(event)

        made = []
        tasks = [asyncio.create_task(take(node.service.submit(request(range(9), 12))))]
        tasks.append(asyncio.create_task(hand_on(0)))
        for _ in range(12):
            await soon(queues[1].get())
            made.append(node.front_end.answers.tokens)
        for task in tasks:
            task.cancel()
    before = 8
    # The first one at once; the second may have to wait for a batch that others wait for.
    assert made[0] == before + 1
    assert made[1] <= before + 3
    assert made[2:] == list(range(before + 3, before + 13))


async def test_tokens_set_out_whole_where_all_their_slots_ran(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is dealt out where each server holds the layers that it runs."""
    routes = staircase_routes(3)
    profile, plan = world(tiny, servers=3, routes=routes)
    held = np.arange(3)[:, None] == np.array(routes[0])
    plan = replace(plan, hosts=np.broadcast_to(held[..., None], plan.hosts.shape).copy())

    def dealt(*_: object) -> None:
        pytest.fail("slots were dealt out")

    asked = [(0, request([3, 40, 9], 6)), (2, request([5, 1], 4))]
    async with running(tiny, profile=profile, plan=plan) as cluster:
        with monkeypatch.context() as patched:
            patched.setattr(Worker, "execute", dealt)
            made = [tokens_of(events) for events in await answers(cluster, asked)]
        await cluster.all_free()
    assert made == [
        tiny.greedy(list(one.prompt_ids), one.max_new_tokens, eos=None) for _, one in asked
    ]
