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
        self, layer: int, experts: IntArray, classes: IntArray, left: FloatArray
    ) -> tuple[IntArray, FloatArray] | None:
        """The experts [n, k] with stand-ins for orphans and what those cost each token, [n].

        None if an orphan has no stand-in, or if one costs a token more than what is `left` of its
        budget, [n].
        """
        classes = np.minimum(classes, self.stand_in.shape[1] - 1)[:, None]
        chosen = self.stand_in[layer][classes, experts]
        loss = self.loss[layer][classes, experts].sum(1)
        stands_in = (chosen != experts).any(1)
        # Without a budget a request is exact, even where a stand-in is taken to cost nothing.
        if (chosen == NOBODY).any() or (stands_in & ((loss > left) | (left <= 0))).any():
            return None
        return chosen, loss


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
