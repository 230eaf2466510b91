"""What servers save that have just worked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import random_cluster, random_model_spec
from trimmoe.core.specs import IntArray
from trimmoe.cost.model import CostModel, cost_model
from trimmoe.cost.warmth import WARM_S, WARM_SHARE, rests_s, times_as_long, warm_shares

SHARES = st.floats(0.0, 1.0)
RESTS = st.floats(0.0, 10.0)


def measured(seed: int, machine: list[int], at_once: list[float]) -> CostModel:
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng)
    cost = cost_model(model, random_cluster(rng, servers=len(machine)))
    return replace(
        cost,
        token_s=np.zeros(len(machine)),
        machine=np.array(machine),
        at_once=np.array(at_once),
    )


@given(warm=SHARES, rested_s=RESTS, longer_s=RESTS)
def test_the_longer_a_server_waited_the_longer_it_takes(
    warm: float, rested_s: float, longer_s: float
) -> None:
    times = times_as_long(warm, rested_s)
    assert 1.0 - warm <= times <= times_as_long(warm, rested_s + longer_s) <= 1.0


def test_after_no_wait_the_share_is_saved_and_after_a_long_one_nothing() -> None:
    assert times_as_long(WARM_SHARE, 0.0) == 1.0 - WARM_SHARE
    assert times_as_long(WARM_SHARE, 100 * WARM_S) == pytest.approx(1.0)


def test_servers_that_share_cores_save_less() -> None:
    """The first has a core to itself, the others three quarters and half of one."""
    cost = measured(1, [0, 1, 1, 1, 1, 2, 2], [1.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0])
    shares = np.array([1.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0])
    assert warm_shares(cost) == pytest.approx(WARM_SHARE * shares)
    assert not warm_shares(replace(cost, token_s=None)).any(), "nothing was measured"


@given(seed=st.integers(0, 99))
def test_servers_wait_while_others_have_the_token(seed: int) -> None:
    cost = measured(seed, [0, 1, 2], [1.0, 1.0, 1.0])
    rng = np.random.default_rng(seed)
    routes: IntArray = rng.integers(0, 3, (3, cost.layer_count))
    routes[0] = 0
    rests = rests_s(cost, routes, 1)
    assert (rests >= 0.0).all()
    assert rests[0] == 0.0, "it has all layers"
    layer_s = cost.dense_s + cost.expert_s.mean(axis=2)
    for server, route in enumerate(routes.tolist()):
        places = [server, *route, server]
        sent = [cost.token_transfer_s, *[cost.transfer_s] * (len(route) - 1), cost.token_transfer_s]
        way_s = sum(s[a, b] for s, a, b in zip(sent, places, places[1:], strict=False))
        others = [layer_s[m, at] for at, m in enumerate(route) if m != server]
        assert rests[server] == pytest.approx(way_s + sum(others))
