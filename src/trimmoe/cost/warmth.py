"""What a server saves that has worked just now: its weights are still in its core's caches.

Kernels are timed one after another, and what software takes is what a token of one stream takes
beyond them (`experiments.measuring`). Some of that is caches that have cooled down while the server
waited for the others, and is not there where it has hardly waited.
"""

from __future__ import annotations

import math

import numpy as np

from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.cost.guessing import layer_times_s, machines_of
from trimmoe.cost.model import CostModel

WARM_SHARE, WARM_S = 0.4, 0.02
"""Share of what software takes after a long wait that is due to caches, and the time in which these
cool down, measured on two servers that have a core each: a row through all layers took 8.5 ms at
once, 10.3 after 5 ms, 11.5 after 20, 13 after 45 and 14.5 after 100."""


def times_as_long(warm: float, rested_s: float) -> float:
    """What software takes after so long a wait, over what it takes after a long one, where a share
    `warm` of that is due to caches. Plain arithmetic, so that compiled loops can take it in."""
    return 1.0 - warm * math.exp(-rested_s / WARM_S)


def warm_shares(cost: CostModel) -> FloatArray:
    """That share of each server, [M]: all of it where it has a core to itself, and none where it
    has half of one, in whose caches others' weights are. None where nothing was measured."""
    if cost.token_s is None:
        return np.zeros(cost.server_count)
    machine, at_once = machines_of(cost)
    core = at_once / np.bincount(machine)[machine]
    return WARM_SHARE * np.clip(2.0 * core - 1.0, 0.0, 1.0)


def rests_s(cost: CostModel, routes: IntArray, top_k: int) -> FloatArray:
    """How long each server waits between two tokens of one stream of its users, on its row of
    `routes` [R, N], [M] seconds: what a token takes without what that server computes."""
    servers, layers = np.arange(cost.server_count), np.arange(cost.layer_count)
    ways = routes[servers]
    layer_s = layer_times_s(cost, top_k)[ways, layers]
    sent_s = cost.transfer_s[ways[:, :-1], ways[:, 1:]].sum(axis=1)
    ends_s = (
        cost.token_transfer_s[servers, ways[:, 0]] + cost.token_transfer_s[ways[:, -1], servers]
    )
    return sent_s + ends_s + np.where(ways == servers[:, None], 0.0, layer_s).sum(axis=1)
