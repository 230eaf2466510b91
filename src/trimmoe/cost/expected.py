"""What exact execution of a layer costs on average, before any token is seen."""

from __future__ import annotations

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.model import CostModel, layer_delay_s


def expected_layer_delay_s(cost: CostModel, hosts: BoolArray, profile: Profile) -> FloatArray:
    """Mean delay of exact nearest-replica execution, [N, M (source), M (destination)].

    Expectation over the profile's activated sets, every slot at its fastest host, the dense part
    on the source included. `hosts` is x_{m,l,k} [M, N, E], every expert hosted somewhere.
    """
    layers = range(cost.layer_count)
    return np.stack([_layer(cost, hosts, profile, layer) for layer in layers])


def _layer(cost: CostModel, hosts: BoolArray, profile: Profile, layer: int) -> FloatArray:
    servers = cost.server_count
    best = fastest_hosts(cost, hosts, layer)
    experts = profile.patterns[layer]
    slot_server = best[:, :, experts]
    shape = slot_server.shape[:-1]
    source = np.broadcast_to(np.arange(servers)[:, None, None], shape)
    destination = np.broadcast_to(np.arange(servers)[None, :, None], shape)
    slot_expert = np.broadcast_to(experts, slot_server.shape)
    delay = layer_delay_s(cost, layer, source, destination, slot_expert, slot_server)
    return delay @ profile.pattern_share[layer] + cost.dense_s[:, layer][:, None]


def fastest_hosts(cost: CostModel, hosts: BoolArray, layer: int) -> IntArray:
    """The host of least delay for every source, destination and expert, [M, M, E]."""
    path = cost.transfer_s[:, None, :] + cost.waiting_s + cost.transfer_s.T[None, :, :]
    delay = path[..., None] + cost.expert_s[:, layer]
    return np.where(hosts[:, layer], delay, np.inf).argmin(2)


def reference_layer_s(
    layer_delay_s: FloatArray, routes: IntArray, access_share: FloatArray
) -> float:
    """d_ref: mean delay of one exact layer on the deployment's own routes, without load.

    `layer_delay_s` [N, M, M] from `expected_layer_delay_s`, `routes` [M, N], `access_share` [M].
    """
    layers = np.arange(routes.shape[1])
    following = np.concatenate([routes[:, 1:], routes[:, -1:]], axis=1)
    return float(access_share @ layer_delay_s[layers, routes, following].mean(1))
