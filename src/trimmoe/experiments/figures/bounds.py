"""What there is to gain for a contender: how fast its actions could make it at best, and how much
of its delay they leave as it is."""

from __future__ import annotations

import numpy as np

from trimmoe.cost.clairvoyant import Exits, clairvoyant_bound
from trimmoe.experiments.figures.bench import BUDGET, CONFIDENCE, Bench
from trimmoe.experiments.figures.contenders import Contender
from trimmoe.policy.trim import TrimPolicy


def bound_s(bench: Bench, contender: Contender, budget: float = BUDGET) -> float:
    """Mean delay per token that no policy with the contender's actions could go below."""
    rig = bench.rig(contender, budget)
    assert isinstance(rig.engine.policy, TrimPolicy)
    bench.announce(f"{contender.title}: clairvoyant")
    needed, charge = rig.engine.exit_terms(CONFIDENCE)
    return clairvoyant_bound(
        rig.engine.policy.lookahead.space,
        bench.world.trace,
        rig.engine.routes,
        bench.access,
        budget=budget,
        exits=Exits(threshold=needed, loss=charge),
    ).delay_s


def way_s(bench: Bench, contender: Contender) -> float:
    """Mean time per token that full depth spends on the way along its route and in attention,
    which skips, drops and substitutes leave as it is; only exits shorten it."""
    rig = bench.rig(contender)
    cost, routes = rig.engine.cost, rig.engine.routes
    entries = np.arange(cost.server_count)
    hops = cost.transfer_s[routes[:, :-1], routes[:, 1:]].sum(1)
    dense = cost.dense_s[routes, np.arange(cost.layer_count)].sum(1)
    ends = cost.token_transfer_s[entries, routes[:, 0]]
    ends = ends + cost.token_transfer_s[routes[:, -1], entries]
    access = bench.access
    return float((hops + dense + ends)[access].mean())


def detour_share(bench: Bench, contender: Contender) -> float:
    """Share of the exit points along its route, averaged over the users' routes, at which the
    link straight back is slower than hops and attention of all that is left of the route."""
    cost, routes = bench.rig(contender).engine.cost, bench.rig(contender).engine.routes
    servers, layers = np.arange(cost.server_count), np.arange(1, cost.layer_count)
    straight = cost.token_transfer_s[routes[:, 1:], servers[:, None]]
    hops = np.zeros((servers.size, layers.size))
    hops[:, :-1] = cost.transfer_s[routes[:, 1:-1], routes[:, 2:]]
    left = hops + cost.dense_s[routes[:, 1:], layers]
    on = np.cumsum(left[:, ::-1], axis=1)[:, ::-1] + straight[:, -1:]
    slower = (straight > on).mean(1) if layers.size else np.zeros(servers.size)
    return float(bench.world.plan.cluster.access_share @ slower)
