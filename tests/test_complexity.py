"""Property 4, counted in operations: what deciding and placing cost as models and clusters grow.

No clock: what is counted is what the work consists of, actions that are priced, nodes of the
recursion, and benefits that are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from byhand import (
    PLAIN,
    UNIT,
    HandWorld,
    decided,
    hosting,
    one_bin,
    substitutes,
    world,
)
from factories import random_cluster, random_model_spec, random_profile
from trimmoe.cost import deciding
from trimmoe.cost.actions import Levers
from trimmoe.cost.enumerating import Actions
from trimmoe.cost.lookahead import LookAhead
from trimmoe.cost.model import Accounting, cost_model
from trimmoe.placement import redundancy
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.routes import home_routes

PAIR_MS = [[0, 10], [10, 0]]
UNGATED = Levers(skip_needs_transmission=False)


@dataclass(kw_only=True)
class Count:
    """How often something was done, and how much of it."""

    calls: int = 0
    amount: int = 0


def counted(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    amount: Callable[..., int] = lambda *_, **__: 0,
) -> Count:
    """Count the calls of `owner.name`, and what `amount` says of each one's arguments."""
    count, real = Count(), getattr(owner, name)

    def counting(*arguments: Any, **named: Any) -> Any:
        count.calls += 1
        count.amount += amount(*arguments, **named)
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, counting)
    return count


def branching(layers: int) -> HandWorld:
    """In every layer a token's expert is 10 ms away, a substitute here loses 2 units and a skip
    loses 1, so that there are three actions whose ends differ by what is left to spend."""
    away, here = [0], [1]
    return world(
        hosting([here] * layers, [away] * layers),
        PAIR_MS,
        skip=one_bin([1] * layers),
        pattern_transitions=np.tile(np.eye(2), (layers - 1, 1, 1)),
        **substitutes(layers, [[0, 2], [2, 0]]),
    )


@pytest.mark.parametrize(("servers", "experts"), [(1, 2), (2, 3), (4, 5)])
@pytest.mark.parametrize("accounting", [Accounting.PINNED, Accounting.MIGRATE])
def test_a_token_has_at_most_an_action_for_every_expert_of_every_server_and_a_skip(
    servers: int, experts: int, accounting: Accounting
) -> None:
    """|A| <= M E + 2, the exit being the second of the two; all experts stand in for all, at
    losses that are all different, and are everywhere."""
    rng = np.random.default_rng(servers)
    links_ms = np.round(rng.uniform(1, 9, (servers, servers)), 2)
    losses = rng.permutation(experts * experts).reshape(experts, experts)
    made = world(
        hosting(*[[list(range(experts))]] * servers, experts=experts),
        np.where(np.eye(servers) > 0, 0.0, links_ms).tolist(),
        skip=one_bin([1]),
        **substitutes(1, losses.tolist()),
    )
    space = made.policy(replace(PLAIN, accounting=accounting)).lookahead.space
    destination = None if accounting is Accounting.MIGRATE else 0
    menu = space.candidates(
        0, 0, destination,
        experts=np.array([[1]]),
        masses=np.array([[0.5]]),
        importance=np.array([0.5]),
        steadiness=np.array([0]),
    )  # fmt: skip
    there = np.isfinite(menu.delay_s[0])
    ways = np.column_stack([menu.slot_server[0, there], menu.slot_expert[0, there]])
    assert len(np.unique(ways, axis=0)) <= servers * experts + 1
    # With what is listed more than once: a multiple that does not grow with the cluster.
    assert menu.delay_s.shape[1] <= servers * (space.max_substitutes + 3) + 1


@pytest.mark.parametrize(("horizon", "nodes"), [(1, 0), (2, 3), (3, 3 + 5), (4, 3 + 5 + 7)])
def test_the_literal_recursion_has_a_node_for_every_allowance_that_may_be_left(
    monkeypatch: pytest.MonkeyPatch, horizon: int, nodes: int
) -> None:
    """(39): of 16 units three actions leave 16, 15 and 14; after the next layer 12 to 16 are
    possible, 5 of them, after the third 10 to 16. Nodes that were met before are remembered; each
    prices its actions for every pattern once."""
    settings = replace(PLAIN, horizon=horizon, literal_lookahead=True, levers=UNGATED)
    policy = branching(5).policy(settings)
    policy = replace(policy, lookahead=replace(policy.lookahead, allowance_step=None))
    count = counted(monkeypatch, LookAhead, "_least_cost")
    decided(policy, [0], units=16.0)
    assert count.calls == nodes
    decided(policy, [0], units=16.0)
    assert count.calls == nodes


