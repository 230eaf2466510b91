"""Hosts for tokens that stay with their users while copies stand in for what servers lack."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import random_cluster, random_model_spec, random_profile
from trimmoe.core.profile import Rung
from trimmoe.placement.at_home import copy_losses, home_hosts
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.optimise import SearchSettings, optimise_plan
from trimmoe.placement.planner import PlanSettings
from trimmoe.placement.stand_ins import copies_bytes


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), servers=st.integers(1, 5), ratio=st.floats(0.8, 4.0))
def test_every_expert_has_a_host_and_no_server_more_than_fits(
    seed: int, servers: int, ratio: float
) -> None:
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng, layers=5, experts=4, top_k=2)
    shares = rng.dirichlet(np.ones(servers))
    capacity = (ratio * model.total_expert_bytes * shares).astype(np.int64)
    hosts = home_hosts(model, capacity, rng.random(5))
    if hosts is None:
        assert ratio < 1.0 or servers > 1, "one server that is large enough holds all of it"
        return
    assert hosts.any(axis=0).all()
    assert (used_bytes(hosts, model) <= capacity).all()
    left = capacity - used_bytes(hosts, model)
    for server, held in enumerate(hosts):
        missing = model.expert_bytes[~held]
        assert missing.size == 0 or missing.min() > left[server], "no memory is left unused"


def test_servers_hold_what_copies_would_lose_most_and_share_the_rest() -> None:
    """Two servers with room for three of four layers each, of which copies lose most in the second
    and the third: both hold these, and one of the others each."""
    model = random_model_spec(np.random.default_rng(0), layers=4, experts=4, top_k=2)
    size = int(model.expert_bytes.sum(axis=1).max())
    model = replace(model, expert_bytes=np.full_like(model.expert_bytes, size // 4))
    capacity = np.full(2, 3 * 4 * (size // 4))
    hosts = home_hosts(model, capacity, np.array([0.1, 0.4, 0.3, 0.2]))
    assert hosts is not None
    whole = np.asarray(hosts.all(axis=2))
    assert whole[:, 1].all()
    assert whole[:, 2].all()
    assert sorted(np.flatnonzero(row).tolist() for row in whole) == [[0, 1, 2], [1, 2, 3]]
    assert not (hosts.any(axis=2) & ~whole).any(), "layers stay whole"


def test_losses_are_those_of_the_most_bits() -> None:
    model = random_model_spec(np.random.default_rng(1), layers=3, experts=4, top_k=2)
    profile = random_profile(np.random.default_rng(2), model)
    (best,) = (rung for rung in profile.rungs if rung.bits == 8)
    found = copy_losses(replace(profile, rungs=profile.rungs[::-1]))
    assert found is not None
    expected = [
        sum(
            profile.class_share[layer, b] * best.curves.upper[layer, b].mean()
            for b in range(profile.class_count)
        )
        for layer in range(3)
    ]
    np.testing.assert_allclose(found, expected)
    assert copy_losses(replace(profile, rungs=())) is None


def test_a_plan_to_trim_stays_at_home_where_links_are_slow_and_copies_lose_little() -> None:
    """They lose much in one layer, which both servers then hold. Where they lose all, or none are
    wanted, tokens travel."""
    rng = np.random.default_rng(3)
    model = random_model_spec(rng, layers=5, experts=5, top_k=2)
    profile = random_profile(rng, model)
    cluster = random_cluster(rng, servers=2, memory_ratio=1.3)
    cluster = replace(
        cluster,
        delay_s=np.array([[0.0, 0.04], [0.04, 0.0]]),
        memory_bytes=np.full(2, 24 * 10**9),
        access_share=np.full(2, 0.5),
    )
    wanted = SearchSettings(objective="trimmed", iterations=300, trimmed_iterations=5)

    def won(rungs: tuple[Rung, ...], share: float) -> tuple[str, bool]:
        known, made = replace(profile, rungs=rungs), PlanSettings(stand_in_share=share)
        plan = optimise_plan(known, model, cluster, wanted, made, cluster_hash="c")
        at_home = bool((plan.routes == np.arange(2)[:, None]).all())
        return plan.header.settings["seed_won"], at_home

    def losing(flips: float) -> tuple[Rung, ...]:
        upper = np.full_like(profile.rungs[0].curves.upper, flips)
        upper[1] = 1.0
        return tuple(
            replace(rung, curves=replace(rung.curves, upper=upper)) for rung in profile.rungs
        )

    shape = (1, model.layer_count, model.expert_count)
    of_all = copies_bytes(model, np.full(shape, 8))[0] / model.total_expert_bytes
    assert won(losing(1e-6), 1.01 * of_all) == ("at home", True)
    assert won(losing(1.0), 1.01 * of_all)[0] != "at home"
    assert won(losing(1e-6), 0.0)[0] != "at home"
