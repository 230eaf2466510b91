"""The work that servers are assigned in every scheduling slot (20), and its limit (c.11)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.simulator.world import Rows


@dataclass(kw_only=True)
class Workload:
    """W_m(t) over F_m, in seconds, of tokens by the slot in which they set out.

    It is work of experts alone, as in the paper, every token's by itself: what batches save does
    not count. What sets out on a wrong draft or guess is not counted.
    """

    slot_s: float
    expert_s: FloatArray
    """c / F of all that may run in a slot, [M, N, F * E]."""
    _assigned_s: dict[int, FloatArray] = field(default_factory=dict)

    def count(self, rows: Rows, of: IntArray, began_s: FloatArray) -> None:
        """Add the experts that the tokens in rows `of` run, which set out at `began_s`, [n]."""
        slots = (began_s / self.slot_s).astype(np.int64)
        for slot in np.unique(slots).tolist():
            more = self._work_s(rows, of[slots == slot])
            self._assigned_s[slot] = self._assigned_s.get(slot, 0.0) + more

    def _work_s(self, rows: Rows, of: IntArray) -> FloatArray:
        """Of tokens in these rows [n] together, [M]."""
        layers = rows.expert.shape[1]
        expert, server = rows.expert[of].astype(np.int64), rows.server[of].astype(np.int64)
        layer = np.broadcast_to(np.arange(layers)[:, None], expert.shape)
        run = (expert >= 0) & (layer < rows.layers[of][:, None, None])
        took_s = self.expert_s[server[run], layer[run], expert[run]]
        return np.bincount(server[run], took_s, self.expert_s.shape[0]).astype(np.float64)

    def with_flying(self, rows: Rows, flying: IntArray) -> Workload:
        """The same with tokens in these rows, which are under way, [n]."""
        both = Workload(
            slot_s=self.slot_s, expert_s=self.expert_s, _assigned_s=dict(self._assigned_s)
        )
        both.count(rows, flying, rows.began_s[flying])
        return both

    def use(self, first: int, last: int) -> FloatArray:
        """W over F times the slot, of slots from `first` up to but not `last`, [slots, M]; above 1
        it breaks (c.11)."""
        nothing = np.zeros(self.expert_s.shape[0])
        found = [self._assigned_s.get(slot, nothing) for slot in range(first, last)]
        return np.array(found).reshape(-1, nothing.size) / self.slot_s

    def full(self, until_s: float) -> BoolArray:
        """Servers to which the last slot over at `until_s` gave more than they can do in one,
        [M]."""
        last = round(until_s / self.slot_s)
        return self.use(last - 1, last)[0] > 1.0


def relieved(hosts: BoolArray, full: BoolArray) -> BoolArray:
    """Who holds what, [M, N, E], without the servers that are `full` [M], but for experts that
    none of the others has."""
    kept = hosts & ~full[:, None, None]
    return np.where(kept.any(0), kept, hosts)
