"""The in-process service: many requests at once, each as if it were alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factories import random_model_spec, random_profile
from serving import EOS, SteppedDecoder, Tiny
from tiny import CONTEXT
from trimmoe.core.events import Attend, Execute, Routed, Strand, TokensArrived
from trimmoe.core.exit_states import ExitState
from trimmoe.models.exact import exact_logits
from trimmoe.policy.presets import final_exits, trimmoe
from trimmoe.runtime.counters import ExpertCounter, ExpertUse
from trimmoe.runtime.exact_decoder import ExactDecoder
from trimmoe.runtime.local_service import LocalService
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import (
    NEVER_EXIT,
    GenerationRequest,
    Overloaded,
    RequestTooLong,
    TokenEvent,
    TokenStream,
    Unavailable,
    quality,
)


@asynccontextmanager
async def running(service: LocalService) -> AsyncGenerator[LocalService]:
    await service.start()
    try:
        yield service
    finally:
        await service.close()


def request(prompt: list[int], new: int = 8, **changes: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="r", prompt_ids=tuple(prompt), max_new_tokens=new, **changes
    )


async def read(stream: TokenStream) -> list[TokenEvent]:
    return [event async for event in stream]


async def freed(service: LocalService) -> None:
    """Wait until nothing runs and nothing waits."""
    while (stats := service.stats()).running or stats.waiting:
        await asyncio.sleep(0.002)
    assert stats.kv_cache_usage == 0


PROMPTS = [
    list(range(5 + i, 5 + i + length)) for i, length in enumerate([1, 40, 3, 17, 9, 2, 64, 5])
]
NEW = [3, 9, 14, 1, 20, 6, 11, 8]


@pytest.mark.parametrize("kind", ["exact decoder", "plan, exact requests"])
async def test_concurrent_requests_get_what_transformers_generates(tiny: Tiny, kind: str) -> None:
    """Eight of unequal length over four slots, so that they join and leave while others run."""
    service = tiny.exact() if kind == "exact decoder" else tiny.planned()
    async with running(service):
        streams = [
            service.submit(request(prompt, new, exact=True, stop_ids=frozenset({EOS})))
            for prompt, new in zip(PROMPTS, NEW, strict=True)
        ]
        answers = await asyncio.gather(*(read(stream) for stream in streams))
        await freed(service)
    for prompt, new, events in zip(PROMPTS, NEW, answers, strict=True):
        expected = tiny.greedy(prompt, new)
        assert [event.token for event in events] == expected
        reason = "stop" if expected[-1] == EOS else "length"
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [reason]
        assert events[0].ledger is None
        for event in events[1:]:
            assert event.ledger is not None
            assert event.ledger.loss == 0
            assert event.ledger.tokens == 1


async def test_a_stop_token_ends_the_answer_and_is_its_last_token(tiny: Tiny) -> None:
    made = tiny.greedy([9, 10, 11], 12, eos=None)
    stop = made[5]
    first = made.index(stop)
    async with running(tiny.exact()) as service:
        events = await read(service.submit(request([9, 10, 11], 12, stop_ids=frozenset({stop}))))
    assert [event.token for event in events] == made[: first + 1]
    assert events[-1].finish_reason == "stop"


async def test_each_request_has_its_own_budget(tiny: Tiny) -> None:
    """One asks for exactness, one for a budget, side by side; neither sees the other."""
    settings = final_exits().but(budget=0.3, exit_risk=None, audit_share=0.0)
    async with running(tiny.planned(settings)) as service:
        exact, loose = await asyncio.gather(
            read(service.submit(request(PROMPTS[1], 24, exact=True))),
            read(service.submit(request(PROMPTS[1], 24, quality_budget=0.3, confidence=2.0))),
        )
    assert [event.token for event in exact] == tiny.greedy(PROMPTS[1], 24, eos=None)
    spent = [event.ledger.loss for event in loose if event.ledger is not None]
    credited = [event.ledger.budget for event in loose if event.ledger is not None]
    assert credited == pytest.approx([0.3] * 23)
    assert 0 < sum(spent) <= sum(credited) + 1e-9
    assert all(event.ledger.budget == 0 for event in exact if event.ledger is not None)


async def test_closing_a_stream_frees_its_slot_for_the_next(tiny: Tiny) -> None:
    """Two steps of the first answer, one that was under way, three of the second: no more."""
    decoder = SteppedDecoder(tiny.view, slots=1)
    async with running(LocalService(decoder, tiny.model())) as service:
        first = service.submit(request([3, 4], 250))
        second = service.submit(request([5, 6], 4))
        decoder.allowed.release(2)
        for _ in range(3):
            await anext(first)
        assert service.stats().running == 1
        assert service.stats().waiting == 1
        await first.aclose()
        decoder.allowed.release(1 + 3)
        made = [event.token for event in await read(second)]
        assert made == tiny.greedy([5, 6], 4, eos=None)
        await freed(service)
        with pytest.raises(StopAsyncIteration):
            await anext(first)


async def test_closing_a_waiting_stream_frees_its_place_at_once(tiny: Tiny) -> None:
    async with running(tiny.exact(slots=1, max_waiting=1)) as service:
        running_one = service.submit(request([3, 4], 250))
        waiting = service.submit(request([5, 6], 4))
        with pytest.raises(Overloaded) as refused:
            service.submit(request([7], 2))
        assert refused.value.retry_after_s > 0
        await waiting.aclose()
        third = service.submit(request([7], 2))
        await running_one.aclose()
        assert [event.token for event in await read(third)] == tiny.greedy([7], 2, eos=None)


async def test_prompt_and_answer_must_fit_the_context(tiny: Tiny) -> None:
    async with running(tiny.exact()) as service:
        with pytest.raises(RequestTooLong, match="context"):
            service.submit(request([1] * (CONTEXT - 3), 4))
        events = await read(service.submit(request([1] * (CONTEXT - 4), 4)))
        assert len(events) == 4


async def test_closing_the_service_ends_open_streams(tiny: Tiny) -> None:
    service = tiny.exact(slots=1)
    with pytest.raises(Unavailable):
        service.submit(request([3]))
    await service.start()
    streams = [service.submit(request([3, 4], 250)) for _ in range(2)]
    await anext(streams[0])
    await service.close()
    for stream in streams:
        with pytest.raises(Unavailable):
            await read(stream)
    assert not service.health().ok
    with pytest.raises(Unavailable):
        service.submit(request([3]))


class _Breaking(ExactDecoder):
    """Fails in the third step."""

    left = 3

    def decode(self, tokens: dict[int, int]) -> list:
        self.left -= 1
        if not self.left:
            raise RuntimeError("broken on purpose")
        return super().decode(tokens)


async def test_a_failing_decoder_fails_the_streams_and_the_health(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(LocalService(_Breaking(tiny.view, slots=1), tiny.model())) as service:
        stream = service.submit(request([3, 4], 50))
        with pytest.raises(Unavailable):
            await read(stream)
        assert not service.health().ok
        with pytest.raises(Unavailable):
            service.submit(request([3]))
    assert "broken on purpose" in caplog.text


async def test_an_interrupted_answer_goes_on_elsewhere_with_the_same_draws(tiny: Tiny) -> None:
    """What was made so far becomes part of the prompt of another service."""
    sampling = Sampling(temperature=1.3, top_p=0.9, seed=11)
    async with running(tiny.exact()) as service:
        whole = await read(service.submit(request([70, 71, 72], 16, sampling=sampling)))
    tokens = [event.token for event in whole]
    async with running(tiny.exact()) as service:
        rest = await read(service.submit(request([70, 71, 72, *tokens[:7]], 9, sampling=sampling)))
    assert [event.token for event in rest] == tokens[7:]
    assert tokens != tiny.greedy([70, 71, 72], 16, eos=None)


async def test_logprobs_are_the_models_own(tiny: Tiny) -> None:
    async with running(tiny.exact()) as service:
        (event,) = await read(service.submit(request([70, 71], 1, sampling=Sampling(logprobs=3))))
    expected = torch.log_softmax(exact_logits(tiny.view, [[70, 71]])[0][-1], dim=-1)
    assert event.logprob == pytest.approx(float(expected.max()), abs=1e-5)
    assert [token for token, _ in event.top_logprobs] == expected.topk(3).indices.tolist()


@pytest.mark.parametrize("state", ExitState)
async def test_the_service_counts_links_and_experts_as_the_ledgers_do(
    tiny: Tiny, state: ExitState
) -> None:
    """But for experts of tokens that went on after their answers: those cost no token anything."""
    settings = final_exits().but(budget=0.3, exit_risk=None, audit_share=0.5)
    settings = settings.but(exit_state=state)
    async with running(tiny.planned(settings)) as service:
        answers = await asyncio.gather(
            *(read(service.submit(request(prompt, 12, confidence=0.5))) for prompt in PROMPTS[:4])
        )
        await freed(service)
        stats = service.stats()
    ledgers = [event.ledger for events in answers for event in events if event.ledger is not None]
    assert sum(link.size_bytes for link in stats.links) == sum(one.total_bytes for one in ledgers)
    run = stats.expert_executions[..., : ExpertUse.DROPPED].sum()
    charged = sum(one.slots_run for one in ledgers)
    assert run > charged if state is ExitState.WHOLE else run == charged
    assert stats.audits == sum(one.audits for one in ledgers) > 0
    assert 0 <= stats.false_exits <= stats.audits


def test_a_request_is_opened_with_what_it_asks_for_or_the_policys_own() -> None:
    model = random_model_spec(np.random.default_rng(0))
    profile = random_profile(np.random.default_rng(0), model)
    settings = trimmoe().but(budget=0.1, confidence=0.8, exit_risk=0.05)
    assert quality(request([1]), settings, profile, copied=True) == (0.1, 0.8)
    both = request([1], quality_budget=0.2, confidence=0.5)
    assert quality(both, settings.but(exit_risk=None), profile, copied=True) == (0.2, 0.5)
    assert quality(replace(both, exact=True), settings, profile, copied=True) == (0.0, NEVER_EXIT)


def test_a_smaller_budget_than_the_policys_runs_fewer_copies_still() -> None:
    """They are charged what they flip where the policy's budget is run up."""
    model = random_model_spec(np.random.default_rng(0))
    profile = random_profile(np.random.default_rng(0), model)
    settings = trimmoe().but(budget=0.1, exit_risk=None)
    half = request([1], quality_budget=0.05)
    assert quality(half, settings, profile, copied=True)[0] == pytest.approx(0.025)
    assert quality(half, settings, profile, copied=False)[0] == 0.05


