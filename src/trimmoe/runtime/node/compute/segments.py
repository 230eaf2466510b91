"""Which layers of a route a server takes tokens through in one go."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trimmoe.core.specs import BoolArray
from trimmoe.engine.step import Engine


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Of one server under one engine."""

    server: int
    in_force: bool
    """Whether there may be any: the engine decides nothing about slots that run here, nor about
    exits."""
    here: BoolArray
    """Experts whose slots run here as long as a token stays, [N, E]."""
    _ends: dict[tuple[tuple[int, ...], int], int] = field(default_factory=dict)
    _settled: dict[int, BoolArray] = field(default_factory=dict)

    @staticmethod
    def of(engine: Engine, server: int) -> Segments:
        """See the class."""
        shape = engine.cost.expert_s.shape[1:]
        here = np.zeros(shape, dtype=bool) if engine.settled is None else engine.settled[server]
        return Segments(server=server, in_force=engine.settled is not None, here=here)

    def end(self, route: tuple[int, ...], layer: int) -> int:
        """The first layer from `layer` on, which is run here, that has to be decided upon whatever
        it activates: the one itself, or what it gives goes to another server. The number of layers
        if there is none."""
        if not self.in_force:
            return layer
        key = (route, layer)
        if key not in self._ends:
            following = enumerate(route[layer + 1 :], layer)
            self._ends[key] = next((at for at, to in following if to != self.server), len(route))
        return self._ends[key]

    def settled(self, until: int) -> BoolArray:
        """`here` for tokens that do not go beyond a layer without a decision, [N, E]."""
        if until not in self._settled:
            table = self.here.copy()
            table[until:] = False
            self._settled[until] = table
        return self._settled[until]
