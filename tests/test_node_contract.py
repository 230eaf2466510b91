"""What every driver owes its users: one suite for the in-process service and for nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from devices import copies
from nodes import hybrid_routes, read, request, running, tokens_of, world
from serving import EOS, Tiny
from tiny import CONTEXT
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import STOOD_IN, Kind, Ledger
from trimmoe.core.loss_curves import Rung
from trimmoe.cost.actions import Levers
from trimmoe.experiments.method_engines import make_engine
from trimmoe.models.exact import exact_logits
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.counters import ExpertUse
from trimmoe.runtime.decoder import PlannedDecoder
from trimmoe.runtime.local_service import LocalService
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import (
    InferenceService,
    Overloaded,
    RequestTooLong,
    TokenEvent,
    Unavailable,
)
from wires import soon, until

DRIVERS = {"in process": 0, "one node": 1, "three nodes": 3}
TRIMMING = PRESETS["final-exits"]().but(budget=0.2, exit_risk=None, audit_share=0.2)
PROMPTS = [
    list(range(5 + i, 5 + i + length)) for i, length in enumerate([1, 40, 3, 17, 9, 2, 64, 5])
]


@dataclass(kw_only=True)
class Driver:
    """Any number of servers behind one service."""

    tiny: Tiny
    nodes: int
    copied: float = 0.0

    @asynccontextmanager
    async def serving(
        self, policy: PolicySettings, *, slots: int = 4, max_waiting: int = 16
    ) -> AsyncGenerator[InferenceService]:
        servers = self.nodes or 3
        routes = hybrid_routes(servers)
        profile, plan = world(self.tiny, servers=servers, routes=routes, copied=self.copied)
        if self.copied:
            profile = replace(profile, rungs=tuple(map(next_to_free, profile.rungs)))
        if self.nodes:
            async with running(
                self.tiny, profile=profile, plan=plan, policy=policy,
                kv_slots=slots, max_waiting=max_waiting,
            ) as cluster:  # fmt: skip
                yield cluster.nodes[0].service
            return
        engine = make_engine(plan, profile, self.tiny.view.spec, policy)
        names = plan.cluster.server_names
        decoder = PlannedDecoder(self.tiny.view, profile, engine, slots=slots, server_names=names)
        service = LocalService(decoder, self.tiny.model(), max_waiting=max_waiting)
        await service.start()
        try:
            yield service
        finally:
            await service.close()


def next_to_free(rung: Rung) -> Rung:
    """Taken to lose so little that its copies run wherever they save anything."""
    curves = replace(rung.curves, upper=np.zeros_like(rung.curves.upper))
    return replace(rung, curves=curves)


@pytest.fixture(params=sorted(DRIVERS))
def driver(request: pytest.FixtureRequest, tiny: Tiny) -> Driver:
    return Driver(tiny=tiny, nodes=DRIVERS[request.param])


def ledgers_of(events: list[TokenEvent]) -> list[Ledger]:
    return [event.ledger for event in events if event.ledger is not None]


async def freed(service: InferenceService) -> None:
    def idle() -> bool:
        stats = service.stats()
        return not (stats.running or stats.waiting or stats.kv_cache_usage)

    await until(idle)


async def test_exact_requests_get_what_transformers_generates(driver: Driver, tiny: Tiny) -> None:
    new = [3, 9, 14, 1, 20, 6, 11, 8]
    async with driver.serving(TRIMMING) as service:
        streams = [
            service.submit(request(prompt, count, exact=True, stop_ids=frozenset({EOS})))
            for prompt, count in zip(PROMPTS, new, strict=True)
        ]
        made = await soon(asyncio.gather(*(read(stream) for stream in streams)))
        await freed(service)
    for prompt, count, events in zip(PROMPTS, new, made, strict=True):
        assert tokens_of(events) == tiny.greedy(prompt, count)
        assert events[0].ledger is None
        assert all(ledger.loss == 0 for ledger in ledgers_of(events))
        assert len(ledgers_of(events)) == len(events) - 1


async def test_no_prefix_of_an_answer_spends_more_than_it_was_credited(driver: Driver) -> None:
    async with driver.serving(TRIMMING) as service:
        streams = [
            service.submit(request(prompt, 24, quality_budget=budget, confidence=0.6))
            for prompt, budget in zip(PROMPTS, [0.02, 0.05, 0.1, 0.2] * 2, strict=True)
        ]
        made = await soon(asyncio.gather(*(read(stream) for stream in streams)))
    total = 0.0
    for events, budget in zip(made, [0.02, 0.05, 0.1, 0.2] * 2, strict=True):
        ledgers = ledgers_of(events)
        assert [ledger.budget for ledger in ledgers] == pytest.approx([budget] * 23)
        spent = np.cumsum([ledger.loss for ledger in ledgers])
        credited = np.cumsum([ledger.budget for ledger in ledgers])
        assert (spent <= credited + 1e-9).all()
        total += spent[-1]
    assert total > 0
    kinds = sum(ledger.kinds for events in made for ledger in ledgers_of(events))
    assert isinstance(kinds, np.ndarray)
    assert kinds[:, [Kind.SKIPPED, Kind.EXITED]].any()


@copies
async def test_stand_ins_run_alike_on_all_drivers_and_never_without_a_budget(tiny: Tiny) -> None:
    """Copies, in two, four or eight bits, of whatever a server does not hold."""
    levers = Levers(substitute=False, stand_in=True, drop_slots=False, skip=False, exit=False)
    policy = replace(PRESETS["final-exits"](), levers=levers, budget=0.2)
    made: list[list[list[TokenEvent]]] = []
    for nodes in (0, 3):
        async with Driver(tiny=tiny, nodes=nodes, copied=1.0).serving(policy) as service:
            asked = [request(prompt, 12) for prompt in PROMPTS[:4]]
            asked += [replace(one, exact=True) for one in asked]
            streams = [service.submit(one) for one in asked]
            made.append(await soon(asyncio.gather(*(read(stream) for stream in streams))))
            uses = service.stats().expert_executions.sum((0, 1))
            assert uses[ExpertUse.LOCAL_STAND_IN] > 0
            assert uses[ExpertUse.LOCAL_SUBSTITUTE] == 0
    exact = [tiny.greedy(prompt, 12, eos=None) for prompt in PROMPTS[:4]]
    for local, spread in zip(*made, strict=True):
        assert tokens_of(local) == tokens_of(spread)
        for one, other in zip(ledgers_of(local), ledgers_of(spread), strict=True):
            np.testing.assert_array_equal(one.kinds, other.kinds)
    assert [tokens_of(events) for events in made[0][4:]] == exact
    assert [tokens_of(events) for events in made[0][:4]] != exact
    kinds = sum(ledger.kinds for events in made[0][:4] for ledger in ledgers_of(events))
    assert kinds[:, STOOD_IN].sum() > 0  # type: ignore[index]


async def test_a_stop_token_ends_the_answer_and_is_its_last_token(
    driver: Driver, tiny: Tiny
) -> None:
    made = tiny.greedy([9, 10, 11], 12, eos=None)
    stop = made[5]
    async with driver.serving(PRESETS["exact"]()) as service:
        events = await soon(
            read(service.submit(request([9, 10, 11], 12, stop_ids=frozenset({stop}))))
        )
        await freed(service)
    assert tokens_of(events) == made[: made.index(stop) + 1]
    assert events[-1].finish_reason == "stop"


async def test_the_same_seed_draws_the_same_tokens_and_can_be_continued(
    driver: Driver, tiny: Tiny
) -> None:
    sampling = Sampling(temperature=1.3, top_p=0.9, seed=11)
    async with driver.serving(PRESETS["exact"]()) as service:
        whole = await soon(read(service.submit(request([70, 71, 72], 16, sampling=sampling))))
        made = tokens_of(whole)
        prompt = [70, 71, 72, *made[:7]]
        rest = await soon(read(service.submit(request(prompt, 9, sampling=sampling))))
    assert tokens_of(rest) == made[7:]
    assert made != tiny.greedy([70, 71, 72], 16, eos=None)


SHAPED = {
    "repetition": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "bias": ({"logit_bias": ((65, 3.0), (66, -2.0))}, {"sequence_bias": {(65,): 3.0, (66,): -2.0}}),
    "least length": ({"min_tokens": 9}, {"min_new_tokens": 9}),
}


@pytest.mark.parametrize("option", sorted(SHAPED))
async def test_logits_are_processed_as_by_transformers(
    driver: Driver, tiny: Tiny, option: str
) -> None:
    ours, theirs = SHAPED[option]
    plain = tiny.greedy([9, 10, 11], 12, eos=None)
    # An end that comes at once, so that a least length matters.
    end = plain[1] if option == "least length" else EOS
    expected = tiny.greedy([9, 10, 11], 12, eos=end, **theirs)
    sampling = Sampling(**ours, stop_ids=(end,))
    async with driver.serving(PRESETS["exact"]()) as service:
        asked = request([9, 10, 11], 12, sampling=sampling, stop_ids=frozenset({end}))
        assert tokens_of(await soon(read(service.submit(asked)))) == expected
    assert expected != tiny.greedy([9, 10, 11], 12, eos=end)


@pytest.mark.parametrize("state", sorted(ExitState))
async def test_tokens_that_leave_early_are_known_to_all_who_draw(
    driver: Driver, state: ExitState
) -> None:
    """Nothing comes twice under a penalty that forbids it, wherever a token is drawn and whatever
    of it goes on to the servers of later layers."""
    policy = TRIMMING.but(exit_state=state, exits_charged=False, exits_weighed=False)
    never_again = Sampling(presence_penalty=1e6)
    async with driver.serving(policy) as service:
        streams = [
            service.submit(request(prompt, 40, confidence=0.2, sampling=never_again))
            for prompt in PROMPTS[:4]
        ]
        made = await soon(asyncio.gather(*(read(stream) for stream in streams)))
    exited = sum(ledger.kinds[:, Kind.EXITED].sum() for one in made for ledger in ledgers_of(one))
    assert exited > 0
    for events in made:
        assert len(set(tokens_of(events))) == 40


async def test_logprobs_come_with_the_tokens(driver: Driver) -> None:
    async with driver.serving(PRESETS["exact"]()) as service:
        events = await soon(
            read(service.submit(request([70, 71], 5, sampling=Sampling(logprobs=3))))
        )
    for event in events:
        assert len(event.top_logprobs) == 3
        assert event.top_logprobs[0] == (event.token, pytest.approx(event.logprob, abs=1e-5))
        assert event.top_logprobs[0][1] >= event.top_logprobs[1][1]


async def test_what_is_thought_of_the_prompt_comes_with_the_first_token(
    driver: Driver, tiny: Tiny
) -> None:
    prompt = PROMPTS[6]
    (logits,) = exact_logits(tiny.view, [prompt])
    expected = torch.log_softmax(logits.float(), dim=-1)
    async with driver.serving(PRESETS["exact"]()) as service:
        sampling = Sampling(prompt_logprobs=2)
        events = await soon(read(service.submit(request(prompt, 3, sampling=sampling))))
        (plain,) = await soon(read(service.submit(request(prompt, 1))))
    first, *rest = events
    assert first.token == plain.token
    assert not plain.prompt
    assert not any(event.prompt for event in rest)
    assert [score.token for score in first.prompt] == prompt[1:]
    for before, score in zip(expected, first.prompt, strict=False):
        assert score.logprob == pytest.approx(float(before[score.token]), abs=1e-4)
        assert score.rank == 1 + int((before > before[score.token]).sum())
        assert [token for token, _ in score.top] == before.topk(2).indices.tolist()


async def test_closing_a_stream_frees_its_place_for_the_next(driver: Driver, tiny: Tiny) -> None:
    async with driver.serving(PRESETS["exact"](), slots=1) as service:
        first = service.submit(request([3, 4], 250))
        await soon(anext(first))
        second = service.submit(request([5, 6], 4))
        assert service.stats().running == 1
        assert service.stats().waiting == 1
        await first.aclose()
        made = tokens_of(await soon(read(second)))
        await freed(service)
        with pytest.raises(StopAsyncIteration):
            await anext(first)
    assert made == tiny.greedy([5, 6], 4, eos=None)


async def test_too_many_waiting_requests_are_refused(driver: Driver, tiny: Tiny) -> None:
    async with driver.serving(PRESETS["exact"](), slots=1, max_waiting=1) as service:
        answered = service.submit(request([3, 4], 250))
        await soon(anext(answered))
        waiting = service.submit(request([5, 6], 4))
        with pytest.raises(Overloaded) as refused:
            service.submit(request([7], 2))
        assert refused.value.retry_after_s > 0
        await waiting.aclose()
        third = service.submit(request([7], 2))
        await answered.aclose()
        assert tokens_of(await soon(read(third))) == tiny.greedy([7], 2, eos=None)


async def test_prompt_and_answer_must_fit_the_context(driver: Driver) -> None:
    async with driver.serving(PRESETS["exact"]()) as service:
        with pytest.raises(RequestTooLong, match="context"):
            service.submit(request([1] * (CONTEXT - 3), 4))
        assert len(await soon(read(service.submit(request([1] * (CONTEXT - 4), 4))))) == 4


async def test_stopping_ends_open_streams(driver: Driver) -> None:
    async with driver.serving(PRESETS["exact"](), slots=1) as service:
        streams = [service.submit(request([3, 4], 250)) for _ in range(2)]
        await soon(anext(streams[0]))
    for stream in streams:
        with pytest.raises(Unavailable):
            await soon(read(stream))
    assert not service.health().ok
    with pytest.raises(Unavailable):
        service.submit(request([3]))


@pytest.mark.parametrize("state", [ExitState.WHOLE, ExitState.DENSE])
async def test_audits_are_counted_as_in_the_ledgers(driver: Driver, state: ExitState) -> None:
    """But for what becomes of a token that goes on when its request may be over."""
    policy = TRIMMING.but(audit_share=0.5, exit_state=state)
    async with driver.serving(policy) as service:
        streams = [service.submit(request(prompt, 12, confidence=0.5)) for prompt in PROMPTS[:4]]
        made = await soon(asyncio.gather(*(read(stream) for stream in streams)))
        told = sum(ledger.audits for events in made for ledger in ledgers_of(events))
        await until(lambda: service.stats().audits >= told)
        audits = service.stats().audits
        assert told > 0
        assert audits == told or state is ExitState.WHOLE
        assert 0 <= service.stats().false_exits <= audits


@pytest.mark.parametrize("name", ["trimmoe", "substitute-only", "exact"])
async def test_one_node_decides_and_answers_as_the_in_process_driver(tiny: Tiny, name: str) -> None:
    """The very tokens and ledgers, audits included, one request after the other."""
    policy = PRESETS[name]().but(exit_risk=None, audit_share=0.3, window_tokens=10**9)
    if not policy.levers.lossless:
        policy = replace(policy, budget=0.2)
    books = []
    profile, plan = world(tiny, servers=1, density=1.0)
    engine = make_engine(plan, profile, tiny.view.spec, policy)
    decoder = PlannedDecoder(
        tiny.view, profile, engine, slots=4, server_names=plan.cluster.server_names
    )
    local = LocalService(decoder, tiny.model())
    await local.start()
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        for service in (local, cluster.nodes[0].service):
            streams = [request(prompt, 16, confidence=0.6) for prompt in PROMPTS[:5]]
            books.append([await soon(read(service.submit(one))) for one in streams])
        # What a request's last tokens leave is not followed once it is over.
        assert cluster.nodes[0].service.stats().audits <= local.stats().audits
    await local.close()
    for ours, theirs in zip(*books, strict=True):
        assert tokens_of(ours) == tokens_of(theirs)
        for one, other in zip(ledgers_of(ours), ledgers_of(theirs), strict=True):
            np.testing.assert_array_equal(one.kinds, other.kinds)
            np.testing.assert_array_equal(one.messages, other.messages)
            assert one.loss == pytest.approx(other.loss, abs=1e-12)
            assert one.slots_run == other.slots_run
            assert one.slots_dropped == other.slots_dropped
            assert one.delay_s == pytest.approx(other.delay_s)
