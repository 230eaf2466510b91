"""What software does with a message in the simulator: its receiver does it before another batch."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from simulated import World
from test_simulator_trails import LAYERS, answered, finished_s, stages
from timed import timed_machines
from trimmoe.core.machines import Precision
from trimmoe.core.specs import straight_times
from trimmoe.cost.batching import TOKEN_SHARE
from trimmoe.cost.warmth import WARM_S
from trimmoe.policy.build import make_policy
from trimmoe.simulator import links, loop
from trimmoe.simulator.links import handle
from trimmoe.simulator.service import _guesses_s, crowd, warmed
from trimmoe.simulator.world import DENSE, NONE, NOW

HOP_S, WAY_S = 0.5, 0.25
WHOLE_S = LAYERS + (LAYERS + 1) * (WAY_S + HOP_S)
"""From its user through all layers and back."""
FURTHER_S = (1.0 - TOKEN_SHARE) * HOP_S
"""What software takes for a further token that comes for the same batch, in one message or two."""


def with_software(one: World, *, token_s: float = 0.0) -> World:
    """The same, where a message takes its receiver half a second, and a token its user's server so
    long."""
    plan = one.deployment.plan
    machines = timed_machines(plan.cluster, one.model, hop_s=HOP_S, token_s=token_s)
    speeds = machines.applied(plan.cluster, one.model, Precision.NONE).speeds
    plan = replace(plan, cluster=replace(plan.cluster, speeds=speeds))
    cost = one.engine.cost
    servers = cost.server_count
    more_s = HOP_S * (1.0 - np.eye(servers))
    cost = replace(
        cost,
        token_s=np.full(servers, token_s),
        # Of two servers to a core no weights stay in its caches.
        machine=np.zeros(servers, dtype=np.int64),
        at_once=np.full(servers, servers / 2),
        transfer_s=cost.transfer_s + more_s,
        token_transfer_s=cost.token_transfer_s + more_s,
    )
    deployment = replace(one.deployment, plan=plan, cost=cost)
    policy = make_policy(deployment, one.profile, one.engine.settings)
    engine = replace(one.engine, cost=cost, policy=policy)
    return replace(one, engine=engine, deployment=deployment)


def test_a_lone_token_takes_what_the_cost_model_says() -> None:
    one = with_software(stages([1, 2, 3], WAY_S))
    sample = answered(one, np.zeros_like(one.trace.confidence), [2])
    assert finished_s(sample, 0) == pytest.approx([WHOLE_S, 2 * WHOLE_S])
    assert sample.all_units.expected_s == pytest.approx([WHOLE_S] * 2, rel=1e-4)


def test_the_loop_is_compiled_once_wherever_measured_times_lie() -> None:
    """Times of guesses are a column of what was measured. To compile the loop takes half a minute,
    once for each kind of arrays that it is given."""
    one = with_software(stages([1, 2, 3], WAY_S))
    column = np.ones((one.engine.cost.server_count, 2))[:, 0]
    engine = replace(one.engine, cost=replace(one.engine.cost, guess_s=column))
    answered(replace(one, engine=engine), np.zeros_like(one.trace.confidence), [2])
    assert len(loop.run_until.signatures) == 1


def test_it_keeps_servers_busy() -> None:
    """Two tokens through three servers, each of which handles one message for either."""
    one = with_software(stages([1, 2, 3], WAY_S))
    sample = answered(one, np.zeros_like(one.trace.confidence), [2])
    assert sample.after.server_busy_s[1:] == pytest.approx([2 * (1.0 + HOP_S)] * 3)


def test_tokens_in_one_batch_wait_for_each_others_messages() -> None:
    """What the second one adds to the first one's messages, on the way to each server and, in a
    message of its own, back to both users' server."""
    one = with_software(stages([1, 2, 3], WAY_S))
    sample = answered(one, np.zeros_like(one.trace.confidence), [1, 1])
    assert finished_s(sample, 0) == pytest.approx([WHOLE_S + 3 * FURTHER_S])
    assert finished_s(sample, 1) == pytest.approx([WHOLE_S + 4 * FURTHER_S])
    assert sample.after.served[1:, DENSE].tolist() == [[1, 2]] * 3


def test_what_a_token_takes_beside_its_layers_a_batch_takes_nearly_once() -> None:
    """Two seconds for one token; for two that begin together on their users' server a share of that
    more."""
    one = with_software(stages([0, 1, 2], WAY_S), token_s=2.0)
    nothing, whole_s = np.zeros_like(one.trace.confidence), WHOLE_S - WAY_S - HOP_S
    assert finished_s(answered(one, nothing, [1]), 0) == pytest.approx([whole_s + 2.0])
    both = answered(one, nothing, [1, 1])
    two_s = 2.0 * (2.0 - TOKEN_SHARE)
    assert finished_s(both, 0) == pytest.approx([whole_s + two_s + 2 * FURTHER_S])
    assert finished_s(both, 1) == pytest.approx([whole_s + two_s + 3 * FURTHER_S])


