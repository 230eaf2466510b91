"""The inner loops of costs, compiled: one implementation for every caller.

Nothing here allocates per token or knows a class; `cost.model` wraps these with named arrays,
`cost.enumerating` lists actions with them and `cost.deciding` chooses among those. Shapes: n
tokens, k slots, M servers, N layers, E experts, G bins of a curve.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from trimmoe.core.compiled_from import forget_outdated
from trimmoe.core.specs import FloatArray

if TYPE_CHECKING:

    def njit(function: Any) -> Any: ...

    def bare(function: Any) -> Any: ...

else:
    import numba

    _FOLDER = Path(__file__).parent
    forget_outdated(_FOLDER, _FOLDER)

    njit = numba.njit(cache=True, nogil=True)
    # For functions that make no array, which is checked when they are compiled: counting the
    # references to arrays in tuples, at every access, takes several times as long as the work.
    bare = numba.njit(cache=True, nogil=True, _nrt=False)


def plain(array: ArrayLike, dtype: DTypeLike | None = None) -> np.ndarray:
    """An array as compiled loops take it: contiguous and writable, copied if it was not.

    Everything is compiled once for every kind of array that it is called with, which takes longer
    than most of what it computes.
    """
    made = np.ascontiguousarray(array, dtype=dtype)
    return made if made.flags.writeable else made.copy()


class Links(NamedTuple):
    """What moving and computing costs; see `cost.model.CostModel`."""

    transfer_s: FloatArray
    """[M, M]."""
    waiting_s: FloatArray
    """Of work on a server, column, that comes from another, row, or its own, [M, M]."""
    expert_s: FloatArray
    """Of all that may run in a slot, as `core.stand_ins` numbers it, [M, N, F * E]."""
    apart_s: FloatArray
    """What it takes a server to send another message, [M]; see `further_s`."""


@bare
def wait_s(links, source, server, destination):
    """Expected wait of one layer's slots on a server. Those that run where the layer gathers do so
    as the token enters the next one, for which it waits anyway."""
    return links.waiting_s[destination if server == destination else source, server]


@bare
def slots_delay_s(links, layer, source, destination, experts, servers):
    """Delay of one token's slots [k] from source to destination; see `cost.model`."""
    slowest = links.transfer_s[source, destination]
    for j in range(experts.shape[0]):
        if experts[j] < 0:
            continue
        server = servers[j]
        work = 0.0
        for i in range(experts.shape[0]):
            if experts[i] >= 0 and servers[i] == server:
                work += links.expert_s[server, layer, experts[i]]
        path = links.transfer_s[source, server] + wait_s(links, source, server, destination)
        slowest = max(slowest, path + links.transfer_s[server, destination] + work)
    return slowest + further_s(links, source, destination, experts, servers)


@bare
def further_s(links, source, destination, experts, servers):
    """What the source's messages for one layer of a token take it beyond the first one, whose time
    is in the transfers: a dispatch to every other server of a slot, and the residual, unless
    that is one of them (`add_sent`)."""
    sent, at_source, at_destination = 0, False, False
    for j in range(experts.shape[0]):
        if experts[j] < 0 or _seen_before(experts, servers, j):
            continue
        sent += servers[j] != source
        at_source = at_source or servers[j] == source
        at_destination = at_destination or servers[j] == destination
    sent += _residual_goes(source, destination, at_source, at_destination)
    return links.apart_s[source] * max(sent - 1, 0)


@njit
def nearest_hosts(links, layer, held, source, destination):
    """The host of least single-slot delay (30) of every expert, the first among equals, -1 where
    nobody holds it, and that delay, then infinite; [E] each. `held` [M, E] of the layer.

    Where the source holds the whole layer, or else the destination, one message is enough: another
    host has to be quicker by what a further one takes.
    """
    servers, experts = held.shape
    best, least = np.full(experts, -1), np.full(experts, np.inf)
    whole, score = -1, np.full(experts, np.inf)
    if held[destination].all():
        whole = destination
    if held[source].all():
        whole = source
    for m in range(servers):
        path = links.transfer_s[source, m] + wait_s(links, source, m, destination)
        path += links.transfer_s[m, destination]
        apart_s = links.apart_s[source] if whole >= 0 and m != whole else 0.0
        for expert in range(experts):
            if held[m, expert]:
                alone = path + links.expert_s[m, layer, expert]
                if alone + apart_s < score[expert]:
                    best[expert], least[expert] = m, alone
                    score[expert] = alone + apart_s
    return best, least


@njit
def all_nearest_hosts(links, hosts):
    """`nearest_hosts` by layer, source, destination and expert, [N, M, M, E] each; server 0 stands
    in where nobody holds the expert. `hosts` [M, N, E]."""
    servers, layers, experts = hosts.shape
    server = np.zeros((layers, servers, servers, experts), dtype=np.int64)
    delay_s = np.empty((layers, servers, servers, experts))
    for layer in range(layers):
        for source in range(servers):
            for destination in range(servers):
                best, least = nearest_hosts(links, layer, hosts[:, layer], source, destination)
                server[layer, source, destination] = np.maximum(best, 0)
                delay_s[layer, source, destination] = least
    return server, delay_s


@njit
def all_slots_delay_s(links, layer, source, destination, experts, servers):
    """`slots_delay_s` of n tokens, [n]."""
    delay = np.empty(source.shape[0])
    for i in range(source.shape[0]):
        delay[i] = slots_delay_s(links, layer, source[i], destination[i], experts[i], servers[i])
    return delay


@bare
def add_messages(messages, rows, source, destination, experts, servers, migrates):
    """Add what n tokens send in a layer to their `rows` of `messages` [.., M, M]; see
    `cost.model.add_layer_messages`."""
    for i in range(rows.shape[0]):
        sent = messages[rows[i]]
        add_sent(sent, source[i], destination[i], experts[i], servers[i], migrates)


@bare
def add_sent(sent, here, there, experts, servers, migrates):
    """The same of one token, from server `here` to `there`: `sent` [M, M], slots [k]."""
    at_source, at_destination = False, False
    for j in range(experts.shape[0]):
        if experts[j] < 0 or _seen_before(experts, servers, j):
            continue
        server = servers[j]
        at_source = at_source or server == here
        at_destination = at_destination or server == there
        if server != here:
            sent[here, server] += 1
            # What ran at the source travels with the residual, not as a return of its own.
            if server != there:
                sent[server, there] += 1
    if _residual_goes(here, there, at_source and not migrates, at_destination):
        sent[here, there] += 1


@bare
def _residual_goes(here, there, at_source, at_destination):
    """Whether a residual is a message of its own, by whether slots ran at either end: else it does
    not leave, or is what the destination's slots read."""
    return here != there and (at_source or not at_destination)


@bare
def _seen_before(experts, servers, j):
    """Whether an earlier slot runs on the server of slot `j`."""
    seen = False
    for earlier in range(j):
        seen = seen or (experts[earlier] >= 0 and servers[earlier] == servers[j])
    return seen


@bare
def curve_at(edges, upper, mass):
    """The step of a loss curve [G] that `mass` falls into, rounding the mass up."""
    last = edges.shape[0] - 1
    return upper[min(np.searchsorted(edges, mass), last)]
