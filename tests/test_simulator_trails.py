"""What a token that exited leaves in the layers left: tokens after it wait for it where they need
it, and nobody goes on with it once its request is over. Times are computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated import World, drained, slowed, unchanging, world
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Kind
from trimmoe.core.specs import straight_times
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.build import deploy
from trimmoe.simulator.arrivals import Requests
from trimmoe.simulator.measure import Sample
from trimmoe.simulator.run import simulate
from trimmoe.simulator.settings import Load, Prefill, SimulationSettings
from trimmoe.simulator.state import make_state, with_room
from trimmoe.simulator.tables import RequestTable
from trimmoe.simulator.turns import follow, trailed
from trimmoe.simulator.world import DENSE, NONE, TRAIL, make_rows, make_world

LAYERS = 3
EXITING: dict[str, Any] = {
    "exit_state": ExitState.DENSE,
    "exit_risk": None,
    "exits_charged": False,
    "exits_weighed": False,
}


def stages(route: Sequence[int], way_s: float = 0.0) -> World:
    """Servers on a route: a layer's attention takes a second, however many tokens are in the batch,
    and everything else no time but the way from one server to another. All users are at the
    first."""
    one = world(
        layers=LAYERS, experts=1, top_k=1, servers=max(route) + 1, budget=0.0,
        **(EXITING | unchanging()),
    )  # fmt: skip
    plan = one.deployment.plan
    servers = plan.cluster.server_count
    hosts = np.zeros_like(plan.hosts)
    hosts[list(route), np.arange(LAYERS)] = True
    cluster = replace(
        plan.cluster,
        access_share=np.eye(servers)[0],
        bandwidth_bytes_per_s=np.full((servers, servers), np.inf),
        delay_s=way_s * (1.0 - np.eye(servers)),
    )
    routes = np.broadcast_to(route, plan.routes.shape).copy()
    plan = replace(plan, cluster=cluster, hosts=hosts, routes=routes)
    engine = make_engine(plan, one.profile, one.model, one.engine.settings)
    cost = replace(
        engine.cost,
        dense_s=np.ones_like(engine.cost.dense_s),
        expert_s=np.zeros_like(engine.cost.expert_s),
    )
    deployment = deploy(plan, one.profile, one.model, one.engine.settings.accounting)
    return replace(one, engine=replace(engine, cost=cost), deployment=deployment)


def answered(
    one: World,
    confidence: np.ndarray,
    lengths: Sequence[int],
    *,
    seed: int = 0,
    prompt: int = 0,
    budget: float = 0.0,
    batch_share: float = 1.0,
) -> Sample:
    """Requests for so many tokens each behind so long prompts, which begin together, with these
    confidences [T, N]."""
    count = len(lengths)
    nothing = np.zeros(count, dtype=np.int64)
    asked = Requests(
        arrival_s=np.zeros(count),
        access=nothing,
        sequence=np.arange(count),
        offset=nothing,
        prompt=np.full(count, prompt),
        output=np.array(lengths),
    )
    wanted = SimulationSettings(
        load=Load(concurrency=count, prefill=Prefill.CHUNKED if prompt else Prefill.EXCLUDED),
        budget=budget,
        confidence=0.5,
        warm_up_s=0.0,
        duration_s=200.0,
        seeds=(seed,),
        batch_share=batch_share,
        control_s=10.0,
    )
    trace = replace(one.trace, confidence=confidence)
    (sample,) = simulate(one.engine, one.deployment, trace, wanted, requests=asked)
    assert sample.after.in_flight == sample.after.running == 0
    return sample


def played(one: World, depths: Sequence[Sequence[int]]) -> Sample:
    """Requests that begin together; `depths` says after how many layers each token is done."""
    confidence = np.zeros_like(one.trace.confidence)
    for request, tokens in enumerate(depths):
        for number, depth in enumerate(tokens):
            confidence[request * one.trace.length + number, depth - 1 :] = 1.0
    sample = answered(one, confidence, [len(tokens) for tokens in depths])
    exited = sum(LAYERS - depth for tokens in depths for depth in tokens)
    assert sample.all_ledger.kinds[:, Kind.EXITED].sum() == exited
    return sample


def finished_s(sample: Sample, request: int) -> list[float]:
    log = sample.all_units
    return log.finished_s[log.request == request].tolist()


def test_a_token_enters_a_layer_only_after_the_trail_of_the_one_before() -> None:
    """A token of the first request and one of the second begin together on one server. The second
    request's exits after one layer; its next one, b, is through that layer when its trail t has
    not had its turn in the following one, and has to let the first request's, a, go ahead, with
    whom it would have gone:

        0    1    2    3    4    5    6    7    8
        | at | b  | a  | t  | b  | a  | t  | b  |
    """
    sample = played(stages([0, 0, 0]), [[3], [1, 3]])
    assert finished_s(sample, 0) == [6.0]
    assert finished_s(sample, 1) == [1.0, 8.0]
    assert sample.after.served[0, DENSE].tolist() == [6, 7]
    assert sample.after.served[0, TRAIL].tolist() == [2, 2]


def test_without_an_exit_before_it_a_token_goes_with_the_others() -> None:
    sample = played(stages([0, 0, 0]), [[3, 3], [3, 3]])
    assert finished_s(sample, 0) == finished_s(sample, 1) == [3.0, 6.0]


def test_trails_wait_for_trails() -> None:
    """Two tokens in a row exit after one layer, c passes all; t and u are their trails:

    0    1    2    3    4    5    6    7    8    9
    | t  | u  | c  | t  | u  | c  | t  | u  | c  |
    """
    sample = played(stages([0, 0, 0]), [[1, 1, 3]])
    assert finished_s(sample, 0) == [1.0, 2.0, 9.0]
    assert sample.after.served[0, TRAIL].tolist() == [4, 4]


def test_a_token_that_exits_in_its_turn_is_done_before_the_trail_it_waited_for() -> None:
    """b waits for the trail t in the second layer and exits there:

    0    1    2    3    4
    | t  | b  | t  | b  |
    """
    sample = played(stages([0, 0, 0]), [[1, 2]])
    assert finished_s(sample, 0) == [1.0, 4.0]


@pytest.mark.parametrize(("way_s", "passed"), [(0.4, 1), (0.6, 2)])
def test_a_trail_ends_where_word_has_come_that_its_request_is_over(
    way_s: float, passed: int
) -> None:
    """The only token exits where the second layer is, 1 + way; its user has it after another way,
    and word of it is there after a third. Its trail is through the second layer at 2 + way."""
    sample = played(stages([0, 1, 1], way_s), [[1]])
    assert finished_s(sample, 0) == pytest.approx([1.0 + 2 * way_s])
    assert sample.after.served[1, TRAIL, 1] == passed


def exiting(state: ExitState) -> World:
    """Every token exits as soon as the profile lets it."""
    eager: dict[str, Any] = EXITING | {"exit_state": state, "confidence": 0.0, "audit_share": 0.0}
    return world(**eager)


def unheard_of(one: World) -> World:
    """The same with all users at a server so far away that no word of theirs comes in time, and
    nothing but users on it."""
    plan = one.deployment.plan
    hosts, delay_s = plan.hosts.copy(), plan.cluster.delay_s.copy()
    hosts[1] |= hosts[0]
    hosts[0] = False
    delay_s[0, 1:] = 1e4
    share = np.eye(delay_s.shape[0])[0]
    cluster = replace(plan.cluster, access_share=share, delay_s=delay_s)
    routes = np.maximum(plan.routes, 1)
    plan = replace(plan, cluster=cluster, hosts=hosts, routes=routes)
    engine = make_engine(plan, one.profile, one.model, one.engine.settings)
    deployment = deploy(plan, one.profile, one.model, one.engine.settings.accounting)
    return replace(one, engine=engine, deployment=deployment)


@pytest.mark.parametrize("state", ExitState)
def test_what_exits_leave_travels_as_the_ledger_says_and_takes_time_where_it_passes(
    state: ExitState,
) -> None:
    one = unheard_of(exiting(state))
    sample = drained(one, duration_s=1e6, control_s=1e5)
    np.testing.assert_array_equal(sample.after.sent, sample.after.received)
    np.testing.assert_array_equal(sample.after.sent[0], sample.all_ledger.messages)
    exited = sample.all_ledger.kinds[:, Kind.EXITED].sum()
    assert exited > 100
    of_tokens = sample.all_units.decoded.sum() * one.model.layer_count
    served = sample.after.served[:, :, 1].sum(0)
    along, apart = state is ExitState.WHOLE, state is ExitState.DENSE
    assert served[DENSE] == of_tokens - exited * (not along)
    assert served[TRAIL] == exited * apart


@pytest.mark.parametrize("state", ExitState)
def test_only_what_nobody_wants_any_more_is_not_sent(state: ExitState) -> None:
    sample = drained(exiting(state))
    np.testing.assert_array_equal(sample.after.sent, sample.after.received)
    missing = sample.all_ledger.messages - sample.after.sent[0]
    assert (missing >= 0).all()
    if state is ExitState.FROZEN:
        assert missing.sum() == 0
    exited = sample.all_ledger.kinds[:, Kind.EXITED].sum()
    served = sample.after.served[:, :, 1].sum(0)
    of_tokens = sample.all_units.decoded.sum() * 4 - exited
    trailed = served[DENSE] - of_tokens if state is ExitState.WHOLE else served[TRAIL]
    assert trailed <= exited
    # Of forty requests of some six tokens.
    assert trailed > 0.6 * exited or state is ExitState.FROZEN


def test_nobody_refers_to_a_trail_that_has_ended() -> None:
    """The middle one of three ends early, while the first is elsewhere and the last waits."""
    nothing = np.zeros(1, dtype=np.int64)
    requests = Requests(
        arrival_s=np.zeros(1), access=nothing, sequence=nothing, offset=nothing, prompt=nothing,
        output=nothing + 3,
    )  # fmt: skip
    asked = RequestTable.of(requests, 1).asked
    rows, state = make_rows(3, LAYERS, 1), with_room(make_state(1, LAYERS, 1), 8)
    rows.request[:], rows.layers[:], rows.layer[:], rows.trailing[:] = 0, LAYERS, 1, True
    follow(rows, 1, 0)
    follow(rows, 2, 1)
    rows.parked[2] = True
    one = stages([0, 0, 0])
    constants = make_world(
        one.engine.cost,
        one.deployment.plan.cluster,
        one.engine.routes,
        batch_times=straight_times(1.0),
        max_batch=None,
        link_queues=False,
        closed=True,
        endless=False,
        frozen=False,
        whole=True,
        drafts=False,
        guesses=0,
        chunks=False,
        segments=False,
        slots=1,
    )
    trailed(constants, rows, asked, state, 1)
    assert rows.leader.tolist() == rows.follower.tolist() == [NONE] * 3
    assert rows.trailing.tolist() == [True, False, True]
    assert not rows.parked.any(), "nobody is left to wake it"


@settings(max_examples=10)
@given(st.integers(0, 2**31), st.integers(2, 5))
def test_when_rows_are_used_again_makes_no_difference(seed: int, servers: int) -> None:
    """Control instants give back the rows of tokens whose trails are through; nobody may still
    wait for them, or they for anybody."""
    often_out: dict[str, Any] = unchanging() | EXITING | {"confidence": 0.3}
    one = world(seed=seed, servers=servers, layers=6, **often_out)
    slow = replace(one, engine=slowed(one.engine, 300.0))
    load = Load(concurrency=12, output_tokens=4, prompt_tokens=3, prefill_chunk=2)
    often, once = (slow.run(load, duration_s=2.0, control_s=each) for each in (0.02, 50.0))
    np.testing.assert_array_equal(often.all_units.finished_s, once.all_units.finished_s)
    np.testing.assert_array_equal(often.after.served, once.after.served)
    np.testing.assert_array_equal(often.after.sent, once.after.sent)
