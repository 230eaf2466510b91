"""Algorithm 2, lines 7-15: the action of least cost plus cost-to-go (40).

Exact execution, substitution only and the paper's letter are this policy with other levers,
horizons and accounting; no baseline has a second implementation of a decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.cost.actions import Candidates
from trimmoe.cost.lookahead import LookAhead, Place, Weights
from trimmoe.cost.model import Accounting
from trimmoe.policy.base import Decision, Observation
from trimmoe.policy.patterns import PatternIndex

WEIGHT_GRID = 0.05
"""Loss weights are rounded to this, so that the look-ahead's memo outlives small adjustments."""


@dataclass(frozen=True, kw_only=True)
class TrimPolicy:
    """Chooses among the feasible actions by step cost plus look-ahead."""

    lookahead: LookAhead
    horizon: int
    routes: IntArray
    """kappa per access server, [M, N]."""
    patterns: PatternIndex
    _by_weight: dict[float, LookAhead] = field(default_factory=dict)

    def decide(self, observation: Observation) -> Decision:
        """One action per token, argmin over the feasible set of f + Phi^(H-1) (40)."""
        lookahead = self._lookahead(observation.loss_weight)
        count = observation.experts.shape[0]
        groups: dict[Place, list[int]] = {}
        for row in range(count):
            groups.setdefault(self._place(observation, row), []).append(row)
        parts = [
            self._decide_together(lookahead, place, np.array(rows), observation)
            for place, rows in groups.items()
        ]
        order = np.argsort(np.concatenate([np.array(rows) for rows in groups.values()]))
        return Decision(
            **{
                name: np.concatenate([getattr(part, name) for part in parts])[order]
                for name in Decision.__slots__
            }
        )

    def _place(self, observation: Observation, row: int) -> Place:
        if self.lookahead.space.cost.accounting is Accounting.MIGRATE:
            return Place(route=None, server=int(observation.server[row]))
        return Place(route=tuple(self.routes[observation.access[row]].tolist()))

    def _decide_together(
        self, lookahead: LookAhead, place: Place, rows: IntArray, observation: Observation
    ) -> Decision:
        """The actions of tokens at one place."""
        layer = observation.layer
        menu = lookahead.space.candidates(
            layer,
            place.source(layer),
            place.destination(layer),
            experts=observation.experts[rows],
            masses=observation.masses[rows],
            importance=observation.importance[rows],
        )
        cost = self._cost(lookahead, place, menu, rows, observation)
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
        )

    def _cost(
        self,
        lookahead: LookAhead,
        place: Place,
        menu: Candidates,
        rows: IntArray,
        observation: Observation,
    ) -> FloatArray:
        """f + Phi of every action, infinite where not allowed, [n, C]."""
        allowance = observation.allowance[rows]
        allowed = menu.allowed(allowance)
        cost = lookahead.weights.step_cost(menu.delay_s, menu.loss)
        if self.horizon > 1 and allowed.sum() > rows.size:
            cost = cost + lookahead.after(
                observation.layer,
                place,
                menu,
                self.patterns.lookup(observation.layer, observation.experts[rows]),
                np.maximum(allowance[:, None] - menu.loss, 0.0),
                allowed,
                self.horizon - 1,
                exit_at=observation.exit_at[rows],
            )
        return np.where(allowed, cost, np.inf)

    def _lookahead(self, loss_weight: float) -> LookAhead:
        rounded = round(loss_weight / WEIGHT_GRID) * WEIGHT_GRID
        if rounded not in self._by_weight:
            weights: Weights = replace(self.lookahead.weights, loss_weight=rounded)
            self._by_weight[rounded] = self.lookahead.weighted(weights)
        return self._by_weight[rounded]
