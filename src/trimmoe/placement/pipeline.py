"""Pipelines: every server holds whole layers in one contiguous range, as people do today.

Expert (l, k) lies on the stage of layer l, whose server also runs its attention and KV cache: the
route is a staircase, the same for all access servers. The logits are computed at the last stage.
Memory left over stays unused.

- `pipeline_stages`: layers in proportion to memory over all servers in the order of the cluster
  file, as llama.cpp RPC splits over its servers in the order they are listed (exo does the same
  on a ring). File order, because that is what the user of such a system chooses, and because
  neighbours in a cluster file tend to be neighbours in the network.
- `compact_stages`: as few servers as hold the model, strung along close links; a stronger seed.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from trimmoe.core.specs import BoolArray, IntArray, ModelSpec
from trimmoe.cost.model import CostModel


def pipeline_stages(model: ModelSpec, capacity: IntArray) -> IntArray | None:
    """Server of every layer, shape [N], non-decreasing; None if whole layers do not fit."""
    return chain_stages(model, capacity, list(range(capacity.size)))


def chain_stages(model: ModelSpec, capacity: IntArray, chain: list[int]) -> IntArray | None:
    """Contiguous layers on the servers of `chain` in turn, in proportion to memory, shape [N].

    Every cut is as near to the proportional one as (c.1) allows here and for the servers after
    it, so None means that no contiguous split fits this chain. A server may get no layer.
    """
    ends = np.concatenate([[0], np.cumsum(model.expert_bytes.sum(axis=1))])
    room = capacity[chain]
    needed = _latest_starts(ends, room)
    filled = np.cumsum(room) / max(int(room.sum()), 1) * ends[-1]
    stages, start = np.empty(model.layer_count, dtype=np.int64), 0
    for position, server in enumerate(chain):
        reach = int(np.searchsorted(ends, ends[start] + room[position], side="right")) - 1
        if needed[position + 1] > reach:
            return None
        wanted = int(np.abs(ends - filled[position]).argmin())
        end = min(max(wanted, needed[position + 1], start), reach)
        stages[start:end] = server
        start = end
    return stages


def _latest_starts(ends: IntArray, room: IntArray) -> list[int]:
    """needed[i]: the least first layer from which the servers i, i+1, ... hold the rest."""
    needed = [ends.size - 1]
    for size in room[::-1]:
        needed.append(int(np.searchsorted(ends, ends[needed[-1]] - size, side="left")))
    return needed[::-1]


def compact_stages(model: ModelSpec, capacity: IntArray, cost: CostModel) -> IntArray | None:
    """Server of every layer on as few servers as hold the model, shape [N]; None if none do.

    From every server a chain grows greedily to the closest server that still lets the model fit
    on so few; of the chains that hold it, the one whose hops (and way back, which the next token
    takes) are the shortest is kept. Fewest is exact for layers of equal size.
    """
    for length in range(1, capacity.size + 1):
        best, best_hops = None, np.inf
        for first in range(capacity.size):
            chain = _grown_chain(model, capacity, cost, first, length)
            stages = None if chain is None else chain_stages(model, capacity, chain)
            if chain is None or stages is None:
                continue
            hops = _hops_s(cost, chain)
            if hops < best_hops:
                best, best_hops = stages, hops
        if best is not None:
            return best
    return None


def _hops_s(cost: CostModel, chain: list[int]) -> float:
    forward = sum(cost.transfer_s[a, b] for a, b in pairwise(chain))
    return float(forward + cost.token_transfer_s[chain[-1], chain[0]])


def _grown_chain(
    model: ModelSpec, capacity: IntArray, cost: CostModel, first: int, length: int
) -> list[int] | None:
    """`length` servers from `first`, each the closest to the last that leaves the goal in reach."""
    typical = model.expert_bytes.sum(axis=1).mean()
    whole_layers = np.floor(capacity / typical + 1e-9)
    chain, layers = [first], whole_layers[first]
    while len(chain) < length:
        others = np.setdiff1d(np.arange(capacity.size), chain)
        left = length - len(chain) - 1
        for server in others[np.argsort(cost.transfer_s[chain[-1], others], kind="stable")]:
            rest = np.sort(whole_layers[np.setdiff1d(others, [server])])[::-1][:left].sum()
            if layers + whole_layers[server] + rest >= model.layer_count:
                chain.append(int(server))
                layers += whole_layers[server]
                break
        else:
            return None
    return chain


def stage_hosts(model: ModelSpec, server_count: int, stages: IntArray) -> BoolArray:
    """Every expert of layer l on the server of its stage, shape [M, N, E]."""
    on_stage = np.arange(server_count)[:, None] == stages[None, :]
    return np.repeat(on_stage[:, :, None], model.expert_count, axis=2)


def staircase_routes(server_count: int, stages: IntArray) -> IntArray:
    """The stages as the route of every access server, shape [M, N]."""
    return np.repeat(stages[None, :], server_count, axis=0)
