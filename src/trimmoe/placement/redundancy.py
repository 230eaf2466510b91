"""Replicas in free memory: Algorithm 1, lines 10-13, by benefit (28) or by what is really saved.

Marginal (default). The tokens of layer l lie on the sources of the routes, in known shares. With a
replica of expert k on server m, tokens from source s to destination t save

    max(0, best present delay of k - delay of k on m),     delays by `cost.host_delay_s`,

neither below d(s, t), which the layer takes anyway. The replica may serve every source, not only
m. The benefit is lambda_l^k times the saving, averaged over the tokens; largest benefit per byte
first; what saves nothing is not replicated. The savings of one expert are submodular (facility
location), so a stale benefit is an upper bound and a lazy heap gives exactly the plain greedy.

Paper. Benefit (28) to the letter: lambda * rho_{m,l} * (z / mean bandwidth + mean delay) over all
present hosts, largest first, until no replica fits. A server that no token lies on has benefit
zero, and still replicas are put there once nothing better fits.
"""

from __future__ import annotations

import heapq

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, ClusterSpec, FloatArray, IntArray, ModelSpec
from trimmoe.cost.model import CostModel, host_delay_s
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.routes import traffic


class SlotSavings:
    """Expected saving per token of one more replica under given routes; mutable, one plan's work.

    For each layer, the distinct (source, destination) pairs of the routes, `weight` [W] their
    share of tokens, `reach` [W, M, E] the slot delay there, `best` [W, E] that of the present
    hosts.
    """

    def __init__(
        self,
        cost: CostModel,
        hosts: BoolArray,
        profile: Profile,
        routes: IntArray,
        access_share: FloatArray,
    ) -> None:
        self._frequency = profile.expected_executions
        self._weight: list[FloatArray] = []
        self._reach: list[FloatArray] = []
        self._best: list[FloatArray] = []
        for layer in range(cost.layer_count):
            pairs = traffic(routes, access_share, layer)
            reach = np.stack(
                [
                    np.maximum(host_delay_s(cost, layer, s, t), cost.transfer_s[s, t])
                    for s, t, _ in pairs
                ]
            )
            self._weight.append(np.array([weight for _, _, weight in pairs]))
            self._reach.append(reach)
            self._best.append(np.where(hosts[:, layer], reach, np.inf).min(axis=1))

    def of(self, server: int, layer: int, expert: int) -> float:
        """Seconds per token saved by a replica of `expert` of `layer` on `server`."""
        saved = self._best[layer][:, expert] - self._reach[layer][:, server, expert]
        expected = float((self._weight[layer] * np.maximum(saved, 0.0)).sum())
        return float(self._frequency[layer, expert]) * expected

    def all(self) -> FloatArray:
        """`of` for every server, layer and expert, shape [M, N, E]."""
        layers = [
            np.einsum("w,wme->me", weight, np.maximum(best[:, None] - reach, 0.0))
            for weight, best, reach in zip(self._weight, self._best, self._reach, strict=True)
        ]
        return np.stack(layers, axis=1) * self._frequency

    def add(self, server: int, layer: int, expert: int) -> None:
        """Count a new replica as present."""
        best = self._best[layer][:, expert]
        np.minimum(best, self._reach[layer][:, server, expert], out=best)


def add_marginal_replicas(
    cost: CostModel,
    model: ModelSpec,
    profile: Profile,
    hosts: BoolArray,
    capacity: IntArray,
    routes: IntArray,
    access_share: FloatArray,
) -> BoolArray:
    """`hosts` with the replicas of the marginal benefit added, shape [M, N, E].

    Stops where nothing that fits saves anything. Keeps (c.1) if `hosts` does.
    """
    hosts = hosts.copy()
    savings = SlotSavings(cost, hosts, profile, routes, access_share)
    free = capacity - used_bytes(hosts, model)
    sizes = model.expert_bytes
    heap = [
        (-savings.of(m, layer, expert) / sizes[layer, expert], m, layer, expert)
        for m, layer, expert in np.argwhere((savings.all() > 0) & ~hosts).tolist()
    ]
    heapq.heapify(heap)
    while heap:
        stale, m, layer, expert = heapq.heappop(heap)
        size = sizes[layer, expert]
        if size > free[m]:
            continue  # Free memory only shrinks: it will never fit.
        fresh = -savings.of(m, layer, expert) / size
        if fresh >= 0:
            continue
        if fresh > stale:
            heapq.heappush(heap, (fresh, m, layer, expert))
            continue
        hosts[m, layer, expert] = True
        free[m] -= size
        savings.add(m, layer, expert)
    return hosts


