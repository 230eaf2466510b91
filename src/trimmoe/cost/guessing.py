"""What guesses take, and how fast the tokens of a stream follow one another by them.

Shapes: M servers, N layers, E experts, R routes, the first M by access server, A access servers.
"""

from __future__ import annotations

import math

import numpy as np

from trimmoe.core.specs import BATCHES, BoolArray, FloatArray, IntArray
from trimmoe.cost.batching import batch_s, row_share
from trimmoe.cost.model import CostModel

GUESSES, GUESS_CHANCE = 16, 0.15
"""Tokens of a stream that are guessed ahead at most, and the chance that all of them have to have
of being right."""


ROWS = 8
"""Rows of a batch up to which drafts are read along with what is known in one process: what more
would take is not made up for by what of them is right."""


def rows_along(streams: int) -> int:
    """How many drafts are read along with each token of so many streams in one process."""
    return max(ROWS // max(streams, 1) - 1, 0)


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


def row_times_s(cost: CostModel, routes: IntArray, top_k: int) -> FloatArray:
    """What one more row takes a batch on the way of each server's users: what it adds to the time
    of the layers, and of sending what is behind them to the next server, [M] seconds."""
    layers = np.arange(cost.layer_count)
    vector_s = np.maximum(cost.transfer_s - cost.token_transfer_s, 0.0)
    layer_s = layer_times_s(cost, top_k) * row_share(cost.batch_times)
    ways = routes[: cost.server_count]
    sent_s = vector_s[ways[:, :-1], ways[:, 1:]].sum(axis=1)
    return sent_s + layer_s[ways, layers].sum(axis=1)


def stream_share(cost: CostModel, routes: IntArray, top_k: int, whole_s: FloatArray) -> FloatArray:
    """Share of what the fullest machine on each route can do that one stream of tokens at full
    depth takes of it, each of them `whole_s` [R] under way, [R]. Users of routes that were added
    are taken for those of the server that these begin on."""
    access = np.concatenate([np.arange(cost.server_count), routes[cost.server_count :, 0]])
    return machine_times_s(cost, routes, access, top_k).max(axis=1) / whole_s


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
    seconds; arguments as there. What is no layer's is done wherever it begins."""
    left = 1 - first_layers(routes, access, hosts) / cost.layer_count
    whole_s = guess_times_s(cost, top_k)[access]
    ends_s = np.zeros(access.size) if cost.guess_ends_s is None else cost.guess_ends_s[access]
    return ends_s + (whole_s - ends_s) * left


def paces_s(
    cost: CostModel, routes: IntArray, access: IntArray, guess_s: FloatArray, top_k: int
) -> FloatArray:
    """How soon tokens on `routes` [A, N] of the users of `access` [A] can follow one another if all
    guesses are right and links are no matter, [A] seconds: as the machine has time that does most
    for one of them, its guess, which takes `guess_s` [A], among that."""
    machine, at_once = machines_of(cost)
    work_s = machine_times_s(cost, routes, access, top_k)
    work_s[np.arange(access.size), machine[access]] += guess_s / at_once[access]
    return work_s.max(axis=1)


def machine_times_s(cost: CostModel, routes: IntArray, access: IntArray, top_k: int) -> FloatArray:
    """What a token at full depth takes of each machine's time, on `routes` [R, N] of the users of
    `access` [R], [R, machines] seconds: layers, the messages that bring it from server to server,
    and its software on its user's."""
    layers, servers = np.arange(cost.layer_count), cost.server_count
    machine, at_once = machines_of(cost)
    message_s = np.zeros(servers) if cost.apart_s is None else cost.apart_s
    layer_s = layer_times_s(cost, top_k)
    able = np.ones(int(machine.max()) + 1)
    able[machine] = at_once
    comes = np.diff(routes, axis=1, prepend=routes[:, :1]) != 0
    taken_s = layer_s[routes, layers] + np.where(comes, message_s[routes], 0.0)
    work_s = [
        np.bincount(machine[route], weights=each_s, minlength=able.size)
        for route, each_s in zip(routes, taken_s, strict=True)
    ]
    found = np.stack(work_s)
    if cost.token_s is not None:
        found[np.arange(access.size), machine[access]] += cost.token_s[access]
    return found / able


def visits(routes: IntArray) -> float:
    """How many servers a token comes to, one after another, on average over `routes` [R, N]."""
    return 1.0 + float((np.diff(routes, axis=1) != 0).sum(axis=1).mean())


def machines_of(cost: CostModel) -> tuple[IntArray, FloatArray]:
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
    return layer_times_s(cost, top_k).sum(axis=1)


def draft_times_s(cost: CostModel, top_k: int, size: float) -> FloatArray:
    """What it takes each server to guess a token with a draft model that is `size` times the work
    of a guess of its own, [M] seconds."""
    return guess_times_s(cost, top_k) * size


def token_batch_times(cost: CostModel, top_k: int) -> tuple[float, ...]:
    """How many times as long as for one token whole layers take for as many as `BATCHES` says.

    Each activates experts of its own, so that a batch reads more of them than a token does; as if
    all were as likely, and of one token independent of another's.
    """
    computed_s = float(cost.dense_s.sum())
    count, expert_s = cost.expert_s.shape[2], top_k * float(cost.expert_s.mean(axis=2).sum())
    if computed_s + expert_s <= 0.0:
        return cost.batch_times
    found = list[float]()
    for rows, times in zip(BATCHES, cost.batch_times, strict=True):
        used = count * (1.0 - (1.0 - top_k / count) ** rows) / top_k
        experts_s = expert_s * used * batch_s(1.0, rows / used, cost.batch_times)
        found.append((computed_s * times + experts_s) / (computed_s + expert_s))
    return tuple(found)


def layer_times_s(cost: CostModel, top_k: int) -> FloatArray:
    """A layer with the experts that a token activates, were all of them there, [M, N] seconds."""
    return cost.dense_s + top_k * cost.expert_s.mean(axis=2)
