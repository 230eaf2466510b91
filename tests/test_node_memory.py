"""Conversations that go on: what was read of a prompt and its answer is not read again, and answers
are the same, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nodes import (
    Servers,
    UnevenNetwork,
    answers,
    constant_routes,
    drafting,
    guessing,
    hybrid_routes,
    ledgers_of,
    read,
    request,
    running,
    staircase_routes,
    tokens_of,
    world,
)
from serving import Tiny
from trimmoe.core.ledger import Kind
from trimmoe.models.exact import greedy
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.local_service import LocalService
from trimmoe.runtime.node.compute import prefill
from trimmoe.runtime.node.records.readings import Reading
from trimmoe.runtime.prefixes import is_exact
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import TokenEvent
from wires import soon, until

TOLD = Sampling(logprobs=3)
DRAWN = Sampling(temperature=0.8, top_p=0.95, seed=5, logprobs=3)
PENALISED = Sampling(
    temperature=0.8, seed=5, frequency_penalty=0.4, repetition_penalty=1.3, logprobs=3
)
"""What may be drawn hangs on all tokens before, those that were not read again included."""
LOSSLESS = {"exact": PRESETS["exact"](), "guesses": guessing(3), "drafts": drafting(0.0)}
lossless = pytest.mark.parametrize("policy", LOSSLESS.values(), ids=LOSSLESS)


def every_pair() -> list[Any]:
    """Routes, a policy and a way to draw, every two of which meet once."""
    ways = {"greedy": TOLD, "drawn": DRAWN, "penalised": PENALISED}
    return [
        pytest.param(
            routes,
            LOSSLESS[policy],
            list(ways.values())[(i + j) % 3],
            id=f"{routes.__name__}-{policy}-{list(ways)[(i + j) % 3]}",
        )
        for i, routes in enumerate((constant_routes, staircase_routes, hybrid_routes))
        for j, policy in enumerate(LOSSLESS)
    ]


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


@asynccontextmanager
async def serving(service: LocalService) -> AsyncGenerator[None]:
    await service.start()
    try:
        yield
    finally:
        await service.close()


@pytest.mark.parametrize(("routes", "policy", "sampling"), every_pair())
async def test_answers_are_the_same_bit_for_bit(
    tiny: Tiny,
    routes: Callable[[int], list[list[int]]],
    policy: PolicySettings,
    sampling: Sampling,
) -> None:
    profile, plan = world(tiny, servers=3, routes=routes(3))
    turns = [words(24), words(9, seed=4), words(13, seed=5)]
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
            said = [await talk(cluster, access, turns, 6, sampling) for access in range(3)]
            await cluster.all_free()
            told_of.append([told(made) for each in said for made in each])
            counts = [[cached(made) for made in each] for each in said]
            if prefix_cache:
                # All that was said, but for the last token of each answer.
                assert counts == [[0, 29, 44]] * 3
            else:
                assert counts == [[0, 0, 0]] * 3
    assert told_of[0] == told_of[1]


async def cold(
    tiny: Tiny, cluster: Servers, access: int, prompt: Sequence[int], new: int, **changes: Any
) -> list[Any]:
    """What servers say that have read nothing before."""
    settings: dict[str, Any] = {**cluster.settings, "prefix_cache": False}
    async with running(
        tiny, profile=cluster.profile, plan=cluster.plan, policy=cluster.policy, **settings
    ) as fresh:
        return told(await ask(fresh, access, prompt, new, **changes))


@lossless
async def test_a_system_prompt_is_read_once_and_whoever_shares_it_leaves_it_as_it_is(
    tiny: Tiny, policy: PolicySettings
) -> None:
    """By several at the same time, and by one whose own conversation goes on afterwards."""
    profile, plan = world(tiny, servers=3, routes=staircase_routes(3))
    system = words(24)
    asked = [[*system, *words(8 + n, seed=10 + n)] for n in range(4)]
    async with running(tiny, profile=profile, plan=plan, policy=policy, prefill_chunk=8) as cluster:
        first = cluster.nodes[0].service.submit(request(asked[0], 16, sampling=TOLD))
        # Its prompt is read; its answer is not over.
        begun = [await soon(anext(first))]
        others = await answers(cluster, [(0, request(one, 8, sampling=TOLD)) for one in asked[1:]])
        begun += await soon(read(first))
        assert [cached(made) for made in others] == [24] * 3
        assert cached(begun) == 0
        longer = [*asked[0], *tokens_of(begun), 1, 2, 3]
        after = await ask(cluster, 0, longer, 8, sampling=TOLD)
        assert cached(after) == len(asked[0]) + 15
        # Of another server's users nothing is known here.
        elsewhere = await ask(cluster, 1, asked[1], 8, sampling=TOLD)
        assert cached(elsewhere) == 0
        said = [begun, *others, after]
        for prompt, made in zip([*asked, longer], said, strict=True):
            assert told(made) == await cold(tiny, cluster, 0, prompt, len(made), sampling=TOLD)
        assert told(elsewhere) == told(others[0])


@pytest.mark.parametrize("whole", [True, False], ids=["taken over", "copied"])
async def test_what_a_server_read_by_itself_to_guess_is_not_read_again(
    tiny: Tiny, whole: bool
) -> None:
    """From the layer on that its guesses begin with, and none the less right."""
    profile, plan = world(tiny, servers=3, routes=[[0, 0, 1, 2]] * 3)
    hosts = plan.hosts.copy()
    hosts[0, 0] = True
    async with running(
        tiny,
        profile=profile,
        plan=replace(plan, hosts=hosts),
        policy=guessing(3),
        prefill_chunk=8,
    ) as cluster:
        node, prompt = cluster.nodes[0], words(40)
        assert node.worker.reads_from(tuple(plan.routes[0].tolist())) == 1
        made = await ask(cluster, 0, prompt, 16)
        begins = [*prompt, *tokens_of(made)] if whole else prompt[:32]
        longer = [*begins, 3, 4]
        starts: list[int] = []
        read_on = node.intake.read_on

        def seen(readings: Iterable[Reading]) -> None:
            given = list(readings)
            starts.extend(one.start for one in given)
            read_on(given)

        node.intake.read_on = seen  # type: ignore[method-assign]
        before = node.front_end.speculation.guessing.made
        again = await ask(cluster, 0, longer, 16)
        assert node.front_end.speculation.guessing.made > before
        # It may have been about to read the last ones when the first answer was over.
        assert len(begins) - 8 <= min(starts) <= len(begins)
        assert cached(again) == (len(begins) - 1 if whole else len(begins))
        assert tokens_of(again) == greedy(tiny.view, [longer], 16)[0]


async def test_who_asks_the_same_again_reads_the_last_token_only(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer of a chunk has a turn of its own here, so that chunks can be counted."""
    monkeypatch.setattr(prefill, "prompt_turn_s", lambda *_: 0.0)
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    prompt = words(30)
    async with running(tiny, profile=profile, plan=plan) as cluster:
        made = [await ask(cluster, 0, prompt, 8, sampling=TOLD) for _ in range(3)]
        chunks = cluster.nodes[0].batch_loop.item_counts["CHUNK"]
        stats = cluster.nodes[0].service.stats()
    assert [cached(one) for one in made] == [0, 29, 29]
    assert told(made[0]) == told(made[1]) == told(made[2])
    assert (stats.prefix_queries, stats.prefix_hits) == (90, 58)
    assert chunks == 3 * sum(server == 0 for server in plan.routes[0])


