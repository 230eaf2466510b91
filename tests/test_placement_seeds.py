"""Every seed plan against a small case worked out by hand, and all of them against (c.1), (c.2)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from factories import (
    clusters,
    models_with_profiles,
    random_cluster,
    random_model_spec,
    random_profile,
)
from trimmoe.core.errors import UserError
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, ModelSpec
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.make import as_published, default, make_plan, make_planner
from trimmoe.placement.seeds import SEEDS, seed_placement, seed_plan
from trimmoe.placement.seeds.activation import layer_entropy, preferred_hosts
from trimmoe.placement.seeds.balanced import balanced_layer, replica_counts
from trimmoe.placement.seeds.base import covered
from trimmoe.placement.seeds.edgeshard import latency_stages, throughput_stages


@settings(max_examples=40)
@given(known=models_with_profiles(), cluster=clusters(max_servers=5))
def test_every_seed_keeps_memory_and_coverage(
    known: tuple[ModelSpec, Profile], cluster: ClusterSpec
) -> None:
    model, profile = known
    try:
        planner = make_planner(profile, model, cluster, default())
        found = {name: seed_plan(name, planner) for name in SEEDS}
    except UserError:
        return  # The experts do not fit; which seeds say so is the capacity's business.
    for name, seed in found.items():
        if seed is None:
            assert name != "dispersed"
            continue
        assert (used_bytes(seed.hosts, model) <= planner.capacity).all(), name
        assert seed.hosts.any(axis=0).all(), name
        assert seed.routes.shape == (cluster.server_count, model.layer_count)
        if seed.stages is not None:
            assert (seed.routes == seed.stages).all()
            layers = np.arange(model.layer_count)
            assert seed.hosts[seed.stages, layers].all()


def test_seeds_by_name() -> None:
    rng = np.random.default_rng(0)
    model = random_model_spec(rng)
    planner = make_planner(random_profile(rng, model), model, random_cluster(rng), default())
    for name in SEEDS:
        made, plain = seed_placement(name, planner), seed_plan(name, planner)
        assert (made is None) == (plain is None) == (name == "single_server")
        if made is None or plain is None:
            continue
        np.testing.assert_array_equal(made.hosts, plain.hosts)
        np.testing.assert_array_equal(made.routes, plain.routes)
        assert made.expected_s == planner.placement(plain.hosts, plain.routes).expected_s
    with pytest.raises(UserError, match="load_balanced"):
        seed_plan("nonesuch", planner)


# Two servers 1 s apart, the second twice as fast; a token id moves in 0.1 s.
LAYER_S = np.array([[4.0, 4.0, 4.0], [2.0, 2.0, 2.0]])
HOP_S = np.array([[0.0, 1.0], [1.0, 0.0]])
TOKEN_S = HOP_S / 10
SIZES = np.array([10, 10, 10])


def test_edgeshard_latency_by_hand() -> None:
    # Room everywhere: the first layer stays at the source, 4 + 1 + 2 + 2 + 0.1 beats 12.
    roomy = np.array([30, 30])
    stages = latency_stages(LAYER_S, HOP_S, TOKEN_S, SIZES, roomy, 0)
    assert stages is not None
    assert stages.tolist() == [0, 1, 1]
    # The fast server has room for one: moving there at the end costs 4 + 4 + 1 + 2 + 0.1 = 11.1.
    stages = latency_stages(LAYER_S, HOP_S, TOKEN_S, SIZES, np.array([30, 10]), 0)
    assert stages is not None
    assert stages.tolist() == [0, 0, 1]
    # The source holds no layer, so any server may start; nobody holds all three.
    stages = latency_stages(LAYER_S, HOP_S, TOKEN_S, SIZES, np.array([9, 30]), 0)
    assert stages is not None
    assert stages.tolist() == [1, 1, 1]
    assert latency_stages(LAYER_S, HOP_S, TOKEN_S, SIZES, np.array([10, 10]), 0) is None


def test_edgeshard_throughput_by_hand() -> None:
    # The slowest of (4, 2 + 2) is 4; of (4 + 4, 2) it is 8.
    stages = throughput_stages(LAYER_S, HOP_S, TOKEN_S, SIZES, np.array([30, 30]), 0)
    assert stages is not None
    assert stages.tolist() == [0, 1, 1]
    # A hop of 9 s makes staying (12) no better than hopping (9); of 13 s it does.
    stages = throughput_stages(LAYER_S, HOP_S * 9, TOKEN_S, SIZES, np.array([30, 30]), 0)
    assert stages is not None
    assert stages.tolist() == [0, 1, 1]
    stages = throughput_stages(LAYER_S, HOP_S * 13, TOKEN_S, SIZES, np.array([30, 30]), 0)
    assert stages is not None
    assert stages.tolist() == [0, 0, 0]
    assert throughput_stages(LAYER_S, HOP_S, TOKEN_S, SIZES, np.array([10, 10]), 0) is None


def test_activation_aware_by_hand() -> None:
    # Layer 0 always uses expert 0 or 1 (entropy ln 2), layer 1 all four alike (ln 4 = 2 ln 2):
    # of 6 slots layer 0 gets 2 and layer 1 gets 4.
    activated = np.array([[1.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
    np.testing.assert_allclose(layer_entropy(activated), [np.log(2), np.log(4)])
    sizes = np.ones((2, 4), dtype=np.int64)
    hosts = preferred_hosts(activated, sizes, np.array([6, 3]), np.array([0.2, 0.8]))
    # Server 1 has most users and chooses first: one slot in layer 0, two in layer 1.
    assert hosts[1].astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    # Server 0 takes what nobody has yet, then the most activated.
    assert hosts[0, 0].astype(int).tolist() == [0, 1, 1, 0]
    assert hosts[0, 1].all()


def test_load_balanced_by_hand() -> None:
    # Loads 6, 2, 1: further replicas go to 6 (-> 3), 6 again (3 -> 2), then 2 ties with 2: first.
    assert replica_counts(np.array([6.0, 2.0, 1.0]), 5, 9).tolist() == [3, 1, 1]
    assert replica_counts(np.array([6.0, 2.0, 1.0]), 5, 2).tolist() == [2, 2, 1]
    # Two servers of two slots and equal speed, loads 6, 2, 1: expert 0 on both, at 3 each, but
    # first replicas come first: 0 on server 0 (3), 1 and then 2 on server 1 (2 + 1).
    sizes, room = np.ones(3, dtype=np.int64), np.array([2, 2])
    hosts = balanced_layer(np.array([6.0, 2.0, 1.0]), sizes, room, np.ones((2, 3)))
    assert hosts.astype(int).tolist() == [[1, 0, 0], [0, 1, 1]]
    # A third slot on server 1 takes the second replica of expert 0.
    hosts = balanced_layer(np.array([6.0, 2.0, 1.0]), sizes, np.array([1, 3]), np.ones((2, 3)))
    assert hosts.astype(int).tolist() == [[1, 0, 0], [1, 1, 1]]


def test_the_best_single_server() -> None:
    rng = np.random.default_rng(0)
    model = random_model_spec(rng)
    cluster = replace(
        random_cluster(rng, memory_ratio=None), memory_bytes=np.array([10**13, 0, 10**13, 0])
    )
    profile = random_profile(rng, model)
    planner = make_planner(profile, model, cluster, default())
    seed = seed_placement("single_server", planner)
    assert seed is not None
    (server,) = set(seed.routes.ravel().tolist())
    other = 2 - server
    assert server in (0, 2)
    assert seed.hosts[server].all()
    assert seed.hosts.sum() == seed.hosts[server].size
    elsewhere = np.zeros_like(seed.hosts)
    elsewhere[other] = True
    there = planner.placement(elsewhere, np.full_like(seed.routes, other))
    assert seed.expected_s <= there.expected_s


def test_covering_gives_up_spare_replicas_only() -> None:
    model = random_model_spec(np.random.default_rng(0), layers=1, experts=3, top_k=1)
    size = int(model.expert_bytes[0, 0])
    hosts = np.array([[[1, 1, 0]], [[1, 0, 0]]], dtype=bool)
    whole = covered(hosts, model, np.array([2 * size, size]))
    assert whole is not None
    assert whole.any(axis=0).all()
    assert whole.sum() == 3
    assert covered(hosts[:1], model, np.array([2 * size])) is None


@pytest.mark.parametrize("name", SEEDS)
def test_every_seed_can_be_planned_as_it_is(name: str) -> None:
    rng = np.random.default_rng(0)
    model = random_model_spec(rng)
    profile = random_profile(rng, model)
    cluster = random_cluster(rng)
    bare = as_published(name)  # type: ignore[arg-type]
    if name == "single_server":
        with pytest.raises(UserError, match="No server"):
            make_plan(profile, model, cluster, bare, cluster_hash="c")
        cluster = replace(cluster, memory_ratio=None, memory_bytes=np.full(4, 10**13))
    plan = make_plan(profile, model, cluster, bare, cluster_hash="c")
    seed = seed_plan(name, make_planner(profile, model, cluster, default(), guesses=False))
    assert seed is not None
    np.testing.assert_array_equal(plan.hosts, seed.hosts)
    np.testing.assert_array_equal(plan.routes, seed.routes)
