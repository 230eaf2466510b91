"""The compiled event loop, part two: messages, which leave in groups and queue on links."""

from __future__ import annotations

from trimmoe.simulator.heap import inlined, njit, push
from trimmoe.simulator.service import crowd, enter, warmed
from trimmoe.simulator.world import (
    FIRST,
    FREE_MESSAGES,
    IDS,
    LAYER,
    MESSAGE,
    NONE,
    NOW,
    OWNER,
    ROLE,
    SOURCE,
    TARGET,
    VECTORS,
)


@inlined
def join(state, group, target, unit, taking, counted):
    """Add a unit to the message of this moment to `target`."""
    entry = enter(state, unit)
    state.entry_next[entry] = state.group_first[group, target]
    state.group_first[group, target] = entry
    state.group_vectors[0, group, target] += taking
    state.group_vectors[1, group, target] += counted


@inlined
def send(world, state, role, source, target, layer, first, taking, counted, ids, owner):
    """Put a message on a link."""
    now = state.clock[NOW]
    send_at(world, state, now, role, source, target, layer, first, taking, counted, ids, owner)


@njit
def send_at(world, state, start_s, role, source, target, layer, first, taking, counted, ids, owner):
    """Put a message on a link at a time: first in, first out, one after another, then the way."""
    state.numbers[FREE_MESSAGES] -= 1
    at = state.free_messages[state.numbers[FREE_MESSAGES]]
    message = state.message[at]
    message[ROLE], message[SOURCE], message[TARGET] = role, source, target
    message[LAYER], message[FIRST], message[OWNER] = layer, first, owner
    message[VECTORS], message[IDS] = counted, ids
    state.sent[0, source, target] += counted
    state.sent[1, source, target] += ids
    takes_s = taking * world.vector_s[source, target] + ids * world.id_s[source, target]
    if world.link_queues:
        start_s = max(start_s, state.link_free_s[source, target])
        state.link_free_s[source, target] = start_s + takes_s
    state.link_busy_s[source, target] += takes_s
    # Its receiver's software comes to it in its turn, see `handle`.
    way_s = world.delay_s[source, target] - world.hop_s[target]
    push(state, start_s + takes_s + way_s, 0, MESSAGE, at)


@inlined
def units_of(state, message):
    """How many units a message is of."""
    entry, count = message[FIRST], 0
    while entry != NONE:
        count += 1
        entry = state.entry_next[entry]
    return max(count, 1)


@inlined
def _occupied(world, state, server, one_s, units):
    """A server's software has so many tokens to do with, for one of which it takes `one_s`, before
    it begins another batch. That, and the batch's beginning, grows with further tokens as batches
    do with their rows."""
    free_s = max(state.clock[NOW], state.listens_s[server])
    times = units * (1.0 - world.token_share)
    if state.handled_s[server] <= free_s:
        times += warmed(world, state, server) - (1.0 - world.token_share)
    takes_s = one_s * times * crowd(world, state, server)
    state.handled_s[server] = max(free_s, state.handled_s[server]) + takes_s


@inlined
def handle(world, state, server, units):
    """A message of so many units has come."""
    _occupied(world, state, server, world.hop_s[server], units)


@inlined
def prepare(world, state, server, units):
    """So many tokens of a server's users begin that leave it at once; when they do."""
    _occupied(world, state, server, world.token_s[server], units)
    return state.handled_s[server]