@lossless
async def test_who_stops_an_answer_goes_on_from_what_was_shown(
    tiny: Tiny, policy: PolicySettings
) -> None:
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    prompt = words(25)
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        stream = cluster.nodes[0].service.submit(request(prompt, 200))
        shown = [await soon(anext(stream)) for _ in range(6)]
        await stream.aclose()
        await cluster.all_free()
        longer = [*prompt, *tokens_of(shown), 7, 7]
        made = await ask(cluster, 0, longer, 10, sampling=TOLD)
        # More may have been confirmed by then than was read.
        assert len(prompt) + 5 <= cached(made) < len(longer)
        assert told(made) == await cold(tiny, cluster, 0, longer, 10, sampling=TOLD)


async def test_places_are_for_who_needs_them_and_the_longest_unused_make_way(tiny: Tiny) -> None:
    """As many sequences run at once as without the cache; nobody keeps what others gave up."""
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    async with running(tiny, profile=profile, plan=plan, kv_slots=3) as cluster:
        memory = cluster.nodes[0].front_end.memory
        prompts = [words(20 + n, seed=n) for n in range(5)]
        for prompt in prompts[:3]:
            await ask(cluster, 0, prompt, 4)
        # The first one is used again, so that the second is the next to go.
        assert cached(await ask(cluster, 0, prompts[0], 4)) == 19
        assert cached(await ask(cluster, 0, prompts[3], 4)) == 0
        await cluster.all_free()
        await until(lambda: len(memory) == 3)
        assert cached(await ask(cluster, 0, prompts[1], 4)) == 0
        crossing = [node for server, node in cluster.nodes.items() if server in plan.routes[0]]
        await until(lambda: all(node.snapshot().retained <= 3 for node in crossing))
        together = await answers(cluster, [(0, request(prompt, 30)) for prompt in prompts])
        assert [len(made) for made in together] == [30] * 5
        await cluster.all_free()
        for node in cluster.nodes.values():
            now = node.snapshot()
            assert (now.sequences, now.kv_cache_usage) == (0, 0.0)
            assert node.intake.seats.free == 3
        assert cluster.nodes[0].front_end.restarts == 0


