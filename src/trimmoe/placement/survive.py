"""Placements that any one server, or any few, may leave: enough hosts of every expert.

Every server has the dense part of a model, so that attention, router and head can run on whichever
servers are left (`live`), and what has to be seen to are the experts: each gets `losses` + 1 hosts
within (c.1). The further ones of an expert go near its nearest one, those of a layer together, so
that whoever takes a lost server's place can run whole layers. Where the memory that a plan leaves
free has room for what is missing it goes there. Otherwise, and if that is better, all are placed
anew: the nearest hosts first, by how long tokens would wait for others, with room kept for the
further ones. Both are linear programs,

    max sum_{m,i} w_{m,i} p_{m,i}    with  sum_m p_{m,i} = n_i,  0 <= p_{m,i} <= 1,

for the experts i of all layers, within memory. With experts of one size that is a network flow,
whose optimum is whole; else what is not whole is packed greedily.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import block_diag, bmat, csr_array, eye_array, kron

from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, ClusterSpec, FloatArray, IntArray, ModelSpec
from trimmoe.cost.model import host_delay_s
from trimmoe.placement.capacity import human_bytes, used_bytes
from trimmoe.placement.live import delay_after_s
from trimmoe.placement.make import make_planner
from trimmoe.placement.planner import Placement, Planner, PlanSettings
from trimmoe.placement.routes import traffic

_LOSS_SHARE = 0.01
"""What expected delays while a server is gone count beside those while all are there."""
_LATER_SHARE = 0.1
"""Of the difference between a neighbour and the next one: what makes layers stay together where not
all of them have room at the nearer one."""
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
    planner = planner.within(plan.expert_capacity_bytes)
    found = planner.placement(plan.hosts, plan.routes)
    made = survivable(planner, found, losses)
    record = {"survive": {"losses": losses, "without_s": found.expected_s}}
    known = plan.header.settings | record | {"expected_s": made.expected_s}
    header = replace(plan.header, settings=known)
    return replace(
        plan,
        header=header,
        hosts=made.hosts,
        routes=made.routes,
        stand_in_bits=planner.stand_in_bits(made.hosts, made.routes),
    )


def survivable(planner: Planner, found: Placement, losses: int) -> Placement:
    """The best placement that was found in which every expert keeps a host whichever `losses`
    servers go; `found` itself if it is one.

    Raises `UserError` if there is too little memory for that, and says how much is missing.
    """
    require_room(planner.cluster, planner.model, planner.capacity, losses)
    if (found.hosts.sum(axis=0) > losses).all():
        return found
    bases = [_spared(planner, found.hosts, losses), _placed_anew(planner, found, losses)]
    made = [
        min(planner.regrown(base, found), key=lambda placement: placement.expected_s)
        for base in bases
        if base is not None
    ]
    if not made:
        raise _no_packing(planner, losses)
    return min(made, key=lambda placement: _value_s(planner, placement))


def _value_s(planner: Planner, placement: Placement) -> float:
    """Expected delay per token, and a little of that while each server in turn is gone."""
    share, hosts = planner.cluster.access_share, placement.hosts
    after_s = [
        share
        @ np.nan_to_num(delay_after_s(planner.cost, hosts, placement.routes, planner.profile, lost))
        for lost in range(share.size)
    ]
    return placement.expected_s + _LOSS_SHARE * float(np.mean(after_s))


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


def _spared(planner: Planner, hosts: BoolArray, losses: int) -> BoolArray | None:
    """Hosts and those that are missing of `losses` + 1, in the memory left, [M, N, E]; None where
    they do not fit."""
    servers = hosts.shape[0]
    held = hosts.reshape(servers, -1)
    needed = np.maximum(losses + 1 - held.sum(axis=0), 0)
    which = np.flatnonzero(needed)
    free = planner.capacity - used_bytes(hosts, planner.model)
    if (free < 0).any():
        return None
    # By the nearest host: how many servers are nearer to it than each other one is.
    nearest = held[:, which].argmax(axis=0)
    rank = planner.cost.transfer_s.argsort(axis=1, kind="stable").argsort(axis=1)[nearest].T
    later = which / held.shape[1] * (rank - 1) * _LATER_SHARE
    sizes = planner.model.expert_bytes.ravel()[which]
    added = _dealt(sizes, free, needed[which], later - rank, ~held[:, which])
    if added is None:
        return None
    whole = held.copy()
    whole[:, which] |= added
    return whole.reshape(hosts.shape)


def _placed_anew(planner: Planner, found: Placement, losses: int) -> BoolArray | None:
    """`losses` + 1 hosts of every expert, the nearest ones for the plan's routes, [M, N, E]."""
    servers, sizes = planner.cluster.server_count, planner.model.expert_bytes.ravel()
    worth = _worth(planner, found.routes).reshape(servers, -1)
    anywhere = np.ones(worth.shape, dtype=bool)
    nearest = _nearest(sizes, planner.capacity, worth, losses)
    if nearest is not None:
        spared = _spared(planner, nearest.reshape(found.hosts.shape), losses)
        if spared is not None:
            return spared
    none = np.zeros_like(anywhere)
    wanted = np.full(sizes.size, losses + 1)
    packed = _packed(none, sizes, planner.capacity, wanted, anywhere)
    return None if packed is None else packed.reshape(found.hosts.shape)


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
    sizes: IntArray, capacity: IntArray, wanted: IntArray, worth: FloatArray, allowed: BoolArray
) -> BoolArray | None:
    """`wanted` [I] hosts of each of I experts, of most worth, [M, I], among those `allowed` [M, I];
    None where no such placement was found."""
    if not sizes.size:
        return np.zeros_like(allowed)
    solved = _solved(sizes, capacity, [(wanted, worth)], allowed)
    if solved is None:
        return None
    return _packed(solved[0], sizes, capacity, wanted, allowed)


