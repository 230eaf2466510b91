"""What else could have been done: other routes on the same hosts, and more memory.

Shapes: M servers, N layers, E experts; route delays are per access server, [M].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray, ModelSpec
from trimmoe.cost.expected import destinations, expected_layer_delay_s
from trimmoe.cost.model import CostModel
from trimmoe.placement.blocks import add_blocks
from trimmoe.placement.redundancy import add_marginal_replicas
from trimmoe.placement.routes import best_routes, expected_delay_s, home_routes, route_delay_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteParts:
    """Where the delay of each access server's route comes from, seconds per token, [M] each."""

    moves_s: FloatArray
    """Between the servers of the route, and the token id's way in and out with what software takes
    for it on its user's server."""
    dense_s: FloatArray
    """Attention, router and shared experts."""
    experts_s: FloatArray
    """What the experts add: computing, and calls to servers off the way."""


def route_parts(cost: CostModel, tables: FloatArray, routes: IntArray) -> RouteParts:
    """The parts of `route_delay_s`, which they sum to; `tables` [N, M, M]."""
    layers = np.arange(routes.shape[1])
    moves = cost.ends_s(routes) + cost.transfer_s[routes, destinations(routes)].sum(axis=1)
    dense = cost.dense_s[routes, layers].sum(axis=1)
    whole = route_delay_s(cost, tables, routes)
    return RouteParts(moves_s=moves, dense_s=dense, experts_s=whole - moves - dense)


def other_routes(cost: CostModel, tables: FloatArray) -> dict[str, FloatArray]:
    """Expected delay per token of simple routes on the same hosts, by name, [M] each."""
    servers, layers = cost.server_count, cost.layer_count
    return {
        "home": route_delay_s(cost, tables, home_routes(servers, layers)),
        "one server": one_server_s(cost, tables),
        "one switch": one_switch_s(cost, tables),
        "best": route_delay_s(cost, tables, best_routes(cost, tables)),
    }


def one_server_s(cost: CostModel, tables: FloatArray) -> FloatArray:
    """Delay of the best route that stays on one server, which may be another, [M]."""
    stays = tables.diagonal(axis1=1, axis2=2).sum(axis=0)
    round_trip = cost.enter_s + cost.token_transfer_s.T
    return (round_trip + stays).min(axis=1)


def one_switch_s(cost: CostModel, tables: FloatArray) -> FloatArray:
    """Delay of the best route with at most one change of server, [M]."""
    best = one_server_s(cost, tables)
    stays = tables.diagonal(axis1=1, axis2=2)
    before = np.concatenate([np.zeros((1, stays.shape[1])), np.cumsum(stays, axis=0)])
    for layer in range(tables.shape[0] - 1):
        # The result of `layer` is the first to go to the second server.
        after = before[-1] - before[layer + 1]
        through = before[layer][:, None] + tables[layer] + after[None, :]
        whole = cost.enter_s[:, :, None] + through + cost.token_transfer_s.T[:, None, :]
        best = np.minimum(best, whole.min(axis=(1, 2)))
    return best


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGains:
    """What more memory on one server would save, by greedy additions to the same hosts."""

    cost: CostModel
    model: ModelSpec
    profile: Profile
    hosts: BoolArray
    capacity: IntArray
    access_share: FloatArray

    def of_each(
        self,
        extra_bytes: int,
        *,
        servers: Iterable[int],
        keep_going: Callable[[], bool] = lambda: True,
    ) -> FloatArray:
        """Seconds per token that `extra_bytes` more on each of `servers` save, [M].

        The finite difference to what the same greedy additions reach in the memory there is; NaN
        for servers not asked for, or not reached before `keep_going` said no.
        """
        gains = np.full(self.capacity.size, np.nan)
        present_s = None
        for server in servers:
            if not keep_going():
                break
            if present_s is None:
                present_s = self._grown_s(self.capacity)
            more = self.capacity.copy()
            more[server] += extra_bytes
            gains[server] = max(0.0, present_s - self._grown_s(more))
        return gains

    def _grown_s(self, capacity: IntArray) -> float:
        """Expected delay on best routes after greedy additions within `capacity` [M]."""
        fixed = self.cost, self.model, self.profile
        hosts = add_blocks(*fixed, self.hosts, capacity, self.access_share)
        tables = expected_layer_delay_s(self.cost, hosts, self.profile)
        routes = best_routes(self.cost, tables)
        hosts = add_marginal_replicas(*fixed, hosts, capacity, routes, self.access_share)
        tables = expected_layer_delay_s(self.cost, hosts, self.profile)
        routes = best_routes(self.cost, tables)
        return expected_delay_s(self.cost, tables, routes, self.access_share)
