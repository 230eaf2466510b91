"""Closing the books of exited tokens: where what they leave goes, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from byhand import PLAIN, Walk, hosting, one_bin, skips, world
from factories import random_cluster, random_model_spec
from trimmoe.core.exit_states import ExitState
from trimmoe.core.wave import Wave
from trimmoe.cost.model import Accounting, cost_model
from trimmoe.engine.books import closed
from trimmoe.engine.state import Account, new_wave

ROUTES = np.array([[0, 0, 1, 1, 0, 2], [2, 2, 2, 2, 2, 2]])
PAIR_MS = [[0, 10], [10, 0]]
RNG = np.random.default_rng(2)
MODEL = random_model_spec(RNG, layers=6)
CLUSTER = random_cluster(RNG, servers=3)


def left_after(layer: int, route: int, state: ExitState, accounting: Accounting) -> dict:
    """Messages by source and target that an exit after `layer` layers adds."""
    cost = cost_model(MODEL, CLUSTER, accounting)
    server = np.array([ROUTES[route, layer] if layer < 6 else ROUTES[route, 5]])
    wave = new_wave(
        (7,),
        [Account(access=1, route=route, budget=0.5, confidence=0.9, balance=0.0)],
        draws=np.zeros(1), server=server, allowance=np.array([0.5]),
        confidence_needed=np.array([0.9]), loss_weight=np.array([0.5]),
        exit_loss=np.array([0.2]), start_s=np.zeros(1), layer_count=6, server_count=3,
    )  # fmt: skip
    done: Wave = closed(cost, ROUTES, replace(wave, layer=layer), wave.alive, state)
    assert done.loss[0] == (0.2 if layer < 6 else 0.0)
    messages = done.messages[0]
    pairs = zip(*np.nonzero(messages), strict=True)
    return {(int(a), int(b)): int(messages[a, b]) for a, b in pairs}


@pytest.mark.parametrize(
    ("layer", "dense", "frozen"),
    [
        (1, {(0, 1): 1, (1, 0): 1, (0, 2): 1}, {(0, 1): 1, (0, 2): 1}),
        (3, {(1, 0): 1, (0, 2): 1}, {(1, 0): 1, (1, 2): 1}),
        (5, {}, {}),
        (6, {}, {}),
    ],
)
def test_a_dense_state_goes_along_the_route_and_a_frozen_one_to_all_of_it(
    layer: int, dense: dict, frozen: dict
) -> None:
    for state, expected in ((ExitState.DENSE, dense), (ExitState.FROZEN, frozen)):
        assert left_after(layer, 0, state, Accounting.PINNED) == expected


@pytest.mark.parametrize("state", list(ExitState))
def test_nothing_travels_on_one_server_or_where_the_cache_is_free(state: ExitState) -> None:
    assert left_after(2, 1, state, Accounting.PINNED) == {}
    assert left_after(1, 0, state, Accounting.MIGRATE) == {}


def test_rounding_leaves_no_balance_below_nothing() -> None:
    """0.1 + 0.2 is a little more than 0.3; what is not spent is kept."""
    account = Account(access=1, route=0, budget=0.5, confidence=0.9, balance=0.3)
    assert account.settled(0.0, 0.1 + 0.2).balance == 0.0
    assert account.settled(0.5, 0.3).balance == 0.5


def test_a_layer_that_is_skipped_drops_no_slots() -> None:
    """Layer 0 is 10 ms away, and a skip of it loses 4 units; layer 1 is here and runs."""
    made = world(hosting([[], [0, 1], [0, 1]], [[0, 1], [], []]), PAIR_MS, skip=one_bin([4] * 3))
    walk = Walk(engine=made.engine(PLAIN))
    walk.arrive()
    assert skips(walk.layer()[0])
    assert (walk.wave.slots_run.tolist(), walk.wave.slots_dropped.tolist()) == ([0], [0])
    assert not skips(walk.layer()[0])
    assert (walk.wave.slots_run.tolist(), walk.wave.slots_dropped.tolist()) == ([1], [0])