async def test_users_of_all_servers_share_the_places_of_each(tiny: Tiny) -> None:
    """Everybody's conversations, more of them than there are places, on routes that cross."""
    profile, plan = world(tiny, servers=3, routes=staircase_routes(3))
    turns = [words(18), words(7, seed=4), words(5, seed=5)]
    async with running(
        tiny, profile=profile, plan=plan, policy=guessing(2), kv_slots=2, prefill_chunk=8
    ) as cluster:
        plain = [await cold(tiny, cluster, access, turns[0], 6) for access in range(3)]
        for _ in range(2):
            talks = [talk(cluster, user % 3, turns, 6, Sampling()) for user in range(6)]
            said = await soon(asyncio.gather(*talks))
            for user, each in enumerate(said):
                assert told(each[0]) == plain[user % 3]
            assert len({repr([told(made) for made in each]) for each in said}) == 1
        await cluster.all_free()
        retained = [node.snapshot().retained for node in cluster.nodes.values()]
        assert max(retained) <= 2
        await until(lambda: sum(len(n.front_end.memory) for n in cluster.nodes.values()) <= 2)


@lossless
async def test_a_server_that_has_lost_it_has_the_others_begin_anew(
    tiny: Tiny, policy: PolicySettings
) -> None:
    """Reading begins with what one of them lacks, and what others have beyond is void."""
    profile, plan = world(tiny, servers=3, routes=staircase_routes(3))
    prompt = words(40)
    async with running(tiny, profile=profile, plan=plan, policy=policy, prefill_chunk=8) as cluster:
        before = await ask(cluster, 0, prompt, 8)
        longer = [*prompt, *tokens_of(before), 3, 4]
        for has in (0, 24):
            (seat,) = cluster.nodes[1].intake.seats._retained.values()
            for written in seat.written.values():
                written.cut(has)
            made = await ask(cluster, 0, longer, 12, sampling=TOLD)
            assert cached(made) == has
            assert told(made) == await cold(tiny, cluster, 0, longer, 12, sampling=TOLD)
        await cluster.all_free()