def test_what_a_token_takes_beside_its_layers_its_users_server_does() -> None:
    """Tokens whose layers are all elsewhere set out one after the other, two seconds and a little
    more after they began. The second one finds the first one's batch begun everywhere: its message
    is taken in before that goes on to its experts, and then it has a layer to wait for."""
    one = with_software(stages([1, 2, 3], WAY_S), token_s=2.0)
    nothing = np.zeros_like(one.trace.confidence)
    alone = answered(one, nothing, [1])
    assert finished_s(alone, 0) == pytest.approx([WHOLE_S + 2.0])
    assert alone.all_units.expected_s == pytest.approx([WHOLE_S + 2.0], rel=1e-4)
    both = answered(one, nothing, [1, 1])
    first_s = WHOLE_S + 2.0 + 3 * HOP_S
    assert finished_s(both, 0) == pytest.approx([first_s])
    assert finished_s(both, 1) == pytest.approx([first_s + 1.0])


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What handles messages is not compiled."""
    monkeypatch.setattr(links, "_occupied", links._occupied.py_func)
    monkeypatch.setattr(links, "warmed", warmed.py_func)
    monkeypatch.setattr(links, "crowd", crowd.py_func)


def server_alone(**more: object) -> SimpleNamespace:
    """A world of one server, of whose software a batch takes 95 % only once."""
    return SimpleNamespace(
        hop_s=np.array([2.0]), token_share=0.95, machine=np.zeros(1), at_once=np.ones(1), **more
    )


@pytest.mark.usefixtures("plainly")
def test_messages_are_handled_one_after_another_between_batches() -> None:
    """A batch runs until 5. The first message after it takes 2 s, the next a twentieth of that for
    each of two tokens, since the same batch follows; the first one of the next batch takes 2 s
    again, and a twentieth for its second token."""
    world = server_alone(warm=np.zeros(1), usual=np.ones(1))
    state = SimpleNamespace(
        clock=np.array([1.0, 0.0]),
        serving_until_s=np.array([5.0]),
        listens_s=np.array([5.0]),
        handled_s=np.array([0.0]),
    )
    came_s, handled_s = [1.0, 2.0, 8.0], []
    for now_s, units in zip(came_s, (1, 2, 2), strict=True):
        state.clock[NOW] = now_s
        if now_s == came_s[-1]:
            state.serving_until_s[0] = state.listens_s[0] = 9.0
        handle.py_func(world, state, 0, units)
        handled_s.append(float(state.handled_s[0]))
    assert handled_s == pytest.approx([7.0, 7.2, 11.1])


@pytest.mark.usefixtures("plainly")
def test_messages_are_handled_while_a_prompt_is_computed() -> None:
    """Which is done beside what reads them, until 5; only the next batch waits for both."""
    world = server_alone(warm=np.zeros(1), usual=np.ones(1))
    state = SimpleNamespace(
        clock=np.array([1.0, 0.0]),
        serving_until_s=np.array([5.0]),
        listens_s=np.zeros(1),
        handled_s=np.zeros(1),
    )
    handle.py_func(world, state, 0, 1)
    assert state.handled_s[0] == pytest.approx(3.0)


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize(
    ("rested_s", "times"), [(0.0, 0.5), (WARM_S, 1 - 0.5 / math.e), (9.0, 1.0)]
)
def test_whoever_has_just_worked_finds_its_weights_in_the_cache(
    rested_s: float, times: float
) -> None:
    """Half of what software takes after a long wait, which is what it usually takes here."""
    world = server_alone(warm=np.array([0.5]), usual=np.ones(1))
    state = SimpleNamespace(
        clock=np.array([5.0 + rested_s, 0.0]),
        serving_until_s=np.array([5.0]),
        listens_s=np.array([5.0]),
        handled_s=np.array([0.0]),
    )
    handle.py_func(world, state, 0, 1)
    assert state.handled_s[0] - state.clock[NOW] == pytest.approx(2.0 * times)


@pytest.mark.usefixtures("plainly")
def test_messages_take_longer_where_others_work_on_the_same_machine() -> None:
    """Two of three servers of a machine that can do one thing at a time."""
    world = SimpleNamespace(
        hop_s=np.full(3, 2.0), token_share=0.95, machine=np.zeros(3), at_once=np.ones(3),
        warm=np.zeros(3), usual=np.ones(3),
    )  # fmt: skip
    state = SimpleNamespace(
        clock=np.array([1.0, 0.0]),
        serving_until_s=np.array([0.0, 5.0, 0.5]),
        listens_s=np.zeros(3),
        handled_s=np.zeros(3),
    )
    handle.py_func(world, state, 0, 1)
    assert state.handled_s[0] == pytest.approx(1.0 + 2.0 * 2)


@pytest.mark.parametrize(("guesses", "takes_s"), [(1, 3.0 * 2.0), (2, 1.5 * 5.0)])
def test_nothing_is_drafted_behind_guesses_that_are_made_at_once(
    guesses: int, takes_s: float
) -> None:
    """A pass brings three guesses of two seconds each, with those behind what a head names, and one
    of five where it names nothing. A batch takes half as long again for a second row."""
    world = SimpleNamespace(
        dense_s=np.ones((1, 4)),
        pass_s=np.array([3.0 * 2.0]),
        pass_ends_s=np.array([3.0 * 0.5]),
        several_s=np.array([5.0]),
        several_ends_s=np.array([1.0]),
        token_batch_times=straight_times(0.5),
    )
    state = SimpleNamespace(
        batch_first=np.array([0]),
        batch_layer=np.array([0]),
        entry_unit=np.arange(2),
        batch_several=np.zeros(1, dtype=bool),
        entry_next=np.array([1, NONE] if guesses == 2 else [NONE, NONE]),
    )
    asked = SimpleNamespace(reads=np.ones(2, dtype=np.int64))
    assert _guesses_s.py_func(world, asked, state, 0) == pytest.approx(takes_s)
    assert state.batch_layer[0] == 3, "all layers at once"
    assert state.batch_several[0] == (guesses == 2)
