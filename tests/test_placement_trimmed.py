"""The trimmed value: what it must be at the ends of the budget, and in between by definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import models_with_profiles, random_cluster, random_model_spec, random_profile
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.core.stand_ins import RUNGS
from trimmoe.cost.actions import ActionSpace
from trimmoe.cost.lookahead import IMPORTANCE_DECILES, typical_tokens
from trimmoe.cost.model import cost_model
from trimmoe.placement.landscape import ExactObjective
from trimmoe.placement.trimmed import PLANNING_LEVERS, EachUserObjective, TrimmedObjective

NO_EXITS = replace(PLANNING_LEVERS, exit=False)
Case = tuple[ModelSpec, Profile, TrimmedObjective, np.ndarray, np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """An objective without exits on a random deployment with random routes."""
    model, profile = draw(models_with_profiles(max_layers=4, max_experts=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    cluster = random_cluster(rng, servers=draw(st.integers(1, 4)))
    hosts = rng.random((cluster.server_count, *model.expert_bytes.shape)) < 0.4
    hosts[rng.integers(cluster.server_count)] = True
    routes = rng.integers(cluster.server_count, size=(cluster.server_count, model.layer_count))
    objective = TrimmedObjective(
        cost=cost_model(model, cluster),
        profile=profile,
        access_share=cluster.access_share,
        budget=0.02,
        levers=NO_EXITS,
    )
    return model, profile, objective, hosts, routes


def exact_s(case: Case) -> float:
    _, profile, objective, hosts, routes = case
    exact = ExactObjective(
        cost=objective.cost, profile=profile, access_share=objective.access_share
    )
    return exact.value_s(hosts, routes)


@settings(max_examples=30)
@given(case=cases())
def test_without_budget_it_is_the_exact_delay(case: Case) -> None:
    _, _, objective, hosts, routes = case
    none = replace(objective, budget=0.0)
    # Losses of zero are free at any price, so it may even be less.
    assert none.value_s(hosts, routes) <= exact_s(case) * (1 + 1e-9)
    lossless = replace(NO_EXITS, substitute=False, drop_slots=False, skip=False)
    bare = replace(objective, levers=lossless)
    assert bare.value_s(hosts, routes) == pytest.approx(exact_s(case))


@settings(max_examples=30)
@given(case=cases())
def test_a_larger_budget_never_costs_time(case: Case) -> None:
    _, _, objective, hosts, routes = case
    budgets = (0.0, 0.005, 0.02, 0.1, 1.0, 100.0)
    values = [replace(objective, budget=b).value_s(hosts, routes) for b in budgets]
    assert (np.diff(values) <= 1e-12).all()
    assert values[0] <= exact_s(case) * (1 + 1e-9)
    # The most that can be saved: every layer's least delay at no price.
    free = replace(objective, budget=1e6).priced(hosts, routes)
    assert free[1] == 0.0


@settings(max_examples=20)
@given(case=cases(), which=st.integers(0, 15))
def test_the_table_is_the_expected_best_action(case: Case, which: int) -> None:
    model, profile, objective, hosts, _ = case
    price_s = float(objective.prices[which])
    whole = ActionSpace(
        cost=objective.cost,
        hosts=hosts,
        substitution_loss=profile.substitution_loss,
        feasible=profile.feasible,
        skip=profile.skip,
        drop=profile.drop,
        theta=np.ones(model.layer_count),
        theta_drop=np.ones(model.layer_count),
        levers=objective.levers,
    )
    layer = model.layer_count - 1
    table = objective.at(price_s).layer_table_s(layer, hosts[:, layer])
    for source, destination in np.ndindex(table.shape):
        expected = objective.cost.dense_s[source, layer]
        for steadiness, share in enumerate(profile.class_share[layer]):
            tokens = typical_tokens(profile, layer, steadiness)
            menu = whole.candidates(layer, source, destination, **tokens)
            best = (menu.delay_s + price_s * menu.loss).min(axis=1)
            by_decile = best.reshape(len(IMPORTANCE_DECILES), -1).mean(axis=0)
            expected += share * (by_decile @ profile.pattern_share[layer])
        assert table[source, destination] == pytest.approx(expected)


@settings(max_examples=20)
@given(case=cases())
def test_the_price_spends_the_budget(case: Case) -> None:
    _, _, objective, hosts, routes = case
    value_s, price_s = objective.priced(hosts, routes)

    def at(price_s: float) -> float:
        tables = [
            objective.at(price_s).layer_table_s(layer, hosts[:, layer])
            for layer in range(hosts.shape[1])
        ]
        following = np.concatenate([routes[:, 1:], routes[:, -1:]], axis=1)
        layers, access = np.arange(hosts.shape[1]), np.arange(routes.shape[0])
        token_s = objective.cost.token_transfer_s
        ends = token_s[access, routes[:, 0]] + token_s[routes[:, -1], access]
        along = ends + np.stack(tables)[layers, routes, following].sum(axis=1)
        return float(objective.access_share @ along) - price_s * objective.budget

    assert value_s == pytest.approx(at(price_s))
    for other in (0.0, price_s / 3, price_s * 0.9, price_s * 1.1, price_s * 3):
        assert at(other) <= value_s + 1e-9


@settings(max_examples=10)
@given(case=cases())
def test_layers_count_by_the_tokens_that_reach_them(case: Case) -> None:
    _, profile, objective, hosts, _ = case
    with_exits = replace(objective, levers=PLANNING_LEVERS)
    for layer, alive in enumerate(profile.active):
        held = hosts[:, layer]
        np.testing.assert_allclose(
            with_exits.at(0.1).layer_table_s(layer, held),
            alive * objective.at(0.1).layer_table_s(layer, held),
        )


def test_routes_may_be_kept_to_some_servers() -> None:
    rng = np.random.default_rng(0)
    model = random_model_spec(rng)
    cluster = random_cluster(rng)
    objective = TrimmedObjective(
        cost=cost_model(model, cluster),
        profile=random_profile(rng, model),
        access_share=cluster.access_share,
        budget=0.02,
    )
    held = np.ones((4, model.expert_count), dtype=bool)
    table = objective.at(0.1, np.array([1, 2])).layer_table_s(0, held)
    assert np.isfinite(table[1:3, 1:3]).all()
    assert np.isinf(table[[0, 3]]).all()
    assert np.isinf(table[:, [0, 3]]).all()


@settings(max_examples=30)
@given(case=cases(), bits=st.sampled_from(RUNGS), seed=st.integers(0, 99))
def test_copies_only_save_and_fewer_save_less(case: Case, bits: int, seed: int) -> None:
    """At every price that actions are condensed at, but for what experts that run on one server
    wait for one another: actions are listed by the delay of each slot by itself."""
    model, _, objective, hosts, _ = case
    waiting_s = (model.top_k - 1) * objective.cost.expert_s.max()
    every = np.where(hosts, 0, bits)
    some = every * (np.random.default_rng(seed).random(hosts.shape) < 0.5)

    def cheapest_s(has: np.ndarray) -> np.ndarray:
        """Delay and priced loss of the best way to act, by layer and price."""
        count = hosts.shape[1]
        curves = np.array(
            [objective.curve(at, hosts[:, at], 0, 0, has[:, at]) for at in range(count)]
        )
        priced = curves[:, 0, None] + objective.prices[:, None] * curves[:, 1, None]
        return priced.min(axis=2)

    bare, few, whole = map(cheapest_s, (np.zeros_like(every), some, every))
    assert (whole <= few + waiting_s + 1e-12).all()
    assert (few <= bare + waiting_s + 1e-12).all()


@settings(max_examples=30)
@given(case=cases(), bits=st.sampled_from(RUNGS))
def test_routes_are_sought_with_every_copy_that_there_could_be(case: Case, bits: int) -> None:
    _, _, objective, hosts, routes = case
    every = np.where(hosts, 0, bits)
    none, whole = (
        replace(objective, copies=lambda _, __, has=has: has).value_s(hosts, routes)
        for has in (np.zeros_like(every), every)
    )
    assert none == pytest.approx(objective.value_s(hosts, routes))
    taken = replace(objective, copied_bits=np.full(len(hosts), bits))
    assert taken.value_s(hosts, routes) == pytest.approx(whole)


@settings(max_examples=30)
@given(case=cases())
def test_users_that_share_no_budget_fare_no_better(case: Case) -> None:
    _, _, objective, hosts, routes = case
    each = EachUserObjective(whole=objective).value_s(hosts, routes)
    assert each >= objective.value_s(hosts, routes) * (1 - 1e-9)
    alone = np.eye(len(hosts))[0]
    only = replace(objective, access_share=alone)
    assert EachUserObjective(whole=only).value_s(hosts, routes) == pytest.approx(
        only.value_s(hosts, routes)
    )
