"""Plans for servers that guess: what guesses need counts, beside what tokens take to full depth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import random_cluster, random_model_spec, random_profile
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, IntArray
from trimmoe.cost.guessing import (
    first_layers,
    guess_times_s,
    interval_s,
    own_guess_times_s,
    paces_s,
)
from trimmoe.cost.model import cost_model
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.guessed import WRONG, GuessedObjective
from trimmoe.placement.make import make_plan
from trimmoe.placement.optimise import SearchSettings, optimise_plan, plan_value_s
from trimmoe.placement.stand_ins import copies_bytes

SLOW_S = 40e-3
GUESSED = SearchSettings(objective="guessed", iterations=300)
MODEL = random_model_spec(np.random.default_rng(1), layers=6, experts=4, top_k=2)
PROFILE = random_profile(np.random.default_rng(1), MODEL)


def two_apart(memory: float) -> ClusterSpec:
    """Two equal servers 40 ms apart, each with room for `memory` of all experts."""
    cluster = random_cluster(np.random.default_rng(2), servers=2)
    room = MODEL.dense_bytes + int(memory * MODEL.total_expert_bytes)
    return replace(
        cluster,
        memory_ratio=None,
        memory_bytes=np.full(2, room),
        flops_per_s=np.full(2, 1e12),
        delay_s=SLOW_S * (1 - np.eye(2)),
        bandwidth_bytes_per_s=np.full((2, 2), 1e9),
        access_share=np.full(2, 0.5),
    )


def objective(cluster: ClusterSpec, bits: IntArray | None) -> GuessedObjective:
    """With these copies on whatever hosts."""
    return GuessedObjective(
        cost=cost_model(MODEL, cluster),
        profile=PROFILE,
        access_share=cluster.access_share,
        copies=lambda hosts, routes: bits,
    )


def halves() -> tuple[np.ndarray, np.ndarray]:
    """Hosts and routes: the first layers on one server, the others on the other."""
    hosts = np.zeros((2, MODEL.layer_count, MODEL.expert_count), dtype=bool)
    hosts[0, :3] = hosts[1, 3:] = True
    return hosts, np.tile(np.repeat([0, 1], 3), (2, 1))


def test_guesses_are_right_as_often_as_copies_are_good() -> None:
    cluster, (hosts, routes) = two_apart(1.0), halves()
    chances = {
        bits: objective(cluster, np.full(hosts.shape, bits)).chances(hosts, routes)
        for bits in WRONG
    }
    lost = {bits: 1.0 - chance for bits, chance in chances.items()}
    for bits, wrong in WRONG.items():
        # Each server lacks what the other holds, so together they lack everything once.
        assert (lost[bits] ** 2).sum() == pytest.approx(wrong**2)
    assert (chances[8] > chances[4]).all()
    assert (chances[4] > chances[2]).all()
    everything = np.ones_like(hosts)
    assert objective(cluster, None).chances(everything, routes).tolist() == [1.0, 1.0]


def test_better_copies_and_whole_experts_are_worth_something() -> None:
    cluster, (hosts, routes) = two_apart(1.0), halves()
    values = [
        objective(cluster, np.full(hosts.shape, bits)).value_s(hosts, routes)
        for bits in (0, 2, 4, 8)
    ]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == 4
    more = hosts.copy()
    more[0, 3:] = True
    few = objective(cluster, np.full(hosts.shape, 2))
    assert few.value_s(more, routes) < few.value_s(hosts, routes)


def test_a_server_that_does_most_of_the_layers_takes_longest_between_tokens() -> None:
    cost = cost_model(MODEL, two_apart(1.0))
    guess_s = guess_times_s(cost, PROFILE.top_k)
    access = np.arange(2)
    _, even = halves()
    uneven = np.tile([0, 0, 0, 0, 0, 1], (2, 1))
    evenly = paces_s(cost, even, access, guess_s, PROFILE.top_k)
    assert (evenly > guess_s).all()
    first, second = paces_s(cost, uneven, access, guess_s, PROFILE.top_k)
    assert first > evenly[0]
    # Its own guesses and few layers there; the other server has most to do for its tokens.
    assert first > second >= guess_s[1]


def test_guesses_begin_where_the_token_itself_has_not_been_on_its_users_server() -> None:
    hosts, routes = halves()
    access = np.arange(2)
    # Its third layer is gathered at the other server.
    assert first_layers(routes, access, hosts).tolist() == [2, 0]
    lacking = hosts.copy()
    lacking[0, 1, 0] = False
    assert first_layers(routes, access, lacking).tolist() == [1, 0]
    home = np.tile(access[:, None], (1, MODEL.layer_count))
    assert first_layers(home, access, np.ones_like(hosts)).tolist() == [5, 5]
    cost = cost_model(MODEL, two_apart(1.0))
    guesses_s = (
        own_guess_times_s(cost, routes, access, hosts, PROFILE.top_k),
        guess_times_s(cost, PROFILE.top_k),
    )
    shared, alone = (paces_s(cost, routes, access, each, PROFILE.top_k) for each in guesses_s)
    assert shared[0] < alone[0]
    assert shared[1] == alone[1]
    timed = replace(cost, guess_s=np.array([6.0, 6.0]), guess_ends_s=np.array([3.0, 1.0]))
    ends_too = own_guess_times_s(timed, routes, access, hosts, PROFILE.top_k)
    assert ends_too == pytest.approx([3.0 + 3.0 * 4 / 6, 6.0]), "the output head is no layer"


@given(
    chance=st.floats(0.0, 1.0),
    guess_s=st.floats(1e-4, 0.1),
    whole_s=st.floats(1e-4, 0.5),
    better=st.floats(0.0, 1.0),
)
def test_better_guesses_never_cost_time_and_no_guess_costs_more_than_none(
    chance: float, guess_s: float, whole_s: float, better: float
) -> None:
    now_s = interval_s(chance, guess_s, whole_s, 0.15, 16)
    assert now_s <= whole_s * (1 + 1e-12)
    assert interval_s(max(chance, better), guess_s, whole_s, 0.15, 16) <= now_s * (1 + 1e-12)


def test_of_plans_that_exact_execution_finds_equal_guesses_take_the_one_that_guesses_well() -> None:
    cluster = two_apart(0.85)
    search = SearchSettings(iterations=1500)
    guessed = replace(search, objective="guessed")
    plans = {
        wanted.objective: optimise_plan(PROFILE, MODEL, cluster, wanted, cluster_hash="")
        for wanted in (search, guessed)
    }
    values = {
        name: plan_value_s(plan, PROFILE, MODEL, cluster, guessed) for name, plan in plans.items()
    }
    assert values["guessed"] <= values["exact"]
    assert values["guessed"] == pytest.approx(plans["guessed"].header.settings["value_s"])
    exact_s = {
        name: plan_value_s(plan, PROFILE, MODEL, cluster, search) for name, plan in plans.items()
    }
    assert exact_s["exact"] <= exact_s["guessed"]


@given(memory=st.floats(0.55, 1.5))
def test_copies_take_what_experts_leave_of_the_memory_there_is(memory: float) -> None:
    cluster = two_apart(memory)
    plan = make_plan(PROFILE, MODEL, cluster, cluster_hash="")
    bits = plan.stand_in_bits
    assert bits is not None
    taken = used_bytes(plan.hosts, MODEL) + copies_bytes(MODEL, bits) + PROFILE.stand_in_bytes
    room = cluster.memory_bytes - MODEL.dense_bytes
    assert (taken <= room).all()
    for server in range(2):
        missing = ~plan.hosts[server]
        if (bits[server][missing] == 8).all():
            continue
        larger = copies_bytes(MODEL, np.full(plan.hosts.shape, 8))[server] / missing.size
        assert room[server] - taken[server] < larger + PROFILE.stand_in_bytes + 1


def test_a_profile_that_maps_experts_guesses_better_without_copies() -> None:
    cluster, (hosts, routes) = two_apart(1.0), halves()
    bare: Profile = replace(PROFILE, stand_in_read=None, stand_in_give=None)
    without, mapped = (
        replace(objective(cluster, None), profile=profile).chances(hosts, routes)
        for profile in (bare, replace(bare, stand_in_read=np.zeros((1, 1, 1, 1), np.float16)))
    )
    assert (mapped > without).all()


@pytest.mark.parametrize("wanted", [SearchSettings(iterations=300), GUESSED])
def test_where_each_server_can_hold_everything_no_token_leaves(wanted: SearchSettings) -> None:
    """Memory that is kept for copies never comes before the experts themselves."""
    for plan in (
        optimise_plan(PROFILE, MODEL, two_apart(1.0), wanted, cluster_hash=""),
        make_plan(PROFILE, MODEL, two_apart(1.0), cluster_hash=""),
    ):
        assert plan.hosts.all()
        assert (plan.routes == np.arange(2)[:, None]).all()
