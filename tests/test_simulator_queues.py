"""Queues and clocks against what is known of them: formulas, order of events, drawn requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from simulated import World, world
from trimmoe.core.errors import UserError
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.build import deploy
from trimmoe.simulator.ahead import uniform
from trimmoe.simulator.arrivals import Source
from trimmoe.simulator.heap import pop, push
from trimmoe.simulator.measure import Sample, estimate
from trimmoe.simulator.settings import Load, Prefill, SimulationSettings
from trimmoe.simulator.state import make_state, with_room
from trimmoe.simulator.world import DENSE, HEAP_SIZE

SERVICE_S = 0.01


def one_queue(layers: int = 1) -> World:
    """One server, one expert a layer; attention takes no time, the expert a fixed one."""
    one = world("exact", layers=layers, experts=1, top_k=1, servers=1)
    cost = one.engine.cost
    cost = replace(
        cost,
        dense_s=np.zeros_like(cost.dense_s),
        expert_s=np.full_like(cost.expert_s, SERVICE_S),
    )
    return replace(one, engine=replace(one.engine, cost=cost))


def single_tokens(use: float, **changes) -> Load:
    load = Load(
        rate_per_s=use / SERVICE_S, output_tokens=1, fixed_lengths=True, prefill=Prefill.EXCLUDED
    )
    return replace(load, **changes)


@pytest.mark.parametrize("use", [0.3, 0.7])
def test_waiting_of_a_single_queue_is_that_of_m_d_1(use: float) -> None:
    """Poisson arrivals, fixed service, one at a time: the mean wait is use * s / 2 (1 - use)."""
    one = one_queue()
    waits = []
    for seed in range(4):
        sample = one.run(
            single_tokens(use),
            warm_up_s=20.0,
            duration_s=200.0,
            seeds=(seed,),
            max_batch=1,
            control_s=10.0,
        )
        waits.append(float(sample.token_s.mean()) - SERVICE_S)
        queued_s = (sample.after.waited_s - sample.before.waited_s).sum()
        assert queued_s / sample.token_s.size == pytest.approx(waits[-1], rel=0.01)
        assert sample.server_use[0] == pytest.approx(use, rel=0.05)
    expected = use * SERVICE_S / (2.0 * (1.0 - use))
    assert np.mean(waits) == pytest.approx(expected, rel=0.06)


def test_a_metronome_below_capacity_never_waits() -> None:
    sample = one_queue().run(
        single_tokens(0.9, burstiness=0.0), duration_s=20.0, max_batch=1, control_s=10.0
    )
    np.testing.assert_allclose(sample.token_s, SERVICE_S, atol=1e-12)


def test_bursts_wait_longer_than_poisson() -> None:
    one = one_queue()
    smooth, bursty = (
        one.run(single_tokens(0.6, burstiness=b), duration_s=100.0, max_batch=1, control_s=10.0)
        for b in (1.0, 8.0)
    )
    assert bursty.token_s.mean() > 2.0 * smooth.token_s.mean()


def batches(sample: Sample) -> tuple[int, int]:
    """Batches and units that the first server served."""
    count, units = sample.after.served[0, DENSE].tolist()
    return count, units


def test_what_is_ready_at_one_instant_is_one_batch() -> None:
    """Requests that start together stay together: every batch holds all of them."""
    one = one_queue()
    load = Load(concurrency=6, output_tokens=10, fixed_lengths=True, prefill=Prefill.EXCLUDED)
    together = one.run(load, duration_s=1.005, batch_share=0.0)
    count, units = batches(together)
    assert units == 6 * count
    np.testing.assert_allclose(together.token_s, 6 * SERVICE_S, atol=1e-12)
    shared = one.run(load, duration_s=1.005, batch_share=0.9)
    np.testing.assert_allclose(shared.token_s, SERVICE_S * (0.9 + 0.1 * 6), atol=1e-12)
    apart = one.run(load, duration_s=1.005, max_batch=1)
    count, units = batches(apart)
    assert units == count


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 1.5, 3.0]), st.integers(0, 2)), max_size=60))
def test_simultaneous_events_come_by_priority_then_as_they_were_scheduled(events) -> None:
    state = with_room(make_state(1, 1, 1), 64)
    for ticket, (time_s, priority) in enumerate(events):
        push(state, time_s, priority, 3, ticket)
    seen = []
    while state.numbers[HEAP_SIZE]:
        seen.append((state.heap_time[0], int(state.heap_what[0]) // 8))
        pop(state)
    expected = sorted(
        ((time_s, priority, ticket) for ticket, (time_s, priority) in enumerate(events))
    )
    assert seen == [(time_s, ticket) for time_s, _, ticket in expected]


def test_a_long_link_queue_is_first_in_first_out() -> None:
    """One token id after another: with slow links the last of a burst waits for all before it."""
    one = world("exact", layers=1, experts=1, top_k=1, servers=2)
    plan = one.deployment.plan
    hosts = np.zeros_like(plan.hosts)
    hosts[1] = True
    cluster = replace(
        plan.cluster,
        access_share=np.array([1.0, 0.0]),
        bandwidth_bytes_per_s=np.array([[np.inf, 1e3], [1e9, np.inf]]),
        delay_s=np.array([[0.0, 0.05], [0.05, 0.0]]),
    )
    plan = replace(plan, cluster=cluster, hosts=hosts, routes=np.ones_like(plan.routes))
    engine = make_engine(plan, one.profile, one.model, one.engine.settings)
    deployment = deploy(plan, one.profile, one.model, one.engine.settings.accounting)
    load = Load(concurrency=5, output_tokens=1, fixed_lengths=True, prefill=Prefill.EXCLUDED)
    slow = replace(one, engine=engine, deployment=deployment)
    id_s = 8 / 1e3
    sending = slow.run(load, duration_s=5 * id_s)
    assert sending.link_use[0, 1] == pytest.approx(1.0)
    finished_s = slow.run(load, duration_s=0.2).all_units.finished_s[:5]
    np.testing.assert_allclose(np.diff(finished_s), id_s, atol=1e-4)


def two_stages(way_s: float) -> World:
    """Two servers, each with one of two layers; attention and links take no time, an expert as
    long for a batch as for one token, and the way between the servers `way_s`."""
    one = world("exact", layers=2, experts=1, top_k=1, servers=2)
    plan = one.deployment.plan
    hosts = np.zeros_like(plan.hosts)
    hosts[[0, 1], [0, 1]] = True
    cluster = replace(
        plan.cluster,
        access_share=np.array([1.0, 0.0]),
        bandwidth_bytes_per_s=np.full((2, 2), np.inf),
        delay_s=np.array([[0.0, way_s], [way_s, 0.0]]),
    )
    routes = np.broadcast_to([0, 1], plan.routes.shape).copy()
    plan = replace(plan, cluster=cluster, hosts=hosts, routes=routes)
    engine = make_engine(plan, one.profile, one.model, one.engine.settings)
    cost = replace(
        engine.cost,
        dense_s=np.zeros_like(engine.cost.dense_s),
        expert_s=np.full_like(engine.cost.expert_s, SERVICE_S),
    )
    deployment = deploy(plan, one.profile, one.model, one.engine.settings.accounting)
    return replace(one, engine=replace(engine, cost=cost), deployment=deployment)


@pytest.mark.parametrize("chunk", [24, 8, 5, 1])
def test_a_chunk_enters_a_layer_as_soon_as_the_chunk_before_has_left_it(chunk: int) -> None:
    """Two stages and c chunks: the last one is through the first stage after c services, then
    there is the way, its own second service and the way back. Nobody waits for a place."""
    way_s = 0.5 * SERVICE_S
    load = Load(
        rate_per_s=1.0, requests=1, burstiness=0.0, prompt_tokens=24, output_tokens=1,
        fixed_lengths=True, prefill_chunk=chunk,
    )  # fmt: skip
    sample = two_stages(way_s).run(load, duration_s=3.0, batch_share=1.0)
    chunks = -(-24 // chunk)
    expected_s = (chunks + 1) * SERVICE_S + 2 * way_s
    np.testing.assert_allclose(sample.first_token_s, [expected_s])
    log = sample.all_units
    assert not log.decoded.any()
    began_s = log.began_s[0]
    ends_s = began_s + way_s + SERVICE_S * (2.0 + np.arange(chunks))
    ends_s[-1] += way_s
    np.testing.assert_allclose(log.finished_s, ends_s)


def test_prompts_of_one_servers_users_set_out_when_they_come() -> None:
    way_s = 0.5 * SERVICE_S
    load = Load(concurrency=3, prompt_tokens=2, output_tokens=1, fixed_lengths=True)
    log = two_stages(way_s).run(load, duration_s=0.1).all_units
    np.testing.assert_allclose(np.sort(log.began_s)[:3], 0.0)


def test_prompts_that_come_together_are_read_one_after_the_other() -> None:
    """On one server the first one's token is there when it has passed all layers by itself."""
    load = Load(concurrency=3, prompt_tokens=8, output_tokens=1, fixed_lengths=True)
    sample = one_queue(layers=4).run(load, duration_s=0.5, batch_share=1.0)
    np.testing.assert_allclose(sample.first_token_s[:3], 4 * SERVICE_S * np.arange(1, 4))


