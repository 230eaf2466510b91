"""Memory for experts on each server, (c.1), and packing one copy of every expert into it, (c.2).

Whether unequal experts fit is bin packing. With equal sizes every packing here is exact; with
unequal ones first-fit decreasing is tried, then an integer program, and a refusal says whether
the total is short, an expert is too large for every server, or no packing was found.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from trimmoe.core.errors import UserError
from trimmoe.core.specs import BoolArray, ClusterSpec, FloatArray, IntArray, ModelSpec

_NODE_LIMIT = 2000
"""Branch-and-bound nodes of the last resort; a limit on nodes, not on time, is reproducible."""


def expert_capacity_bytes(
    cluster: ClusterSpec, model: ModelSpec, *, kv_reserve_bytes: int | IntArray = 0
) -> IntArray:
    """C_m of (c.1): bytes for experts on each server, shape [M].

    With `memory_ratio` the servers share floor(ratio x bytes of all experts) in proportion to
    their memory, to the byte and never more. Otherwise each has its memory less the dense part
    and less `kv_reserve_bytes`, of each or [M], for KV caches and the like; a server too small for
    these has 0.

    Raises `UserError` if the experts cannot fit: too little in total, or an expert that no server
    can hold. That they can be packed is found out by `packed_hosts`.
    """
    assert np.all(np.asarray(kv_reserve_bytes) >= 0)
    if cluster.memory_ratio is not None:
        capacity = _scaled(cluster.memory_bytes, cluster.memory_ratio, model.total_expert_bytes)
    else:
        capacity = np.maximum(cluster.memory_bytes - model.dense_bytes - kv_reserve_bytes, 0)
    _require_possible(cluster, model, capacity)
    return capacity


def human_bytes(size: int) -> str:
    """A size for people, in decimal units: `1.50 GB`."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


def _scaled(memory_bytes: IntArray, ratio: float, expert_bytes: int) -> IntArray:
    """Largest-remainder shares of floor(ratio x expert_bytes), in exact integers, shape [M]."""
    memory = [int(size) for size in memory_bytes]
    target, whole = int(Fraction(ratio) * expert_bytes), sum(memory)
    capacity = [target * size // whole for size in memory]
    remainder = [target * size % whole for size in memory]
    by_remainder = sorted(range(len(memory)), key=lambda m: (-remainder[m], m))
    for m in by_remainder[: target - sum(capacity)]:
        capacity[m] += 1
    return np.array(capacity, dtype=np.int64)


def _require_possible(cluster: ClusterSpec, model: ModelSpec, capacity: IntArray) -> None:
    needed, there = model.total_expert_bytes, int(capacity.sum())
    if there < needed:
        more = "raise memory_ratio" if cluster.memory_ratio is not None else "add memory or servers"
        raise UserError(
            f"Cluster {cluster.name} has {human_bytes(there)} for experts, {model.name} needs "
            f"{human_bytes(needed)}: {human_bytes(needed - there)} are short; {more} or choose a "
            "smaller model."
        )
    layer, expert = np.unravel_index(model.expert_bytes.argmax(), model.expert_bytes.shape)
    largest = int(model.expert_bytes[layer, expert])
    if largest > capacity.max():
        raise UserError(
            f"In cluster {cluster.name} no server can hold one expert of layer {layer} of "
            f"{human_bytes(largest)}: the largest has {human_bytes(int(capacity.max()))} for "
            f"experts, {human_bytes(largest - int(capacity.max()))} are short; add memory to one "
            "server or choose a smaller model."
        )


def used_bytes(hosts: BoolArray, model: ModelSpec) -> IntArray:
    """Bytes of the experts each server holds, the left side of (c.1), shape [M]."""
    return np.einsum("mlk,lk->m", hosts.astype(np.int64), model.expert_bytes)


def packed_hosts(cluster: ClusterSpec, model: ModelSpec, capacity: IntArray) -> BoolArray:
    """One copy of every expert within `capacity`, shape [M, N, E].

    Raises `UserError` if no packing is found, naming how much is left over.
    """
    sizes = model.expert_bytes.ravel()
    server, left_over = _first_fit_decreasing(sizes, capacity)
    if left_over:
        exact = _integer_packing(sizes, capacity)
        if exact is None:
            raise _no_packing(cluster, model, capacity, left_over)
        server = exact
    hosts = np.zeros((capacity.size, sizes.size), dtype=bool)
    hosts[server, np.arange(sizes.size)] = True
    return hosts.reshape(capacity.size, model.layer_count, model.expert_count)


def _first_fit_decreasing(sizes: IntArray, capacity: IntArray) -> tuple[IntArray, int]:
    """Server of every expert, -1 where none had room, and the bytes of those; servers largest
    first."""
    free, server, left_over = capacity.copy(), np.full(sizes.size, -1), 0
    order = np.argsort(-capacity, kind="stable")
    for expert in np.argsort(-sizes, kind="stable"):
        fits = order[free[order] >= sizes[expert]]
        if fits.size == 0:
            left_over += int(sizes[expert])
            continue
        server[expert] = fits[0]
        free[fits[0]] -= sizes[expert]
    return server, left_over


def _integer_packing(sizes: IntArray, capacity: IntArray) -> IntArray | None:
    """An exact packing by size classes, or None if there is none within the node limit.

    Variables n[m, c] = how many experts of class c server m holds; few where sizes repeat.
    """
    classes, member, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    servers, kinds = capacity.size, classes.size
    unit = float(classes.max())
    fits = np.kron(np.eye(servers), classes / unit)
    covers = np.kron(np.ones(servers), np.eye(kinds))
    # SciPy's annotations say float where arrays are meant.
    upper: Any = np.minimum(capacity[:, None] // classes[None, :], counts[None, :]).ravel()
    room: Any = capacity / unit
    wanted: Any = counts
    result = milp(
        c=np.zeros(servers * kinds),
        integrality=np.ones(servers * kinds),
        bounds=Bounds(0, upper),
        constraints=[
            LinearConstraint(fits, -np.inf, room),
            LinearConstraint(covers, wanted, wanted),
        ],
        options={"node_limit": _NODE_LIMIT},
    )
    return None if result.x is None else _unpacked(result.x, sizes, capacity, member, kinds)


def _unpacked(
    solution: FloatArray, sizes: IntArray, capacity: IntArray, member: IntArray, kinds: int
) -> IntArray | None:
    """Server of every expert from the solver's n[m, c]; None if it holds only within tolerance."""
    counts = np.rint(solution).astype(np.int64).reshape(capacity.size, kinds)
    server = np.empty(sizes.size, dtype=np.int64)
    for kind in range(kinds):
        experts = np.flatnonzero(member == kind)
        where = np.repeat(np.arange(capacity.size), counts[:, kind])
        if where.size != experts.size:
            return None
        server[experts] = where
    load = np.bincount(server, weights=sizes, minlength=capacity.size)
    return server if (load <= capacity).all() else None


def _no_packing(
    cluster: ClusterSpec, model: ModelSpec, capacity: IntArray, left_over: int
) -> UserError:
    spare = int(capacity.sum()) - model.total_expert_bytes
    return UserError(
        f"Cluster {cluster.name} has {human_bytes(spare)} more than the experts of {model.name} "
        f"need in total, but in pieces too small for whole experts: no packing was found for the "
        f"last {human_bytes(left_over)}; add about that much memory to one server."
    )
