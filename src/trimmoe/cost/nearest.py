"""Exact execution at the nearest hosts, layer after layer, compiled: where slots run and what that
costs each token.

Rows of tokens are the words of a `core.wave.Wave`, whose columns are named here. Shapes: n tokens,
k slots, M servers, N layers, E experts, R routes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimmoe.core.ledger import Kind
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.wave import COLUMN, SCALARS
from trimmoe.cost.kernels import Links, add_sent, bare, slots_delay_s

_SERVER, _ROUTE, _SLOTS_RUN = COLUMN["server"], COLUMN["route"], COLUMN["slots_run"]
_DELAY_S, _AHEAD = COLUMN["delay_s"], COLUMN["ahead"]
_LOCAL_EXACT, _REMOTE_EXACT = int(Kind.LOCAL_EXACT), int(Kind.REMOTE_EXACT)


class Nearest(NamedTuple):
    """What there is to know where nothing is decided."""

    links: Links
    dense_s: FloatArray
    """[M, N]."""
    routes: IntArray
    """[R, N]."""
    server: IntArray
    """Nearest host by layer, source, destination and expert, [N, M, M, E]."""
    delay_s: FloatArray
    """Of that slot alone, infinite where nobody holds it, [N, M, M, E]."""
    here: BoolArray
    """Experts whose slots run where a token is, as long as it stays there, [M, N, E]."""

    def before_leaving(self, server: int, to: int) -> BoolArray:
        """Experts whose slots run on a server though what the layer gives gathers on another,
        [N, E]."""
        held = np.isfinite(self.delay_s[:, server, to])
        return held & (self.server[:, server, to] == server)


@bare
def pass_layers(nearest, first, words, floats, messages, experts, settled, server, destination):
    """Charge tokens for the layers from `first` on that they passed, in place.

    Of the first `settled` layers all activated `experts` [n, L, k] ran where the token is; of one
    more, if L says so, at the nearest hosts, which are written to `server` [n, k], and the result
    gathers at `destination` [n], on the route; that is -1 where an expert has no host. `words`
    [n, W], and the same as `floats`; `messages` [n, M, M] is part of it.
    """
    links, slots = nearest.links, experts.shape[2]
    for r in range(words.shape[0]):
        at = words[r, _SERVER]
        for step in range(settled):
            layer, work_s = first + step, 0.0
            for j in range(slots):
                work_s += links.expert_s[at, layer, experts[r, step, j]]
            floats[r, _DELAY_S] += work_s + nearest.dense_s[at, layer]
            words[r, SCALARS + layer] = _LOCAL_EXACT
        words[r, _SLOTS_RUN] += settled * slots
        if settled < experts.shape[1]:
            layer, chosen = first + settled, experts[r, settled]
            to = _found(nearest, layer, words[r], chosen, server[r])
            destination[r] = to
            if to >= 0:
                _charge(nearest, layer, to, words[r], floats[r], messages[r], chosen, server[r])


@bare
def _found(nearest, layer, words, experts, server):
    """Where one token's layer gathers, -1 if an expert has no host; hosts go to `server` [k]."""
    at, last = words[_SERVER], nearest.routes.shape[1] - 1
    to = nearest.routes[words[_ROUTE], min(layer + 1, last)]
    for j in range(experts.shape[0]):
        if np.isinf(nearest.delay_s[layer, at, to, experts[j]]):
            return -1
        server[j] = nearest.server[layer, at, to, experts[j]]
    return to


@bare
def _charge(nearest, layer, to, words, floats, messages, experts, server):
    """One token's layer, whose slots run at `server` [k] and gather at `to`."""
    at, remote = words[_SERVER], False
    for j in range(experts.shape[0]):
        remote = remote or server[j] != at
    spent_s = slots_delay_s(nearest.links, layer, at, to, experts, server)
    floats[_DELAY_S] += spent_s + nearest.dense_s[at, layer]
    floats[_AHEAD] = np.inf
    words[SCALARS + layer] = _REMOTE_EXACT if remote else _LOCAL_EXACT
    words[_SLOTS_RUN] += experts.shape[0]
    add_sent(messages, at, to, experts, server, False)
    words[_SERVER] = to
