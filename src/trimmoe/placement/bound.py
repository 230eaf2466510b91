"""The optimum of small instances, or a bound on it, by an integer program (SciPy's HiGHS).

The program is exact for expected exact delay: its optimum is that of `landscape.ExactObjective`
over all hosts and routes. Variables, for access servers a with users:

- x[m, l, k] in {0, 1}: server m holds expert k of layer l; memory (c.1) and coverage (c.2).
- f[a, l, s, t] in {0, 1}: layer l of tokens from a runs on s and its result goes to t; a unit flow
  from layer to layer, in the last layer s = t.
- v[a, l, k, s, m, t] >= 0: the same, and expert k runs on m: sums to f over m, is at most x over
  (s, t), and is zero where the server holds the expert that is nearer between s and t (one
  constraint for each such server, since at most one v of a, l, k is 1).
- D[a, l, p] >= the delay of activated set p: at least the way from s to t, and for every slot and
  server the way over it plus all work of the set on it. Where the slot is elsewhere only the work
  counts, which is never more than the delay, so integral solutions have exactly the maximum.

With f and x integral v is, so D takes the model's value and the optimum is the model's. Until the
time is up HiGHS has a lower bound from the relaxation and maybe a solution; both are given as such.
The program has A N E M^3 variables v, so only small instances are tried.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.model import host_delay_s
from trimmoe.placement.planner import Planner

MOST_ENTRIES = 400_000
"""Matrix entries up to which the program is tried."""
_MS = 1e3
"""Milliseconds inside, so that HiGHS's absolute tolerances are far below any delay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What the program says about the least expected exact delay per token."""

    lower_s: float
    """No placement and routes are better than this; 0 if nothing was proved."""
    optimal: bool
    """Whether the program was solved; then `lower_s` is the optimum, within its tolerance."""
    hosts: BoolArray | None
    """Those of the best solution found, [M, N, E]."""

    def gap(self, value_s: float) -> float:
        """By which share of itself `value_s` may lie above the optimum."""
        return max(0.0, 1.0 - self.lower_s / value_s)

    def record(self, value_s: float) -> dict[str, float | bool]:
        """What a plan's header keeps, for a plan of `value_s`."""
        return {"lower_s": self.lower_s, "optimal": self.optimal, "gap": self.gap(value_s)}


def exact_bound(planner: Planner, *, time_limit_s: float) -> Bound | None:
    """Solve the program for at most about `time_limit_s`; None if it is too large to try."""
    program = _Program(planner)
    if program.entries_expected() > MOST_ENTRIES:
        return None
    return program.solved(time_limit_s)


@dataclass
class _Rows:
    """Sparse constraints lower <= row @ variables <= upper, collected one by one."""

    column: list[IntArray] = field(default_factory=list)
    value: list[FloatArray] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add(self, lower: float, upper: float, *terms: tuple[Any, Any]) -> None:
        """One constraint from (variables, coefficients), coefficients broadcast."""
        columns = [np.atleast_1d(variables).ravel() for variables, _ in terms]
        values = [
            np.broadcast_to(np.asarray(by, dtype=np.float64), np.shape(variables)).ravel()
            if np.ndim(variables)
            else np.atleast_1d(np.asarray(by, dtype=np.float64))
            for variables, by in terms
        ]
        self.column.append(np.concatenate(columns))
        self.value.append(np.concatenate(values))
        self.lower.append(lower)
        self.upper.append(upper)

    def constraint(self, variables: int) -> LinearConstraint:
        starts = np.concatenate([[0], np.cumsum([len(row) for row in self.column])])
        matrix: Any = csr_array(
            (np.concatenate(self.value), np.concatenate(self.column), starts),
            shape=(len(self.column), variables),
        )
        # HiGHS refuses a column named twice in a row.
        matrix.sum_duplicates()
        return LinearConstraint(matrix, self.lower, self.upper)  # type: ignore[arg-type]


