"""What is left of a plan while servers are gone: hosts, routes, and what they take."""

from __future__ import annotations

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.expected import expected_layer_delay_s
from trimmoe.cost.model import CostModel
from trimmoe.placement.routes import best_routes, route_delay_s


def live_hosts(hosts: BoolArray, lost: frozenset[int]) -> BoolArray:
    """The hosts without those of lost servers, [M, N, E]."""
    live = hosts.copy()
    live[sorted(lost)] = False
    return live


def covered(hosts: BoolArray, lost: frozenset[int]) -> BoolArray:
    """Live hosts as if experts without any were on every live server, [M, N, E]."""
    orphans = np.logical_not(hosts.any(axis=0))
    return hosts | (orphans[None] & _alive(hosts, lost)[:, None, None])


def live_tables_s(
    cost: CostModel, hosts: BoolArray, profile: Profile, lost: frozenset[int]
) -> FloatArray:
    """Expected delay of each layer between servers, [N, M, M]; inf where one of them is lost. An
    expert without a live host makes no route better or worse than another."""
    alive = _alive(hosts, lost)
    tables = expected_layer_delay_s(cost, covered(live_hosts(hosts, lost), lost), profile)
    tables[:, ~alive, :] = np.inf
    tables[:, :, ~alive] = np.inf
    return tables


def live_routes(
    cost: CostModel, hosts: BoolArray, profile: Profile, lost: frozenset[int]
) -> IntArray:
    """The best routes without lost servers, [M, N]; those of lost access servers mean nothing."""
    return best_routes(cost, live_tables_s(cost, hosts, profile, lost))


def delay_after_s(
    cost: CostModel, hosts: BoolArray, routes: IntArray, profile: Profile, lost: int
) -> FloatArray:
    """Expected exact delay per token of each access server's users once a server is gone, [M]; NaN
    for those of that one. Only routes that crossed it change."""
    gone = frozenset([lost])
    tables = live_tables_s(cost, hosts, profile, gone)
    crossed = (routes == lost).any(axis=1)
    taken = np.where(crossed[:, None], best_routes(cost, tables), routes)
    delay_s = route_delay_s(cost, tables, taken)
    return np.where(np.arange(len(routes)) == lost, np.nan, delay_s)


def _alive(hosts: BoolArray, lost: frozenset[int]) -> BoolArray:
    alive = np.ones(hosts.shape[0], dtype=bool)
    alive[sorted(lost)] = False
    return alive