def test_others_tokens_go_on_between_the_chunks_of_a_long_prompt() -> None:
    """A token of another request waits for one chunk at each server, not for the whole prompt."""
    one = two_stages(0.0)
    load = Load(concurrency=2, prompt_tokens=40, output_tokens=30, fixed_lengths=True)
    longest_s = {
        chunk: float(
            one.run(
                replace(load, prefill_chunk=chunk), duration_s=3.0, batch_share=0.0
            ).token_s.max()
        )
        for chunk in (40, 4)
    }
    assert longest_s[40] > 40 * SERVICE_S
    assert longest_s[4] < (2 * 4 + 4) * SERVICE_S


def test_arrivals_have_the_rate_and_burstiness_that_were_asked_for() -> None:
    share = np.array([0.1, 0.6, 0.3])
    for burstiness in (0.0, 1.0, 5.0):
        load = Load(rate_per_s=20.0, burstiness=burstiness, output_tokens=7.0)
        drawn = Source(load, share, sequences=9, length=4, seed=1).draw(20_000)
        gaps = np.diff(drawn.arrival_s)
        assert gaps.mean() == pytest.approx(1 / 20, rel=0.06)
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burstiness, rel=0.15, abs=1e-9)
        assert drawn.output.mean() == pytest.approx(7.0, rel=0.05)
        assert drawn.output.min() == 1
        np.testing.assert_allclose(np.bincount(drawn.access) / 20_000, share, atol=0.02)


