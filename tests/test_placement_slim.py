"""SlimCaching against small cases worked out by hand."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trimmoe.placement.seeds.slim import greedy_caches, knapsack, successive_caches

# Two servers, one layer of three experts of one byte: a call costs 1 at home, 5 away.
DELAY_S = np.where(np.eye(2, dtype=bool), 1.0, 5.0)[:, :, None, None] * np.ones((2, 2, 1, 3))
WEIGHT = np.array([[0.5, 0.3, 0.2]])
SIZES = np.ones((1, 3), dtype=np.int64)
EVEN = np.array([0.5, 0.5])


def test_top_1_caches_the_most_activated_experts_everywhere() -> None:
    """Each server has room for one: the saving is 4 s for its own users, none for the others."""
    hosts = greedy_caches(DELAY_S, WEIGHT, EVEN, SIZES, np.array([1, 1]))
    assert hosts[:, 0].tolist() == [[True, False, False], [True, False, False]]


def test_top_1_weighs_a_cache_by_the_users_it_serves() -> None:
    """Room for two at server 1 only, whose users are few: still its own most activated."""
    hosts = greedy_caches(DELAY_S, WEIGHT, np.array([0.9, 0.1]), SIZES, np.array([0, 2]))
    assert hosts[1, 0].tolist() == [True, True, False]


def test_top_k_fills_one_server_after_another() -> None:
    """What the larger server caches saves the smaller one nothing: it is as far as the cloud."""
    hosts = successive_caches(DELAY_S, WEIGHT, EVEN, SIZES, np.array([1, 2]))
    assert hosts[:, 0].tolist() == [[True, False, False], [True, True, False]]


def test_top_k_does_not_repeat_what_a_near_server_caches() -> None:
    """Server 0 reaches server 1 as fast as itself; the cloud is a third, farther one."""
    delay_s = np.full((3, 3, 1, 3), 9.0)
    delay_s[:2, :2] = 1.0
    hosts = successive_caches(
        delay_s, WEIGHT, np.array([0.5, 0.5, 0.0]), SIZES, np.array([1, 2, 0])
    )
    assert hosts[:, 0].tolist() == [[False, False, True], [True, True, False], [False] * 3]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 9)), min_size=1, max_size=7),
    st.integers(0, 25),
)
def test_the_knapsack_is_optimal(items: list[tuple[float, int]], capacity: int) -> None:
    saving = np.array([value for value, _ in items])
    sizes = np.array([size for _, size in items])
    kept = knapsack(saving, sizes, capacity)
    assert sizes[kept].sum() <= capacity
    best = max(
        sum(saving[list(chosen)])
        for count in range(len(items) + 1)
        for chosen in combinations(range(len(items)), count)
        if sizes[list(chosen)].sum() <= capacity
    )
    assert saving[kept].sum() >= best - 1e-9
