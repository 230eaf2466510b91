"""Routes kappa: which server runs attention, KV cache and router of each layer, at what cost.

A route of access server a is a shortest path: the token's id goes from a to kappa(1), each layer
costs its expected delay from kappa(l) to kappa(l+1), and the sampled id returns from kappa(N) to
a. After the last layer the state stays where it is, for the head, so its destination is its own
source. The head itself costs the same order everywhere (some 0.01 ms) and is left out, as in the
cost model.

Shapes: M servers, N layers, E experts, P patterns. A layer table `delay_s[l, s, t]` of shape
[N, M, M] holds the expected delay of layer l from source s to destination t.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.expected import best_hosts, destinations
from trimmoe.cost.model import CostModel


def home_routes(server_count: int, layer_count: int) -> IntArray:
    """Every access server keeps all layers itself, shape [M, N]."""
    return np.repeat(np.arange(server_count)[:, None], layer_count, axis=1)


def route_delay_s(cost: CostModel, layer_delays: FloatArray, routes: IntArray) -> FloatArray:
    """Expected delay per token of each access server's route, seconds, shape [M].

    `routes` has shape [M (access), N]; includes the token id's way in and out, and what software
    takes for it on its user's server.
    """
    layers = np.arange(routes.shape[1])
    return cost.ends_s(routes) + layer_delays[layers, routes, destinations(routes)].sum(axis=1)


def best_routes(
    cost: CostModel, layer_delays: FloatArray, hosts: BoolArray | None = None
) -> IntArray:
    """The route of least `route_delay_s` for each access server, shape [M, N].

    Exact, by dynamic programming from the last layer back. On ties a layer stays where it is. With
    `hosts` [M, N, E] a token that leaves behind a layer whose experts its server does not all hold
    is taken to cost a further message, where that was measured: its slots are dealt out.
    """
    if hosts is not None and cost.apart_s is not None:
        layer_delays = layer_delays + _dealt_s(cost.apart_s, hosts)
    layers, servers = layer_delays.shape[:2]
    every = np.arange(servers)
    # Cost from layer l on when it runs on s, for access server a: [a, s].
    ahead = layer_delays[-1].diagonal()[None, :] + cost.token_transfer_s.T
    following = np.empty((layers, servers, servers), dtype=np.int64)
    for layer in range(layers - 2, -1, -1):
        through = layer_delays[layer][None] + ahead[:, None, :]  # [a, s, t]
        to = through.argmin(axis=2)
        stays = through[:, every, every] <= through.min(axis=2)
        following[layer] = np.where(stays, every[None, :], to)
        ahead = through.min(axis=2)
    start = cost.enter_s + ahead
    routes = np.empty((servers, layers), dtype=np.int64)
    routes[:, 0] = np.where(start[every, every] <= start.min(axis=1), every, start.argmin(axis=1))
    for layer in range(layers - 1):
        routes[:, layer + 1] = following[layer, every, routes[:, layer]]
    return routes


def _dealt_s(apart_s: FloatArray, hosts: BoolArray) -> FloatArray:
    """By layer, source and destination, [N, M, M]."""
    deals = ~hosts.all(axis=2).T * apart_s
    return deals[:, :, None] * ~np.eye(apart_s.size, dtype=bool)


def expected_delay_s(
    cost: CostModel, layer_delays: FloatArray, routes: IntArray, access_share: FloatArray
) -> float:
    """Expected exact delay per token over all users: routes weighted by access share, seconds."""
    return float(access_share @ route_delay_s(cost, layer_delays, routes))


def execution_share(
    cost: CostModel,
    hosts: BoolArray,
    profile: Profile,
    routes: IntArray,
    access_share: FloatArray,
) -> FloatArray:
    """Share of exact slot executions that run on each server, shape [M], sums to one."""
    share = np.zeros(cost.server_count)
    for layer in range(cost.layer_count):
        for source, destination, weight in traffic(routes, access_share, layer):
            best = best_hosts(cost, hosts, layer, source, destination)
            np.add.at(share, best, weight * profile.activated[layer])
    return share / share.sum()


def traffic(routes: IntArray, access_share: FloatArray, layer: int) -> list[tuple[int, int, float]]:
    """Distinct (source, destination, share of tokens) of one layer, ascending; shares sum to one.

    Access servers without users are left out.
    """
    weights: dict[tuple[int, int], float] = {}
    to = destinations(routes)
    for access in np.flatnonzero(access_share > 0):
        pair = (int(routes[access, layer]), int(to[access, layer]))
        weights[pair] = weights.get(pair, 0.0) + float(access_share[access])
    return [(source, to, weight) for (source, to), weight in sorted(weights.items())]
