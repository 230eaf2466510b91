"""Placements that any one server, or any few, may leave: enough hosts of every expert.

Every server has the dense part of a model, so that attention, router and head can run on whichever
servers are left (`live`), and what has to be seen to are the experts: each gets `losses` + 1
hosts within (c.1). Where the memory that a plan leaves free has room for the hosts that are missing
they go there. Otherwise, and if that is better, all are placed anew: the nearest host of an expert
counts by how long tokens wait for it, the others a hundredth of that,

    max sum_{m,i} w_{m,i} (p_{m,i} + 0.01 q_{m,i})

    with  sum_m p_{m,i} = 1,  sum_m q_{m,i} = losses,  0 <= p, q  and  p + q <= 1,

for the experts i of all layers, within memory. With experts of one size this is a network flow,
whose optimum is whole; else what is not whole is packed greedily.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import bmat, csr_array, eye_array, kron

from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, ClusterSpec, FloatArray, IntArray, ModelSpec
from trimmoe.cost.model import host_delay_s
from trimmoe.placement.capacity import human_bytes, used_bytes
from trimmoe.placement.make import Placement, Planner, PlanSettings, make_planner
from trimmoe.placement.routes import traffic

_SPARE_SHARE = 0.01
"""What a further host counts beside the nearest one."""
_WHOLE = 0.5


def surviving(
    plan: Plan, profile: Profile, model: ModelSpec, settings: PlanSettings, losses: int
) -> Plan:
    """A plan made with these settings, turned into the best one found in which every expert keeps a
    host whichever `losses` servers go.

    The header's settings say what that costs (`survive`: `losses`, and the expected exact delay per
    token `without_s`). Raises `UserError` as `survivable` does.
    """
    planner = make_planner(profile, model, plan.cluster, settings)
    planner = replace(planner, capacity=plan.expert_capacity_bytes)
    found = planner.placement(plan.hosts, plan.routes)
    made = survivable(planner, found, losses)
    record = {"survive": {"losses": losses, "without_s": found.expected_s}}
    known = plan.header.settings | record | {"expected_s": made.expected_s}
    header = replace(plan.header, settings=known)
    return replace(plan, header=header, hosts=made.hosts, routes=made.routes)


def survivable(planner: Planner, found: Placement, losses: int) -> Placement:
    """The best placement that was found in which every expert keeps a host whichever `losses`
    servers go; `found` itself if it is one.

    Raises `UserError` if there is too little memory for that, and says how much is missing.
    """
    require_room(planner.cluster, planner.model, planner.capacity, losses)
    if (found.hosts.sum(axis=0) > losses).all():
        return found
    bases = [_completed(planner, found, losses), _placed_anew(planner, found, losses)]
    made = [grown for base in bases if base is not None for grown in planner.regrown(base, found)]
    if not made:
        raise _no_packing(planner, losses)
    return min(made, key=lambda placement: placement.expected_s)


def require_room(cluster: ClusterSpec, model: ModelSpec, capacity: IntArray, losses: int) -> None:
    """Raise `UserError` unless the servers' memory may do for `losses` + 1 hosts of every expert.

    With experts of one size it then does.
    """
    if cluster.server_count <= losses:
        raise UserError(
            f"Cluster {cluster.name} has {cluster.server_count} of the {losses + 1} servers that "
            f"it takes to survive the loss of {losses}; add servers or leave out --survive."
        )
    whole, size = model.total_expert_bytes, int(model.expert_bytes.min())
    full = capacity > whole
    usable = np.minimum(capacity, whole)
    if (model.expert_bytes == size).all():
        usable = usable // size * size
    short = (losses + 1) * whole - int(usable.sum())
    if short <= 0:
        return
    names = ", ".join(
        name for name, has_all in zip(cluster.server_names, full, strict=True) if has_all
    )
    where = f"servers other than {names}, which can hold all experts already" if full.any() else ""
    raise UserError(
        f"To survive the loss of {losses} of its servers cluster {cluster.name} needs room for "
        f"{losses + 1} hosts of every expert of {model.name}, {human_bytes((losses + 1) * whole)}, "
        f"of which {human_bytes(short)} are missing on {where or 'any of its servers'}; add memory "
        "or leave out --survive."
    )


def _completed(planner: Planner, found: Placement, losses: int) -> BoolArray | None:
    """The plan's hosts and those that are missing in free memory, [M, N, E]; None where they do not
    fit."""
    free = planner.capacity - used_bytes(found.hosts, planner.model)
    needed = np.maximum(losses + 1 - found.hosts.sum(axis=0), 0).ravel()
    which = np.flatnonzero(needed)
    count = planner.cluster.server_count
    sizes = planner.model.expert_bytes.ravel()[which]
    allowed = ~found.hosts.reshape(count, -1)[:, which]
    worth = _worth(planner, found.routes).reshape(count, -1)[:, which]
    added = _dealt(sizes, free, needed[which] - 1, worth, allowed)
    if added is None:
        return None
    hosts = found.hosts.reshape(count, -1).copy()
    hosts[:, which] |= added
    return hosts.reshape(found.hosts.shape)


def _placed_anew(planner: Planner, found: Placement, losses: int) -> BoolArray | None:
    """`losses` + 1 hosts of every expert, for the plan's routes."""
    count = planner.cluster.server_count
    sizes = planner.model.expert_bytes.ravel()
    worth = _worth(planner, found.routes).reshape(count, -1)
    spare = np.full(sizes.size, losses)
    dealt = _dealt(sizes, planner.capacity, spare, worth, np.ones_like(worth, dtype=bool))
    return None if dealt is None else dealt.reshape(found.hosts.shape)


