"""Random starts with structure: close servers share one interval of layers.

Single moves cannot turn one good division of labour between far sites into another, because
everything between the two is bad. So servers are grouped by their links (average linkage, cut at a
random number of groups), each group takes an interval of layers that starts at a random place, at
the front or ends at the back, and fills it server by server along close links. Layers then without
a host go where the mutator finds room; where it finds none, the draw is given up. Of many draws the
best few are worth a climb.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.cost.model import CostModel
from trimmoe.placement.mutate import Mutator


@dataclass(kw_only=True)
class IntervalStarts:
    """Draws placements [M, N, E] that keep (c.1) and (c.2)."""

    cost: CostModel
    mutator: Mutator
    _groupings: list[IntArray] = field(init=False)
    _apart: list[list[float]] = field(init=False)
    _ends: IntArray = field(init=False)
    """Bytes of the layers before each, and of all, [N + 1]."""

    def __post_init__(self) -> None:
        self._groupings = groupings(self.cost)
        self._apart = self.cost.transfer_s.tolist()
        sizes = self.mutator.model.expert_bytes.sum(axis=1)
        self._ends = np.concatenate([[0], np.cumsum(sizes)])

    def draw(self, rng: np.random.Generator) -> BoolArray | None:
        """One random placement, or None if the layers left over found no room."""
        model = self.mutator.model
        hosts = np.zeros((self.cost.server_count, *model.expert_bytes.shape), dtype=bool)
        group_of = self._groupings[int(rng.integers(len(self._groupings)))]
        for group in range(group_of.max() + 1):
            self._fill(hosts, self._chain(np.flatnonzero(group_of == group), rng), rng)
        return hosts if self.mutator.settle(hosts, rng) else None

    def _chain(self, servers: IntArray, rng: np.random.Generator) -> list[int]:
        """The servers from a random one on, each the closest to the last."""
        left = servers.tolist()
        chain = [left.pop(int(rng.integers(len(left))))]
        while left:
            from_last = self._apart[chain[-1]]
            chain.append(left.pop(min(range(len(left)), key=lambda at: from_last[left[at]])))
        return chain

    def _fill(self, hosts: BoolArray, chain: list[int], rng: np.random.Generator) -> None:
        """Consecutive layers from a random one on, each server filled before the next."""
        capacity, ends = self.mutator.capacity, self._ends
        layer = self._first_layer(int(capacity[chain].sum()), rng)
        for server in chain:
            full = np.searchsorted(ends, ends[layer] + capacity[server], side="right")
            hosts[server, layer : int(full) - 1] = True
            layer = int(full) - 1

    def _first_layer(self, room: int, rng: np.random.Generator) -> int:
        """The front, where the interval ends at the back, or anything between."""
        last = int(np.searchsorted(self._ends, self._ends[-1] - room))
        return int((0, last, rng.integers(last + 1))[int(rng.integers(3))])


def groupings(cost: CostModel) -> list[IntArray]:
    """Group of every server, [M] each, for every number of groups that average linkage gives."""
    servers = cost.server_count
    if servers == 1:
        return [np.zeros(1, dtype=np.int64)]
    apart = (cost.transfer_s + cost.transfer_s.T) / 2
    tree = linkage(squareform(apart, checks=False), method="average")
    cuts = [fcluster(tree, count, criterion="maxclust") - 1 for count in range(1, servers + 1)]
    distinct = {cut.tobytes(): cut.astype(np.int64) for cut in cuts}
    return list(distinct.values())
