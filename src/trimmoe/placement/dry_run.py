"""What of a model fits where, from sizes alone: nothing is placed and no profile is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.specs import BoolArray, ClusterSpec, IntArray, ModelSpec
from trimmoe.placement.capacity import expert_capacity_bytes, packed_hosts


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A model's experts against the memory of M servers."""

    room_bytes: IntArray
    """Left for experts after the dense part and the reserve, [M]; 0 where these do not fit."""
    holds_dense: BoolArray
    """Whether the dense part and the reserve fit, [M]."""
    experts: IntArray
    """Experts that fit, the smallest first, at most all, [M]."""
    holds_all: BoolArray
    """Whether the whole model fits, [M]."""
    copies: float
    """Room of all servers over the size of all experts."""
    refusal: str | None
    """Why the planner would refuse; None if every expert finds a place."""


def dry_run(cluster: ClusterSpec, model: ModelSpec, *, kv_reserve_bytes: int = 0) -> Fit:
    """Fit a model into the servers' real memory, whatever `memory_ratio` the cluster asks for.

    `kv_reserve_bytes` is what every server keeps for KV caches.
    """
    real = replace(cluster, memory_ratio=None)
    fixed = model.dense_bytes + kv_reserve_bytes
    room = np.maximum(cluster.memory_bytes - fixed, 0)
    piled = np.cumsum(np.sort(model.expert_bytes, axis=None))
    try:
        capacity = expert_capacity_bytes(real, model, kv_reserve_bytes=kv_reserve_bytes)
        packed_hosts(real, model, capacity)
        refusal = None
    except UserError as error:
        refusal = str(error)
    return Fit(
        room_bytes=room,
        holds_dense=cluster.memory_bytes >= fixed,
        experts=np.searchsorted(piled, room, side="right"),
        holds_all=room >= model.total_expert_bytes,
        copies=float(room.sum() / model.total_expert_bytes),
        refusal=refusal,
    )
