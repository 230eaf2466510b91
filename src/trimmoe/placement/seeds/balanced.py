"""Load-balanced placement: heavy experts are replicated, replicas packed evenly, per layer.

Source: DeepSeek's expert-parallel load balancer (EPLB), its global policy: per layer, every
further replica goes to the expert with the most load per replica, then replicas, heaviest first,
go to the least loaded device that has a slot and does not hold the expert yet.

Reconstructed here:

- Devices are unequal: a server's slots in a layer follow its memory left over the layers left, and
  the load of a replica counts in seconds on it, so fast servers get more.
- Load is the activation a_l^k, in equal parts on the replicas.
- The first replicas of all experts are placed before the further ones, so that coverage (c.2)
  comes first; `base.covered` places what found no slot.
- Tokens stay at home: the routes are the access servers'.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.placement.planner import Planner
from trimmoe.placement.routes import home_routes
from trimmoe.placement.seeds.base import SeedPlan, covered


def load_balanced(planner: Planner) -> SeedPlan | None:
    """The seed plan of this module; None if no room was found for every expert."""
    model = planner.model
    hosts = np.zeros((planner.capacity.size, *model.expert_bytes.shape), dtype=bool)
    room = planner.capacity.copy()
    for layer in range(model.layer_count):
        part = room // (model.layer_count - layer)
        hosts[:, layer] = balanced_layer(
            planner.profile.activated[layer],
            model.expert_bytes[layer],
            part,
            planner.cost.expert_s[:, layer],
        )
        room -= hosts[:, layer] @ model.expert_bytes[layer]
    whole = covered(hosts, model, planner.capacity)
    if whole is None:
        return None
    return SeedPlan(hosts=whole, routes=home_routes(whole.shape[0], whole.shape[1]))


def replica_counts(load: FloatArray, total: int, most: int) -> IntArray:
    """Replicas of every expert, [E], `total` in all but at most `most` each (EPLB)."""
    counts = np.ones(load.size, dtype=np.int64)
    for _ in range(total - load.size):
        per_replica = np.where(counts < most, load / counts, -1.0)
        heaviest = int(per_replica.argmax())
        if per_replica[heaviest] < 0:
            break
        counts[heaviest] += 1
    return counts


def balanced_layer(
    load: FloatArray, sizes: IntArray, room: IntArray, expert_s: FloatArray
) -> BoolArray:
    """Hosts of one layer, [M, E]: `load`, `sizes` [E], `room` in bytes [M], `expert_s` [M, E]."""
    servers, experts = expert_s.shape
    slots = int((room // max(int(sizes.max()), 1)).sum())
    counts = replica_counts(load, slots, servers)
    hosts, free, busy = np.zeros((servers, experts), dtype=bool), room.copy(), np.zeros(servers)
    per_replica = load / counts
    first = [(False, expert) for expert in range(experts)]
    further = [(True, expert) for expert in range(experts) for _ in range(counts[expert] - 1)]
    for _, expert in sorted(first + further, key=lambda it: (it[0], -per_replica[it[1]], it[1])):
        fits = np.flatnonzero((free >= sizes[expert]) & ~hosts[:, expert])
        if fits.size == 0:
            continue
        after = busy[fits] + per_replica[expert] * expert_s[fits, expert]
        server = int(fits[after.argmin()])
        hosts[server, expert] = True
        free[server] -= sizes[expert]
        busy[server] = after.min()
    return hosts
