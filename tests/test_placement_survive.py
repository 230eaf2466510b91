"""Plans that any server may leave: every expert keeps a host, every user a route."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from factories import random_cluster, random_model_spec, random_profile
from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, ModelSpec
from trimmoe.cost.expected import expected_layer_delay_s
from trimmoe.cost.model import cost_model
from trimmoe.experiments.explain import explain_plan
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.live import delay_after_s, live_routes
from trimmoe.placement.make import default, make_plan
from trimmoe.placement.routes import expected_delay_s
from trimmoe.placement.survive import require_room, surviving


def _world(
    seed: int, servers: int, ratio: float, *, unequal: bool = False
) -> tuple[Profile, ModelSpec, ClusterSpec]:
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng, layers=3, experts=4, unequal=unequal)
    cluster = random_cluster(rng, servers=servers, memory_ratio=ratio)
    return random_profile(rng, model), model, cluster


def _planned(profile: Profile, model: ModelSpec, cluster: ClusterSpec, losses: int) -> Plan:
    plan = make_plan(profile, model, cluster, cluster_hash="c")
    return surviving(plan, profile, model, default(), losses)


@given(
    seed=st.integers(0, 10**6),
    servers=st.integers(2, 5),
    ratio=st.floats(2.0, 4.0),
    unequal=st.booleans(),
    losses=st.integers(1, 2),
)
@settings(max_examples=30)
def test_whoever_goes_every_expert_and_layer_is_still_hosted(
    seed: int, servers: int, ratio: float, unequal: bool, losses: int
) -> None:
    profile, model, cluster = _world(seed, servers, ratio, unequal=unequal)
    refusals = "servers that it takes|missing on" + "|pieces" * unequal
    try:
        plan = _planned(profile, model, cluster, losses)
    except UserError:
        with pytest.raises(UserError, match=refusals):
            _planned(profile, model, cluster, losses)
        return
    assert (used_bytes(plan.hosts, model) <= plan.expert_capacity_bytes).all()
    cost = cost_model(model, cluster)
    for lost in combinations(range(servers), losses):
        left = [server for server in range(servers) if server not in lost]
        assert plan.hosts[left].any(axis=0).all()
        routes = live_routes(cost, plan.hosts, profile, frozenset(lost))
        assert not np.isin(routes[left], lost).any()
    delays = expected_layer_delay_s(cost, plan.hosts, profile)
    expected_s = expected_delay_s(cost, delays, plan.routes, cluster.access_share)
    assert plan.header.settings["expected_s"] == pytest.approx(expected_s)


@given(seed=st.integers(0, 10**6), servers=st.integers(2, 4), ratio=st.floats(1.2, 3.0))
@settings(max_examples=25)
def test_it_is_refused_only_where_there_is_no_room(seed: int, servers: int, ratio: float) -> None:
    """Experts of one size: with as many bytes more as were said to be missing, it works."""
    profile, model, cluster = _world(seed, servers, ratio)
    plan = make_plan(profile, model, cluster, cluster_hash="c")
    capacity, whole = plan.expert_capacity_bytes, model.total_expert_bytes
    size = int(model.expert_bytes.max())
    room = int((np.minimum(capacity, whole) // size * size).sum())
    if room >= 2 * whole:
        assert (surviving(plan, profile, model, default(), 1).hosts.sum(axis=0) >= 2).all()
        return
    with pytest.raises(UserError, match="are missing on"):
        surviving(plan, profile, model, default(), 1)
    # A server that has room for all and one more expert needs no more: give it to the others.
    added = capacity.copy()
    short = 2 * whole - room
    for server in np.argsort(capacity):
        more = min(short, whole - min(int(capacity[server]) // size * size, whole))
        added[server] = capacity[server] // size * size + more if more else capacity[server]
        short -= more
    richer = replace(plan, expert_capacity_bytes=added)
    made = surviving(richer, profile, model, default(), 1)
    assert (made.hosts.sum(axis=0) >= 2).all()
    assert (used_bytes(made.hosts, model) <= added).all()


def test_the_sentence_says_how_much_is_missing_and_where() -> None:
    _, model, cluster = _world(1, 3, 2.0)
    size, whole = int(model.expert_bytes.max()), model.total_expert_bytes
    some = np.array([whole - size, whole // 2, 0])
    with pytest.raises(UserError, match=r"missing on any of its servers; add memory"):
        require_room(cluster, model, some, 1)
    with pytest.raises(UserError, match=r"missing on servers other than s0, which can hold all"):
        require_room(cluster, model, np.array([9 * whole, whole - size, 0]), 1)
    require_room(cluster, model, np.array([9 * whole, whole - size, size]), 1)
    with pytest.raises(UserError, match="has 3 of the 4 servers"):
        require_room(cluster, model, np.full(3, 9 * whole), 3)


def test_a_plan_that_survives_already_stays_as_it_is() -> None:
    profile, model, cluster = _world(2, 3, 3.0)
    plan = _planned(profile, model, cluster, 1)
    again = surviving(plan, profile, model, default(), 1)
    assert np.array_equal(again.hosts, plan.hosts)
    assert np.array_equal(again.routes, plan.routes)


@pytest.mark.parametrize("seed", [3, 5])
def test_what_it_costs_is_explained(seed: int) -> None:
    profile, model, cluster = _world(seed, 4, 2.2)
    plan = make_plan(profile, model, cluster, cluster_hash="c")
    made = surviving(plan, profile, model, default(), 1)
    assert (plan.hosts.sum(axis=0) < 2).any()
    without_s = plan.header.settings["expected_s"]
    assert made.header.settings["survive"] == {"losses": 1, "without_s": pytest.approx(without_s)}
    texts = []
    for each in (plan, made):
        console = Console(file=io.StringIO(), width=140)
        explain_plan(each, profile, model, console, lambda: False)
        texts.append(console.file.getvalue())  # type: ignore[attr-defined]
    over_ms = (made.header.settings["expected_s"] - without_s) * 1e3
    cost = f"{over_ms:.2f} ms" if over_ms > 0 else "nothing"
    assert f"any server may go, which costs {cost}" in texts[1]
    assert "waits" in texts[0]
    assert "waits" not in texts[1]
    assert "may go" not in texts[0]


def test_delays_after_a_loss_are_those_of_the_routes_taken_then() -> None:
    profile, model, cluster = _world(4, 4, 3.0)
    plan = _planned(profile, model, cluster, 1)
    cost = cost_model(model, cluster)
    for lost in range(4):
        after_s = delay_after_s(cost, plan.hosts, plan.routes, profile, lost)
        assert np.isnan(after_s[lost])
        left = np.delete(after_s, lost)
        assert (left > 0).all()
        assert np.isfinite(left).all()
