"""A ring of stages that verifies drafts in chunks, as others do over slow links, in our engine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluating import Bench, make_bench
from test_simulator_guesses import (
    RIGHT,
    WAY_S,
    WHOLE_S,
    WRONG,
    Guess,
    answered,
    finished_s,
    foreseen,
    stages,
)
from test_simulator_guesses import guessing as guessing_world
from trimmoe.cost.guessing import guess_times_s, row_times_s
from trimmoe.engine.lead import Chunks, Passed
from trimmoe.experiments.compare import CompareSettings, compare, comparison_json, comparison_table
from trimmoe.experiments.method_engines import method_engine, plan_for
from trimmoe.experiments.methods import configured, find_method
from trimmoe.policy.presets import ring
from trimmoe.simulator.measure import Sample
from trimmoe.simulator.replay import replay

WHOLE, GUESS, ROW = 10.0, 1.0, 0.5


def passed(rights: list[bool], guesses: int) -> list[Passed]:
    chunks = Chunks(guesses=guesses, guess_s=GUESS, row_s=ROW)
    return [chunks.after(WHOLE, guessed=True, right=right) for right in rights]


def test_what_is_right_comes_with_the_chunk_and_one_token_more() -> None:
    """Three drafts, all right: four tokens in one pass, and then the next chunk."""
    made = passed([True] * 5, 3)
    whole_s = WHOLE + 3 * (GUESS + ROW)
    assert [one.interval_s for one in made] == [whole_s, 0.0, 0.0, 0.0, whole_s]
    assert sum(one.in_vain for one in made) == 0


def test_what_follows_a_wrong_draft_was_in_vain() -> None:
    """The second of three is wrong: it and the third were sent for nothing."""
    made = passed([True, False, True], 3)
    assert [one.interval_s > 0 for one in made] == [True, False, True]
    assert [one.in_vain for one in made] == [0, 2, 0]


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 8))
def test_every_chunk_sends_the_same_and_has_a_token_at_least(
    rights: list[bool], guesses: int
) -> None:
    """Known and drafted tokens of every chunk that is over are shown or were in vain."""
    chunks, shown = [], 0
    for one in passed(rights, guesses):
        if one.interval_s:
            chunks.append(0)
            assert shown <= guesses + 1
            shown = 0
        shown += 1
        chunks[-1] += 1 + one.in_vain
    assert all(each == guesses + 1 for each in chunks[:-1])


# Executed.


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("model"))


def test_it_has_the_pipelines_stages_and_the_copies_that_we_guess_with(bench: Bench) -> None:
    spec = bench.view.spec
    own = plan_for(find_method("ring"), bench.plan, bench.profile, spec)
    pipeline = plan_for(find_method("pipeline"), bench.plan, bench.profile, spec)
    np.testing.assert_array_equal(own.hosts, pipeline.hosts)
    np.testing.assert_array_equal(own.routes, pipeline.routes)
    assert pipeline.stand_in_bits is None
    assert own.stand_in_bits is not None
    assert not own.stand_in_bits[own.hosts].any()


def test_one_more_row_takes_a_share_of_the_layers_and_its_own_bytes(bench: Bench) -> None:
    method = find_method("ring")
    settings = configured(method, budget=0.02, confidence=0.9)
    engine = method_engine(method, bench.plan, bench.profile, bench.view.spec, settings)
    cost, top_k = engine.cost, bench.view.spec.top_k
    found = row_times_s(cost, engine.routes, top_k)
    for access, way in enumerate(engine.routes[: cost.server_count].tolist()):
        layers = sum(
            cost.dense_s[server, layer] + top_k * cost.expert_s[server, layer].mean()
            for layer, server in enumerate(way)
        )
        hops = sum(cost.transfer_s[a, b] - cost.token_transfer_s[a, b] for a, b in pairwise(way))
        assert found[access] == pytest.approx(0.1 * layers + hops)


def test_a_comparison_has_it_and_it_flips_nothing(bench: Bench) -> None:
    settings = CompareSettings(
        methods=("pipeline", "ring", "ring-16"), passages=4, context=8, steps=12
    )
    ids = np.random.default_rng(3).integers(0, 256, 400).tolist()
    passages, outcomes = compare(bench.view, bench.profile, bench.plan, ids, settings)
    content = comparison_json(settings, bench.profile, bench.plan, "text", passages, outcomes)
    pipeline, four, more = content["methods"]
    assert [row["flip_rate"] for row in (pipeline, four, more)] == [0.0, 0.0, 0.0]
    for row in (four, more):
        assert row["guessed_share"] == 1.0, "however improbable"
        assert row["hops_per_token"] >= pipeline["hops_per_token"]
        assert row["delay_per_token_ms"] != pipeline["delay_per_token_ms"]
    assert comparison_table(content).row_count == 3


# Simulated.


def played(tokens: list[Guess], drafted: int, guess_s: float) -> Sample:
    one = guessing_world(stages([1, 2, 3], WAY_S), drafted, guess_s)
    policy = replace(ring(drafted), guess_confidence=0.5)
    one = foreseen(replace(one, engine=replace(one.engine, settings=policy)), tokens)
    return answered(one, np.zeros_like(one.trace.confidence), [len(tokens)])


def test_the_next_chunk_begins_when_all_of_the_last_one_are_through() -> None:
    """Two drafts behind every known token, 1.5 s apart: then nothing until they are with the
    user."""
    sample = played([RIGHT] * 6, 2, 1.5)
    first = [WHOLE_S, WHOLE_S + 1.5, WHOLE_S + 3.0]
    assert finished_s(sample, 0) == pytest.approx(first + [first[-1] + each for each in first])


def test_a_wrong_draft_ends_its_chunk() -> None:
    """Its user knows at 5.5. The server is drafting what would have come next until 6."""
    sample = played([RIGHT, WRONG, RIGHT, RIGHT], 3, 1.5)
    assert finished_s(sample, 0)[:3] == pytest.approx([WHOLE_S, WHOLE_S + 1.5, 6.0 + WHOLE_S])
    assert sample.withdrawn_layers > 0


def test_a_replay_books_chunks() -> None:
    one = guessing_world(stages([1, 2, 3], WAY_S), 2, 1.5)
    policy = replace(ring(2), guess_confidence=0.5)
    one = foreseen(replace(one, engine=replace(one.engine, settings=policy)), [RIGHT] * 10)
    access = np.zeros(one.trace.sequence_count, dtype=np.int64)
    ledgers = replay(one.engine, one.trace, access, budget=0.0, confidence=0.9)[:4]
    guess_s = float(guess_times_s(one.engine.cost, one.model.top_k)[0])
    assert guess_s == pytest.approx(1.5)
    assert [each.delay_s > 0 for each in ledgers] == [True, False, False, True]
    assert ledgers[0].delay_s > WHOLE_S + 2 * guess_s