def _nearest(
    sizes: IntArray, capacity: IntArray, worth: FloatArray, losses: int
) -> BoolArray | None:
    """The host of most worth of each expert, [M, I], with room for `losses` others of it."""
    one, allowed = np.ones(sizes.size, dtype=int), np.ones(worth.shape, dtype=bool)
    kinds = [(one, worth), (losses * one, np.zeros_like(worth))]
    solved = _solved(sizes, capacity, kinds, allowed)
    return None if solved is None else _packed(solved[0], sizes, capacity, one, allowed)


def _solved(
    sizes: IntArray,
    capacity: IntArray,
    kinds: Sequence[tuple[IntArray, FloatArray]],
    allowed: BoolArray,
) -> list[BoolArray] | None:
    """The linear program's optimum for each kind of host that share the memory, [M, I], rounded
    where it is not whole; None if there is none. A kind is how many there are to be of each expert
    and what each is worth; on one server an expert is of one kind at most."""
    servers, experts = allowed.shape
    unit = int(sizes.max())
    same = bool((sizes == unit).all())
    weights = np.ones(experts) if same else sizes / unit
    room = capacity // unit if same else capacity / unit
    within = kron(eye_array(servers), csr_array(weights[None]))
    each = kron(csr_array(np.ones((1, servers))), eye_array(experts))
    once = eye_array(servers * experts)
    value = np.stack([worth.ravel() for _, worth in kinds])
    # SciPy's annotations say less than it takes.
    unequal: Any = bmat([[within] * len(kinds), [once] * len(kinds)], format="csr")
    equal: Any = block_diag([each] * len(kinds), format="csr")
    bounds: Any = [(0, int(may)) for may in allowed.ravel()] * len(kinds)
    result = linprog(
        -value.ravel() / max(float(np.abs(value).max()), 1e-300),
        A_ub=unequal,
        b_ub=np.concatenate([room, np.ones(servers * experts)]),
        A_eq=equal,
        b_eq=np.concatenate([wanted for wanted, _ in kinds]),
        bounds=bounds,
        method="highs-ds",
    )
    if result.x is None:
        return None
    return list((result.x > _WHOLE).reshape(len(kinds), servers, experts))


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