def _worth(planner: Planner, routes: IntArray) -> FloatArray:
    """Seconds per token that an expert on a server saves against one where it is farthest away,
    [M, N, E]."""
    cost, layers = planner.cost, []
    for layer in range(cost.layer_count):
        pairs = traffic(routes, planner.cluster.access_share, layer)
        reach_s = sum(
            weight * np.maximum(host_delay_s(cost, layer, s, t), cost.transfer_s[s, t])
            for s, t, weight in pairs
        )
        layers.append(np.max(reach_s, axis=0) - reach_s)
    return np.stack(layers, axis=1) * planner.profile.expected_executions


def _dealt(
    sizes: IntArray, capacity: IntArray, spare: IntArray, worth: FloatArray, allowed: BoolArray
) -> BoolArray | None:
    """One host of each of I experts and `spare` [I] further ones, [M, I], among those `allowed`
    [M, I]; None where no such placement was found."""
    solved = _solved(sizes, capacity, spare, worth, allowed)
    if solved is None:
        return None
    packed = _packed(solved & allowed, sizes, capacity, spare + 1, allowed)
    return packed if packed is not None else _packed(
        np.zeros_like(allowed), sizes, capacity, spare + 1, allowed
    )  # fmt: skip


def _solved(
    sizes: IntArray, capacity: IntArray, spare: IntArray, worth: FloatArray, allowed: BoolArray
) -> BoolArray | None:
    """The linear program's optimum, [M, I], rounded where it is not whole; None if there is none.

    Variables: p, then q, each by server and expert.
    """
    servers, experts = worth.shape
    if not experts:
        return np.zeros_like(allowed)
    unit = int(sizes.max())
    same = bool((sizes == unit).all())
    weights = np.ones(experts) if same else sizes / unit
    room = capacity // unit if same else capacity / unit
    within = kron(eye_array(servers), csr_array(weights[None]))
    each = kron(csr_array(np.ones((1, servers))), eye_array(experts))
    once = eye_array(servers * experts)
    scale = max(float(worth.max()), 1e-300)
    value = np.concatenate([worth.ravel(), _SPARE_SHARE * worth.ravel()]) / scale
    # SciPy's annotations say less than it takes.
    unequal: Any = bmat([[within, within], [once, once]], format="csr")
    equal: Any = bmat([[each, None], [None, each]], format="csr")
    bounds = np.stack([np.zeros(2 * allowed.size), np.tile(allowed.ravel(), 2)], axis=1)
    result = linprog(
        -value,
        A_ub=unequal,
        b_ub=np.concatenate([room, np.ones(servers * experts)]),
        A_eq=equal,
        b_eq=np.concatenate([np.ones(experts), spare]),
        bounds=bounds,
        method="highs-ds",
    )
    if result.x is None:
        return None
    both = result.x[: allowed.size] + result.x[allowed.size :]
    return both.reshape(allowed.shape) > _WHOLE


def _packed(
    hosts: BoolArray, sizes: IntArray, capacity: IntArray, wanted: IntArray, allowed: BoolArray
) -> BoolArray | None:
    """`hosts` [M, I] without what is too much for a server and with what is still `wanted` [I],
    the largest first, where most is free; None where that has no room."""
    hosts = hosts.copy()
    free = capacity - (hosts * sizes).sum(axis=1)
    for server in np.flatnonzero(free < 0):
        for expert in sorted(np.flatnonzero(hosts[server]), key=lambda expert: sizes[expert]):
            if free[server] >= 0:
                break
            hosts[server, expert] = False
            free[server] += sizes[expert]
    lacking = wanted - hosts.sum(axis=0)
    for expert in sorted(np.flatnonzero(lacking > 0), key=lambda expert: -sizes[expert]):
        possible = np.flatnonzero(allowed[:, expert] & ~hosts[:, expert] & (free >= sizes[expert]))
        chosen = possible[np.argsort(-free[possible], kind="stable")][: lacking[expert]]
        if chosen.size < lacking[expert]:
            return None
        hosts[chosen, expert] = True
        free[chosen] -= sizes[expert]
    return hosts


def _no_packing(planner: Planner, losses: int) -> UserError:
    largest = int(planner.model.expert_bytes.max())
    return UserError(
        f"Cluster {planner.cluster.name} has room for {losses + 1} hosts of every expert of "
        f"{planner.model.name} in total, but in pieces too small for whole experts; add about "
        f"{human_bytes(largest)} to each server or leave out --survive."
    )
