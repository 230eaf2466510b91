"""The inner loops of planning, compiled: shortest routes and which hosts they reach.

Shapes: A access servers, M servers, N layers, E experts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trimmoe import cost
from trimmoe.core.compiled_from import forget_outdated
from trimmoe.cost.kernels import nearest_hosts, njit

# The cost model's formulas are compiled into what is here.
forget_outdated(Path(__file__).parent, Path(__file__), Path(cost.__file__).parent)


@njit
def shortest_routes(tables, enter, back):
    """Least cost [A] and route [A, N] of every access server, by dynamic programming.

    `tables` [N, M, M]: cost of each layer from source to destination; the last layer stays where
    it is. `enter`, `back` [A, M]: cost from the access server to each server and back. On ties a
    layer stays where it is, and the first layer at the access server that is row `a`'s own
    cheapest entry.
    """
    layers, servers = tables.shape[0], tables.shape[1]
    accesses = enter.shape[0]
    cost, routes = np.empty(accesses), np.empty((accesses, layers), dtype=np.int64)
    ahead, through = np.empty(servers), np.empty(servers)
    following = np.empty((layers, servers), dtype=np.int64)
    for access in range(accesses):
        for s in range(servers):
            ahead[s] = tables[layers - 1, s, s] + back[access, s]
        for layer in range(layers - 2, -1, -1):
            for s in range(servers):
                least, to = tables[layer, s, s] + ahead[s], s
                for t in range(servers):
                    there = tables[layer, s, t] + ahead[t]
                    if there < least:
                        least, to = there, t
                through[s], following[layer, s] = least, to
            ahead[:] = through
        here = int(np.argmin(enter[access]))
        least = enter[access, here] + ahead[here]
        for s in range(servers):
            if enter[access, s] + ahead[s] < least:
                least, here = enter[access, s] + ahead[s], s
        cost[access] = least
        for layer in range(layers):
            routes[access, layer] = here
            if layer < layers - 1:
                here = following[layer, here]
    return cost, routes


@njit
def reached_hosts(links, hosts, routes):
    """Which replicas are the nearest of their expert somewhere on the `routes` [A, N], [M, N, E].

    Every expert with a host has one, so what is reached alone still covers every expert (c.2).
    """
    servers, layers, _ = hosts.shape
    reached = np.zeros_like(hosts)
    for layer in range(layers):
        seen = np.zeros((servers, servers), dtype=np.bool_)
        held = np.ascontiguousarray(hosts[:, layer])
        for access in range(routes.shape[0]):
            source = routes[access, layer]
            destination = routes[access, min(layer + 1, layers - 1)]
            if seen[source, destination]:
                continue
            seen[source, destination] = True
            best = nearest_hosts(links, layer, held, source, destination)[0]
            for expert in range(best.size):
                if best[expert] >= 0:
                    reached[best[expert], layer, expert] = True
    return reached
