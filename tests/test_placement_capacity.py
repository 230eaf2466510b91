from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject

from factories import clusters, model_specs, random_cluster, random_model_spec
from trimmoe.core.errors import UserError
from trimmoe.core.specs import ClusterSpec, ModelSpec
from trimmoe.placement.capacity import (
    expert_capacity_bytes,
    human_bytes,
    packed_hosts,
    used_bytes,
)


def model_of(sizes: list[list[int]], *, dense_bytes: int = 0) -> ModelSpec:
    layers, experts = np.shape(sizes)
    spec = random_model_spec(np.random.default_rng(0), layers=layers, experts=experts, top_k=1)
    return replace(spec, expert_bytes=np.array(sizes), dense_bytes=dense_bytes)


def cluster_of(memory: list[int], ratio: float | None = None) -> ClusterSpec:
    cluster = random_cluster(np.random.default_rng(0), servers=len(memory), memory_ratio=ratio)
    return replace(cluster, memory_bytes=np.array(memory))


def test_dense_part_and_kv_reserve_are_subtracted() -> None:
    model = model_of([[10, 10]], dense_bytes=30)
    cluster = cluster_of([100, 40, 20])
    assert expert_capacity_bytes(cluster, model).tolist() == [70, 10, 0]
    assert expert_capacity_bytes(cluster, model, kv_reserve_bytes=15).tolist() == [55, 0, 0]


def test_memory_ratio_keeps_proportions_and_the_total_to_the_byte() -> None:
    capacity = expert_capacity_bytes(cluster_of([1, 1, 1], 2.0), model_of([[25, 25]]))
    assert capacity.tolist() == [34, 33, 33]
    capacity = expert_capacity_bytes(cluster_of([300, 100], 2.0), model_of([[25, 25]]))
    assert capacity.tolist() == [75, 25]


@given(cluster=clusters(), model=model_specs())
def test_scaled_capacity_is_what_the_ratio_says(cluster: ClusterSpec, model: ModelSpec) -> None:
    assert cluster.memory_ratio is not None
    try:
        capacity = expert_capacity_bytes(cluster, model)
    except UserError:
        shares = cluster.memory_bytes / cluster.memory_bytes.sum() * cluster.memory_ratio
        assert shares.max() * model.total_expert_bytes < model.expert_bytes.max() + 1
        return
    wanted = cluster.memory_ratio * model.total_expert_bytes
    assert wanted - 1 - 1e-6 * wanted <= capacity.sum() <= wanted * (1 + 1e-12)
    shares = cluster.memory_bytes / cluster.memory_bytes.sum() * wanted
    assert np.abs(capacity - shares).max() <= 1.0 + 1e-6 * wanted


def test_total_shortage_is_named() -> None:
    model = model_of([[3 * 10**9, 3 * 10**9]], dense_bytes=10**9)
    with pytest.raises(UserError, match=r"has 5\.00 GB .* needs 6\.00 GB: 1\.00 GB are short"):
        expert_capacity_bytes(cluster_of([4 * 10**9, 3 * 10**9]), model)
    with pytest.raises(UserError, match="raise memory_ratio"):
        expert_capacity_bytes(cluster_of([1, 1], 0.5), model)


def test_an_expert_too_large_for_every_server_is_named() -> None:
    model = model_of([[10, 10], [10, 60 * 10**6]])
    with pytest.raises(UserError, match=r"expert of layer 1 of 60\.00 MB.*50\.00 MB.*10\.00 MB"):
        expert_capacity_bytes(cluster_of([50 * 10**6, 50 * 10**6]), model)


def test_pieces_too_small_are_named() -> None:
    # Three experts of 60 on two servers of 100: 20 to spare, one expert homeless.
    model, cluster = model_of([[60, 60, 60]]), cluster_of([100, 100])
    with pytest.raises(UserError, match=r"20 B more .* last 60 B"):
        packed_hosts(cluster, model, expert_capacity_bytes(cluster, model))


def test_the_integer_program_packs_where_first_fit_decreasing_fails() -> None:
    # First-fit decreasing puts 4 and 4 together and leaves a 3 over; 4+3+3 twice is exact.
    model, cluster = model_of([[4, 4, 3, 3, 3, 3]]), cluster_of([10, 10])
    capacity = expert_capacity_bytes(cluster, model)
    hosts = packed_hosts(cluster, model, capacity)
    assert hosts.sum(axis=0).tolist() == [[1] * 6]
    assert used_bytes(hosts, model).tolist() == [10, 10]


@given(cluster=clusters(max_servers=4), model=model_specs(max_layers=3))
def test_packing_covers_everything_within_memory(cluster: ClusterSpec, model: ModelSpec) -> None:
    try:
        capacity = expert_capacity_bytes(replace(cluster, memory_ratio=3.0), model)
    except UserError:
        reject()  # One expert is larger than any server.
    try:
        hosts = packed_hosts(cluster, model, capacity)
    except UserError:
        # Only where the servers' room in whole experts of the largest size is too little.
        largest = model.expert_bytes.max()
        assert (capacity // largest).sum() < model.expert_bytes.size
        return
    assert (hosts.sum(axis=0) == 1).all()
    assert (used_bytes(hosts, model) <= capacity).all()


def test_human_bytes() -> None:
    texts = [human_bytes(size) for size in (0, 999, 1_500, 2_000_000, 3_210_000_000)]
    assert texts == ["0 B", "999 B", "1.50 kB", "2.00 MB", "3.21 GB"]
