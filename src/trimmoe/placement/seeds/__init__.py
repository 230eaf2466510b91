"""Seed plans by name: the planner's starts, and baselines of their own.

Each is a function of the planner that gives hosts and routes, and stages where it is a pipeline.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.specs import IntArray
from trimmoe.placement.baseline import dispersed_hosts
from trimmoe.placement.pipeline import (
    compact_stages,
    pipeline_stages,
    stage_hosts,
    staircase_routes,
)
from trimmoe.placement.planner import Placement, Planner
from trimmoe.placement.routes import home_routes
from trimmoe.placement.seeds.activation import activation_aware
from trimmoe.placement.seeds.balanced import load_balanced
from trimmoe.placement.seeds.base import Seed, SeedPlan
from trimmoe.placement.seeds.edgeshard import edgeshard_latency, edgeshard_throughput
from trimmoe.placement.seeds.single import single_server
from trimmoe.placement.seeds.slim import slim_caching

__all__ = ["SEEDS", "Seed", "SeedPlan", "seed_placement", "seed_plan"]


def dispersed(planner: Planner) -> SeedPlan:
    """The predecessor's, see `placement.baseline`; tokens at home."""
    groups = planner.settings.groups
    if groups is None:
        groups = max(1, round(planner.model.expert_count**0.5))
    hosts = dispersed_hosts(
        planner.cluster, planner.model, planner.profile, planner.capacity, groups
    )
    return SeedPlan(hosts=hosts, routes=home_routes(hosts.shape[0], hosts.shape[1]))


def pipeline(planner: Planner) -> SeedPlan | None:
    """Layers in proportion to memory in file order, see `placement.pipeline`."""
    return _staged(planner, pipeline_stages(planner.model, planner.capacity))


def compact_pipeline(planner: Planner) -> SeedPlan | None:
    """As few and close servers as hold the model, see `placement.pipeline`."""
    return _staged(planner, compact_stages(planner.model, planner.capacity, planner.cost))


def _staged(planner: Planner, stages: IntArray | None) -> SeedPlan | None:
    if stages is None:
        return None
    servers = planner.cluster.server_count
    return SeedPlan(
        hosts=stage_hosts(planner.model, servers, stages),
        routes=staircase_routes(servers, stages),
        stages=np.asarray(stages),
    )


SEEDS: dict[str, Seed] = {
    "dispersed": dispersed,
    "pipeline": pipeline,
    "compact_pipeline": compact_pipeline,
    "edgeshard_latency": edgeshard_latency,
    "edgeshard_throughput": edgeshard_throughput,
    "activation_aware": activation_aware,
    "load_balanced": load_balanced,
    "slim_caching": slim_caching,
    "single_server": single_server,
}


def seed_plan(name: str, planner: Planner) -> SeedPlan | None:
    """The seed plan called `name`, or None where the method cannot serve the model.

    Raises `UserError` for a name that there is not, or if the experts do not fit at all.
    """
    if name not in SEEDS:
        raise UserError(f"There is no seed plan `{name}`; choose from {', '.join(SEEDS)}.")
    return SEEDS[name](planner)


def seed_placement(name: str, planner: Planner) -> Placement | None:
    """`seed_plan` evaluated: hosts, its own routes, and expected exact delay per token."""
    found = seed_plan(name, planner)
    return None if found is None else planner.placement(found.hosts, found.routes)
