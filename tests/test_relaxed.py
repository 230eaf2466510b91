"""Relaxed acceptance: where full depth puts a guess second, nearly as high as its first, and the
budget has a whole token left, the guess is kept. One prediction flips, and none behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluating import Bench, make_bench
from nodes import answers, hybrid_routes, ledgers_of, running, spent_within, tokens_of, world
from questions import Questions
from serving import Tiny
from simulated import World
from test_simulator_guesses import RIGHT, UNSURE, WRONG, foreseen
from test_simulator_guesses import guessing as world_that_guesses
from test_simulator_trails import answered, finished_s, stages
from trimmoe.models.exact import exact_logits
from trimmoe.policy.presets import auto, auto_within, relaxed, speculative, trimming
from trimmoe.policy.relaxed import NOBODY, keeps, runner_up
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.home import runners_up
from trimmoe.runtime.layerwise import Layerwise
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import TokenEvent
from trimmoe.runtime.texts import Text
from trimmoe.simulator.measure import Sample

BUDGET = 0.5
BOLD = replace(relaxed(), budget=BUDGET, guess_confidence=0.0, guess_chance=0.0)
"""So much that there is often a token left, and every guess is followed."""


def likely(*shares: float) -> list[tuple[int, float]]:
    """Tokens 10, 11, ... of such probabilities."""
    return [(token, math.log(share)) for token, share in enumerate(shares, 10)]


def test_the_second_is_nearly_right_if_it_is_half_as_probable_as_the_first() -> None:
    assert runner_up(likely(0.4, 0.21, 0.2)) == 11
    assert runner_up(likely(0.4, 0.19)) == NOBODY
    assert runner_up(likely(0.4)) == NOBODY


@pytest.mark.parametrize(
    ("credit", "guess", "second", "kept"),
    [(1.0, 7, 7, True), (0.98, 7, 7, False), (3.0, 8, 7, False), (3.0, -1, NOBODY, False)],
    ids=["a whole token", "not yet", "another token", "no token"],
)
def test_a_guess_is_kept_for_a_whole_token_of_credit(
    credit: float, guess: int, second: int, kept: bool
) -> None:
    assert keeps(credit, guess, second) is kept


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.05, 0.5, 3.0]))
def test_logits_and_probabilities_say_the_same(seed: int, width: float) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0.0, width, (8, 20)).astype(np.float32))
    best = logits.log_softmax(-1).topk(2)
    ranked = [
        list(zip(ids, values, strict=True))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    assert runners_up(logits).tolist() == [runner_up(each) for each in ranked]


@pytest.fixture(scope="module")
def questions(tiny: Tiny) -> Questions:
    return Questions(tiny=tiny, count=9)


async def served(
    tiny: Tiny, questions: Questions, policy: PolicySettings = BOLD, **changes: Any
) -> list[list[TokenEvent]]:
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        made = await answers(cluster, questions.among(3, new=24, **changes))
        await cluster.all_free()
    return made


def predicted(tiny: Tiny, prompt: Sequence[int], made: Sequence[int]) -> list[int]:
    """What full depth has in the place of each token of an answer, after those before it. Where it
    is another one, the answer has what full depth puts second, and nearly as high."""
    logits = exact_logits(tiny.view, [[*prompt, *made]])[0][len(prompt) - 1 : -1]
    best, second = logits.argmax(-1).tolist(), runners_up(logits).tolist()
    for token, first, other in zip(made, best, second, strict=True):
        assert token in (first, other)
    return best


async def test_servers_keep_what_is_nearly_right_and_charge_each_flip_and_nothing_else(
    tiny: Tiny, questions: Questions
) -> None:
    made = await served(tiny, questions)
    assert spent_within(BUDGET, made) > 0
    for prompt, events in zip(questions.prompts, made, strict=True):
        told, best = tokens_of(events), predicted(tiny, prompt, tokens_of(events))
        flips = [token != first for token, first in zip(told, best, strict=True)]
        assert [ledger.loss for ledger in ledgers_of(events)] == flips[1:]
        assert not flips[0], "nothing was credited before it"
    assert all(event.logprob is None and not event.top_logprobs for each in made for event in each)


async def test_what_is_kept_and_what_is_trimmed_come_out_of_one_account(
    tiny: Tiny, questions: Questions
) -> None:
    """As where an expert has no host: no answer spends more than its budget at any token."""
    made = await served(tiny, questions, policy=replace(BOLD, levers=trimming().levers))
    assert spent_within(BUDGET, made) > 0
    losses = [ledger.loss for events in made for ledger in ledgers_of(events)]
    assert any(0.0 < loss < 1.0 for loss in losses), "trimmed"
    assert any(loss >= 1.0 for loss in losses), "kept"


def test_levers_are_used_in_need_while_an_expert_has_no_host() -> None:
    everywhere = np.ones((2, 1, 3), dtype=bool)
    somewhere, nowhere = everywhere.copy(), everywhere.copy()
    somewhere[0, 0, 1] = False
    nowhere[:, 0, 1] = False
    policy = auto_within()
    assert policy.for_hosts(everywhere) == policy.for_hosts(somewhere) == policy
    assert policy.for_hosts(nowhere) == replace(policy, levers=trimming().levers)
    assert auto().for_hosts(nowhere) == auto()


async def test_who_asks_for_probabilities_is_told_those_of_what_is_kept(
    tiny: Tiny, questions: Questions
) -> None:
    made = await served(tiny, questions, sampling=Sampling(logprobs=1))
    kept = [event for events in made for event in events if event.ledger and event.ledger.loss > 0]
    assert kept
    for event in kept:
        assert event.logprob is not None
        ((best, logprob),) = event.top_logprobs
        assert event.token != best
        assert logprob >= event.logprob >= logprob - math.log(2) - 1e-6


@pytest.mark.parametrize("how", ["exact", "drawn"])
async def test_answers_that_are_asked_for_exactly_or_drawn_keep_nothing(
    tiny: Tiny, questions: Questions, how: str
) -> None:
    drawn: dict[str, Any] = {"sampling": Sampling(temperature=0.9, seed=3)}
    asked: dict[str, Any] = {"exact": True} if how == "exact" else drawn
    plain = replace(speculative(), guess_confidence=0.0, guess_chance=0.0)
    ours = await served(tiny, questions, **asked)
    theirs = await served(tiny, questions, plain, **asked)
    assert [tokens_of(events) for events in ours] == [tokens_of(events) for events in theirs]
    assert spent_within(0.0, ours) == 0


async def test_an_answer_ends_where_full_depth_ends_it(tiny: Tiny, questions: Questions) -> None:
    """Nothing is kept in the place of a token that ends it; one of sixteen does."""
    stops = frozenset(range(0, 256, 16))
    made = await served(tiny, questions, stop_ids=stops)
    for prompt, events in zip(questions.prompts, made, strict=True):
        best = predicted(tiny, prompt, tokens_of(events))
        assert not stops.intersection(best[:-1])
        assert (events[-1].finish_reason == "stop") == (best[-1] in stops)
    assert {events[-1].finish_reason for events in made} == {"stop", "length"}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("model"))


def test_in_one_process_too_what_flips_is_what_is_charged(bench: Bench) -> None:
    ids = np.random.default_rng(3).integers(0, 256, 80).tolist()
    text = Text(
        prompt=ids[:8],
        tokens=ids[8:-1],
        following=ids[9:],
        access=1,
        budget=BUDGET,
        confidence=0.9,
    )
    scored = list(Layerwise(bench.driver(BOLD, slots=1), [text], at_once=1).run())
    exact = exact_logits(bench.view, [ids[:-1]])[0][8:].argmax(-1).tolist()
    losses = [one.ledger.loss for one in scored]
    assert losses == [
        float(one.prediction != best) for one, best in zip(scored, exact, strict=True)
    ]
    assert 0 < sum(losses) < len(losses)
    spent = np.cumsum(losses)
    assert (spent <= BUDGET * np.arange(1, spent.size + 1) + 1e-9).all()


def nearly_right(budget: float, guesses: Sequence, near: Sequence[bool]) -> Sample:
    """One request of these tokens, whose guesses full depth nearly agrees with or not."""
    one: World = foreseen(world_that_guesses(stages([1, 2, 3], 0.25), 1, 1.0), guesses)
    engine = one.engine
    kept = replace(engine.settings, relaxed=True, budget=budget)
    told = np.zeros((one.trace.token_count, 1), dtype=bool)
    told[: len(near), 0] = near
    one = replace(
        one, engine=replace(engine, settings=kept), trace=replace(one.trace, home_near=told)
    )
    return answered(one, np.zeros_like(one.trace.confidence), [len(guesses)], budget=budget)


@pytest.mark.parametrize(
    ("budget", "near", "as_if", "loss"),
    [
        (1.0, [True, False], [RIGHT, UNSURE], 1.0),
        (1.0, [False, False], [WRONG, UNSURE], 0.0),
        (0.5, [True, False], [WRONG, UNSURE], 0.0),
    ],
    ids=["kept", "not near", "no credit"],
)
def test_the_simulator_has_what_follows_a_kept_guess_go_on(
    budget: float, near: list[bool], as_if: list, loss: float
) -> None:
    sample = nearly_right(budget, [WRONG, UNSURE], near)
    other = nearly_right(0.0, as_if, [False, False])
    assert finished_s(sample, 0) == finished_s(other, 0)
    assert sample.ledger.loss == loss


def test_the_simulator_saves_credit_up_for_a_whole_token() -> None:
    sample = nearly_right(0.5, [WRONG, WRONG, UNSURE], [True, True, False])
    other = nearly_right(0.0, [WRONG, RIGHT, UNSURE], [False] * 3)
    assert finished_s(sample, 0) == finished_s(other, 0)
    assert sample.ledger.loss == 1.0