@pytest.mark.parametrize("leaves", [True, False], ids=["user leaves", "route changes"])
async def test_what_is_left_for_a_next_attempt_that_has_no_use_for_it_is_given_up(
    tiny: Tiny, leaves: bool
) -> None:
    profile, plan = world(tiny, servers=3, routes=[[0, 1, 1, 0], [1] * 4, [2] * 4])
    plan = replace(plan, hosts=np.ones_like(plan.hosts))
    async with running(tiny, profile=profile, plan=plan, policy=guessing(2)) as cluster:
        node, prompt = cluster.nodes[0], words(40)
        prompt += tokens_of(await ask(cluster, 0, prompt, 8))
        (seat,) = cluster.nodes[1].intake.seats._retained.values()
        for written in seat.written.values():
            written.cut(8)
        stream = node.service.submit(request(prompt, 9))
        (job,) = node.front_end._jobs
        await asyncio.sleep(0)
        async with node.front_end._turn:  # No other attempt begins.
            await until(lambda: job.begun is not None)
            assert len(node.front_end.memory) == 1
            if leaves:
                await stream.aclose()
            else:
                node.planner.want_lost(frozenset({1}))
                await until(lambda: 1 not in node.planner.in_force.route_of(0))
        if not leaves:
            assert tokens_of(await soon(read(stream))) == greedy(tiny.view, [prompt], 9)[0]
            assert all(1 not in kept.route for kept in node.front_end.memory._kept.values())
        await until(lambda: not cluster.nodes[1].snapshot().retained)
        left = len(node.front_end.memory)
        assert left == 1 - leaves
        await until(lambda: len(node.worker.draft_runner.states) == left)


async def test_a_place_that_is_gone_on_one_server_is_given_up_on_all(tiny: Tiny) -> None:
    profile, plan = world(tiny, servers=3, routes=staircase_routes(3))
    async with running(tiny, profile=profile, plan=plan, policy=guessing(2)) as cluster:
        await ask(cluster, 0, words(20), 4)
        assert [node.snapshot().retained for node in cluster.nodes.values()] == [1, 1, 1]
        (sequence,) = cluster.nodes[2].intake.seats._retained
        cluster.nodes[2].intake.seats.release([sequence])
        cluster.nodes[2]._evicted(sequence)
        await until(lambda: not len(cluster.nodes[0].front_end.memory))
        await until(lambda: not any(n.snapshot().retained for n in cluster.nodes.values()))
        await until(lambda: not cluster.nodes[0].worker.draft_runner.states)
        assert not cluster.nodes[0].worker.draft_runner._slot_of


@lossless
async def test_what_crossed_a_lost_server_is_read_again(tiny: Tiny, policy: PolicySettings) -> None:
    """On a detour while it is away, and on the old route once it is back with nothing."""
    profile, plan = world(tiny, servers=3, routes=[[0, 1, 1, 0], [1] * 4, [2] * 4])
    plan = replace(plan, hosts=np.ones_like(plan.hosts))
    turns = [words(30), words(8, seed=4), words(6, seed=5)]
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        so_far = list(turns[0])
        so_far += tokens_of(await ask(cluster, 0, so_far, 6)) + turns[1]
        await cluster.kill(1)
        await until(lambda: not len(cluster.nodes[0].front_end.memory))
        await until(lambda: not cluster.nodes[0].snapshot().retained)
        there = await ask(cluster, 0, so_far, 6, sampling=TOLD)
        assert cached(there) == 0
        expected = await cold(tiny, cluster, 0, so_far, 6, sampling=TOLD)
        assert told(there) == expected
        await cluster.revive(1)
        await until(lambda: not cluster.nodes[0].planner.lost)
        await cluster.nodes[0].planner.until_settled()
        back = await ask(cluster, 0, so_far, 6, sampling=TOLD)
        assert told(back) == expected
        so_far += tokens_of(back) + turns[2]
        last = await ask(cluster, 0, so_far, 6, sampling=TOLD)
        assert cached(last) == len(so_far) - len(turns[2]) - 1
        assert told(last) == await cold(tiny, cluster, 0, so_far, 6, sampling=TOLD)


