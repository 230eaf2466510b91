"""Streams whose users' servers guess ahead, decoded in one process: books of what exact execution
took and of guesses made apart from it."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from rich.console import Console

from evaluating import Bench, make_bench
from trimmoe.core.ledger import Ledger
from trimmoe.cost.guessing import guess_times_s
from trimmoe.experiments.compare import (
    CompareSettings,
    compare,
    comparison_json,
    print_comparison,
)
from trimmoe.experiments.method_engines import make_engine
from trimmoe.experiments.methods import METHODS
from trimmoe.models.exact import exact_logits
from trimmoe.policy.presets import exact, speculative
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.generate import generate
from trimmoe.runtime.home import Own, home_pass
from trimmoe.runtime.layerwise import Layerwise
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.texts import Text

CONTEXT, STEPS, GUESSES = 8, 30, 2
SURE = 0.07
"""Of a random model, nothing is much surer."""
BOLD = replace(speculative(), guesses=GUESSES, guess_confidence=SURE)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("model"))


def random_ids(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def tokens_booked(
    bench: Bench, policy: PolicySettings, ids: list[int], access: int
) -> list[Ledger]:
    """Of each decoded token of one text."""
    text = Text(
        prompt=ids[:CONTEXT],
        tokens=ids[CONTEXT:-1],
        following=ids[CONTEXT + 1 :],
        access=access,
        budget=0.0,
        confidence=0.9,
    )
    driver = bench.driver(policy, slots=1)
    return [one.ledger for one in Layerwise(driver, [text], at_once=1).run()]


def flags(bench: Bench, ids: list[int], access: int) -> list[tuple[bool, bool]]:
    """Whether what follows each decoded token is guessed on its server, and rightly."""
    view = bench.view
    cache = view.new_cache(slots=1)
    batch = view.batch(cache, [0], [range(len(ids) - 1)])
    held = torch.from_numpy(bench.plan.hosts[access])
    made = home_pass(view, [ids[:-1]], batch, cache, Own.of(view, held))[CONTEXT:]
    predicted = exact_logits(view, [ids[:-1]])[0][CONTEXT:].argmax(-1).tolist()
    return [
        (guess.confidence >= SURE, guess.token == token)
        for guess, token in zip(made, predicted, strict=True)
    ]


def set_out_s(
    whole_s: list[float], found: list[tuple[bool, bool]], guess_s: float
) -> tuple[list[float], list[int]]:
    """When each token sets out, and the one that would follow the last; and how many set out behind
    each in vain, each token taking `whole_s`."""
    out_s, through_s, in_vain = [0.0], [], []
    for at, (takes_s, (guessed, right)) in enumerate(zip(whole_s, found, strict=True)):
        through_s.append(max([out_s[at] + takes_s, *through_s]))
        free_s = through_s[at - GUESSES] if at >= GUESSES else 0.0
        early_s = min(max(out_s[at] + guess_s, free_s), through_s[at])
        out_s.append(early_s if guessed and right else through_s[at])
        followed = guessed and not right
        there_is_time = int((through_s[at] - out_s[at]) / guess_s)
        in_vain.append(min(GUESSES, there_is_time) if followed else 0)
    return out_s, in_vain


@pytest.mark.parametrize("access", range(4))
def test_tokens_take_what_their_guesses_leave_of_exact_execution(bench: Bench, access: int) -> None:
    ids = random_ids(CONTEXT + STEPS + 1, seed=access)
    plain = tokens_booked(bench, exact(), ids, access)
    booked = tokens_booked(bench, BOLD, ids, access)
    engine = make_engine(bench.plan, bench.profile, bench.view.spec, BOLD)
    guess_s = float(guess_times_s(engine.cost, bench.view.spec.top_k)[access])
    found = flags(bench, ids, access)
    out_s, in_vain = set_out_s([one.delay_s for one in plain], found, guess_s)
    assert list(accumulate(one.delay_s for one in booked)) == pytest.approx(out_s[1:])
    for one, same, vain in zip(booked, plain, in_vain, strict=True):
        np.testing.assert_array_equal(one.messages, (1 + vain) * same.messages)
        np.testing.assert_array_equal(one.kinds, same.kinds)
    assert (True, True) in found
    assert (True, False) in found
    assert out_s[-1] < sum(one.delay_s for one in plain)


def test_nothing_is_guessed_below_the_confidence_asked(bench: Bench) -> None:
    ids = random_ids(CONTEXT + STEPS + 1)
    doubting = replace(BOLD, guess_confidence=1.1)
    for one, same in zip(
        tokens_booked(bench, doubting, ids, 1), tokens_booked(bench, exact(), ids, 1), strict=True
    ):
        assert one.delay_s == pytest.approx(same.delay_s)
        np.testing.assert_array_equal(one.messages, same.messages)


def test_a_comparison_finds_guesses_faster_and_every_token_exact(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bold = replace(METHODS["speculative"], settings=lambda: BOLD)
    monkeypatch.setitem(METHODS, "speculative", bold)
    settings = CompareSettings(
        methods=("exact", "speculative"), passages=6, context=CONTEXT, steps=STEPS
    )
    given = (bench.view, bench.profile, bench.plan)
    passages, outcomes = compare(*given, random_ids(600), settings)
    content = comparison_json(settings, bench.profile, bench.plan, "", passages, outcomes)
    rows = {row["method"]: row for row in content["methods"]}
    plain, ours = rows["exact"], rows["speculative"]
    assert ours["agreement"] == plain["agreement"] == 1.0
    assert ours["perplexity"] == pytest.approx(plain["perplexity"])
    assert ours["delay_per_token_ms"] < plain["delay_per_token_ms"]
    assert ours["hops_per_token"] > plain["hops_per_token"]
    assert 0 < ours["guessed_right_share"] < ours["guessed_share"] < 1
    assert plain["guessed_share"] == 0
    assert ours["kinds_by_layer"] == plain["kinds_by_layer"]
    written = io.StringIO()
    print_comparison(Console(file=written, width=200), content)
    assert "speculative against exact nearest: delay -" in written.getvalue()


def test_generated_tokens_are_those_of_exact_execution_and_sooner(bench: Bench) -> None:
    prompt = random_ids(CONTEXT)
    told: dict[str, tuple[list[int], float]] = {}
    for policy in (exact(), replace(BOLD, guess_confidence=0.0)):
        made = list(
            generate(
                bench.driver(policy, slots=1),
                prompt,
                access=2,
                budget=0.0,
                confidence=0.9,
                max_new_tokens=20,
                stop=frozenset(),
                sampling=Sampling(temperature=0.0),
            )
        )
        delays_s = [one.ledger.delay_s for one in made if one.ledger is not None]
        told[policy.name] = [one.token for one in made], sum(delays_s)
    assert told["speculative"][0] == told["exact"][0]
    assert told["speculative"][1] < told["exact"][1]


def test_a_slot_may_be_used_again(bench: Bench) -> None:
    """What a sequence left in the servers' caches is nothing to the next one there."""
    first, second = (random_ids(CONTEXT + STEPS + 1, seed) for seed in (5, 6))
    driver = bench.driver(BOLD, slots=1)
    texts = [
        Text(
            prompt=ids[:CONTEXT],
            tokens=ids[CONTEXT:-1],
            following=ids[CONTEXT + 1 :],
            access=0,
            budget=0.0,
            confidence=0.9,
        )
        for ids in (first, second)
    ]
    done = [one.ledger for one in Layerwise(driver, texts, at_once=1).run() if one.text == 1]
    alone = tokens_booked(bench, BOLD, second, 0)
    assert [one.delay_s for one in done] == pytest.approx([one.delay_s for one in alone])


def test_streams_without_guesses_pay_for_no_second_cache(bench: Bench) -> None:
    assert bench.driver(exact(), slots=1).guesser is None
