from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import (
    models_with_profiles,
    random_cluster,
    random_model_spec,
    random_profile,
)
from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, ModelSpec
from trimmoe.cost.expected import (
    best_hosts,
    destinations,
    expected_layer_delay_s,
    reference_layer_delay_s,
)
from trimmoe.cost.model import CostModel, cost_model, layer_delay_s
from trimmoe.placement.routes import (
    best_routes,
    execution_share,
    home_routes,
    route_delay_s,
    traffic,
)


def random_hosts(rng: np.random.Generator, shape: tuple[int, int, int]) -> BoolArray:
    hosts = rng.random(shape) < 0.4
    hosts[rng.integers(shape[0]), :, :] |= ~hosts.any(axis=0)
    return hosts


def bare_cost(transfer: np.ndarray, layers: int, token: np.ndarray | None = None) -> CostModel:
    rng = np.random.default_rng(0)
    servers = len(transfer)
    model = random_model_spec(rng, layers=layers, experts=2, top_k=1)
    cost = cost_model(model, random_cluster(rng, servers=servers))
    return replace(
        cost,
        transfer_s=transfer,
        token_transfer_s=np.zeros_like(transfer) if token is None else token,
        expert_s=np.zeros_like(cost.expert_s),
        dense_s=np.zeros_like(cost.dense_s),
    )


@given(known=models_with_profiles(max_layers=3), seed=st.integers(0, 10**6))
def test_expected_delay_is_the_mean_of_the_cost_model(
    known: tuple[ModelSpec, Profile], seed: int
) -> None:
    model, profile = known
    rng = np.random.default_rng(seed)
    servers = int(rng.integers(1, 5))
    cost = cost_model(model, random_cluster(rng, servers=servers, symmetric=False))
    cost = cost.with_waiting(rng.uniform(0, 0.01, servers))
    cost = replace(cost, apart_s=rng.uniform(0, 0.01, servers))
    hosts = random_hosts(rng, (servers, model.layer_count, model.expert_count))
    expected = expected_layer_delay_s(cost, hosts, profile)
    for layer, s, t in np.ndindex(expected.shape):
        patterns = profile.patterns[layer]
        best = best_hosts(cost, hosts, layer, s, t)
        ends = np.full(len(patterns), s), np.full(len(patterns), t)
        delay = layer_delay_s(cost, layer, *ends, patterns, best[patterns])
        mean = profile.pattern_share[layer] @ delay + cost.dense_s[s, layer]
        assert expected[layer, s, t] == pytest.approx(mean, rel=1e-9)


def test_best_hosts_are_hosts() -> None:
    rng = np.random.default_rng(3)
    model = random_model_spec(rng)
    cost = cost_model(model, random_cluster(rng))
    hosts = random_hosts(rng, (4, model.layer_count, model.expert_count))
    for layer in range(model.layer_count):
        best = best_hosts(cost, hosts, layer, 0, 1)
        assert hosts[best, layer, np.arange(model.expert_count)].all()


def test_two_layers_by_hand() -> None:
    # Layer 0 is cheap on server 0, layer 1 on server 1, a hop costs 1, ids 0.25 to come or go.
    transfer = np.array([[0.0, 1.0], [1.0, 0.0]])
    cost = bare_cost(transfer, layers=2, token=transfer / 4)
    delays = np.array([[[0.1, 1.1], [6.0, 5.0]], [[9.0, 9.0], [9.0, 0.2]]])
    routes = best_routes(cost, delays)
    assert routes.tolist() == [[0, 1], [0, 1]]
    np.testing.assert_allclose(route_delay_s(cost, delays, routes), [1.1 + 0.2 + 0.25] * 2)
    np.testing.assert_allclose(
        route_delay_s(cost, delays, home_routes(2, 2)), [0.1 + 9.0, 5.0 + 0.2]
    )
    share = np.array([0.5, 0.5])
    assert reference_layer_delay_s(delays, routes, share) == pytest.approx(1.3 / 2)


