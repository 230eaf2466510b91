"""Which layers of a route a server takes tokens through in one go."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from trimmoe.core.specs import BoolArray
from trimmoe.cost.nearest import Nearest
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
    nearest: Nearest | None = None
    """Where slots run in the layer behind which a token leaves; None if that is decided upon."""
    _ends: dict[tuple[tuple[int, ...], int], int] = field(default_factory=dict)
    _settled: dict[tuple[int, int | None], BoolArray] = field(default_factory=dict)

    @staticmethod
    def of(engine: Engine, server: int) -> Segments:
        """See the class."""
        shape = engine.cost.expert_s.shape[1:]
        here = np.zeros(shape, dtype=bool) if engine.settled is None else engine.settled[server]
        return Segments(
            server=server,
            in_force=engine.settled is not None,
            here=here,
            nearest=None if engine.decides else engine.nearest,
        )

    @cached_property
    def end_here(self) -> bool:
        """Whether all slots of tokens that come to the last layer run here, so that tokens of one
        sequence may end together."""
        return self.in_force and bool(self.here[-1].all())

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

    def leaves_for(self, route: tuple[int, ...], until: int) -> int | None:
        """Where tokens go behind a layer that was found by `end`, if the layer may be run whole
        where its slots all run here."""
        if self.nearest is None or until >= len(route) - 1 or route[until] != self.server:
            return None
        return route[until + 1]

    def settled(self, until: int, to: int | None = None) -> BoolArray:
        """`here` for tokens that do not go beyond a layer without a decision, [N, E]; with the
        experts of that layer that run here for tokens that leave for the server `to` behind it."""
        if (until, to) not in self._settled:
            table = self.here.copy()
            table[until:] = False
            if to is not None:
                assert self.nearest is not None
                table[until] = self.nearest.before_leaving(self.server, to)[until]
            self._settled[until, to] = table
        return self._settled[until, to]
