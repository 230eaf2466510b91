"""Exact execution: every slot's target at its nearest host."""

from __future__ import annotations

import numpy as np

from trimmoe.core.specs import IntArray
from trimmoe.cost.actions import ActionSpace, Levers
from trimmoe.cost.model import Accounting, layer_delay_s
from trimmoe.cost.nearest import Nearest
from trimmoe.policy.base import Decision, Observation


def nothing_to_choose(levers: Levers, accounting: Accounting) -> bool:
    """Whether there is one action only, and no exit that asks what comes after it."""
    return levers.lossless and not levers.exit and accounting is not Accounting.MIGRATE


def leaves_settled(levers: Levers, accounting: Accounting) -> bool:
    """Whether there is one action only where all activated experts run where the token is, and no
    exit that asks what comes after it."""
    return nothing_to_choose(levers, accounting) or (
        not levers.local and not levers.exit and accounting is not Accounting.MIGRATE
    )


def exact_decision(space: ActionSpace, routes: IntArray, observation: Observation) -> Decision:
    """Every slot's target at its nearest host; of infinite delay where one has none."""
    layer, source, experts = observation.layer, observation.server, observation.experts
    destination, server = placed(space, routes, observation, experts)
    delay_s = layer_delay_s(space.cost, layer, source, destination, experts, server)
    best_s = space.menu.best_s[layer, source[:, None], destination[:, None], experts]
    return Decision(
        slot_expert=experts,
        slot_server=server,
        destination=destination,
        delay_s=np.where(np.isinf(best_s).any(1), np.inf, delay_s),
        loss=np.zeros(experts.shape[0]),
        ahead=np.full(experts.shape[0], np.inf),
    )


def placed(
    space: ActionSpace, routes: IntArray, observation: Observation, ran: IntArray
) -> tuple[IntArray, IntArray]:
    """Where the results of the experts `ran` [n, k] gather, [n], and their hosts, [n, k].

    On the route, or under `migrate` where the first slot runs, at its fastest host.
    """
    cost, layer, source = space.cost, observation.layer, observation.server
    nearest = space.menu.best_server[layer]
    if cost.accounting is not Accounting.MIGRATE:
        destination = routes[observation.route, min(layer + 1, routes.shape[1] - 1)]
        return destination, nearest[source[:, None], destination[:, None], ran]
    first = ran[:, 0]
    alone_s = cost.transfer_s[source] + cost.waiting_s + cost.expert_s[:, layer, first].T
    destination = np.where(space.hosts[:, layer, first].T, alone_s, np.inf).argmin(1)
    server = nearest[source[:, None], destination[:, None], ran]
    server[:, 0] = destination
    return destination, server


def nearest_of(space: ActionSpace, routes: IntArray) -> Nearest:
    """What exact execution on routes [R, N] does, as tables."""
    servers, menu = np.arange(space.hosts.shape[0]), space.menu
    staying = menu.best_server[:, servers, servers]
    return Nearest(
        links=space.cost.links,
        dense_s=np.ascontiguousarray(space.cost.dense_s),
        routes=np.ascontiguousarray(routes),
        server=menu.best_server,
        delay_s=menu.best_s,
        here=space.hosts & (staying == servers[None, :, None]).transpose(1, 0, 2),
    )
