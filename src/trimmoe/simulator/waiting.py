"""Waiting times as servers measure them, for decisions to look at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimmoe.core.specs import FloatArray
from trimmoe.simulator.state import State
from trimmoe.simulator.world import EXPERTS


@dataclass(kw_only=True)
class Waiting:
    """How long slots waited at every server lately."""

    memory: float
    """Share of what was known that stays at every measurement."""
    mean_s: FloatArray
    """[M]."""
    totals: FloatArray
    """Seconds waited and slots served so far, [2, M]."""

    @staticmethod
    def none(servers: int, memory: float) -> Waiting:
        """Nothing has been measured."""
        return Waiting(memory=memory, mean_s=np.zeros(servers), totals=np.zeros((2, servers)))

    def measured(self, state: State) -> FloatArray:
        """After what has happened since the last time, [M] seconds."""
        slots = state.served[:, EXPERTS, 1].astype(np.float64)
        totals = np.stack([state.waited_s[:, EXPERTS], slots])
        waited_s, served = totals - self.totals
        lately_s = waited_s / np.maximum(served, 1)
        mean_s = self.memory * self.mean_s + (1.0 - self.memory) * lately_s
        # A server that nobody asked has not become slower or faster.
        self.mean_s, self.totals = np.where(served > 0, mean_s, self.mean_s), totals
        return self.mean_s
