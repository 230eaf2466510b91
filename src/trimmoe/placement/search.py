"""Local search over placements: late acceptance from many starts, the best going on.

Late acceptance (Burke and Bykov) takes a neighbour that is no worse than the present placement or
than the one some steps ago, so it leaves local optima without a temperature to tune. After every
accepted step replicas that no route has a use for are dropped: they cost memory and buy nothing,
and what they leave is what the next steps need.

The given starts climb first; then rounds follow of random starts (`intervals`), of which the best
few climb a little, after which the best placements of all go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.placement.intervals import IntervalStarts
from trimmoe.placement.landscape import Landscape
from trimmoe.placement.mutate import Mutator

KeepGoing = Callable[[], bool]
"""Asked before every step; a clock, if any, is behind it."""

_HISTORY = 500
"""Steps that late acceptance looks back."""
_DRAWS = 2000
"""Random starts in one round."""
_BEST_DRAWS = 3
"""How many of them climb."""
_SLICE = 500
"""Steps of one climb before others have their turn."""
_POOL = 4
"""Placements that go on from round to round."""


@dataclass(kw_only=True)
class Climber:
    """One placement on its way; `best_s` never rises."""

    name: str
    landscape: Landscape
    mutator: Mutator
    hosts: BoolArray
    rng: np.random.Generator
    best_s: float = field(init=False)
    best_hosts: BoolArray = field(init=False)

    def __post_init__(self) -> None:
        self._tables = self.landscape.tables(self.hosts)
        self._value_s, routes = self.landscape.best(self._tables, self.hosts)
        self.best_s, self.best_hosts = self._value_s, self.hosts
        self._history = np.full(_HISTORY, self._value_s)
        self._steps = 0
        self._drop_unreached(routes)

    def step(self) -> None:
        """Try one neighbour."""
        at = self._steps % _HISTORY
        self._steps += 1
        hosts = self.mutator.neighbour(self.hosts, self.rng)
        if hosts is None:
            return
        tables = self._changed_tables(hosts)
        value_s, routes = self.landscape.best(tables, hosts)
        if value_s <= max(self._value_s, self._history[at]):
            self.hosts, self._tables, self._value_s = hosts, tables, value_s
            self._drop_unreached(routes)
            if self._value_s < self.best_s:
                self.best_s, self.best_hosts = self._value_s, self.hosts
        self._history[at] = min(self._history[at], self._value_s)

    def _changed_tables(self, hosts: BoolArray) -> FloatArray:
        changed = np.flatnonzero((hosts != self.hosts).any(axis=(0, 2)))
        tables = self._tables.copy()
        for layer in changed:
            tables[layer] = self.landscape.table(int(layer), hosts[:, layer])
        return tables

    def _drop_unreached(self, routes: IntArray) -> None:
        reached = self.landscape.reached(self.hosts, routes)
        if (reached == self.hosts).all():
            return
        self._tables, self.hosts = self._changed_tables(reached), reached
        self._value_s, _ = self.landscape.best(self._tables, reached)


@dataclass(kw_only=True)
class Search:
    """A pool of climbers and what it has cost so far; mutable, one plan's work."""

    landscape: Landscape
    mutator: Mutator
    rng: np.random.Generator
    iterations: int
    """Steps and draws at most."""
    keep_going: KeepGoing
    draws: int = _DRAWS
    """Random starts in one round; 0 for none."""
    climb_steps: int = _SLICE
    done: int = 0
    pool: list[Climber] = field(default_factory=list)

    def run(self, starts: dict[str, BoolArray]) -> Climber:
        """Search from `starts` and report the best; it is never worse than any of them.

        Reproducible if it is the number of iterations that ends it.
        """
        assert starts
        self.pool = [self._climber(name, hosts) for name, hosts in starts.items()]
        self._select()
        self._climb(self.pool)
        while self._may_go_on():
            drawn = self._best_draws()
            self._climb(drawn)
            self.pool += drawn
            self._select()
            self._climb(self.pool)
        return min(self.pool, key=lambda climber: climber.best_s)

    def _climber(self, name: str, hosts: BoolArray) -> Climber:
        return Climber(
            name=name,
            landscape=self.landscape,
            mutator=self.mutator,
            hosts=hosts,
            rng=self.rng.spawn(1)[0],
        )

    def _may_go_on(self) -> bool:
        return self.done < self.iterations and self.keep_going()

    def _select(self) -> None:
        self.pool.sort(key=lambda climber: climber.best_s)
        del self.pool[_POOL:]

    def _climb(self, climbers: list[Climber]) -> None:
        for climber in climbers:
            for _ in range(self.climb_steps):
                if not self._may_go_on():
                    return
                climber.step()
                self.done += 1

    def _best_draws(self) -> list[Climber]:
        source = IntervalStarts(cost=self.landscape.cost, mutator=self.mutator)
        found: list[tuple[float, int, BoolArray]] = []
        for draw in range(self.draws):
            if not self._may_go_on():
                break
            self.done += 1
            hosts = source.draw(self.rng)
            if hosts is not None:
                found.append((self.landscape.value_s(hosts), draw, hosts))
        found.sort(key=lambda one: one[:2])
        return [self._climber("random intervals", hosts) for _, _, hosts in found[:_BEST_DRAWS]]
