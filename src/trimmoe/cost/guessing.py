"""What guesses take, and how fast the tokens of a stream follow one another by them.

Shapes: M servers, N layers, E experts, R routes, the first M by access server, A access servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.batching import batch_s
from trimmoe.cost.model import CostModel

GUESSES, GUESS_CHANCE = 16, 0.15
"""Tokens of a stream that are guessed ahead at most, and the chance that all of them have to have
of being right."""


ROWS = 8
"""Rows of a batch up to which drafts are read along with what is known in one process: what more
would take is not made up for by what of them is right."""


def rows_along(streams: int) -> int:
    """How many drafts are read along with each token of so many streams in one process."""
    return ROWS // max(streams, 1) - 1


def window(chance: float, least: float, most: int) -> int:
    """How many guesses may be ahead of what is confirmed: as many as are all right with a chance of
    at least `least` where each is with `chance`, and no more than `most`."""
    if least <= 0.0 or chance >= 1.0:
        return most
    if chance < least:
        return 0
    return min(int(math.log(least) / math.log(chance) + 1e-9), most)


def interval_s(chance: float, guess_s: float, whole_s: float, least: float, most: int) -> float:
    """From one token to the next, to be expected where each takes `whole_s` to full depth and back,
    a guess takes `guess_s` and is right with `chance`, and `least` and `most` bound the window."""
    ahead = max(window(chance, least, most), 1)
    right_s = min(max(guess_s, whole_s / (1 + ahead)), whole_s)
    return chance * right_s + (1.0 - chance) * whole_s


IN_VAIN = 2.0
"""How many times as long as its own time a server's own guess takes it, with those behind wrong
ones and with prompts that it reads; measured on two and on five servers."""
MOST_ALONG, SURE = 4, 0.7
"""Drafts of a head that are read along with a token at most, and the share of cases in which it is
sure enough of one more, measured on the embedded model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crowd:
    """What the tokens of one stream take while others are under way, as the cost model has it.

    Tokens of users of the same server pass in one batch; those of others keep machines busy.
    """

    whole_s: float
    """To full depth and back, without load."""
    path_s: float
    """Of that, what servers compute."""
    busiest_s: float
    """What the fullest machine computes for a token."""
    software_s: float
    """What software takes that machine for one, or for a batch of several."""
    home_s: float
    """What the user's server does for one."""
    at_once: float
    """How many servers its machine serves at once."""
    batch_share: float
    here: int = 1
    """Streams of that server's users."""
    streams: int = 1
    """Streams in the cluster."""

    def among(self, here: int, streams: int) -> Crowd:
        """The same with so many of them."""
        here = max(here, 1)
        return replace(self, here=here, streams=max(here, streams))

    def trip_s(self, drafts: int) -> float:
        """Until the next token can set out where so many drafts are read along with each."""
        alone_s = self.whole_s + self.path_s * (self._batch(1 + drafts) - 1.0)
        return max(alone_s, self._machine_s(1 + drafts))

    def along(self, chance: float) -> tuple[int, float]:
        """How many drafts it pays best to read along, each of them right with `chance` where those
        before it are and the head is sure of it, and the time from one token to the next by
        that."""
        each = [
            (self.trip_s(k) / _expected_tokens(chance * SURE, k), k) for k in range(MOST_ALONG + 1)
        ]
        least_s, drafts = min(each)
        return drafts, least_s

    def among_s(self, guess_s: float) -> float:
        """A guess that takes `guess_s` by itself, in a batch with those of all of its streams, and
        with what is guessed in vain."""
        return guess_s * self._batch(1) * IN_VAIN

    def own_s(self, chance: float, guess_s: float, least: float, most: int) -> float:
        """From one token to the next where the user's server guesses by itself, one token of each
        of its streams in `guess_s`, if it guesses as many of them as `least` and `most` allow; see
        `interval_s`. Infinite where none is allowed."""
        if math.isinf(least):
            return math.inf
        batch = self._batch(1)
        alone_s = interval_s(chance, guess_s, self.trip_s(0), least, most)
        guessing_s = self._groups * guess_s / self.at_once
        return max(alone_s, self.home_s * batch + guess_s, self._machine_s(1), guessing_s)

    def drafts(self, right: float, own_s: float) -> int:
        """How many drafts of a head that are `right` so often are read along with each token; none
        where a server's own guesses bring the next one sooner, in `own_s`."""
        drafts, along_s = self.along(right)
        return drafts if along_s < own_s else 0

    def _machine_s(self, rows: int) -> float:
        """What the fullest machine takes for so many rows of each stream in the cluster."""
        return self._groups * (self.software_s + self.busiest_s * self._batch(rows))

    @property
    def _groups(self) -> float:
        """Batches under way, one of each server's users."""
        return self.streams / self.here

    def _batch(self, rows: int) -> float:
        """What a batch of so many rows of each stream takes over what one row does."""
        return batch_s(1.0, self.here * rows, self.batch_share)


