"""The engine on a virtual clock: what goes in comes out, and without load it is the cost model."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated import LENGTH, SEQUENCES, World, drained, slowed, unchanging, world
from trimmoe.core.errors import UserError
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Ledger
from trimmoe.core.trace import Trace
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.build import deploy
from trimmoe.simulator.arrivals import Source
from trimmoe.simulator.measure import Sample
from trimmoe.simulator.replay import replay
from trimmoe.simulator.settings import Load, Prefill
from trimmoe.simulator.world import EXPERTS

ALONE = Load(concurrency=1, output_tokens=5, fixed_lengths=True, prefill=Prefill.EXCLUDED)
HEAVY = Load(concurrency=60, output_tokens=8, prefill=Prefill.EXCLUDED)


@pytest.mark.parametrize("preset", ["exact", "substitute-only", "trimmoe", "paper"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_without_load_a_token_takes_what_the_cost_model_says(preset: str, top_k: int) -> None:
    # What an exited token leaves is under way with the next one, which may have to wait for it.
    one = world(preset, top_k=top_k, exit_state=ExitState.FROZEN, **unchanging())
    # One token can still meet itself on a link, which the cost model leaves out.
    sample = one.run(ALONE, link_queues=top_k == 1, duration_s=20.0)
    log = sample.all_units
    assert log.request.size > 30
    np.testing.assert_allclose(log.finished_s - log.began_s, log.expected_s, atol=1e-9, rtol=0)


def replayed(one: World, sample: Sample) -> tuple[np.ndarray, list[Ledger]]:
    """Which units are of requests that one stream has answered whole, and the ledgers of a replay
    of these."""
    log = sample.all_units
    whole = np.flatnonzero(np.bincount(log.request) == ALONE.output_tokens)
    assert whole.size > 5
    source = Source(
        ALONE,
        one.deployment.plan.cluster.access_share,
        sequences=SEQUENCES,
        length=LENGTH,
        seed=0,
    )
    asked = source.draw(whole.size)
    steps = np.arange(5)
    tokens = asked.sequence[:, None] * LENGTH + (asked.offset[:, None] + steps) % LENGTH
    columns = {
        item.name: getattr(one.trace, item.name)[tokens.reshape(-1)]
        for item in fields(Trace)
        if isinstance(getattr(one.trace, item.name), np.ndarray)
    }
    cut = Trace(header=one.trace.header, length=5, **columns)
    policy = one.engine.settings
    ledgers = replay(
        one.engine, cut, asked.access, budget=policy.budget, confidence=policy.confidence
    )
    return np.isin(log.request, whole), ledgers


@pytest.mark.parametrize("preset", ["exact", "trimmoe"])
def test_without_load_the_mean_is_the_expected_delay_of_a_replay(preset: str) -> None:
    one = world(preset, **unchanging())
    sample = one.run(ALONE, link_queues=False, duration_s=20.0)
    whole, ledgers = replayed(one, sample)
    log = sample.all_units
    mine = (log.finished_s - log.began_s)[whole]
    assert mine.mean() == pytest.approx(np.mean([one.delay_s for one in ledgers]), abs=1e-9)


@pytest.mark.parametrize("preset", ["trimmoe", "guessing"])
def test_tokens_spend_what_they_do_in_a_replay(preset: str) -> None:
    """Also those that set out on guesses, which may not touch what others leave."""
    one = world(preset, budget=0.1, **unchanging())
    sample = one.run(ALONE, duration_s=20.0)
    whole, ledgers = replayed(one, sample)
    spent = sample.all_units.loss[whole]
    assert spent.any()
    np.testing.assert_allclose(spent, [one.loss for one in ledgers], atol=1e-12)


@pytest.mark.parametrize("preset", ["exact", "trimmoe"])
def test_what_is_sent_is_received_and_is_what_the_ledger_says(preset: str) -> None:
    sample = drained(world(preset))
    np.testing.assert_array_equal(sample.after.sent, sample.after.received)
    np.testing.assert_array_equal(sample.after.sent[0], sample.all_ledger.messages)
    assert sample.all_ledger.hops > 0


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_papers_accounting_sends_what_the_papers_ledger_says(top_k: int) -> None:
    one = world("paper", top_k=top_k)
    load = Load(rate_per_s=20.0, requests=40, output_tokens=4, prefill=Prefill.EXCLUDED)
    sample = one.run(load, duration_s=60.0)
    assert sample.after.in_flight == 0
    np.testing.assert_array_equal(sample.after.sent, sample.after.received)
    np.testing.assert_array_equal(sample.after.sent[0], sample.all_ledger.messages)


def test_the_papers_accounting_has_no_prompts() -> None:
    with pytest.raises(UserError, match="exclude the prefill"):
        world("paper").run(Load(rate_per_s=1.0))


def test_every_token_layer_is_exactly_one_of_six_kinds() -> None:
    sample = drained(world())
    ledger, log = sample.all_ledger, sample.all_units
    assert ledger.kinds.sum(axis=1).tolist() == [ledger.tokens] * 4
    assert sample.ledger.kinds.sum(axis=1).tolist() == [int(log.decoded.sum())] * 4


def test_every_request_gets_all_its_tokens_one_after_another() -> None:
    one = world()
    sample = drained(one)
    share = one.deployment.plan.cluster.access_share
    load = Load(rate_per_s=20.0, burstiness=4.0, output_tokens=6, prompt_tokens=9)
    asked = Source(load, share, sequences=SEQUENCES, length=LENGTH, seed=0).draw(40)
    log = sample.all_units
    assert sample.output_tokens == asked.output.sum()
    assert sample.all_ledger.tokens == asked.prompt.sum() + asked.decoded.sum()
    assert sample.request_s.size == sample.first_token_s.size == 40
    assert (sample.first_token_s > 0).all()
    for request in range(40):
        mine = log.request == request
        began, finished = log.began_s[mine], log.finished_s[mine]
        chunks = -(-asked.prompt[request] // 4)
        assert (began[:chunks] == began[0]).all()
        assert began[0] >= asked.arrival_s[request]
        np.testing.assert_array_equal(began[chunks:], finished[chunks - 1 : -1])
        assert (np.diff(finished) >= 0).all()
        assert log.decoded[mine].tolist() == [False] * chunks + [True] * asked.decoded[request]


def test_littles_law() -> None:
    """Mean number in flight = rate x mean time; exact over a run that starts and ends empty, and
    about right over a window of a busy one."""
    sample = drained(world())
    log = sample.all_units
    assert sample.after.area == pytest.approx((log.finished_s - log.began_s).sum())
    busy = world().run(HEAVY, warm_up_s=2.0, duration_s=20.0)
    log = busy.all_units
    inside = log.finished_s >= 2.0
    rate = inside.sum() / busy.duration_s
    mean_s = (log.finished_s - log.began_s)[inside].mean()
    assert busy.mean_in_flight == pytest.approx(rate * mean_s, rel=0.02)
    assert busy.mean_in_flight == pytest.approx(60, rel=0.02)


def test_nothing_is_busier_than_always() -> None:
    one = world()
    heavy = replace(one, engine=slowed(one.engine, 300.0))
    sample = heavy.run(HEAVY, warm_up_s=1.0, duration_s=10.0)
    for use in (sample.server_use, sample.link_use):
        assert (use >= 0).all()
        assert (use <= 1 + 1e-9).all()
    assert sample.server_use.max() > 0.5
    assert sample.waiting_s.max() > 0


def test_load_makes_tokens_wait() -> None:
    one = world(**unchanging())
    slow = replace(one, engine=slowed(one.engine, 300.0))
    alone, crowd = (slow.run(load, duration_s=10.0) for load in (ALONE, HEAVY))
    assert crowd.token_s.mean() > 1.5 * alone.token_s.mean()
    assert len(crowd.token_s) > 3 * len(alone.token_s)


def test_reading_weights_once_makes_batches_cheaper() -> None:
    one = world(**unchanging())
    slow = replace(one, engine=slowed(one.engine, 300.0))
    shared, apart = (slow.run(HEAVY, duration_s=10.0, batch_share=s) for s in (0.9, 0.0))
    assert len(shared.token_s) > 1.5 * len(apart.token_s)


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    load = Load(rate_per_s=30.0, output_tokens=5, prompt_tokens=3)
    first, again, other = (world().run(load, duration_s=4.0, seeds=(s,)) for s in (1, 1, 2))
    np.testing.assert_array_equal(first.token_s, again.token_s)
    np.testing.assert_array_equal(first.after.sent, again.after.sent)
    assert first.ledger.loss == again.ledger.loss
    assert first.token_s.size != other.token_s.size or (first.token_s != other.token_s).any()


def test_deciding_ahead_decides_the_same_whenever_control_comes() -> None:
    """Without feedback the control interval is nothing but bookkeeping."""
    one = world(**unchanging())
    short, long = (one.run(HEAVY, duration_s=5.0, control_s=c) for c in (0.05, 50.0))
    np.testing.assert_array_equal(short.all_units.finished_s, long.all_units.finished_s)
    np.testing.assert_array_equal(short.all_units.loss, long.all_units.loss)


def test_feedback_reaches_decisions_at_control_instants() -> None:
    one = world(loss_weight=0.9, price_start=False, weight_step=0.5)
    steered, late = (one.run(HEAVY, duration_s=6.0, control_s=c) for c in (0.5, 50.0))
    assert steered.ledger.loss / steered.ledger.tokens > late.ledger.loss / late.ledger.tokens


@settings(max_examples=10)
@given(
    st.integers(0, 2**31),
    st.sampled_from(["trimmoe", "substitute-only", "guessing"]),
    st.sampled_from([0.0, 0.01, 0.1]),
    st.booleans(),
)
def test_no_budget_is_exceeded_under_load(seed: int, preset: str, budget: float, lying) -> None:
    """At no prefix of any answer, in bursts, with any calibration."""
    one = world(preset, seed=seed, lying=lying, budget=budget, confidence=0.3, exit_risk=None)
    load = Load(rate_per_s=80.0, requests=60, burstiness=9.0, output_tokens=6, prompt_tokens=4)
    log = one.run(load, duration_s=5.0, control_s=0.2).all_units
    for request in np.unique(log.request):
        mine = (log.request == request) & log.decoded
        spent = np.cumsum(log.loss[mine])
        assert (spent <= budget * np.arange(1, spent.size + 1) + 1e-9).all()
    assert (log.loss[~log.decoded] == 0).all()


def test_expected_waits_move_work_to_idle_servers() -> None:
    """Measured waiting, fed back, makes the policy avoid the servers that everybody waits for."""
    one = world("exact", servers=4, **unchanging())
    hosts = np.ones_like(one.deployment.plan.hosts)
    # Slots on the server of the attention wait for nobody, so there are none.
    hosts[0] = False
    routes = np.zeros_like(one.deployment.plan.routes)
    plan = replace(one.deployment.plan, hosts=hosts, routes=routes)
    deployment = deploy(plan, one.profile, one.model, one.engine.settings.accounting)
    engine = make_engine(plan, one.profile, one.model, one.engine.settings)
    slow = slowed(engine, 300.0)
    slow = replace(slow, cost=replace(slow.cost, dense_s=engine.cost.dense_s))
    deployment = replace(deployment, cost=slow.cost)
    everywhere = replace(one, deployment=deployment, engine=slow)
    blind, seeing = (
        everywhere.run(HEAVY, warm_up_s=5.0, duration_s=10.0, waiting_feedback=fed, max_batch=2)
        for fed in (False, True)
    )
    spread = [np.sort(each.after.served[1:, EXPERTS, 1]) for each in (blind, seeing)]
    most, second = (counts[-1] / counts.sum() for counts in spread)
    assert second < most


@pytest.mark.parametrize(
    ("layers", "experts", "servers"), [(1, 1, 1), (3, 1, 3), (1, 4, 2), (3, 4, 1)]
)
def test_worlds_with_one_of_something(layers: int, experts: int, servers: int) -> None:
    one = world(layers=layers, experts=experts, servers=servers, top_k=1)
    sample = drained(one)
    assert sample.all_ledger.tokens > 40
    if servers == 1:
        assert sample.after.sent.sum() == 0


def test_a_run_without_requests_is_empty() -> None:
    sample = world().run(Load(rate_per_s=1e-6), duration_s=1.0)
    assert sample.token_s.size == sample.output_tokens == sample.ledger.tokens == 0
    assert sample.server_use.max() == 0.0
