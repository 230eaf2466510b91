from __future__ import annotations

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
from trimmoe.core.specs import BoolArray, FloatArray, IntArray, ModelSpec
from trimmoe.cost.model import Accounting, CostModel, cost_model, host_delay_s
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.redundancy import (
    SlotSavings,
    add_load_replicas,
    add_marginal_replicas,
    add_paper_replicas,
    mean_fetch_s,
    migrating_residence,
    primary_copies,
)
from trimmoe.placement.routes import home_routes, traffic


def one_copy(rng: np.random.Generator, servers: int, model: ModelSpec) -> BoolArray:
    hosts = np.zeros((servers, model.layer_count, model.expert_count), dtype=bool)
    where = rng.integers(servers, size=hosts.shape[1:])
    np.put_along_axis(hosts, where[None], True, axis=0)
    return hosts


def mean_slot_delay_s(
    cost: CostModel, hosts: BoolArray, profile: Profile, routes: IntArray, share: FloatArray
) -> float:
    """What the marginal benefit lessens, computed afresh."""
    total = 0.0
    for layer in range(cost.layer_count):
        for s, t, weight in traffic(routes, share, layer):
            delay = np.maximum(host_delay_s(cost, layer, s, t), cost.transfer_s[s, t])
            best = np.where(hosts[:, layer], delay, np.inf).min(axis=0)
            total += weight * float(profile.expected_executions[layer] @ best)
    return total


def plain_greedy(
    cost: CostModel,
    model: ModelSpec,
    profile: Profile,
    hosts: BoolArray,
    capacity: IntArray,
    routes: IntArray,
    share: FloatArray,
) -> BoolArray:
    hosts = hosts.copy()
    savings = SlotSavings(cost, hosts, profile, routes, share)
    while True:
        free = capacity - used_bytes(hosts, model)
        best, chosen = 0.0, None
        for m, layer, expert in np.argwhere(~hosts).tolist():
            size = model.expert_bytes[layer, expert]
            benefit = savings.of(m, layer, expert) / size
            if size <= free[m] and benefit > best:
                best, chosen = benefit, (m, layer, expert)
        if chosen is None:
            return hosts
        hosts[chosen] = True
        savings.add(*chosen)


@given(known=models_with_profiles(max_layers=3, max_experts=5), seed=st.integers(0, 10**6))
def test_lazy_greedy_is_plain_greedy(known: tuple[ModelSpec, Profile], seed: int) -> None:
    model, profile = known
    rng = np.random.default_rng(seed)
    servers = int(rng.integers(1, 5))
    cluster = random_cluster(rng, servers=servers)
    cost = cost_model(model, cluster)
    hosts = one_copy(rng, servers, model)
    spare = rng.integers(0, model.total_expert_bytes, servers)
    capacity = used_bytes(hosts, model) + spare
    routes = rng.integers(servers, size=(servers, model.layer_count))
    given_ = (cost, model, profile, hosts, capacity, routes, cluster.access_share)
    lazy = add_marginal_replicas(*given_)
    np.testing.assert_array_equal(lazy, plain_greedy(*given_))
    assert (lazy >= hosts).all()
    assert (used_bytes(lazy, model) <= capacity).all()
    # Greedy stops only where nothing that fits saves anything.
    rest = SlotSavings(cost, lazy, profile, routes, cluster.access_share).all()
    free = capacity - used_bytes(lazy, model)
    assert not ((rest > 0) & ~lazy & (model.expert_bytes <= free[:, None, None])).any()


@given(known=models_with_profiles(max_layers=3, max_experts=4), seed=st.integers(0, 10**6))
def test_savings_are_what_is_saved(known: tuple[ModelSpec, Profile], seed: int) -> None:
    model, profile = known
    rng = np.random.default_rng(seed)
    cluster = random_cluster(rng, servers=3)
    cost = cost_model(model, cluster)
    hosts = one_copy(rng, 3, model)
    routes = rng.integers(3, size=(3, model.layer_count))
    savings = SlotSavings(cost, hosts, profile, routes, cluster.access_share)
    predicted = savings.all()
    before = mean_slot_delay_s(cost, hosts, profile, routes, cluster.access_share)
    for m, layer, expert in np.argwhere(~hosts).tolist():
        more = hosts.copy()
        more[m, layer, expert] = True
        after = mean_slot_delay_s(cost, more, profile, routes, cluster.access_share)
        assert predicted[m, layer, expert] == pytest.approx(before - after, rel=1e-6, abs=1e-12)
        assert savings.of(m, layer, expert) == pytest.approx(predicted[m, layer, expert])