class _Program:
    """The variables' numbers and constraints of one instance; used once."""

    def __init__(self, planner: Planner) -> None:
        self.planner, self.cost = planner, planner.cost
        self.access = np.flatnonzero(planner.cluster.access_share > 0)
        self.layers, self.experts = planner.model.expert_bytes.shape
        self.servers = self.cost.server_count
        self.rows = _Rows()

    def entries_expected(self) -> int:
        """Roughly how many entries the matrix gets."""
        pairs = self.servers**2
        per_slot = self.servers * pairs * (self.planner.model.top_k + 2)
        sets = int((self.planner.profile.pattern_share > 0).sum())
        ways = self.layers * self.experts * self.servers * pairs * (self.servers + 3)
        return self.access.size * (sets * self.planner.model.top_k * per_slot + ways)

    def solved(self, time_limit_s: float) -> Bound:
        """Build and solve."""
        self._number()
        self._flows()
        self._hosting()
        self._delays()
        lower: Any = np.zeros(self.count)
        upper: Any = np.where(self.integral, 1.0, np.inf)
        upper[self.absent] = 0.0
        result = milp(
            c=self._objective(),
            integrality=self.integral,  # type: ignore[arg-type]
            bounds=Bounds(lower, upper),
            constraints=self.rows.constraint(self.count),
            options={"time_limit": time_limit_s, "mip_rel_gap": 1e-6},
        )
        proved = getattr(result, "mip_dual_bound", None)
        lower_s = max(0.0, float(proved) / _MS) if proved is not None else 0.0
        hosts = None if result.x is None else result.x[self.x] > 0.5
        return Bound(lower_s=lower_s, optimal=result.status == 0, hosts=hosts)

    def _number(self) -> None:
        accesses, servers = self.access.size, self.servers
        sets = self.planner.profile.patterns.shape[1]
        shapes = {
            "x": (servers, self.layers, self.experts),
            "f": (accesses, self.layers, servers, servers),
            "v": (accesses, self.layers, self.experts, servers, servers, servers),
            "d": (accesses, self.layers, sets),
        }
        numbers, start = {}, 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            numbers[name] = np.arange(start, start + size).reshape(shape)
            start += size
        self.x, self.f, self.v, self.d = (numbers[name] for name in shapes)
        self.count = start
        self.integral = np.zeros(start, dtype=np.int64)
        self.integral[self.x] = self.integral[self.f] = 1
        # The last layer's result stays where it is.
        off = ~np.eye(servers, dtype=bool)
        self.absent = self.f[:, -1][:, off].ravel()

    def _flows(self) -> None:
        for a in range(self.access.size):
            self.rows.add(1.0, 1.0, (self.f[a, 0], 1.0))
            for layer in range(self.layers - 1):
                for m in range(self.servers):
                    into, out = self.f[a, layer, :, m], self.f[a, layer + 1, m, :]
                    self.rows.add(0.0, 0.0, (into, 1.0), (out, -1.0))

    def _hosting(self) -> None:
        sizes, capacity = self.planner.model.expert_bytes, self.planner.capacity
        unit = float(sizes.max())
        for m in range(self.servers):
            self.rows.add(-np.inf, capacity[m] / unit, (self.x[m], sizes / unit))
        for layer, k in np.ndindex(sizes.shape):
            self.rows.add(1.0, np.inf, (self.x[:, layer, k], 1.0))
            nearer = self._nearer(layer, k)
            for a in range(self.access.size):
                way = self.v[a, layer, k]  # [s, m, t]
                for s, t in np.ndindex(self.servers, self.servers):
                    self.rows.add(0.0, 0.0, (way[s, :, t], 1.0), (self.f[a, layer, s, t], -1.0))
                for m in range(self.servers):
                    host = self.x[m, layer, k]
                    self.rows.add(-np.inf, 0.0, (way[:, m, :], 1.0), (host, -1.0))
                    if nearer[m].any():
                        self.rows.add(-np.inf, 1.0, (way[nearer[m]], 1.0), (host, 1.0))

    def _nearer(self, layer: int, k: int) -> BoolArray:
        """Whether the first server is taken before m between s and t, [M, s, m, t]."""
        alone = np.empty((self.servers,) * 3)  # [s, m, t]
        for s, t in np.ndindex(self.servers, self.servers):
            alone[s, :, t] = host_delay_s(self.cost, layer, s, t)[:, k]
        first = np.arange(self.servers)
        nearer = np.empty((self.servers,) * 4, dtype=bool)
        for m in range(self.servers):
            ties = (alone == alone[:, m, None]) & (m < first)[None, :, None]
            nearer[m] = (alone > alone[:, m, None]) | ties
        return nearer

    def _delays(self) -> None:
        transfer_ms = self.cost.transfer_s * _MS
        path_ms = transfer_ms[:, :, None] + transfer_ms[None]  # [s, m, t]
        path_ms = path_ms + self.cost.arrival_wait_s[:, :, None] * _MS
        profile = self.planner.profile
        for layer, p in np.argwhere(profile.pattern_share > 0).tolist():
            experts = profile.patterns[layer, p]
            work_ms = self.cost.expert_s[:, layer] * _MS  # [m, k]
            for a in range(self.access.size):
                d, way = self.d[a, layer, p], self.v[a, layer]
                self.rows.add(0.0, np.inf, (d, 1.0), (self.f[a, layer], -transfer_ms))
                for k in experts:
                    alone_ms = path_ms + work_ms[None, :, k, None]
                    self.rows.add(0.0, np.inf, (d, 1.0), (way[k], -alone_ms))
                    for m in range(self.servers):
                        works = [(way[j][:, m, :], -work_ms[m, j]) for j in experts]
                        on_way = (way[k][:, m, :], -path_ms[:, m, :])
                        self.rows.add(0.0, np.inf, (d, 1.0), on_way, *works)

    def _objective(self) -> FloatArray:
        objective = np.zeros(self.count)
        share = self.planner.cluster.access_share
        enter_ms, back_ms = self.cost.enter_s * _MS, self.cost.token_transfer_s * _MS
        for a, access in enumerate(self.access):
            weight = share[access]
            objective[self.f[a, 0]] += weight * enter_ms[access][:, None]
            objective[self.f[a, -1].diagonal()] += weight * back_ms[:, access]
            for layer in range(self.layers):
                dense_ms = self.cost.dense_s[:, layer] * _MS
                objective[self.f[a, layer]] += weight * dense_ms[:, None]
            objective[self.d[a]] += weight * self.planner.profile.pattern_share
        return objective
