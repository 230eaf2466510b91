"""SlimCaching: experts cached at the edge by what they save the users near them.

Source: SlimCaching (edge caching of MoE experts for distributed inference): minimise the average
latency of fetching activated experts under each server's storage. For one expert per token the
saving is submodular and a greedy choice by marginal saving is near optimal; for several per token
servers are filled one after another, each by a dynamic programme over its storage given what the
earlier ones cache.

Reconstructed here:

- An expert nobody caches would come from a cloud that holds everything; there is none here, so
  before anyone holds it an expert costs every user as much as the farthest server would.
- Savings are those of single slots (30) from home, weighted by users and activation a_l^k; the
  joint benefit of caching several experts of one activated set is left out, as in its greedy part.
- Experts still without a host are given one by `base.covered`.
- Tokens stay at home, remote experts are called: the routes are the access servers'.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.model import CostModel
from trimmoe.placement.planner import Planner
from trimmoe.placement.routes import home_routes
from trimmoe.placement.seeds.base import SeedPlan, covered

STORAGE_STEPS = 2048
"""Steps into which a server's storage is divided; an expert's size is rounded up to steps."""


def slim_caching(planner: Planner) -> SeedPlan | None:
    """The seed plan of this module; None if no room was found for every expert."""
    weight = planner.profile.activated
    delay_s = call_delays_s(planner.cost)
    share, sizes = planner.cluster.access_share, planner.model.expert_bytes
    if planner.model.top_k == 1:
        hosts = greedy_caches(delay_s, weight, share, sizes, planner.capacity)
    else:
        hosts = successive_caches(delay_s, weight, share, sizes, planner.capacity)
    whole = covered(hosts, planner.model, planner.capacity)
    if whole is None:
        return None
    return SeedPlan(hosts=whole, routes=home_routes(whole.shape[0], whole.shape[1]))


def call_delays_s(cost: CostModel) -> FloatArray:
    """Delay of one slot called from each home on each server (30), [M (home), M, N, E]."""
    path = cost.transfer_s + cost.transfer_s.T + cost.arrival_wait_s
    return path[:, :, None, None] + cost.expert_s[None]


def greedy_caches(
    delay_s: FloatArray, weight: FloatArray, share: FloatArray, sizes: IntArray, capacity: IntArray
) -> BoolArray:
    """Top-1: always the cache entry of largest marginal saving per byte that still fits, [M, N, E].

    `delay_s` [M, M, N, E], `weight` a_l^k and `sizes` [N, E], `share` of users [M].
    """
    servers = capacity.size
    hosts = np.zeros((servers, *sizes.shape), dtype=bool)
    now_s, room = delay_s.max(axis=1), capacity.astype(np.float64)
    saving = np.stack([_saving(now_s, delay_s[:, m], weight, share) for m in range(servers)])
    saving = saving / sizes
    while True:
        saving[hosts | (sizes[None] > room[:, None, None])] = -np.inf
        server, layer, expert = np.unravel_index(saving.argmax(), saving.shape)
        if not saving[server, layer, expert] > 0:
            return hosts
        hosts[server, layer, expert] = True
        room[server] -= sizes[layer, expert]
        now_s[:, layer, expert] = np.minimum(
            now_s[:, layer, expert], delay_s[:, server, layer, expert]
        )
        # Only the savings of this expert have changed.
        gain = np.maximum(now_s[:, None, layer, expert] - delay_s[:, :, layer, expert], 0.0)
        saving[:, layer, expert] = share @ gain * weight[layer, expert] / sizes[layer, expert]


def successive_caches(
    delay_s: FloatArray, weight: FloatArray, share: FloatArray, sizes: IntArray, capacity: IntArray
) -> BoolArray:
    """Top-k: server after server, largest first, the set of largest saving that fits, [M, N, E].

    Each is a knapsack over the server's storage. Arguments as in `greedy_caches`.
    """
    hosts = np.zeros((capacity.size, *sizes.shape), dtype=bool)
    now_s = delay_s.max(axis=1)
    for server in np.argsort(-capacity, kind="stable"):
        saving = _saving(now_s, delay_s[:, server], weight, share)
        kept = knapsack(saving.reshape(-1), sizes.reshape(-1), int(capacity[server]))
        hosts[server] = kept.reshape(sizes.shape)
        now_s = np.where(hosts[server], np.minimum(now_s, delay_s[:, server]), now_s)
    return hosts


def knapsack(saving: FloatArray, sizes: IntArray, capacity: int) -> BoolArray:
    """The items [I] of largest total saving that fit, sizes rounded up to storage steps."""
    kept = np.zeros(saving.size, dtype=bool)
    if capacity <= 0:
        return kept
    step = max(1.0, capacity / STORAGE_STEPS)
    width = np.ceil(sizes / step).astype(np.int64)
    room = int(capacity / step)
    best = np.zeros(room + 1)
    took = np.zeros((saving.size, room + 1), dtype=bool)
    for item in np.flatnonzero((saving > 0) & (width <= room)):
        with_it = np.full(room + 1, -np.inf)
        with_it[width[item] :] = best[: room + 1 - width[item]] + saving[item]
        took[item] = with_it > best
        best = np.maximum(best, with_it)
    left = room
    for item in range(saving.size - 1, -1, -1):
        if took[item, left]:
            kept[item] = True
            left -= int(width[item])
    return kept


def _saving(
    now_s: FloatArray, there_s: FloatArray, weight: FloatArray, share: FloatArray
) -> FloatArray:
    """Expected seconds per token that one more cache saves, [N, E]; delays are [M, N, E]."""
    return np.einsum("m,mlk->lk", share, np.maximum(now_s - there_s, 0.0)) * weight