def test_a_replica_may_serve_another_source() -> None:
    """Server 1 is near server 0, where all users are; 0 has no memory, so 1 gets the replica."""
    rng = np.random.default_rng(0)
    model = random_model_spec(rng, layers=1, experts=2, top_k=1)
    delay = np.array([[0, 1, 20], [1, 0, 20], [20, 20, 0]]) * 1e-3
    cluster = replace(
        random_cluster(rng, servers=3), delay_s=delay, access_share=np.array([1.0, 0.0, 0.0])
    )
    profile = random_profile(rng, model)
    hosts = np.zeros((3, 1, 2), dtype=bool)
    hosts[2] = True
    size = int(model.expert_bytes[0, 0])
    found = add_marginal_replicas(
        cost_model(model, cluster),
        model,
        profile,
        hosts,
        np.array([0, 2 * size, 2 * size]),
        home_routes(3, 1),
        cluster.access_share,
    )
    np.testing.assert_array_equal(found[1], profile.expected_executions > 0)


def test_nothing_is_replicated_at_zero_benefit_unless_by_the_letter() -> None:
    rng = np.random.default_rng(1)
    model = random_model_spec(rng, layers=2, experts=3, top_k=2)
    cluster = replace(random_cluster(rng, servers=2), access_share=np.array([1.0, 0.0]))
    profile = random_profile(rng, model)
    hosts = np.zeros((2, 2, 3), dtype=bool)
    hosts[0] = True
    capacity = np.array([10, 10]) * model.total_expert_bytes
    routes = home_routes(2, 2)
    cost = replace(cost_model(model, cluster), expert_s=np.zeros((2, 2, 3)))
    marginal = add_marginal_replicas(
        cost, model, profile, hosts, capacity, routes, cluster.access_share
    )
    np.testing.assert_array_equal(marginal, hosts)
    residence = migrating_residence(cost, hosts, profile, cluster.access_share)
    np.testing.assert_allclose(residence, [[1, 1], [0, 0]])
    letter = add_paper_replicas(cluster, model, profile, hosts, capacity, residence)
    assert letter.all()


def test_benefit_28_by_hand() -> None:
    rng = np.random.default_rng(2)
    model = random_model_spec(rng, layers=1, experts=2, top_k=1, hidden=500)
    bandwidth = np.array([[np.inf, 1e6, 3e6], [1e6, np.inf, 2e6], [3e6, 2e6, np.inf]])
    delay = np.array([[0, 4, 8], [4, 0, 6], [8, 6, 0]]) * 1e-3
    cluster = replace(
        random_cluster(rng, servers=3), bandwidth_bytes_per_s=bandwidth, delay_s=delay
    )
    # z = 1000 bytes; from 0 to hosts 1 and 2: 1000 / 2e6 + 6 ms.
    fetch = mean_fetch_s(cluster, model, np.array([False, True, True]))
    np.testing.assert_allclose(fetch, [6.5e-3, 0, 0])


def test_the_letter_takes_the_largest_benefit_first() -> None:
    rng = np.random.default_rng(6)
    model = random_model_spec(rng, layers=3, experts=4, top_k=1)
    cluster = random_cluster(rng, servers=3)
    profile = random_profile(rng, model)
    hosts = one_copy(rng, 3, model)
    size = int(model.expert_bytes[0, 0])
    used, one_more = used_bytes(hosts, model), np.array([size, 0, 0])
    residence = rng.dirichlet(np.ones(3), 3).T
    found = add_paper_replicas(cluster, model, profile, hosts, used + one_more, residence)
    ((layer, expert),) = np.argwhere(found[0] & ~hosts[0]).tolist()
    benefits = {
        (a, b): profile.expected_executions[a, b]
        * residence[0, a]
        * mean_fetch_s(cluster, model, hosts[:, a, b])[0]
        for a, b in np.argwhere(~hosts[0]).tolist()
    }
    assert benefits[layer, expert] == max(benefits.values())


