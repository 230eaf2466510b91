"""Everything on the one best server: what anybody would do if the model fits on it."""

from __future__ import annotations

import numpy as np

from trimmoe.placement.planner import Planner
from trimmoe.placement.seeds.base import SeedPlan


def single_server(planner: Planner) -> SeedPlan | None:
    """All layers on the server of least expected exact delay; None if none holds the model."""
    shape = (planner.cost.server_count, *planner.model.expert_bytes.shape)
    able = np.flatnonzero(planner.capacity >= planner.model.total_expert_bytes)
    found = []
    for server in able:
        hosts = np.zeros(shape, dtype=bool)
        hosts[server] = True
        found.append(planner.placement(hosts, np.full(shape[:2], server)))
    if not found:
        return None
    best = min(found, key=lambda placement: placement.expected_s)
    return SeedPlan(hosts=best.hosts, routes=best.routes, stages=best.routes[0])
