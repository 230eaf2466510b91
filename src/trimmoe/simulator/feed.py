"""What recorded tokens answer to the engine's commands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimmoe.core.events import Executed, Routed
from trimmoe.core.specs import IntArray
from trimmoe.core.trace import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFeed:
    """Turns recorded tokens into the events a driver of a real model would send."""

    trace: Trace

    def routed(self, wave: int, layer: int, tokens: IntArray) -> Routed:
        """Router and importance of tokens [n] (rows of the trace) at a layer."""
        trace, whole = self.trace, self.trace.probabilities
        return Routed(
            wave=wave,
            experts=trace.experts[tokens, layer],
            masses=trace.masses[tokens, layer].astype(np.float64),
            importance=trace.importance[tokens, layer].astype(np.float64),
            steadiness=trace.steadiness[tokens, layer],
            probabilities=None if whole is None else whole[tokens, layer].astype(np.float64),
        )

    def executed(self, wave: int, layer: int, tokens: IntArray) -> Executed:
        """Exit confidence and prediction of tokens [n] after a layer."""
        trace = self.trace
        return Executed(
            wave=wave,
            confidence=trace.confidence[tokens, layer].astype(np.float64),
            exit_at=trace.exit_at[tokens, layer],
        )