def test_requests_are_the_same_however_they_are_drawn() -> None:
    load, share = Load(rate_per_s=2.0), np.array([0.5, 0.5])
    whole = Source(load, share, sequences=9, length=4, seed=1).draw(30)
    parts = Source(load, share, sequences=9, length=4, seed=1)
    first, second = parts.draw(10), parts.draw(20)
    for name in ("arrival_s", "access", "sequence", "offset", "prompt", "output"):
        joined = np.concatenate([getattr(first, name), getattr(second, name)])
        np.testing.assert_allclose(joined, getattr(whole, name))


def test_draws_are_uniform_and_belong_to_their_token() -> None:
    requests, numbers = (axis.reshape(-1) for axis in np.meshgrid(np.arange(100), np.arange(50)))
    drawn = uniform(3, requests, numbers)
    assert stats.kstest(drawn, "uniform").pvalue > 0.01
    assert np.unique(drawn).size == drawn.size
    some = np.array([4, 999, 17])
    np.testing.assert_array_equal(uniform(3, requests[some], numbers[some]), drawn[some])
    assert (uniform(4, requests, numbers) != drawn).all()


def test_intervals_are_students() -> None:
    values = [1.0, 2.0, 3.0, 6.0, np.nan]
    found = estimate(values)
    low, high = stats.t.interval(0.95, 3, loc=3.0, scale=stats.sem(values[:4]))
    assert (found.mean, found.low_95, found.high_95) == pytest.approx((3.0, low, high))
    assert np.isnan(estimate([1.0]).low_95)
    assert np.isnan(estimate([np.nan]).mean)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda: Load(), "rate"),
        (lambda: Load(rate_per_s=1.0, concurrency=1), "rate"),
        (lambda: Load(rate_per_s=0.0), "rate"),
        (lambda: Load(concurrency=0), "concurrency"),
        (lambda: Load(rate_per_s=1.0, burstiness=-1.0), "burstiness"),
        (lambda: Load(rate_per_s=1.0, output_tokens=0.5), "token"),
        (lambda: Load(concurrency=2, requests=3), "requests"),
        (lambda: SimulationSettings(load=Load(rate_per_s=1.0), duration_s=0.0), "duration"),
        (lambda: SimulationSettings(load=Load(rate_per_s=1.0), batch_share=1.5), "share"),
        (lambda: SimulationSettings(load=Load(rate_per_s=1.0), seeds=()), "seed"),
        (lambda: SimulationSettings(load=Load(rate_per_s=1.0), max_batch=0), "batch"),
    ],
)
def test_settings_that_mean_nothing_are_refused(broken, says: str) -> None:
    with pytest.raises(UserError, match=says):
        broken()
