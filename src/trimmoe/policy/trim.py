"""Algorithm 2, lines 7-15: the action of least cost plus cost-to-go (40).

Exact execution, substitution only and the paper's letter are this policy with other levers,
horizons and accounting; no baseline has a second implementation of a decision. The cost-to-go is
looked up in value tables, and a batch is decided in one compiled loop; without tables it is the
literal recursion (39), for a finite horizon.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trimmoe.core.changed import changed
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.stand_ins import NO_STAND_IN
from trimmoe.cost import deciding
from trimmoe.cost.actions import Candidates, as_batch
from trimmoe.cost.expected import destinations, expected_layer_delay_s
from trimmoe.cost.kernels import plain
from trimmoe.cost.lookahead import LookAhead, Place, Weights
from trimmoe.cost.model import Accounting
from trimmoe.cost.nearest import Nearest
from trimmoe.cost.values import ValueTables
from trimmoe.policy.base import Decision, Observation, Policy
from trimmoe.policy.letter import by_gate, target_only, with_slots
from trimmoe.policy.nearest import (
    exact_decision,
    leaves_settled,
    nearest_of,
    nothing_to_choose,
)
from trimmoe.policy.patterns import PatternIndex
from trimmoe.policy.tables import TableBank

WEIGHT_GRID = 0.025
"""Loss weights are rounded to this, so that tables and memos outlive small adjustments."""


@dataclass(frozen=True, kw_only=True)
class TrimPolicy(Policy):
    """Chooses among the feasible actions by step cost plus look-ahead."""

    lookahead: LookAhead
    horizon: int | None
    """H of (40); None sees to the last layer."""
    routes: IntArray
    """kappa per route, the first M by access server, [R, N]."""
    patterns: PatternIndex
    tables: TableBank | None
    """None: the literal recursion, which needs a horizon, or nothing to look up."""
    one_expert: bool = False
    """Whether only the target of an activated set is run, see `letter`."""
    target_importance: bool = False
    """Whether the target's gate is a layer's importance."""
    _by_weight: dict[float, LookAhead] = field(default_factory=dict)

    @property
    def nearest(self) -> Nearest | None:
        space = self.lookahead.space
        settles = leaves_settled(space.levers, space.cost.accounting) and not self.one_expert
        return nearest_of(space, self.routes) if settles else None

    @property
    def copies(self) -> BoolArray | None:
        stand_ins = self.lookahead.space.stand_ins
        return None if stand_ins is None else stand_ins.number != NO_STAND_IN

    @property
    def exact_to_go_s(self) -> FloatArray | None:
        return None if self.copies is None else self._exact_to_go_s

    @cached_property
    def _exact_to_go_s(self) -> FloatArray:
        space, routes = self.lookahead.space, self.routes
        tables_s = expected_layer_delay_s(space.cost, space.hosts, self.lookahead.profile)
        each_s = tables_s[np.arange(routes.shape[1]), routes, destinations(routes)]
        return each_s[:, ::-1].cumsum(axis=1)[:, ::-1]

    def without_copies(self) -> TrimPolicy:
        space = replace(self.lookahead.space, stand_ins=None)
        return replace(
            self,
            lookahead=replace(self.lookahead, space=space, _menus={}, _values={}),
            tables=None if self.tables is None else replace(self.tables, space=space, _tables={}),
            _by_weight={},
        )

    @property
    def decides(self) -> bool:
        space = self.lookahead.space
        return not nothing_to_choose(space.levers, space.cost.accounting)

    def decide(self, observation: Observation) -> Decision:
        """One action per token, argmin over the feasible set of f + Phi (40)."""
        if not self.decides:
            return exact_decision(self.lookahead.space, self.routes, observation)
        if self.target_importance:
            observation = by_gate(observation)
        if self.one_expert:
            decision = self._decided(target_only(observation))
            return with_slots(decision, observation.experts.shape[1], observation.server)
        return self._decided(observation)

    def _decided(self, observation: Observation) -> Decision:
        """One action per token, of those whose activated sets may be approximated."""
        steadiness = np.minimum(observation.steadiness, self.lookahead.space.class_count - 1)
        observation = changed(observation, steadiness=steadiness)
        groups = self._groups(observation)
        parts = [
            self._decide_together(weight, place, rows, observation)
            for (weight, place), rows in groups.items()
        ]
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate(list(groups.values())))
        return Decision(
            **{
                name: np.concatenate([getattr(part, name) for part in parts])[order]
                for name in Decision.__slots__
            }
        )

    def _groups(self, observation: Observation) -> dict[tuple[float, Place | None], IntArray]:
        """Rows that are decided together."""
        rounded = np.rint(observation.loss_weight / WEIGHT_GRID) * WEIGHT_GRID
        if self.tables is not None:
            if (rounded == rounded[:1]).all():
                return {(float(rounded[0]), None): np.arange(rounded.size)}
            return {(w, None): np.flatnonzero(rounded == w) for w in np.unique(rounded).tolist()}
        groups: dict[tuple[float, Place | None], list[int]] = {}
        for row, weight in enumerate(rounded.tolist()):
            groups.setdefault((weight, self._place(observation, row)), []).append(row)
        return {key: np.array(rows) for key, rows in groups.items()}

    @property
    def _migrates(self) -> bool:
        return self.lookahead.space.cost.accounting is Accounting.MIGRATE

    def _place(self, observation: Observation, row: int) -> Place:
        if self._migrates:
            return Place(route=None, server=int(observation.server[row]))
        return Place(route=tuple(self.routes[observation.route[row]].tolist()))

    def _decide_together(
        self, weight: float, place: Place | None, rows: IntArray, observation: Observation
    ) -> Decision:
        """The actions of tokens under one loss weight, and at one place if it is named, as it is
        for the literal recursion."""
        layer = observation.layer
        source, destination = observation.server[rows], None
        if place is not None:
            source, destination = place.source(layer), place.destination(layer)
        elif not self._migrates:
            assert self.tables is not None
            return self._decide_at_once(self.tables, weight, rows, observation)
        menu = self.lookahead.space.candidates(
            layer,
            source,
            destination,
            experts=observation.experts[rows],
            masses=observation.masses[rows],
            importance=observation.importance[rows],
            steadiness=observation.steadiness[rows],
        )
        cost = self._cost(weight, place, menu, rows, observation)
        best = cost.argmin(1)
        # Nothing costs less than itself with a broken estimate: fall back to exact execution.
        best = np.where(np.isfinite(cost[np.arange(rows.size), best]), best, 0)
        at = (np.arange(rows.size), best)
        return Decision(
            slot_expert=menu.slot_expert[at],
            slot_server=menu.slot_server[at],
            destination=menu.destination[at],
            delay_s=menu.delay_s[at],
            loss=menu.loss[at],
            ahead=np.full(rows.size, np.inf),
        )

    def _decide_at_once(
        self, bank: TableBank, weight: float, rows: IntArray, observation: Observation
    ) -> Decision:
        """All tokens in one compiled loop over the value tables."""
        layer, route = observation.layer, observation.route[rows]
        tables, space = bank.of(weight), self.lookahead.space
        batch = as_batch(
            observation.experts[rows],
            observation.masses[rows],
            observation.importance[rows],
            observation.steadiness[rows],
            self.routes[route, layer],
            self.routes[route, min(layer + 1, self.routes.shape[1] - 1)],
        )
        count, slots = batch.experts.shape
        picked = (
            np.empty((count, slots), dtype=np.int64),
            np.empty((count, slots), dtype=np.int64),
            np.empty(count),
            np.empty(count),
            np.empty(count),
        )
        weights = self.lookahead.weights
        deciding.choose(
            space.menu,
            layer,
            batch,
            plain(observation.allowance[rows], np.float64),
            tables.exits.rows(observation.exit_at[rows]),
            tables.place_of[layer][route],
            bank.layer_values(tables, layer, self.patterns.members),
            (weight, weights.reference_s, weights.budget),
            space.levers.skip_needs_transmission,
            picked,
        )
        return Decision(
            slot_expert=picked[0],
            slot_server=picked[1],
            destination=batch.destination,
            delay_s=picked[2],
            loss=picked[3],
            # A short horizon does not know what is still to come.
            ahead=picked[4] if self.horizon is None else np.full(rows.size, np.inf),
        )

    def _cost(
        self,
        weight: float,
        place: Place | None,
        menu: Candidates,
        rows: IntArray,
        observation: Observation,
    ) -> FloatArray:
        """f + Phi of every action, infinite where not allowed, [n, C]."""
        lookahead = self._lookahead(weight)
        allowance = observation.allowance[rows]
        allowed = menu.allowed(allowance)
        cost = lookahead.weights.step_cost(menu.delay_s, menu.loss)
        left = np.maximum(allowance[:, None] - menu.loss, 0.0)
        patterns = self.patterns.lookup(observation.layer, observation.experts[rows])
        if self.tables is not None:
            cost = cost + self._tabled(
                self.tables.of(weight), menu, rows, observation, patterns, left
            )
        elif self.horizon is not None and self.horizon > 1 and allowed.sum() > rows.size:
            assert place is not None
            cost = cost + lookahead.after(
                observation.layer,
                place,
                menu,
                patterns,
                left,
                allowed,
                self.horizon - 1,
                steadiness=observation.steadiness[rows],
                exit_row=lookahead.exits.rows(observation.exit_at[rows]),
            )
        return np.where(allowed, cost, np.inf)

    def _tabled(
        self,
        tables: ValueTables,
        menu: Candidates,
        rows: IntArray,
        observation: Observation,
        patterns: IntArray,
        left: FloatArray,
    ) -> FloatArray:
        return tables.after_actions(
            observation.layer,
            menu,
            route=observation.route[rows],
            patterns=patterns,
            left=left,
            steadiness=observation.steadiness[rows],
            exit_at=observation.exit_at[rows],
            migrates=self._migrates,
        )

    def _lookahead(self, weight: float) -> LookAhead:
        if weight not in self._by_weight:
            weights: Weights = replace(self.lookahead.weights, loss_weight=weight)
            self._by_weight[weight] = self.lookahead.weighted(weights)
        return self._by_weight[weight]


def rounded_weight(loss_weight: float) -> float:
    """A loss weight on the grid that tables are made for."""
    return round(loss_weight / WEIGHT_GRID) * WEIGHT_GRID