def along_times_s(cost: CostModel, routes: IntArray, whole_s: FloatArray, top_k: int) -> FloatArray:
    """From one token to the next of a stream by itself where as many drafts of a head are read
    along as pay, with tokens on `routes` [A, N] that take `whole_s` [A] to full depth and back,
    [A] seconds: see `Crowd.along`."""
    layer_s = _layer_times_s(cost, top_k) - _token_times_s(cost)
    path_s = layer_s[routes, np.arange(cost.layer_count)].sum(axis=1)
    drafts = np.arange(MOST_ALONG + 1)
    trips_s = whole_s[:, None] + np.outer(path_s * (1.0 - cost.batch_share), drafts)
    tokens = [_expected_tokens(cost.head_right * SURE, each) for each in drafts.tolist()]
    return (trips_s / tokens).min(axis=1)


def _expected_tokens(chance: float, drafts: int) -> float:
    """That a pass over a token and so many drafts behind it gives."""
    return sum(chance**right for right in range(drafts + 1))


def crowds(cost: CostModel, routes: IntArray, whole_s: FloatArray, top_k: int) -> tuple[Crowd, ...]:
    """One stream of each server's users by itself, on its row of `routes` [R, N], whose tokens
    take `whole_s` [R] to full depth and back."""
    servers, layers = np.arange(cost.server_count), np.arange(cost.layer_count)
    _, at_once = _machines(cost)
    work_s, layer_s = _work_s(cost, routes[servers], top_k), _layer_times_s(cost, top_k)
    computed = replace(cost, apart_s=None, dense_s=cost.dense_s - _token_times_s(cost))
    computed_s = _work_s(computed, routes[servers], top_k)
    fullest = work_s.argmax(axis=1)
    layer_s = (layer_s - _token_times_s(cost))[routes[servers], layers]
    return tuple(
        Crowd(
            whole_s=float(whole_s[server]),
            path_s=float(layer_s[server].sum()),
            busiest_s=float(computed_s[server, fullest[server]]),
            software_s=float((work_s - computed_s)[server, fullest[server]]),
            home_s=float(layer_s[server, routes[server] == server].sum()),
            at_once=float(at_once[server]),
            batch_share=cost.batch_share,
        )
        for server in servers.tolist()
    )


def row_times_s(cost: CostModel, routes: IntArray, top_k: int) -> FloatArray:
    """What one more row takes a batch on the way of each server's users: what it adds to the time
    of the layers, and of sending what is behind them to the next server, [M] seconds."""
    layers = np.arange(cost.layer_count)
    vector_s = np.maximum(cost.transfer_s - cost.token_transfer_s, 0.0)
    layer_s = _layer_times_s(cost, top_k) * (1.0 - cost.batch_share)
    ways = routes[: cost.server_count]
    sent_s = vector_s[ways[:, :-1], ways[:, 1:]].sum(axis=1)
    return sent_s + layer_s[ways, layers].sum(axis=1)


def stream_share(cost: CostModel, routes: IntArray, top_k: int, whole_s: FloatArray) -> FloatArray:
    """Share of what the fullest machine on each route can do that one stream of tokens at full
    depth takes of it, each of them `whole_s` [R] under way, [R]."""
    return _work_s(cost, routes, top_k).max(axis=1) / whole_s


def at_home(routes: IntArray, access: IntArray, hosts: BoolArray) -> BoolArray:
    """Whether all that tokens of the users of `access` [A] need on `routes` [A, N] is on their own
    server, so that its own pass is full depth itself; `hosts` [M, N, E]; [A]."""
    return (routes == access[:, None]).all(axis=1) & np.all(hosts[access], axis=(1, 2))


