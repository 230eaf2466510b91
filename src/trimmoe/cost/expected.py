"""What exact execution costs on average, before any token is seen.

Shapes: M servers, N layers, E experts, P patterns. A layer table `delay_s[l, s, t]` of shape
[N, M, M] holds the expected delay of layer l from source s to destination t.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost import kernels
from trimmoe.cost.model import CostModel


def best_hosts(
    cost: CostModel, hosts: BoolArray, layer: int, source: int, destination: int
) -> IntArray:
    """The host of least single-slot delay (30) for each expert of `layer`, shape [E].

    Ties go to the server that comes first; server 0 stands in where nobody holds an expert.
    """
    held = np.ascontiguousarray(hosts[:, layer])
    return np.maximum(kernels.nearest_hosts(cost.links, layer, held, source, destination)[0], 0)


def expected_layer_delay_s(
    cost: CostModel, hosts: BoolArray, profile: Profile, *, by: CostModel | None = None
) -> FloatArray:
    """Expected delay of exact nearest-replica execution for every source and destination.

    The expectation over the profile's patterns of `cost.layer_delay_s` with every slot on its
    `best_hosts`, by this cost model or another one, plus the dense part at the source; seconds,
    shape [N, M, M].
    """
    tables = [
        layer_table_s(cost, hosts[:, layer], profile, layer, by=by)
        for layer in range(cost.layer_count)
    ]
    return np.stack(tables)


def layer_table_s(
    cost: CostModel,
    held: BoolArray,
    profile: Profile,
    layer: int,
    *,
    by: CostModel | None = None,
) -> FloatArray:
    """`expected_layer_delay_s` of one layer whose hosts are `held` [M, E], shape [M, M].

    Infinite where an expert that is used has no host. Compiled, because planning asks for
    thousands of these.
    """
    used = np.flatnonzero(profile.pattern_share[layer] > 0)
    table = _expected_table(
        cost.links,
        (by or cost).links,
        layer,
        np.ascontiguousarray(held),
        profile.pattern_share[layer, used],
        profile.patterns[layer, used],
    )
    return table + cost.dense_s[:, layer, None]


@kernels.njit
def _expected_table(links, choosing, layer, held, share, patterns):
    """The mean over patterns [P, k] of `kernels.slots_delay_s` on `kernels.nearest_hosts`, [M, M];
    `choosing` are the links by which those are nearest.

    All patterns of a pair of servers share the ways and hosts, so that a slot is two additions.
    """
    servers = held.shape[0]
    table, work = np.zeros((servers, servers)), np.zeros(servers)
    path, alone = np.empty(servers), np.empty(held.shape[1])
    at = np.empty(patterns.shape[1], dtype=np.int64)
    for source in range(servers):
        for destination in range(servers):
            best = kernels.nearest_hosts(choosing, layer, held, source, destination)[0]
            for m in range(servers):
                there = links.transfer_s[source, m]
                there += kernels.wait_s(links, source, m, destination)
                path[m] = there + links.transfer_s[m, destination]
            for expert in range(best.size):
                alone[expert] = links.expert_s[best[expert], layer, expert]
            direct, total = links.transfer_s[source, destination], 0.0
            for p in range(share.size):
                delay = direct
                for slot in patterns[p]:
                    if best[slot] < 0:
                        delay = np.inf
                        break
                    work[best[slot]] += alone[slot]
                for slot in patterns[p]:
                    m = best[slot]
                    if m >= 0:
                        delay = max(delay, path[m] + work[m])
                for slot in range(at.size):
                    at[slot] = best[patterns[p, slot]]
                    if at[slot] >= 0:
                        work[at[slot]] = 0.0
                delay += kernels.further_s(links, source, destination, patterns[p], at)
                total += share[p] * delay
            table[source, destination] = total
    return table


def destinations(routes: IntArray) -> IntArray:
    """Where each layer's result goes: the next layer's server, the last stays, same shape."""
    return np.concatenate([routes[..., 1:], routes[..., -1:]], axis=-1)


def reference_layer_delay_s(
    layer_delays: FloatArray, routes: IntArray, access_share: FloatArray
) -> float:
    """d_ref: the mean per-layer delay of exact nearest-replica execution on the routes, seconds.

    Averaged over layers and over access servers by share; without load if the cost model behind
    `layer_delays` has no waiting. Includes the dense part, excludes the token id's way in and out.
    """
    layers = np.arange(routes.shape[1])
    per_access = layer_delays[layers, routes, destinations(routes)].mean(axis=1)
    return float(access_share @ per_access)