@lossless
async def test_an_answer_that_went_on_from_another_survives_a_lost_server(
    tiny: Tiny, policy: PolicySettings
) -> None:
    profile, plan = world(tiny, servers=3, routes=[[0, 1, 1, 0], [1] * 4, [2] * 4])
    plan = replace(plan, hosts=np.ones_like(plan.hosts))
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        prompt = words(30)
        prompt += [*tokens_of(await ask(cluster, 0, prompt, 6)), 5, 6]
        stream = cluster.nodes[0].service.submit(request(prompt, 80))
        made = [await soon(anext(stream)) for _ in range(5)]
        await cluster.kill(1)
        made += await soon(read(stream))
        assert cluster.nodes[0].front_end.restarts == 1
        assert cached(made) == 35
        expected = greedy(tiny.view, [prompt], 80)[0]
        assert tokens_of(made) == expected
        await cluster.all_free()


async def test_tokens_that_were_trimmed_are_read_again(tiny: Tiny) -> None:
    """So that a prompt is exact however it came about, whatever it is asked under."""
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    policy = replace(PRESETS["trimmoe"](), budget=0.3)
    prompts = [words(24, seed=seed) for seed in range(6)]
    counts = []
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        for prompt in prompts:
            made = await ask(cluster, 0, prompt, 12)
            whole = [is_exact(ledger, exits=True) for ledger in ledgers_of(made)]
            kept = len(prompt) + [*whole, False].index(False)
            longer = [*prompt, *tokens_of(made), 9]
            exact = await ask(cluster, 0, longer, 8, exact=True, sampling=TOLD)
            assert cached(exact) == kept
            counts.append(kept - len(prompt))
            plain = await cold(tiny, cluster, 0, longer, 8, exact=True, sampling=TOLD)
            assert told(exact) == plain
    assert min(counts) < 11
    assert max(counts) > 0


async def test_final_exits_leave_nothing_behind_that_is_used(tiny: Tiny) -> None:
    """What an exit leaves may be on its way still when its answer is over."""
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    policy = PRESETS["final-exits"]().but(budget=0.5, confidence=0.0, exits_weighed=False)
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        prompt = words(24)
        made = await ask(cluster, 0, prompt, 12)
        whole = [is_exact(ledger, exits=False) for ledger in ledgers_of(made)]
        assert any(ledger.kinds[:, Kind.EXITED].any() for ledger in ledgers_of(made))
        longer = [*prompt, *tokens_of(made), 9]
        exact = await ask(cluster, 0, longer, 8, exact=True, sampling=TOLD)
        assert cached(exact) - len(prompt) == whole.index(False)
        assert told(exact) == await cold(tiny, cluster, 0, longer, 8, exact=True, sampling=TOLD)


async def test_conversations_all_at_once_on_uneven_links(tiny: Tiny) -> None:
    """Many users whose turns overlap, with guesses; answers are those of transformers."""
    rng = np.random.default_rng(11)
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    systems = [words(20, seed=40), words(33, seed=41)]
    async with running(
        tiny,
        profile=profile,
        plan=plan,
        policy=guessing(3),
        network=UnevenNetwork(5),
        kv_slots=4,
        prefill_chunk=8,
    ) as cluster:
        talks, openings = [], []
        for user in range(9):
            opening = systems[user % 2] + words(int(rng.integers(1, 9)), seed=50 + user)
            turns = [opening, words(3, seed=60 + user), words(4, seed=70 + user)]
            openings.append(turns)
            talks.append(talk(cluster, user % 3, turns, 7, Sampling()))
        said = await soon(asyncio.gather(*talks))
        await cluster.all_free()
        stats = [node.service.stats() for node in cluster.nodes.values()]
        assert sum(one.prefix_hits for one in stats) > 0
        assert sum(node.front_end.restarts for node in cluster.nodes.values()) == 0
    for turns, made in zip(openings, said, strict=True):
        so_far: list[int] = []
        for turn, events in zip(turns, made, strict=True):
            so_far += turn
            assert tokens_of(events) == greedy(tiny.view, [so_far], 7)[0]
            so_far += tokens_of(events)


