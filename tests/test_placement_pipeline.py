from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, reject

from factories import clusters, model_specs, random_cluster, random_model_spec
from trimmoe.core.errors import UserError
from trimmoe.core.specs import ClusterSpec, ModelSpec
from trimmoe.cost.model import cost_model
from trimmoe.placement.capacity import expert_capacity_bytes, used_bytes
from trimmoe.placement.pipeline import (
    chain_stages,
    compact_stages,
    pipeline_stages,
    stage_hosts,
    staircase_routes,
)


def model_of_layers(*sizes: int) -> ModelSpec:
    spec = random_model_spec(np.random.default_rng(0), layers=len(sizes), experts=2, top_k=1)
    return replace(spec, expert_bytes=np.repeat(np.array(sizes)[:, None], 2, axis=1) // 2)


def staged(stages: np.ndarray | None) -> list[int] | None:
    return None if stages is None else stages.tolist()


def test_layers_follow_memory() -> None:
    model = model_of_layers(*[10] * 8)
    assert staged(pipeline_stages(model, np.array([80, 40, 40]))) == [0] * 4 + [1] * 2 + [2] * 2
    assert staged(pipeline_stages(model, np.array([40, 0, 40]))) == [0] * 4 + [2] * 4
    assert staged(pipeline_stages(model, np.array([45, 45]))) == [0] * 4 + [1] * 4


def test_whole_layers_must_fit() -> None:
    model = model_of_layers(10, 10, 10, 10)
    assert pipeline_stages(model, np.array([19, 19, 19])) is None
    assert staged(pipeline_stages(model, np.array([19, 19, 29]))) == [0, 1, 2, 2]
    # A large layer in the middle pins the cuts around it.
    assert staged(pipeline_stages(model_of_layers(10, 30, 10), np.array([10, 30, 10]))) == [0, 1, 2]
    assert pipeline_stages(model_of_layers(10, 30, 10), np.array([30, 10, 10])) is None


def test_a_chain_has_its_own_order() -> None:
    stages = chain_stages(model_of_layers(*[10] * 4), np.array([10, 30, 99]), [1, 0])
    assert staged(stages) == [1, 1, 1, 0]


def test_compact_uses_few_and_close_servers() -> None:
    rng = np.random.default_rng(1)
    delay = np.full((4, 4), 20e-3)
    delay[1, 3] = delay[3, 1] = 1e-3
    np.fill_diagonal(delay, 0)
    cluster = replace(
        random_cluster(rng, servers=4), delay_s=delay, bandwidth_bytes_per_s=np.full((4, 4), 1e9)
    )
    model = model_of_layers(*[10] * 4)
    cost = cost_model(model, cluster)
    assert staged(compact_stages(model, np.array([20, 20, 20, 20]), cost)) == [1, 1, 3, 3]
    # Two suffice only with server 0, however far; one suffices where one holds everything.
    assert set(staged(compact_stages(model, np.array([30, 10, 10, 10]), cost)) or []) in (
        {0, 1},
        {0, 2},
        {0, 3},
    )
    assert staged(compact_stages(model, np.array([10, 10, 40, 10]), cost)) == [2] * 4
    assert compact_stages(model, np.array([9, 9, 9, 50 - 11]), cost) is None


@given(cluster=clusters(min_ratio=1.0), model=model_specs())
def test_stages_are_contiguous_and_keep_memory(cluster: ClusterSpec, model: ModelSpec) -> None:
    try:
        capacity = expert_capacity_bytes(replace(cluster, memory_ratio=3.0), model)
    except UserError:
        reject()  # One expert is larger than any server.
    servers = cluster.server_count
    for stages in (
        pipeline_stages(model, capacity),
        compact_stages(model, capacity, cost_model(model, cluster)),
    ):
        if stages is None:
            continue
        assert len(set(stages.tolist())) == 1 + np.count_nonzero(np.diff(stages))
        hosts = stage_hosts(model, servers, stages)
        assert (hosts.sum(axis=0) == 1).all()
        assert (used_bytes(hosts, model) <= capacity).all()
        routes = staircase_routes(servers, stages)
        assert routes.shape == (servers, model.layer_count)
        assert hosts[routes[0], np.arange(model.layer_count)].all()


@given(cluster=clusters(), model=model_specs(unequal=False))
def test_compact_is_the_fewest_for_equal_layers(cluster: ClusterSpec, model: ModelSpec) -> None:
    try:
        capacity = expert_capacity_bytes(cluster, model)
    except UserError:
        reject()  # One expert is larger than any server.
    stages = compact_stages(model, capacity, cost_model(model, cluster))
    whole = np.sort(capacity // int(model.expert_bytes[0].sum()))[::-1]
    enough = np.flatnonzero(np.cumsum(whole) >= model.layer_count)
    if enough.size == 0:
        assert stages is None
    else:
        assert stages is not None
        assert len(set(stages.tolist())) <= enough[0] + 1
