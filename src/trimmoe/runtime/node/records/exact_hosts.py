"""How prompts pass a layer: every expert exact, and others only for those that nobody holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.stand_ins import expert_of
from trimmoe.cost.actions import ActionSpace

NOBODY = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactHosts:
    """Look-ups for exact execution on one deployment."""

    server: IntArray
    """Host of least delay by source, destination and expert, [N, M, M, E]."""
    orphans: BoolArray
    """Experts without a host, [N, E]."""
    substitute: IntArray
    """Their least lossy live substitute by steadiness class, or NOBODY, [N, B, E]; every other
    expert stands for itself."""
    loss: FloatArray
    """Quality loss of the substitute, [N, B, E]."""
    copy: IntArray
    """The number of an orphan's copy on every server, or NOBODY, [M, N, E]."""
    copy_loss: FloatArray
    """Quality loss of the copy, infinite where there is none, [M, N, B, E]."""

    def stays(self, server: int) -> BoolArray:
        """Experts that run on a server for tokens that are there before and after their layer,
        [N, E]."""
        return (self.server[:, server, server] == server) & ~self.orphans

    def stood_in(
        self, layer: int, server: int, experts: IntArray, classes: IntArray, left: FloatArray
    ) -> tuple[IntArray, FloatArray] | None:
        """What runs in the place of experts [n, k] of tokens on a server, a substitute or the
        server's own copy for orphans, and what that costs each token, [n].

        None if there is neither for an orphan, or if it costs a token more than what is `left` of
        its budget, [n].
        """
        classes = np.minimum(classes, self.substitute.shape[1] - 1)[:, None]
        chosen, loss = self.substitute[layer][classes, experts], self.loss[layer][classes, experts]
        copied = self.copy_loss[server, layer][classes, experts]
        chosen = np.where(copied < loss, self.copy[server, layer][experts], chosen)
        loss = np.minimum(copied, loss).sum(1)
        stands_in = (chosen != experts).any(1)
        # Without a budget a request is exact, even where a stand-in is taken to cost nothing.
        if (chosen == NOBODY).any() or (stands_in & ((loss > left) | (left <= 0))).any():
            return None
        return chosen, loss

    def hosts(self, layer: int, server: int, destination: int, chosen: IntArray) -> IntArray:
        """Where what was chosen [n, k] for tokens on a server runs, [n, k]."""
        count = self.orphans.shape[1]
        nearest = self.server[layer, server, destination][expert_of(chosen, count)]
        return np.where(chosen >= count, server, nearest)


def exact_hosts_of(space: ActionSpace) -> ExactHosts:
    """Who runs what exactly where decisions are made on `space`."""
    orphans: BoolArray = np.logical_not(space.hosts.any(axis=0))
    # Prompts are few and this happens only after failures: every slot is taken for the dearest.
    substitution_loss = space.substitution_loss.max(2)
    layers, classes, experts = substitution_loss.shape[:3]
    itself = np.broadcast_to(np.arange(experts), (layers, classes, experts))
    usable = space.feasible & ~orphans[:, None, :] & space.levers.substitute
    loss = np.where(usable[:, None], substitution_loss, np.inf)
    least = loss.min(3)
    found = np.where(np.isfinite(least), loss.argmin(3), NOBODY)
    copy, copy_loss = _copies(space, orphans)
    return ExactHosts(
        server=space.menu.best_server,
        orphans=orphans,
        substitute=np.where(orphans[:, None], found, itself),
        loss=np.where(orphans[:, None], least, 0.0),
        copy=copy,
        copy_loss=copy_loss,
    )


def _copies(space: ActionSpace, orphans: BoolArray) -> tuple[IntArray, FloatArray]:
    """See `ExactHosts.copy` and `ExactHosts.copy_loss`; slots are taken for those of most mass."""
    layers, experts = orphans.shape
    servers, classes = space.hosts.shape[0], space.class_count
    lost = np.full((servers, layers, classes, experts), np.inf)
    stand_ins = space.stand_ins
    if stand_ins is None:
        return np.full((servers, layers, experts), NOBODY), lost
    copy = np.where(orphans, stand_ins.number, NOBODY)
    dearest = stand_ins.upper.max(3)
    server, layer, expert = np.nonzero(copy != NOBODY)
    rung = copy[server, layer, expert] // experts - 1
    lost[server, layer, :, expert] = dearest[rung, layer]
    return copy, lost
