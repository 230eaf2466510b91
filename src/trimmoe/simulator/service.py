"""The compiled event loop, part one: queues of servers and the batches they take."""

from __future__ import annotations

from trimmoe.simulator.heap import inlined, njit, push
from trimmoe.simulator.world import (
    DENSE,
    DONE,
    DUE,
    EVENTS,
    EXPERTS,
    FREE_ENTRIES,
    NONE,
    NOW,
    TICKET,
)


@inlined
def ready(state, server, kind, layer, unit):
    """Queue a unit at a server."""
    state.numbers[FREE_ENTRIES] -= 1
    entry = state.free_entries[state.numbers[FREE_ENTRIES]]
    state.entry_unit[entry], state.entry_next[entry] = unit, NONE
    state.entry_ready_s[entry] = state.clock[NOW]
    state.entry_ticket[entry] = state.numbers[TICKET]
    state.numbers[TICKET] += 1
    last = state.queue_last[server, kind, layer]
    if last == NONE:
        state.queue_first[server, kind, layer] = entry
    else:
        state.entry_next[last] = entry
    state.queue_last[server, kind, layer] = entry
    wake(state, server)


@inlined
def wake(state, server):
    """Let an idle server start at the end of this instant."""
    if state.batch_first[server] == NONE and not state.starting[server]:
        state.starting[server] = True
        state.due[state.numbers[DUE]] = server
        state.numbers[DUE] += 1


@inlined
def free(state, entry):
    state.free_entries[state.numbers[FREE_ENTRIES]] = entry
    state.numbers[FREE_ENTRIES] += 1


@njit
def start_all(world, rows, asked, state):
    """Everything of this instant has happened: idle servers take what there is."""
    for at in range(state.numbers[DUE]):
        state.numbers[EVENTS] += 1
        _started(world, rows, asked, state, state.due[at])
    state.numbers[DUE] = 0


@njit
def _started(world, rows, asked, state, server):
    """Take what waits for the layer of the unit that has waited longest, as one batch."""
    state.starting[server] = False
    oldest, chosen, at = -1, DENSE, 0
    for kind in range(2):
        for layer in range(state.queue_first.shape[2]):
            entry = state.queue_first[server, kind, layer]
            if entry != NONE and (oldest < 0 or state.entry_ticket[entry] < oldest):
                oldest, chosen, at = state.entry_ticket[entry], kind, layer
    if oldest < 0:
        return
    now, first = state.clock[NOW], state.queue_first[server, chosen, at]
    entry, last, taken = first, first, 0
    while entry != NONE and taken < world.max_batch:
        state.waited_s[server, chosen] += now - state.entry_ready_s[entry]
        taken += 1
        last, entry = entry, state.entry_next[entry]
    state.entry_next[last] = NONE
    state.queue_first[server, chosen, at] = entry
    if entry == NONE:
        state.queue_last[server, chosen, at] = NONE
    state.batch_first[server] = first
    state.batch_kind[server], state.batch_layer[server] = chosen, at
    service_s = _service_s(world, rows, asked, state, server)
    state.served[server, chosen, 0] += 1
    state.served[server, chosen, 1] += taken
    state.busy_s[server] += service_s
    state.serving_until_s[server] = now + service_s
    push(state, now + service_s, 0, DONE, server)


@njit
def _service_s(world, rows, asked, state, server):
    """Time of a batch: what one token takes, of which weights are read once per batch (dense) or
    per expert."""
    kind, layer = state.batch_kind[server], state.batch_layer[server]
    entry, tokens, counts = state.batch_first[server], 0, state.per_expert
    if kind == EXPERTS:
        counts[:] = 0
    while entry != NONE:
        row = asked.row[state.entry_unit[entry]]
        while row != NONE:
            tokens += 1
            if kind == EXPERTS:
                for slot in range(rows.expert.shape[2]):
                    expert = int(rows.expert[row, layer, slot])
                    if expert >= 0 and rows.server[row, layer, slot] == server:
                        counts[expert] += 1
            row = rows.sibling[row]
        entry = state.entry_next[entry]
    share = world.batch_share
    if kind == DENSE:
        return world.dense_s[server, layer] * (share + (1.0 - share) * tokens)
    total = 0.0
    for expert in range(counts.size):
        if counts[expert] > 0:
            each = share + (1.0 - share) * counts[expert]
            total += world.expert_s[server, layer, expert] * each
    return total