@pytest.mark.parametrize(
    ("executions", "residence", "chosen"),
    [
        ([[0.2, 0.7], [0.1, 0.1]], [0.5, 0.5], (0, 1)),
        ([[0.3, 0.7], [0.1, 0.1]], [0.5, 0.5], (0, 0)),
        ([[0.2, 0.3], [0.3, 0.5]], [0.5, 0.5], (1, 0)),
        ([[0.2, 0.3], [0.3, 0.5]], [0.8, 0.5], (0, 0)),
    ],
)
def test_the_letters_replica_is_of_the_largest_lambda_times_rho_times_way(
    executions: list[list[float]], residence: list[float], chosen: tuple[int, int]
) -> None:
    """(28): server 0 has room for one expert more; of both layers expert 0 is 10 ms away and expert
    1 4 ms, and messages take no time. With half of the tokens there lambda times way is

    0.2 x 10 = 2 against 0.7 x 4 = 2.8, then 0.3 x 10 = 3 against 2.8; and of 2 and 1.2 in layer 0,
    3 and 2 in layer 1, the third, but 0.8 x 2 = 1.6 against 0.5 x 3 where more are in layer 0.
    """
    rng = np.random.default_rng(4)
    model = random_model_spec(rng, layers=2, experts=2, top_k=1)
    cluster = replace(
        random_cluster(rng, servers=3),
        bandwidth_bytes_per_s=np.full((3, 3), np.inf),
        delay_s=np.array([[0, 10, 4], [10, 0, 7], [4, 7, 0]]) * 1e-3,
    )
    profile = replace(
        random_profile(rng, model),
        activated=np.array(executions),
        executed=np.ones((2, 2)),
        active=np.ones(2),
    )
    hosts = np.zeros((3, 2, 2), dtype=bool)
    hosts[1, :, 0] = hosts[2, :, 1] = True
    room = used_bytes(hosts, model) + np.array([int(model.expert_bytes[0, 0]), 0, 0])
    there = np.array([residence, *[(1 - np.array(residence)) / 2] * 2])
    found = add_paper_replicas(cluster, model, profile, hosts, room, there)
    assert [tuple(one) for one in np.argwhere(found & ~hosts).tolist()] == [(0, *chosen)]


def test_tokens_migrate_to_their_experts() -> None:
    rng = np.random.default_rng(7)
    model = random_model_spec(rng, layers=2, experts=2, top_k=1)
    cluster = replace(random_cluster(rng, servers=2), access_share=np.array([1.0, 0.0]))
    profile = random_profile(rng, model)
    profile = replace(profile, activated=np.array([[0.25, 0.75], [0.5, 0.5]]))
    hosts = np.zeros((2, 2, 2), dtype=bool)
    hosts[0, 0, 0] = hosts[1, 0, 1] = hosts[:, 1] = True
    cost = cost_model(model, cluster, Accounting.MIGRATE)
    residence = migrating_residence(cost, hosts, profile, cluster.access_share)
    np.testing.assert_allclose(residence, [[1, 0.25], [0, 0.75]])


def test_replicas_by_load_are_of_the_most_activations_per_replica_where_memory_is_free() -> None:
    """Experts 0, 1, 2 are activated 6 : 3 : 1 and as large as one another. Server 0 holds them
    all, 1 has room for two more and 2 for three: expert 0 (6 per replica) goes to 2, where most is
    free; 0 and 1 (3 each) to 1 and 2, which by then have as much; 1 (1.5) to 1, 2 to what is
    left of 2."""
    rng = np.random.default_rng(0)
    model = random_model_spec(rng, layers=1, experts=3, top_k=1)
    model = replace(model, expert_bytes=np.full((1, 3), 10))
    profile = replace(random_profile(rng, model), activated=np.array([[0.6, 0.3, 0.1]]))
    hosts = np.zeros((3, 1, 3), dtype=bool)
    hosts[0] = True
    full = add_load_replicas(model, profile, hosts, np.array([30, 20, 30]))
    assert full[:, 0].tolist() == [[True] * 3, [True, True, False], [True] * 3]
    less = add_load_replicas(model, profile, hosts, np.array([35, 9, 29]))
    assert less[:, 0].tolist() == [[True] * 3, [False] * 3, [True, True, False]]


def test_the_copy_that_stays_is_the_one_that_tokens_on_the_routes_reach_fastest() -> None:
    rng = np.random.default_rng(3)
    model = random_model_spec(rng, layers=2, experts=4, top_k=1)
    cluster = random_cluster(rng, servers=3)
    cost, share = cost_model(model, cluster), cluster.access_share
    hosts = one_copy(rng, 3, model) | one_copy(rng, 3, model)
    routes = rng.integers(3, size=(3, 2))
    kept = primary_copies(cost, hosts, routes, share)
    assert (kept.sum(axis=0) == 1).all()
    assert not (kept & ~hosts).any()
    for layer, expert in np.ndindex(2, 4):
        mean_s = np.zeros(3)
        for s, t, weight in traffic(routes, share, layer):
            mean_s += weight * host_delay_s(cost, layer, s, t)[:, expert]
        assert kept[:, layer, expert].argmax() == min(
            np.flatnonzero(hosts[:, layer, expert]), key=lambda server: mean_s[server]
        )
