"""Simulations that begin full come to what those from rest come to, in a fraction of the tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from test_figures_suite import tiny_world
from trimmoe.experiments.figures.base import load_row
from trimmoe.experiments.figures.bench import Bench
from trimmoe.experiments.figures.contenders import Contender, everybody
from trimmoe.experiments.figures.load import UnderLoad
from trimmoe.experiments.figures.loads import Loaded, full_start
from trimmoe.experiments.figures.overall import full_sentence
from trimmoe.experiments.figures.world import generated_world, quick
from trimmoe.experiments.random_clusters import paper_cluster
from trimmoe.simulator.run import simulate
from trimmoe.simulator.settings import Load, Prefill, SimulationSettings

OUTPUT, RATE_PER_S = 30, 200.0
LOAD = Load(
    rate_per_s=RATE_PER_S,
    prompt_tokens=1,
    output_tokens=OUTPUT,
    fixed_lengths=True,
    prefill=Prefill.EXCLUDED,
)


def contender(key: str) -> Contender:
    return next(one for one in everybody() if one.key == key)


def loaded(bench: Bench, key: str, *, tokens: int = 300) -> Loaded:
    one = contender(key)
    rig = bench.rig(one)
    return Loaded(
        engine=rig.engine,
        deployment=rig.deployment,
        trace=bench.world.trace,
        alone_s=bench.alone_s(one),
        tokens=tokens,
        budgeted=rig.settings.budget > 0,
    )


def from_rest(run: Loaded) -> SimulationSettings:
    """Filled for longer than the slowest answer takes."""
    return SimulationSettings(
        load=LOAD,
        budget=0.02 if run.budgeted else 0.0,
        warm_up_s=1.5 * OUTPUT * float(run.alone_s.max()),
        duration_s=0.4,
        seeds=(0,),
    )


@pytest.fixture(scope="module")
def bench() -> Bench:
    """Ten servers that hardly anybody waits for."""
    world = generated_world("switch-base-8e", paper_cluster(0), quick(), seed=0)
    return Bench(world=world, effort=quick())


def test_as_many_answers_are_under_way_as_arrive_while_one_takes() -> None:
    share, alone_s = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.4])
    load = replace(LOAD, rate_per_s=100.0)
    asked = full_start(load, share, alone_s, sequences=6, length=6, end_s=2.0, seed=1)
    assert (np.diff(asked.arrival_s) >= 0).all()
    assert (asked.prompt == 0).all()
    begun = asked.output < OUTPUT  # One in thirty of those under way is whole.
    expected = 100.0 * share * OUTPUT * alone_s
    found = np.bincount(asked.access[begun], minlength=3)
    np.testing.assert_allclose(found, expected * (1 - 1 / OUTPUT), atol=5 * np.sqrt(expected).max())
    assert (asked.arrival_s[begun] <= alone_s[asked.access[begun]]).all()
    assert asked.output[begun].mean() == pytest.approx(OUTPUT / 2, rel=0.05)
    arriving = asked.arrival_s[~begun & (asked.arrival_s > alone_s.max())]
    assert arriving.size == pytest.approx(100.0 * 1.6, abs=5 * np.sqrt(160))


@pytest.mark.parametrize("key", ["letter/slimcaching", "own/substitute-only-1"])
def test_a_full_start_comes_to_what_filling_comes_to(bench: Bench, key: str) -> None:
    run = loaded(bench, key)
    settings = from_rest(run)
    assert run.begins_full(settings)
    samples, full = run.simulated(settings)
    assert full
    rest = simulate(run.engine, run.deployment, run.trace, settings)
    for samples_of in (samples, rest):
        assert min(one.token_s.size for one in samples_of) > 1000
    for measured in (
        lambda one: one.token_s.mean(),
        lambda one: one.before.running,
        lambda one: one.ledger.hops / one.ledger.tokens,
    ):
        found = np.mean([measured(one) for one in samples])
        assert found == pytest.approx(np.mean([measured(one) for one in rest]), rel=0.15)
    assert samples[0].before.time_s < rest[0].before.time_s / 2


def test_only_what_takes_long_to_fill_in_an_open_loop_begins_full(bench: Bench) -> None:
    run = loaded(bench, "pinned/exact")
    settings = from_rest(run)
    assert run.begins_full(settings)
    assert not replace(run, tokens=10**6).begins_full(settings)
    assert not run.begins_full(replace(settings, load=Load(concurrency=8)))
    unequal = replace(LOAD, fixed_lengths=False)
    assert not run.begins_full(replace(settings, load=unequal))


def test_where_tokens_wait_the_cluster_fills_from_rest(bench: Bench) -> None:
    run = loaded(bench, "pinned/exact")
    settings = from_rest(run)
    hurried = replace(run, alone_s=run.alone_s / 2)  # As if tokens took twice as long under load.
    assert hurried.begins_full(settings)
    (sample,), full = hurried.simulated(settings)
    assert not full
    assert sample.before.time_s == settings.warm_up_s


def test_the_report_says_who_began_full() -> None:
    row = {"title": "EPLB", "began_full": True}
    (sentence,) = full_sentence([row, row, {"title": "exact", "began_full": False}])
    assert sentence.endswith("Here those of: EPLB.")
    assert full_sentence([{"title": "exact", "began_full": False}]) == []


def test_rows_under_load_carry_whether_they_began_full() -> None:
    bench = Bench(world=tiny_world(), effort=quick())
    rows = UnderLoad().measure(bench)["rows"]
    assert {row["began_full"] for row in rows} <= {True, False}
    for row in rows:
        assert row["began_full"] == ((row["key"], row["rate_per_s"]) in bench.began_full)


def test_service_is_that_of_whole_requests_at_the_pace_of_their_tokens(bench: Bench) -> None:
    """The paper's 300 ms are for a request: of 30 tokens that is 10 ms a token."""
    run = loaded(bench, "pinned/exact")
    (sample,) = simulate(run.engine, run.deployment, run.trace, from_rest(run))
    slow = replace(sample, pace_s=np.array([0.002, 0.010, 0.011, 0.005]))
    row = load_row([slow, replace(sample, pace_s=np.array([0.020]))], 0.3, OUTPUT)
    assert row["requests"] == 5
    assert row["sla_share"] == pytest.approx(3 / 5)
    assert row["request_ms"] == pytest.approx(1e3 * OUTPUT * 0.048 / 5)
    assert row["request_quantiles_ms"][-1] == pytest.approx(1e3 * OUTPUT * 0.020)


def test_a_request_that_is_measured_whole_took_its_tokens_together(bench: Bench) -> None:
    """All that arrive after the warm-up and finish: as many tokens as asked for, none elsewhere."""
    run = loaded(bench, "pinned/exact")
    settings = replace(from_rest(run), warm_up_s=0.0, duration_s=3.0)
    settings = replace(settings, load=replace(LOAD, rate_per_s=20.0, requests=10))
    (sample,) = simulate(run.engine, run.deployment, run.trace, settings)
    assert sample.request_s.size == sample.pace_s.size == 10
    np.testing.assert_allclose(np.sort(OUTPUT * sample.pace_s), np.sort(sample.request_s))