def first_layer(route: IntArray, server: int, held: BoolArray) -> int:
    """The layer that guesses of a server's users begin with: before it their tokens, on `route`
    [N], pass that server themselves, which holds all experts there, of `held` [N, E], so that there
    is nothing to do twice. What comes out of the last of those layers is gathered elsewhere."""
    leaves, lacks = route != server, ~held.all(axis=1)
    own = int(leaves.argmax()) if leaves.any() else route.size
    whole = int(lacks.argmax()) if lacks.any() else route.size
    return max(min(own - 1, whole), 0)


def first_layers(routes: IntArray, access: IntArray, hosts: BoolArray) -> IntArray:
    """`first_layer` of the users of `access` [A] on `routes` [A, N]; `hosts` [M, N, E]; [A]."""
    each = zip(routes, access.tolist(), strict=True)
    return np.array([first_layer(route, server, hosts[server]) for route, server in each])


def own_guess_times_s(
    cost: CostModel, routes: IntArray, access: IntArray, hosts: BoolArray, top_k: int
) -> FloatArray:
    """What it takes servers to guess a token of their users, from its `first_layers` on, [A]
    seconds; arguments as there."""
    left = 1 - first_layers(routes, access, hosts) / cost.layer_count
    return guess_times_s(cost, top_k)[access] * left


def paces_s(
    cost: CostModel, routes: IntArray, access: IntArray, guess_s: FloatArray, top_k: int
) -> FloatArray:
    """How soon tokens on `routes` [A, N] of the users of `access` [A] can follow one another if all
    guesses are right and links are no matter, [A] seconds: as the machine has time that does most
    for one of them, its guess, which takes `guess_s` [A], among that."""
    machine, at_once = _machines(cost)
    work_s = _work_s(cost, routes, top_k)
    work_s[np.arange(access.size), machine[access]] += guess_s / at_once[access]
    return work_s.max(axis=1)


def _work_s(cost: CostModel, routes: IntArray, top_k: int) -> FloatArray:
    """What a token at full depth takes of each machine's time, [R, machines] seconds: layers, and
    the messages that bring it from server to server."""
    layers, servers = np.arange(cost.layer_count), cost.server_count
    machine, at_once = _machines(cost)
    message_s = np.zeros(servers) if cost.apart_s is None else cost.apart_s
    layer_s = _layer_times_s(cost, top_k)
    able = np.ones(int(machine.max()) + 1)
    able[machine] = at_once
    comes = np.diff(routes, axis=1, prepend=routes[:, :1]) != 0
    taken_s = layer_s[routes, layers] + np.where(comes, message_s[routes], 0.0)
    work_s = [
        np.bincount(machine[route], weights=each_s, minlength=able.size)
        for route, each_s in zip(routes, taken_s, strict=True)
    ]
    return np.stack(work_s) / able


def _machines(cost: CostModel) -> tuple[IntArray, FloatArray]:
    """Of each server, the machine it runs on and how much that does at once, [M] both."""
    servers = cost.server_count
    machine = np.arange(servers) if cost.machine is None else cost.machine
    return machine, np.ones(servers) if cost.at_once is None else cost.at_once


def guess_times_s(cost: CostModel, top_k: int) -> FloatArray:
    """What it takes each server to guess a token: attention and router of all layers, and in each
    as long as the experts that a token activates take there on average, unless that was measured;
    [M] seconds."""
    if cost.guess_s is not None:
        return cost.guess_s
    return _layer_times_s(cost, top_k).sum(axis=1)


def draft_times_s(cost: CostModel, top_k: int, size: float) -> FloatArray:
    """What it takes each server to guess a token with a draft model that is `size` times the work
    of a guess of its own, [M] seconds."""
    return guess_times_s(cost, top_k) * size


def _token_times_s(cost: CostModel) -> FloatArray:
    """Of a layer's time, what software takes for the token beside layers, [M, N]."""
    taken_s = np.zeros((cost.server_count, cost.layer_count))
    if cost.token_s is not None:
        taken_s[:, 0] = cost.token_s
    return taken_s


def _layer_times_s(cost: CostModel, top_k: int) -> FloatArray:
    """A layer with the experts that a token activates, were all of them there, [M, N] seconds."""
    return cost.dense_s + top_k * cost.expert_s.mean(axis=2)