@pytest.mark.parametrize("which", ["exact", "planned"])
async def test_the_in_process_service_remembers_too(tiny: Tiny, which: str) -> None:
    service = tiny.exact() if which == "exact" else tiny.planned(guessing(3))
    async with serving(service):
        system, said = words(40), []
        so_far = list(system)
        for turn in ([1, 2, 3], [4, 5], [6]):
            so_far += turn
            made = await soon(read(service.submit(request(so_far, 9, sampling=TOLD))))
            assert tokens_of(made) == greedy(tiny.view, [so_far], 9)[0]
            said.append(cached(made))
            so_far += tokens_of(made)
        assert said == [0, 51, 62]
        shared = [*system, 8, 8]
        both = [service.submit(request(shared, 5, sampling=TOLD)) for _ in range(2)]
        made_of = await soon(asyncio.gather(*(read(stream) for stream in both)))
        assert [cached(made) for made in made_of] == [40, 41]
        assert told(made_of[0]) == told(made_of[1])
        assert tokens_of(made_of[0]) == greedy(tiny.view, [shared], 5)[0]
        # More than there are slots: the longest unused make way.
        for seed in range(6):
            await soon(read(service.submit(request(words(20, seed=80 + seed), 3))))
        assert cached(await soon(read(service.submit(request(shared, 5))))) == 0
        assert service.stats().prefix_hits == 51 + 62 + 40 + 41


@lossless
async def test_conversations_while_a_server_dies_and_comes_back(
    tiny: Tiny, policy: PolicySettings
) -> None:
    """Some answers are stopped midway, and there are fewer places than conversations."""
    profile, plan = world(
        tiny, servers=4, routes=[[0, 1, 1, 0], [1, 1, 2, 2], [2, 2, 3, 3], [3, 0, 0, 3]]
    )
    plan = replace(plan, hosts=np.ones_like(plan.hosts))
    async with running(
        tiny,
        profile=profile,
        plan=plan,
        policy=policy,
        network=UnevenNetwork(1),
        kv_slots=3,
        prefill_chunk=8,
    ) as cluster:

        async def converse(user: int) -> int:
            rng = np.random.default_rng(user)
            so_far, saved = words(20, seed=40 + user % 2), 0
            for turn in range(4):
                so_far += words(int(rng.integers(1, 9)), seed=10 * user + turn)
                new = int(rng.integers(1, 12))
                stream = cluster.nodes[user % 3].service.submit(request(so_far, new))
                shown = [await anext(stream) for _ in range(int(rng.integers(1, new + 1)))]
                await stream.aclose()
                assert tokens_of(shown) == greedy(tiny.view, [so_far], len(shown))[0]
                so_far += tokens_of(shown)
                saved += cached(shown)
            return saved

        async def meanwhile() -> None:
            while not over.is_set():
                await asyncio.sleep(0.3)
                await cluster.kill(3)
                await asyncio.sleep(0.1)
                await cluster.revive(3)

        over = asyncio.Event()
        dying = asyncio.create_task(meanwhile())
        saved = await soon(asyncio.gather(*(converse(user) for user in range(5))))
        over.set()
        await soon(dying)
        # Where servers die faster than users speak nothing is kept in between.
        saved.append(await soon(converse(0)))
        assert sum(saved) > 0
        survivors = [cluster.nodes[server] for server in range(3)]
        await until(lambda: not any(node.snapshot().sequences for node in survivors))
        for node in survivors:
            # What is read here for guesses is kept for as long as the states are, and no longer.
            kept = node.front_end.memory
            await until(
                lambda node=node, kept=kept: len(node.worker.draft_runner.states) <= len(kept)
            )
            assert all(sequence in kept for sequence in node.worker.draft_runner.states)
            assert node.intake.seats.free == 3
