"""How prompts pass a layer: every expert exact, and stand-ins only for those that nobody holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.actions import ActionSpace

NOBODY = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """Look-ups for exact execution on one deployment."""

    server: IntArray
    """Host of least delay by source, destination and expert, [N, M, M, E]."""
    orphans: BoolArray
    """Experts without a host, [N, E]."""
    stand_in: IntArray
    """Their least lossy live substitute by steadiness class, or NOBODY, [N, B, E]; every other
    expert stands for itself."""
    loss: FloatArray
    """Quality loss of the stand-in, [N, B, E]."""

    def stood_in(
        self, layer: int, experts: IntArray, classes: IntArray, budget: float
    ) -> IntArray | None:
        """The experts [n, k] with stand-ins for orphans, None if that is beyond the budget.

        A prompt's token is held to what a generated one is credited, split evenly over layers,
        so that no account of a prompt has to travel.
        """
        if budget <= 0:
            return None
        classes = np.minimum(classes, self.stand_in.shape[1] - 1)[:, None]
        chosen = self.stand_in[layer][classes, experts]
        loss = self.loss[layer][classes, experts].sum(1)
        if (chosen == NOBODY).any() or (loss > budget / self.server.shape[0]).any():
            return None
        return chosen


def passage_of(space: ActionSpace) -> Passage:
    """The passage of prompts where decisions are made on `space`."""
    orphans: BoolArray = np.logical_not(space.hosts.any(axis=0))
    # Prompts are few and this happens only after failures: every slot is taken for the dearest.
    substitution_loss = space.substitution_loss.max(2)
    layers, classes, experts = substitution_loss.shape[:3]
    itself = np.broadcast_to(np.arange(experts), (layers, classes, experts))
    usable = space.feasible & ~orphans[:, None, :] & space.levers.substitute
    loss = np.where(usable[:, None], substitution_loss, np.inf)
    least = loss.min(3)
    found = np.where(np.isfinite(least), loss.argmin(3), NOBODY)
    return Passage(
        server=space.menu.best_server,
        orphans=orphans,
        stand_in=np.where(orphans[:, None], found, itself),
        loss=np.where(orphans[:, None], least, 0.0),
    )
