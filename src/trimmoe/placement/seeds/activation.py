"""Activation-aware placement: each server keeps what its users activate most, layer by layer.

Source: the placements of Prism and DanceMoE, as far as their descriptions go: a layer gets room on
a server according to how evenly its experts are used (the entropy of their activation), and the
room of a layer goes to the experts that the requests at this server activate most.

Reconstructed here:

- A profile has one text for all users, so every server sees the same frequencies a_l^k.
- Room: layer l gets the share H_l / sum H of a server's memory, H the entropy of its normalised
  activations, in bytes and at most its whole size; what rounding leaves goes to the next layers.
- Servers choose in the order of their users, most first. A server takes the most activated experts
  not held yet by anyone while there are such, then the most activated: otherwise all servers would
  hold the same and coverage (c.2) would be an afterthought.
- Experts still without a host are given one by `base.covered`.
- Tokens stay at home, remote experts are called: the routes are the access servers'.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.placement.planner import Planner
from trimmoe.placement.routes import home_routes
from trimmoe.placement.seeds.base import SeedPlan, covered


def activation_aware(planner: Planner) -> SeedPlan | None:
    """The seed plan of this module; None if no room was found for every expert."""
    hosts = preferred_hosts(
        planner.profile.activated,
        planner.model.expert_bytes,
        planner.capacity,
        planner.cluster.access_share,
    )
    hosts = covered(hosts, planner.model, planner.capacity)
    if hosts is None:
        return None
    return SeedPlan(hosts=hosts, routes=home_routes(hosts.shape[0], hosts.shape[1]))


def layer_entropy(activated: FloatArray) -> FloatArray:
    """Entropy of each layer's normalised activations [N, E], in nats, [N]."""
    share = activated / activated.sum(axis=1, keepdims=True)
    return -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=1)


def preferred_hosts(
    activated: FloatArray, sizes: IntArray, capacity: IntArray, access_share: FloatArray
) -> BoolArray:
    """What every server keeps, [M, N, E], before coverage; `activated`, `sizes` [N, E]."""
    layers, experts = sizes.shape
    hosts = np.zeros((capacity.size, layers, experts), dtype=bool)
    entropy = layer_entropy(activated)
    weight = entropy if entropy.sum() > 0 else np.ones(layers)
    for server in np.argsort(-access_share, kind="stable"):
        room = int(capacity[server])
        for layer in range(layers):
            ahead = weight[layer:].sum()
            part = int(room * weight[layer] / ahead) if ahead > 0 else room
            held = hosts[:, layer].any(axis=0)
            for expert in np.lexsort((-activated[layer], held)):
                if sizes[layer, expert] <= part:
                    hosts[server, layer, expert] = True
                    part -= int(sizes[layer, expert])
                    room -= int(sizes[layer, expert])
    return hosts