def add_paper_replicas(
    cluster: ClusterSpec,
    model: ModelSpec,
    profile: Profile,
    hosts: BoolArray,
    capacity: IntArray,
    residence: FloatArray,
) -> BoolArray:
    """`hosts` with replicas by (28) until memory is full, shape [M, N, E].

    `residence`: rho_{m,l}, the share of tokens on each server before each layer, [M, N].
    The benefit is not submodular (means over hosts may rise), so every one is kept up to date:
    a replica changes only those of its own expert.
    """
    hosts = hosts.copy()
    free = capacity - used_bytes(hosts, model)
    weight = residence[:, :, None] * profile.expected_executions
    benefit = np.empty(hosts.shape)
    for layer, expert in np.ndindex(hosts.shape[1:]):
        fetch_s = mean_fetch_s(cluster, model, hosts[:, layer, expert])
        benefit[:, layer, expert] = weight[:, layer, expert] * fetch_s
    while True:
        possible = ~hosts & (model.expert_bytes <= free[:, None, None])
        if not possible.any():
            return hosts
        index = int(np.where(possible, benefit, -np.inf).argmax())
        m, layer, expert = (int(i) for i in np.unravel_index(index, hosts.shape))
        hosts[m, layer, expert] = True
        free[m] -= model.expert_bytes[layer, expert]
        fetch_s = mean_fetch_s(cluster, model, hosts[:, layer, expert])
        benefit[:, layer, expert] = weight[:, layer, expert] * fetch_s


def primary_copies(
    cost: CostModel, hosts: BoolArray, routes: IntArray, access_share: FloatArray
) -> BoolArray:
    """One copy of every expert, the one of `hosts` that tokens on the routes reach fastest on
    average, shape [M, N, E]."""
    kept = np.zeros_like(hosts)
    experts = np.arange(hosts.shape[2])
    for layer in range(hosts.shape[1]):
        reach_s = sum(
            weight * host_delay_s(cost, layer, source, destination)
            for source, destination, weight in traffic(routes, access_share, layer)
        )
        kept[np.where(hosts[:, layer], reach_s, np.inf).argmin(axis=0), layer, experts] = True
    return kept


def add_load_replicas(
    model: ModelSpec, profile: Profile, hosts: BoolArray, capacity: IntArray
) -> BoolArray:
    """`hosts` with replicas by load alone until memory is full, shape [M, N, E].

    What redundancy is without an eye on communication, as in the paper's predecessor [37], where
    "important experts can be replicated": every further replica is of the expert with the most
    activations per replica, on the server with most free memory that does not hold it. Neither
    links, nor where tokens are, nor skips and exits are looked at.
    """
    hosts = hosts.copy()
    free = capacity - used_bytes(hosts, model)
    while True:
        possible = ~hosts & (model.expert_bytes <= free[:, None, None])
        if not possible.any():
            return hosts
        load = np.where(possible.any(axis=0), profile.activated / hosts.sum(axis=0), -np.inf)
        layer, expert = (int(i) for i in np.unravel_index(int(load.argmax()), load.shape))
        server = int(np.where(possible[:, layer, expert], free, -1).argmax())
        hosts[server, layer, expert] = True
        free[server] -= model.expert_bytes[layer, expert]


def mean_fetch_s(cluster: ClusterSpec, model: ModelSpec, hosting: BoolArray) -> FloatArray:
    """z / mean bandwidth + mean delay of (28) from each server to those `hosting` [M], shape [M].

    Zero for the hosts themselves: they fetch nothing.
    """
    bandwidth = cluster.bandwidth_bytes_per_s[:, hosting].mean(axis=1)
    delay = cluster.delay_s[:, hosting].mean(axis=1)
    return np.where(hosting, 0.0, model.hidden_bytes / bandwidth + delay)


def migrating_residence(
    cost: CostModel, hosts: BoolArray, profile: Profile, access_share: FloatArray
) -> FloatArray:
    """rho_{m,l} of (28) on the baseline trajectories (13), shape [M, N], columns sum to one.

    A token starts at its access server and moves to the nearest replica of its target expert, by
    one-slot delay (30). Targets are drawn layer by layer in proportion to `activated`.
    """
    residence = np.empty((cost.server_count, cost.layer_count))
    here = access_share.astype(np.float64)
    for layer in range(cost.layer_count):
        residence[:, layer] = here
        target = profile.activated[layer] / profile.activated[layer].sum()
        moved = np.zeros_like(here)
        for source in np.flatnonzero(here > 0):
            stay_there = cost.transfer_s[source][:, None] + cost.expert_s[:, layer]
            nearest = np.where(hosts[:, layer], stay_there, np.inf).argmin(axis=0)
            np.add.at(moved, nearest, here[source] * target)
        here = moved
    return residence