@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_a_smaller_budget_never_allows_more_exits(
    seed: int, budget: float, other: float, copied: bool
) -> None:
    profile = random_profile(
        np.random.default_rng(seed), random_model_spec(np.random.default_rng(seed))
    )
    small, large = (
        quality(request([1], quality_budget=one, confidence=0.3), trimmoe(), profile, copied=copied)
        for one in sorted((budget, other))
    )
    assert small[0] <= large[0]
    assert small[1] >= large[1] >= 0.3
    exits_flip = profile.exit_bound(trimmoe().readings.exit_state) * profile.exit_rate
    assert (exits_flip[profile.exit_grid >= small[1]] <= small[0] / 2).all()


def test_experts_are_counted_by_what_became_of_them_and_where() -> None:
    """Two tokens on servers 0 and 1, two slots each, in layer 1."""
    counter = ExpertCounter(layer_count=2, expert_count=4)
    rows, server = np.array([0, 1]), np.array([0, 1])
    attend = Attend(wave=3, layer=1, rows=rows, server=server)
    arrived = TokensArrived(wave=3, sequences=(7, 8), draws=np.zeros(2))
    routed = Routed(
        wave=3,
        experts=np.array([[2, 0], [2, 3]]),
        masses=np.full((2, 2), 0.5),
        importance=np.ones(2),
        steadiness=np.zeros(2, dtype=np.int64),
    )
    execute = Execute(
        wave=3,
        layer=1,
        rows=rows,
        slot_expert=np.array([[2, 1], [2, -1]]),
        slot_server=np.array([[0, 1], [0, 1]]),
        destination=server,
    )
    counter.absorb([(arrived, (attend,)), (routed, (execute,))])
    found = {
        tuple(where.tolist()): int(counter.counts[tuple(where)])
        for where in np.argwhere(counter.counts)
    }
    assert found == {
        (1, 2, ExpertUse.LOCAL_EXACT): 1,
        (1, 0, ExpertUse.REMOTE_SUBSTITUTE): 1,
        (1, 2, ExpertUse.REMOTE_EXACT): 1,
        (1, 3, ExpertUse.DROPPED): 1,
    }


def test_rows_that_are_given_up_in_a_layer_are_not_counted() -> None:
    """Others of their batch are."""
    counter = ExpertCounter(layer_count=1, expert_count=4)
    attend = Attend(wave=1, layer=0, rows=np.arange(2), server=np.zeros(2, dtype=int))
    routed = Routed(
        wave=1,
        experts=np.array([[0, 1], [2, 3]]),
        masses=np.full((2, 2), 0.5),
        importance=np.ones(2),
        steadiness=np.zeros(2, dtype=int),
    )
    execute = Execute(
        wave=1,
        layer=0,
        rows=np.array([1]),
        slot_expert=np.array([[2, 3]]),
        slot_server=np.zeros((1, 2), dtype=int),
        destination=np.zeros(1, dtype=int),
    )
    imported = TokensArrived(wave=1, sequences=(1, 2), draws=np.zeros(2))
    counter.absorb([(imported, (attend,)), (routed, (Strand(wave=1, rows=np.array([0])), execute))])
    assert counter.counts[0, :, ExpertUse.LOCAL_EXACT].tolist() == [0, 0, 1, 1]
    assert counter.counts.sum() == 2