def test_layers_run_where_their_experts_are_unless_a_message_costs_less() -> None:
    """Server 0 has the first layer's experts, 1 the others'; attention is the same everywhere, and
    a little quicker on 0."""
    cost = bare_cost(np.array([[0.0, 1.0], [1.0, 0.0]]), layers=3)
    hosts = np.zeros((2, 3, 2), dtype=bool)
    hosts[0, 0] = hosts[1, 1:] = True
    stays, moves = [[0.0, 1.0], [9.0, 9.0]], [[2.0, 1.0], [9.0, 0.1]]
    delays = np.array([stays, moves, [[9.0, 9.0], [9.0, 0.0]]])
    measured = replace(cost, apart_s=np.array([0.2, 0.2]))
    assert best_routes(cost, delays, hosts)[0].tolist() == [0, 0, 1]
    assert best_routes(measured, delays)[0].tolist() == [0, 0, 1]
    assert best_routes(measured, delays, hosts)[0].tolist() == [0, 1, 1]
    free = replace(cost, apart_s=np.array([0.05, 0.05]))
    assert best_routes(free, delays, hosts)[0].tolist() == [0, 0, 1]


def test_ties_stay_at_home() -> None:
    cost = bare_cost(np.zeros((3, 3)), layers=4)
    routes = best_routes(cost, np.ones((4, 3, 3)))
    np.testing.assert_array_equal(routes, home_routes(3, 4))


@given(seed=st.integers(0, 10**6), servers=st.integers(1, 3), layers=st.integers(1, 4))
def test_best_routes_are_shortest_paths(seed: int, servers: int, layers: int) -> None:
    """Against every possible route, so also never worse than home, constants or staircases."""
    rng = np.random.default_rng(seed)
    shape = (servers, servers)
    cost = bare_cost(rng.random(shape), layers, token=rng.random(shape))
    delays = rng.random((layers, *shape))
    best = route_delay_s(cost, delays, best_routes(cost, delays))
    for path in itertools.product(range(servers), repeat=layers):
        other = np.repeat(np.array(path)[None, :], servers, axis=0)
        assert (best <= route_delay_s(cost, delays, other) * (1 + 1e-12)).all()


@given(known=models_with_profiles(), seed=st.integers(0, 10**6))
def test_best_routes_beat_home_and_constants(known: tuple[ModelSpec, Profile], seed: int) -> None:
    model, profile = known
    rng = np.random.default_rng(seed)
    servers = int(rng.integers(1, 6))
    cost = cost_model(model, random_cluster(rng, servers=servers))
    hosts = random_hosts(rng, (servers, model.layer_count, model.expert_count))
    delays = expected_layer_delay_s(cost, hosts, profile)
    best = route_delay_s(cost, delays, best_routes(cost, delays))
    rivals = [home_routes(servers, model.layer_count)]
    rivals += [np.full((servers, model.layer_count), m) for m in range(servers)]
    for routes in rivals:
        assert (best <= route_delay_s(cost, delays, routes) * (1 + 1e-12)).all()


def test_destinations_and_traffic() -> None:
    routes = np.array([[0, 1, 1], [0, 1, 2], [2, 2, 2]])
    assert destinations(routes).tolist() == [[1, 1, 1], [1, 2, 2], [2, 2, 2]]
    share = np.array([0.5, 0.25, 0.25])
    assert traffic(routes, share, 0) == [(0, 1, 0.75), (2, 2, 0.25)]
    assert traffic(routes, np.array([0.5, 0.5, 0.0]), 2) == [(1, 1, 0.5), (2, 2, 0.5)]


def test_executions_are_shared_by_the_nearest_hosts() -> None:
    rng = np.random.default_rng(5)
    model = random_model_spec(rng, layers=2, experts=2, top_k=1)
    profile = random_profile(rng, model)
    cost = bare_cost(1.0 - np.eye(2), layers=2)
    hosts = np.ones((2, 2, 2), dtype=bool)
    share = execution_share(cost, hosts, profile, home_routes(2, 2), np.array([0.3, 0.7]))
    np.testing.assert_allclose(share, [0.3, 0.7])
