from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from trimmoe.placement.baseline import dispersed_hosts, expert_groups
from trimmoe.placement.capacity import expert_capacity_bytes, used_bytes


def blocks(*labels: int) -> np.ndarray:
    same = np.equal.outer(labels, labels)
    return np.where(same, 0.8, -0.2) + 0.2 * np.eye(len(labels))


def test_groups_find_blocks_of_similar_experts() -> None:
    group_of = expert_groups(blocks(0, 1, 2, 0, 1, 2), 3)
    np.testing.assert_array_equal(
        np.equal.outer(group_of, group_of), np.equal.outer([0, 1, 2] * 2, [0, 1, 2] * 2)
    )


@given(data=st.data())
def test_groups_are_balanced(data: st.DataObject) -> None:
    _, profile = data.draw(models_with_profiles(max_layers=1))
    experts = profile.expert_count
    count = data.draw(st.integers(1, experts))
    group_of = expert_groups(profile.similarity[0], count)
    assert group_of.min() >= 0
    assert group_of.max() < count
    assert np.bincount(group_of).max() <= -(-experts // count)


def test_group_mates_are_dispersed() -> None:
    rng = np.random.default_rng(1)
    model = random_model_spec(rng, layers=5, experts=6, top_k=2)
    cluster = replace(random_cluster(rng, servers=3), memory_bytes=np.full(3, 10))
    profile = random_profile(rng, model)
    labels = (0, 0, 0, 1, 1, 1)
    profile = replace(profile, similarity=np.stack([blocks(*labels)] * 5))
    hosts = dispersed_hosts(cluster, model, profile, expert_capacity_bytes(cluster, model), 2)
    # Each of the three servers keeps one of each group: a substitute for every expert.
    np.testing.assert_array_equal(hosts[:, :, :3].sum(axis=2), 1)
    np.testing.assert_array_equal(hosts[:, :, 3:].sum(axis=2), 1)


def test_memory_is_balanced_by_capacity() -> None:
    rng = np.random.default_rng(2)
    model = random_model_spec(rng, layers=10, experts=8)
    cluster = replace(random_cluster(rng, servers=2), memory_bytes=np.array([30, 10]))
    profile = random_profile(rng, model)
    hosts = dispersed_hosts(cluster, model, profile, expert_capacity_bytes(cluster, model), 8)
    assert hosts.sum(axis=(1, 2)).tolist() == [60, 20]


@given(cluster=clusters(min_ratio=1.0, max_ratio=3.0), known=models_with_profiles())
def test_covers_within_memory_or_refuses(
    cluster: ClusterSpec, known: tuple[ModelSpec, Profile]
) -> None:
    """Property 1 for the seed: (c.1) and (c.2), or a refusal that is true for equal sizes."""
    model, profile = known
    try:
        capacity = expert_capacity_bytes(cluster, model)
        hosts = dispersed_hosts(cluster, model, profile, capacity, 3)
    except UserError:
        memory = cluster.memory_bytes / cluster.memory_bytes.sum() * (cluster.memory_ratio or 0)
        whole = np.floor(memory * model.total_expert_bytes / model.expert_bytes.max() + 1e-6)
        assert whole.sum() <= model.expert_bytes.size
        return
    assert (hosts.sum(axis=0) == 1).all()
    assert (used_bytes(hosts, model) <= capacity).all()


def test_a_tight_fit_of_unequal_experts_is_packed_afresh() -> None:
    rng = np.random.default_rng(3)
    model = random_model_spec(rng, layers=1, experts=6, top_k=1)
    model = replace(model, expert_bytes=np.array([[4, 4, 3, 3, 3, 3]]))
    cluster = replace(
        random_cluster(rng, servers=2, memory_ratio=None), memory_bytes=np.array([10, 10])
    )
    profile = replace(random_profile(rng, model), similarity=blocks(0, 1, 2, 2, 2, 2)[None])
    hosts = dispersed_hosts(cluster, model, profile, cluster.memory_bytes, 3)
    assert used_bytes(hosts, model).tolist() == [10, 10]


def test_refusal_passes_through() -> None:
    rng = np.random.default_rng(4)
    model = random_model_spec(rng, layers=1, experts=3, top_k=1)
    model = replace(model, expert_bytes=np.array([[60, 60, 60]]))
    cluster = random_cluster(rng, servers=2)
    with pytest.raises(UserError, match="no packing was found"):
        dispersed_hosts(cluster, model, random_profile(rng, model), np.array([100, 100]), 3)
