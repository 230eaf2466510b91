"""EdgeShard's two dynamic programmes: contiguous shards for least latency or best throughput.

Source: Zhang et al., "EdgeShard: Efficient LLM Inference via Collaborative Edge Computing" (2024):
layers are sharded over chosen devices so that the time of one token through all of them
("latency"), or that of the slowest stage with its transfer ("throughput"), is least; the first
layer stays on the source device and the sampled token returns to it.

Reconstructed here:

- A layer is its dense part and its experts; the seconds of one exact MoE layer on one server are
  those of the cost model with all experts there.
- The source is the access server with most users. If it cannot hold the first layer, any may.
- Latency: the programme is over (layer, device); how much memory is left on the devices is that of
  the best path to this state, as published, so it is a heuristic where memory is scarce. A layer
  that fits on no device in any kept path ends it: None.
- Throughput: over (layers done, set of devices used, last device), each device one contiguous
  range. Exponential in devices: where there are more than `MOST_SERVERS`, the roomiest are taken.
- The route is the staircase of stages for every access server.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.expected import expected_layer_delay_s
from trimmoe.cost.kernels import njit
from trimmoe.placement.pipeline import stage_hosts, staircase_routes
from trimmoe.placement.planner import Planner
from trimmoe.placement.seeds.base import SeedPlan

MOST_SERVERS = 12


def edgeshard_latency(planner: Planner) -> SeedPlan | None:
    """Shards of least latency for one token; None if whole layers do not fit."""
    return _staged(
        planner,
        latency_stages(
            layer_seconds(planner),
            planner.cost.transfer_s,
            planner.cost.token_transfer_s,
            planner.model.expert_bytes.sum(axis=1),
            planner.capacity,
            source_server(planner),
        ),
    )


def edgeshard_throughput(planner: Planner) -> SeedPlan | None:
    """Shards whose slowest stage is the fastest; None if whole layers do not fit."""
    roomiest = np.argsort(-planner.capacity, kind="stable")[:MOST_SERVERS]
    source = source_server(planner)
    if source not in roomiest:
        roomiest[-1] = source
    chosen = np.sort(roomiest)
    stages = throughput_stages(
        layer_seconds(planner)[chosen],
        planner.cost.transfer_s[np.ix_(chosen, chosen)],
        planner.cost.token_transfer_s[np.ix_(chosen, chosen)],
        planner.model.expert_bytes.sum(axis=1),
        planner.capacity[chosen],
        int(np.searchsorted(chosen, source)),
    )
    return _staged(planner, None if stages is None else chosen[stages])


def _staged(planner: Planner, stages: IntArray | None) -> SeedPlan | None:
    if stages is None:
        return None
    servers = planner.cost.server_count
    return SeedPlan(
        hosts=stage_hosts(planner.model, servers, stages),
        routes=staircase_routes(servers, stages),
        stages=stages,
    )


def source_server(planner: Planner) -> int:
    """Where most users are: EdgeShard's source node."""
    return int(planner.cluster.access_share.argmax())


def layer_seconds(planner: Planner) -> FloatArray:
    """Expected seconds of every layer on every server that holds all of it, [M, N]."""
    cost = planner.cost
    everywhere: BoolArray = np.ones((cost.server_count, *planner.model.expert_bytes.shape), bool)
    # With every expert everywhere, a layer that stays on its server is computed there.
    tables = expected_layer_delay_s(cost, everywhere, planner.profile)
    return tables.diagonal(axis1=1, axis2=2).T.copy()


def latency_stages(
    layer_s: FloatArray,
    transfer_s: FloatArray,
    token_s: FloatArray,
    sizes: IntArray,
    capacity: IntArray,
    source: int,
) -> IntArray | None:
    """Server of every layer, [N]; `layer_s` [M, N], transfers [M, M], `sizes` [N] in bytes."""
    servers, layers = layer_s.shape
    free = np.repeat(capacity[None, :], servers, axis=0)  # [last device, device]
    total = np.where(
        _may_start(sizes[0], capacity, source), layer_s[:, 0] + token_s[source], np.inf
    )
    free[np.arange(servers), np.arange(servers)] -= sizes[0]
    came_from = np.empty((layers, servers), dtype=np.int64)
    for layer in range(1, layers):
        fits = free >= sizes[layer]  # [from, to]
        through = np.where(fits, total[:, None] + transfer_s, np.inf)
        came_from[layer] = through.argmin(axis=0)
        total = through.min(axis=0) + layer_s[:, layer]
        free = free[came_from[layer]]
        free[np.arange(servers), np.arange(servers)] -= sizes[layer]
    total = total + token_s[:, source]
    if not np.isfinite(total.min()):
        return None
    stages = np.empty(layers, dtype=np.int64)
    stages[-1] = total.argmin()
    for layer in range(layers - 1, 0, -1):
        stages[layer - 1] = came_from[layer, stages[layer]]
    return stages


def _may_start(first_size: int, capacity: IntArray, source: int) -> BoolArray:
    """Where the first layer may lie, [M]: on the source if it has room."""
    if capacity[source] >= first_size:
        return np.arange(capacity.size) == source
    return capacity >= first_size


def throughput_stages(
    layer_s: FloatArray,
    transfer_s: FloatArray,
    token_s: FloatArray,
    sizes: IntArray,
    capacity: IntArray,
    source: int,
) -> IntArray | None:
    """Server of every layer, [N], for the least time of the slowest stage and its hand-over."""
    servers, layers = layer_s.shape
    work = np.concatenate([np.zeros((servers, 1)), np.cumsum(layer_s, axis=1)], axis=1)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    starts = _may_start(int(sizes[0]), capacity, source)
    slowest, before = _slowest_stages(work, ends, transfer_s, capacity, starts)
    final = np.maximum(slowest[:, :, layers], token_s[:, source][None, :])
    if not np.isfinite(final.min()):
        return None
    used, server = (int(i) for i in np.unravel_index(final.argmin(), final.shape))
    return _traced(before, used, server, layers)


@njit
def _slowest_stages(work, ends, transfer_s, capacity, starts):
    """Least time of the slowest stage with layers 0..i-1 on the set S, the last of them on j.

    [2^M, M, N + 1]; and from which device and layer each came, [2^M, M, N + 1, 2].
    """
    servers, bounds = work.shape
    slowest = np.full((1 << servers, servers, bounds), np.inf)
    before = np.full((1 << servers, servers, bounds, 2), -1, dtype=np.int64)
    for server in range(servers):
        for end in range(1, bounds):
            if starts[server] and ends[end] <= capacity[server]:
                slowest[1 << server, server, end] = work[server, end]
    for used in range(1, 1 << servers):
        for last in range(servers):
            for done in range(1, bounds - 1):
                reached = slowest[used, last, done]
                if reached == np.inf:
                    continue
                for server in range(servers):
                    if used >> server & 1:
                        continue
                    after = used | 1 << server
                    so_far = max(reached, transfer_s[last, server])
                    for end in range(done + 1, bounds):
                        if ends[end] - ends[done] > capacity[server]:
                            break
                        slow = max(so_far, work[server, end] - work[server, done])
                        if slow < slowest[after, server, end]:
                            slowest[after, server, end] = slow
                            before[after, server, end, 0] = last
                            before[after, server, end, 1] = done
    return slowest, before


def _traced(before: IntArray, used: int, server: int, layers: int) -> IntArray:
    stages, end = np.empty(layers, dtype=np.int64), layers
    while end > 0:
        last, start = before[used, server, end].tolist()
        start = max(start, 0)
        stages[start:end] = server
        used, server, end = used & ~(1 << server), last, start
    return stages
