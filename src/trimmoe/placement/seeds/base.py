"""What a seed plan is: somebody's way of placing experts, with the routes it implies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trimmoe.core.specs import BoolArray, IntArray, ModelSpec
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.planner import Planner


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedPlan:
    """Hosts and routes; M servers, N layers, E experts."""

    hosts: BoolArray
    """[M, N, E]; satisfies (c.1) and (c.2)."""
    routes: IntArray
    """[M (access), N]."""
    stages: IntArray | None = None
    """Server of every layer, [N], where the seed is a pipeline."""


Seed = Callable[[Planner], SeedPlan | None]
"""A seed plan of a cluster; None where the method cannot serve the model there.

Raises `UserError` if the experts do not fit at all.
"""


def covered(hosts: BoolArray, model: ModelSpec, capacity: IntArray) -> BoolArray | None:
    """`hosts` [M, N, E] with a host for every expert, or None if no room was found.

    Experts without one, largest first, go where most is free. Where none has room, the server
    with most to spare gives up replicas that others hold too, the most replicated first.
    """
    hosts = hosts.copy()
    free = capacity - used_bytes(hosts, model)
    sizes = model.expert_bytes
    orphans = np.argwhere(~hosts.any(axis=0))
    order = np.argsort(-sizes[orphans[:, 0], orphans[:, 1]], kind="stable")
    for layer, expert in orphans[order].tolist():
        size = int(sizes[layer, expert])
        server = int(free.argmax())
        if free[server] < size:
            made = _make_room(hosts, sizes, free, size)
            if made is None:
                return None
            server = made
        hosts[server, layer, expert] = True
        free[server] -= size
    return hosts


def _make_room(hosts: BoolArray, sizes: IntArray, free: IntArray, wanted: int) -> int | None:
    """Drop replicas that others hold too until one server has `wanted` bytes free; in place."""
    spare = hosts & (hosts.sum(axis=0) > 1)
    to_spare = np.einsum("mlk,lk->m", spare.astype(np.int64), sizes)
    server = int((free + to_spare).argmax())
    if free[server] + to_spare[server] < wanted:
        return None
    replicas = hosts.sum(axis=0)
    # The most replicated first: they are missed the least.
    at = np.argwhere(spare[server])
    for layer, expert in at[np.argsort(-replicas[at[:, 0], at[:, 1]], kind="stable")].tolist():
        if free[server] >= wanted:
            break
        hosts[server, layer, expert] = False
        free[server] += sizes[layer, expert]
    return server