def test_the_literal_recursion_is_exponential_in_the_horizon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no two ways spend the same, 3, 9 and 27 nodes: losses of layer l are 4^l times 1 and 2
    units."""
    made = branching(5)
    scale = 4.0 ** np.arange(5)
    profile = replace(
        made.profile,
        skip=one_bin(scale.tolist()),
        substitution_loss=made.profile.substitution_loss * scale[:, None, None, None, None],
    )
    made = replace(made, profile=profile)
    count = counted(monkeypatch, LookAhead, "_least_cost")
    found = []
    for horizon in (1, 2, 3, 4):
        settings = replace(PLAIN, horizon=horizon, literal_lookahead=True, levers=UNGATED)
        policy = made.policy(settings)
        exact = replace(policy, lookahead=replace(policy.lookahead, allowance_step=None))
        count.calls = 0
        decided(exact, [0], units=1024.0)
        found.append(count.calls)
    assert found == [0, 3, 3 + 9, 3 + 9 + 27]


def priced(actions: Actions, *rest: Any) -> int:
    """Actions that one layer of tables prices, at every level and exit row."""
    goes_on, levels = rest[3], rest[4]
    return actions.loss.size * goes_on.size * levels.size


def test_tables_to_full_depth_cost_the_same_per_layer_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linear in N: one pass over every layer but the first, on every distinct way on."""
    count = counted(monkeypatch, deciding, "arrival_values", priced)
    found = []
    for layers in (2, 3, 5, 9):
        policy = branching(layers).policy(replace(PLAIN, horizon=None))
        assert policy.tables is not None
        count.calls = count.amount = 0
        policy.tables.prepare([0.5])
        # At home every user's tokens stay where they are: a place per server.
        assert count.calls == 2 * (layers - 1)
        found.append(count.amount / (layers - 1))
    # One more prediction of the exit per layer is what grows with depth, not the work on each.
    per_row = [each / (layers + 1) for each, layers in zip(found, (2, 3, 5, 9), strict=True)]
    assert per_row == [per_row[0]] * 4


def test_a_decision_by_tables_looks_up_and_computes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once there are tables, a decision to full depth prices the actions of its own layer, as a
    myopic one does."""
    policy = branching(6).policy(replace(PLAIN, horizon=None))
    decided(policy, [0])
    passes = counted(monkeypatch, deciding, "arrival_values")
    nodes = counted(monkeypatch, LookAhead, "_least_cost")
    choices = counted(monkeypatch, deciding, "choose")
    for layer in range(6):
        decided(policy, [0], layer=layer, units=3 * UNIT)
    assert (passes.calls, nodes.calls, choices.calls) == (0, 0, 6)


def test_a_replica_only_renews_the_benefits_of_its_own_expert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Algorithm 1, lines 10-13: at most M N E replicas, each of which makes the benefits of one
    expert on M servers stale. So at most M N E benefits at first and M more per replica, not all of
    them again: a heap of M N E entries."""
    servers, layers, experts = 4, 6, 8
    rng = np.random.default_rng(0)
    model = random_model_spec(rng, layers=layers, experts=experts, top_k=2)
    profile, cluster = random_profile(rng, model), random_cluster(rng, servers=servers)
    hosts = np.zeros((servers, layers, experts), dtype=bool)
    owner = rng.integers(servers, size=(layers, experts))
    np.put_along_axis(hosts, owner[None], True, axis=0)
    capacity = used_bytes(hosts, model) + int(model.total_expert_bytes)
    pairs = servers * layers * experts

    benefits = counted(monkeypatch, redundancy.SlotSavings, "of")
    made = redundancy.add_marginal_replicas(
        cost_model(model, cluster), model, profile, hosts, capacity,
        home_routes(servers, layers), cluster.access_share,
    )  # fmt: skip
    replicas = int(made.sum() - hosts.sum())
    assert replicas > 20
    # Before the loop each that saves anything, in it each that leaves the heap, stale ones again.
    assert benefits.calls <= 2 * pairs + servers * replicas

    fetches = counted(monkeypatch, redundancy, "mean_fetch_s")
    letter = redundancy.add_paper_replicas(
        cluster, model, profile, hosts, capacity, np.full((servers, layers), 1 / servers)
    )
    assert fetches.calls == layers * experts + int(letter.sum() - hosts.sum())
