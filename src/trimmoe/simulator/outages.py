"""Servers that stand still for a while, as a machine does that is suspended, or a server that dies
and comes back: nothing is lost, and what needs them waits."""

from __future__ import annotations

import numpy as np

from trimmoe.simulator.settings import SimulationSettings
from trimmoe.simulator.state import State


class Outages:
    """Drawn from a seed: one server after another, at equal distances."""

    def __init__(self, settings: SimulationSettings, *, servers: int, seed: int) -> None:
        self._every_s, self._lasts_s = settings.outage_every_s, settings.outage_s
        self._servers, self._draws = servers, np.random.default_rng((seed, servers))
        self._next_s = self._every_s or np.inf

    def befall(self, state: State, now_s: float) -> None:
        """Servers whose outage is due begin no batch before it is over. One that has begun is
        finished first, and what takes no time is done meanwhile."""
        while self._every_s is not None and self._next_s <= now_s:
            server = self._draws.integers(self._servers)
            state.handled_s[server] = max(state.handled_s[server], now_s) + self._lasts_s
            self._next_s += self._every_s
