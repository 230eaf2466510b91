from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import models_with_profiles, random_cluster, random_model_spec, random_profile
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.cost.expected import expected_layer_delay_s
from trimmoe.cost.model import cost_model
from trimmoe.placement.blocks import BlockSearch, add_blocks
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.routes import best_routes, expected_delay_s


@settings(max_examples=40)
@given(
    known=models_with_profiles(max_layers=4, max_experts=5),
    servers=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)
def test_every_step_saves_what_it_promises(
    known: tuple[ModelSpec, Profile], servers: int, seed: int
) -> None:
    model, profile = known
    rng = np.random.default_rng(seed)
    cluster = random_cluster(rng, servers=servers, symmetric=False)
    cost, share = cost_model(model, cluster), cluster.access_share
    hosts = np.zeros((servers, model.layer_count, model.expert_count), dtype=bool)
    np.put_along_axis(hosts, rng.integers(servers, size=(1, *hosts.shape[1:])), True, axis=0)
    spare = rng.integers(0, model.total_expert_bytes, servers)
    capacity = used_bytes(hosts, model) + spare
    search = BlockSearch(cost, model, profile, hosts, capacity, share)
    while (step := search.best_step()) is not None:
        promised = search.expected_s - step.saving_s
        used = used_bytes(search.hosts, model).sum()
        search.take(step)
        delays = expected_layer_delay_s(cost, search.hosts, profile)
        real = expected_delay_s(cost, delays, best_routes(cost, delays), share)
        assert real == pytest.approx(promised, rel=1e-9)
        assert real == pytest.approx(search.expected_s, rel=1e-9)
        assert used_bytes(search.hosts, model).sum() - used == step.size_bytes > 0
        assert (used_bytes(search.hosts, model) <= capacity).all()
    assert (search.hosts >= hosts).all()


def test_a_run_is_found_that_no_single_replica_is_worth() -> None:
    """All experts far away, every token needs two at once: one replica, or one layer, is no use."""
    rng = np.random.default_rng(0)
    model = random_model_spec(rng, layers=4, experts=2, top_k=2)
    delay = np.full((3, 3), 20e-3)
    delay[0, 1] = delay[1, 0] = 0.1e-3
    np.fill_diagonal(delay, 0.0)
    share = np.array([1.0, 0.0, 0.0])
    cluster = replace(random_cluster(rng, servers=3), delay_s=delay, access_share=share)
    hosts = np.zeros((3, 4, 2), dtype=bool)
    hosts[2] = True
    layer_bytes = int(model.expert_bytes[0].sum())
    capacity = np.array([2, 2, 4]) * layer_bytes
    found = add_blocks(
        cost_model(model, cluster), model, random_profile(rng, model), hosts, capacity, share
    )
    # The two near servers hold the whole model between them, two layers each.
    assert found[:2].all(axis=2).sum(axis=1).tolist() == [2, 2]
    assert found[:2].any(axis=0).all()
