"""What a plan is worth: an objective, and the best routes on it for given hosts.

An objective prices every layer between two servers, and what a user's route is worth by what its
layers cost; a deployment is worth the mean of that, weighted by where users enter. Local search
asks for thousands of neighbours that differ in a few layers, so the tables are kept by (layer,
hosts of that layer).

Shapes: M servers, N layers, E experts, A access servers with users.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.expected import layer_table_s
from trimmoe.cost.model import CostModel
from trimmoe.placement.compiled import reached_hosts, shortest_routes
from trimmoe.placement.routes import best_routes, expected_delay_s

_KEPT_TABLES = 100_000
"""Tables kept at most; then all are forgotten. It changes speed, never a result."""


class Objective(Protocol):
    """Seconds per token that a deployment is to cost little of."""

    @property
    def name(self) -> str: ...

    def layer_table_s(self, layer: int, held: BoolArray) -> FloatArray:
        """Cost of one layer whose hosts are `held` [M, E] by source and destination, [M, M].

        Routes are those along which its sum is least; infinite where none may go.
        """
        ...

    def worth_s(self, cost_s: FloatArray, hosts: BoolArray, routes: IntArray) -> FloatArray:
        """What the search lowers, of the users of each server [A], from what their routes [A, N]
        cost them, [A]."""
        ...

    def value_s(self, hosts: BoolArray, routes: IntArray) -> float:
        """What deployments are compared by, seconds per token."""
        ...


class Summed:
    """Of an objective: a route is worth what its layers cost."""

    def worth_s(self, cost_s: FloatArray, hosts: BoolArray, routes: IntArray) -> FloatArray:
        """The cost itself."""
        return cost_s


@dataclass(frozen=True, kw_only=True)
class ExactObjective(Summed):
    """Expected delay of exact nearest-replica execution without load: the planner's default."""

    cost: CostModel
    profile: Profile
    access_share: FloatArray
    name: str = "exact"

    def layer_table_s(self, layer: int, held: BoolArray) -> FloatArray:
        return layer_table_s(self.cost, held, self.profile, layer)

    def value_s(self, hosts: BoolArray, routes: IntArray) -> float:
        tables = [self.layer_table_s(layer, hosts[:, layer]) for layer in range(hosts.shape[1])]
        return expected_delay_s(self.cost, np.stack(tables), routes, self.access_share)


@dataclass(kw_only=True)
class Landscape:
    """Best routes and what they are worth for any hosts under one objective."""

    cost: CostModel
    access_share: FloatArray
    objective: Objective
    _tables: dict[tuple[int, bytes], FloatArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._access = np.flatnonzero(self.access_share > 0)
        self._weight = self.access_share[self._access]
        self._links = self.cost.links
        self._enter = np.ascontiguousarray(self.cost.enter_s[self._access])
        self._back = np.ascontiguousarray(self.cost.token_transfer_s[:, self._access].T)

    def tables(self, hosts: BoolArray) -> FloatArray:
        """The table of every layer, [N, M, M]."""
        return np.stack([self.table(layer, hosts[:, layer]) for layer in range(hosts.shape[1])])

    def table(self, layer: int, held: BoolArray) -> FloatArray:
        """The table of one layer, from memory where it was asked for before, [M, M]."""
        key = (layer, held.tobytes())
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= _KEPT_TABLES:
                self._tables.clear()
            table = self._tables[key] = self.objective.layer_table_s(layer, held)
        return table

    def best(self, tables: FloatArray, hosts: BoolArray) -> tuple[float, IntArray]:
        """Least expected cost per token and the routes [A, N] of the servers with users; `tables`
        are those of `hosts`."""
        cost_s, routes = shortest_routes(tables, self._enter, self._back)
        return float(self._weight @ self.objective.worth_s(cost_s, hosts, routes)), routes

    def value_s(self, hosts: BoolArray) -> float:
        """Least expected cost per token on these hosts."""
        return self.best(self.tables(hosts), hosts)[0]

    def routes(self, hosts: BoolArray) -> IntArray:
        """The best routes of all access servers, also those without users, [M, N]."""
        return best_routes(self.cost, self.tables(hosts), hosts)

    def reached(self, hosts: BoolArray, routes: IntArray) -> BoolArray:
        """The replicas that these routes [A, N] have any use for, [M, N, E]."""
        return reached_hosts(self._links, hosts, routes)
