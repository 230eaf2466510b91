"""The value tables of one policy, one per loss weight that is needed."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.cost import deciding
from trimmoe.cost.actions import ActionSpace
from trimmoe.cost.exits import ExitForecast
from trimmoe.cost.lookahead import Weights
from trimmoe.cost.values import ValueTables, build_tables

KEPT_FOR = 8192
"""Lookups after which a table that was not among them is forgotten: weights wander, and a table may
take half a gigabyte."""


@dataclass(kw_only=True)
class TableBank:
    """Makes tables on first use; a pure function of its arguments with a memo.

    A server that must not wait calls `prepare` beforehand, off the decision path, and sets
    `on_demand` to false: then the nearest weight there is will do.
    """

    space: ActionSpace
    profile: Profile
    weights: Weights
    exits: ExitForecast
    routes: IntArray
    levels: FloatArray
    horizon: int | None = None
    """H of (40); None reaches to the last layer."""
    on_demand: bool = True
    _tables: dict[float, ValueTables] = field(default_factory=dict)
    _lookups: int = field(default=0, init=False)
    _used: dict[float, int] = field(default_factory=dict, init=False)
    """At which lookup each was looked up last, where they are made on demand."""

    def of(self, loss_weight: float) -> ValueTables:
        """The tables for a loss weight."""
        if self.on_demand:
            self._lookups += 1
            self._used[loss_weight] = self._lookups
        found = self._tables.get(loss_weight)
        if found is not None:
            return found
        if not self.on_demand and self._tables:
            nearest = min(self._tables, key=lambda there: abs(there - loss_weight))
            return self._tables[nearest]
        self._forget()
        self.prepare([loss_weight])
        return self._tables[loss_weight]

    def _forget(self) -> None:
        """Drop what has not been looked up for long."""
        since = self._lookups - KEPT_FOR
        self._tables = {
            weight: each
            for weight, each in self._tables.items()
            if self._used.get(weight, 0) > since
        }

    def prepare(self, loss_weights: list[float]) -> None:
        """Make the tables of these weights."""
        for loss_weight in loss_weights:
            if loss_weight not in self._tables:
                tables = build_tables(
                    self.space,
                    self.profile,
                    replace(self.weights, loss_weight=loss_weight),
                    self.exits,
                    self.routes,
                    self.levels,
                    horizon=self.horizon,
                )
                # Another thread may be looking meanwhile: replaced, never changed.
                self._tables = {**self._tables, loss_weight: tables}

    def fixed(self, loss_weights: list[float], near: Container[float]) -> TableBank:
        """Another bank with tables of these weights, and of others of its own that are `near`, that
        never makes any more.

        What it decides is a function of what it is made with, whoever prepares what meanwhile.
        """
        kept = {weight: each for weight, each in self._tables.items() if weight in near}
        bank = replace(self, _tables=kept, on_demand=False)
        bank.prepare(loss_weights)
        return bank

    def has(self, loss_weight: float) -> bool:
        """Whether there are tables for a weight."""
        return loss_weight in self._tables

    def layer_values(
        self, tables: ValueTables, layer: int, members: NDArray[np.uint8]
    ) -> deciding.Values:
        """One layer of tables for the compiled loop; `members` [N, E, P]."""
        return deciding.Values(
            levels=tables.levels,
            after=tables.after[layer],
            goes_on=np.ascontiguousarray(tables.exits.goes_on[:, layer]),
            members=members[layer],
        )
