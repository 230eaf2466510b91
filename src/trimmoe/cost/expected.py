"""What exact execution costs on average, before any token is seen.

Shapes: M servers, N layers, E experts, P patterns. A layer table `delay_s[l, s, t]` of shape
[N, M, M] holds the expected delay of layer l from source s to destination t.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.model import CostModel, host_delay_s, layer_delay_s


def best_hosts(
    cost: CostModel, hosts: BoolArray, layer: int, source: int, destination: int
) -> IntArray:
    """The host of least single-slot delay (30) for each expert of `layer`, shape [E].

    Ties go to the server that comes first.
    """
    delay = host_delay_s(cost, layer, source, destination)
    return np.where(hosts[:, layer], delay, np.inf).argmin(axis=0)


def expected_layer_delay_s(cost: CostModel, hosts: BoolArray, profile: Profile) -> FloatArray:
    """Expected delay of exact nearest-replica execution for every source and destination.

    The expectation over the profile's patterns of `cost.layer_delay_s` with every slot on its
    `best_hosts`, plus the dense part at the source; seconds, shape [N, M, M].
    """
    tables = [
        layer_table_s(cost, hosts[:, layer], profile, layer) for layer in range(cost.layer_count)
    ]
    return np.stack(tables)


def layer_table_s(cost: CostModel, held: BoolArray, profile: Profile, layer: int) -> FloatArray:
    """`expected_layer_delay_s` of one layer whose hosts are `held` [M, E], shape [M, M]."""
    used = np.flatnonzero(profile.pattern_share[layer] > 0)
    share, patterns = profile.pattern_share[layer, used], profile.patterns[layer, used]
    every = np.arange(cost.server_count)
    # [s, t, m]; one source at a time below, so that memory stays small.
    path = cost.transfer_s[:, None, :] + cost.waiting_s + cost.transfer_s.T[None]
    table = np.empty((every.size, every.size))
    for source in every:
        alone = path[source, :, :, None] + cost.expert_s[None, :, layer]
        best = np.where(held[None], alone, np.inf).argmin(axis=1)  # [t, E]
        ends = np.full((every.size, used.size), source), np.tile(every[:, None], used.size)
        slots = np.broadcast_to(patterns, (every.size, *patterns.shape))
        delay = layer_delay_s(cost, layer, *ends, slots, best[:, patterns])
        # Not a matrix product: threaded ones are slower than the sum at this size.
        table[source] = (delay * share).sum(axis=1)
    return table + cost.dense_s[:, layer, None]


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
