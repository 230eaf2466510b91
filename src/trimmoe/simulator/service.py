"""The compiled event loop, part one: queues of servers and the batches they take.

A server works as `runtime.node.scheduler` has it: quick steps first, then tokens and prompts in
turns. Of prompts what has come furthest comes first, of tokens other servers' slots, then the
lowest layer, then guesses, of which again what has come furthest, unless something has been passed
over for too long; with all that is ready for the same layer.
"""

from __future__ import annotations

from trimmoe.cost import batching, warmth
from trimmoe.cost.batching import PATIENCE
from trimmoe.simulator.heap import inlined, njit, push
from trimmoe.simulator.world import (
    CHUNK,
    CHUNK_EXPERTS,
    DENSE,
    DONE,
    DUE,
    EXPERTS,
    FREE_ENTRIES,
    HOME,
    NONE,
    NOW,
    OWN,
    RIGHT,
    TICKET,
    TRAIL,
)

_batch_s = inlined(batching.batch_s)
_shared_s = inlined(batching.shared_s)
_chains_s = inlined(batching.chains_s)
_times_as_long = inlined(warmth.times_as_long)
_guess_layers = inlined(batching.guess_layers)
_prompt_turn_s = inlined(batching.prompt_turn_s)


@inlined
def enter(state, unit):
    """A fresh entry of a unit."""
    state.numbers[FREE_ENTRIES] -= 1
    entry = state.free_entries[state.numbers[FREE_ENTRIES]]
    state.entry_unit[entry], state.entry_next[entry] = unit, NONE
    return entry


@inlined
def free(state, entry):
    state.free_entries[state.numbers[FREE_ENTRIES]] = entry
    state.numbers[FREE_ENTRIES] += 1


@inlined
def ready(rows, state, server, kind, layer, unit, since_s):
    """Queue a unit at a server, a prompt's by itself, and what passes without a decision apart
    from tokens; it has waited since then."""
    if rows.prompt[unit]:
        kind += CHUNK
    elif rows.apart[unit] and kind == DENSE:
        kind = TRAIL
    line_up(state, server, kind, layer, unit, since_s)


@inlined
def line_up(state, server, kind, layer, what, since_s):
    """Queue a unit, or of a guess its request, at a server; its ticket."""
    entry, ticket = enter(state, what), state.numbers[TICKET]
    state.entry_ready_s[entry] = since_s
    state.entry_ticket[entry] = ticket
    state.entry_begun[entry] = state.begun[server]
    state.numbers[TICKET] += 1
    last = state.queue_last[server, kind, layer]
    if last == NONE:
        state.queue_first[server, kind, layer] = entry
        _put_on(state, server, kind, layer)
    else:
        state.entry_next[last] = entry
    state.queue_last[server, kind, layer] = entry
    wake(state, server)
    return ticket


@inlined
def quick(state, server, unit):
    """Have a unit go on as soon as the server is free."""
    entry = enter(state, unit)
    state.entry_ready_s[entry] = state.clock[NOW]
    last = state.quick_last[server]
    if last == NONE:
        state.quick_first[server] = entry
    else:
        state.entry_next[last] = entry
    state.quick_last[server] = entry
    wake(state, server)


@inlined
def wake(state, server):
    """Let an idle server start at the end of this instant."""
    if state.batch_first[server] == NONE and not state.starting[server]:
        state.starting[server] = True
        state.due[state.numbers[DUE]] = server
        state.numbers[DUE] += 1


@inlined
def _put_on(state, server, kind, layer):
    """A queue that was empty is one to choose from."""
    side, queue = kind // CHUNK, kind * state.queue_first.shape[2] + layer
    state.line_next[server, queue] = state.line_first[server, side]
    state.line_first[server, side] = queue


@inlined
def _rank(state, server, queue):
    """What comes first is least: class, layer, ticket."""
    layers = state.queue_first.shape[2]
    kind, layer = queue // layers, queue % layers
    first = state.queue_first[server, kind, layer]
    ticket = state.entry_ticket[first]
    if state.begun[server] - state.entry_begun[first] >= PATIENCE:
        return 0, 0, ticket
    if kind >= CHUNK:
        return 1, -layer, ticket
    if kind == HOME:
        return 3, -layer, ticket
    return 1 if kind == EXPERTS else 2, layer, ticket


@inlined
def _taken_off(state, server, side, queue):
    """A queue that is empty is none to choose from."""
    before, at = NONE, state.line_first[server, side]
    while at != queue:
        before, at = at, state.line_next[server, at]
    if before == NONE:
        state.line_first[server, side] = state.line_next[server, queue]
    else:
        state.line_next[server, before] = state.line_next[server, queue]


@inlined
def _least(state, server, queue):
    """Of a line of queues the one that comes first, and its rank; NONE of an empty line."""
    least = 9, 0, 0
    found = queue
    while queue != NONE:
        rank = _rank(state, server, queue)
        if rank < least:
            found, least = queue, rank
        queue = state.line_next[server, queue]
    return found, least


@njit
def take(world, rows, asked, state, server):
    """An idle server takes what waits for the layer whose turn it is, if anything does, as one
    batch."""
    line = state.line_first[server]
    queue, least = _least(state, server, line[0])
    # Prompts make way for guesses only once these are passed over no more.
    turns = queue != NONE and (least[0] == 0 or queue // state.queue_first.shape[2] != HOME)
    side = int(line[1] != NONE and (state.prompts_turn[server] or not turns))
    if side == 1:
        queue, least = _least(state, server, line[1])
    if queue == NONE:
        return
    if side == 1 or turns:
        state.prompts_turn[server] = side == 0
    state.begun[server] += 1
    layers = state.queue_first.shape[2]
    kind, layer = queue // layers, queue % layers
    now, first = state.clock[NOW], state.queue_first[server, kind, layer]
    most = 1 if kind == CHUNK else world.max_batch
    entry, last, taken = first, first, 0
    while entry != NONE and taken < most:
        state.waited_s[server, kind] += now - state.entry_ready_s[entry]
        taken += 1
        last, entry = entry, state.entry_next[entry]
    state.entry_next[last] = NONE
    state.queue_first[server, kind, layer] = entry
    if entry == NONE:
        state.queue_last[server, kind, layer] = NONE
        _taken_off(state, server, side, queue)
    state.served[server, kind, 0] += 1
    state.taken_s[server] = now
    serve(world, rows, asked, state, server, first, kind, layer)
    # A batch of guesses passes several layers.
    state.served[server, kind, 1] += taken * (1 + state.batch_layer[server] - layer)


@njit
def serve(world, rows, asked, state, server, first, kind, layer):
    """Begin a batch."""
    state.batch_first[server] = first
    state.batch_kind[server], state.batch_layer[server] = kind, layer
    service_s = _service_s(world, rows, asked, state, server) * crowd(world, state, server)
    prompt = is_prompts(rows, state, kind, first)
    if not prompt or state.taken_s[server] == state.clock[NOW]:
        service_s += max(state.handled_s[server] - state.clock[NOW], 0.0)
    state.busy_s[server] += service_s
    state.serving_until_s[server] = state.clock[NOW] + service_s
    if not prompt:
        state.listens_s[server] = state.serving_until_s[server]
    push(state, state.clock[NOW] + service_s, 0, DONE, server)


@inlined
def warmed(world, state, server):
    """How many times as long as between tokens of one stream software takes now."""
    last_s = max(state.serving_until_s[server], state.handled_s[server])
    rested_s = max(state.clock[NOW] - last_s, 0.0)
    return _times_as_long(world.warm[server], rested_s) / world.usual[server]


@njit
def crowd(world, state, server):
    """How many times as long a server's work takes beside what is served on the same machine."""
    working = 1
    for other in range(world.machine.size):
        if other != server and world.machine[other] == world.machine[server]:
            working += state.serving_until_s[other] > state.clock[NOW]
    return max(1.0, working / world.at_once[server])


@inlined
def goes_on_in_slice(world, state, server):
    """Whether a chunk in service may enter its next layer before others have a turn."""
    until_s = state.taken_s[server] + _prompt_turn_s(state.token_turn_s[server], world.visits)
    return state.clock[NOW] < until_s


@inlined
def is_prompts(rows, state, kind, first):
    """Whether a batch, of such a kind and with this first entry, is a prompt's."""
    own = kind == OWN and rows.prompt[state.entry_unit[first]]
    return own or kind in (CHUNK, CHUNK_EXPERTS)


@inlined
def is_dense(kind):
    """Whether it is attention and router, of tokens or of a prompt."""
    return kind in (DENSE, TRAIL, CHUNK)


@inlined
def _guesses_s(world, asked, state, server):
    """The same of guesses, which take as long in each layer, and pass several; the batch's is the
    last. Of what is read for each only the last row asks what follows."""
    entry, layer, tokens, guesses = state.batch_first[server], state.batch_layer[server], 0, 0
    while entry != NONE:
        tokens += asked.reads[state.entry_unit[entry]]
        guesses, entry = guesses + 1, state.entry_next[entry]
    one_s, ends_s = world.pass_s[server], world.pass_ends_s[server]
    state.batch_several[server] = guesses > 1
    if guesses > 1:
        one_s, ends_s = world.several_s[server], world.several_ends_s[server]
    layers = world.dense_s.shape[1]
    read_s = _batch_s(one_s - ends_s, tokens, world.token_batch_times)
    layer_s = (read_s + _batch_s(ends_s, guesses, world.token_batch_times)) / layers
    passed = _guess_layers(layer_s, layers - layer)
    state.batch_layer[server] = layer + passed - 1
    return passed * layer_s


@njit
def _service_s(world, rows, asked, state, server):
    """Time of a batch: what one token takes, of which weights are read once per batch (dense) or
    per expert."""
    kind, layer = state.batch_kind[server], state.batch_layer[server]
    if kind == HOME:
        return _guesses_s(world, asked, state, server)
    entry, tokens, begun, counts = state.batch_first[server], 0, 0, state.per_expert
    ends, ending = kind == DENSE and layer + 1 == world.dense_s.shape[1], 0
    dense = is_dense(kind)
    if not dense:
        counts[:] = 0
    while entry != NONE:
        row, before = state.entry_unit[entry], tokens
        begins = layer == 0 and asked.access[rows.request[row]] == server
        while row != NONE:
            tokens += 1
            ending += ends and rows.guess[row] != RIGHT and not rows.trailing[row]
            if not dense:
                for slot in range(rows.expert.shape[2]):
                    expert = int(rows.expert[row, layer, slot])
                    if expert >= 0 and rows.server[row, layer, slot] == server:
                        counts[expert] += 1
            row = rows.sibling[row]
        begun += begins * (tokens - before)
        entry = state.entry_next[entry]
    if dense:
        takes_s = _batch_s(world.dense_s[server, layer], tokens, world.batch_times)
        if kind == CHUNK:
            # It comes by itself, and is no more than one token to software, wherever its user is.
            begun = int(layer == 0)
        if begun > 0:
            token_s = _shared_s(world.token_s[server], begun, world.token_share)
            takes_s += token_s * warmed(world, state, server)
        if ending > 0:
            takes_s += _chains_s(world.naming_s[server], world.named, ending)
        return takes_s
    total = 0.0
    for expert in range(counts.size):
        if counts[expert] > 0:
            each_s = world.expert_s[server, layer, expert]
            total += _batch_s(each_s, counts[expert], world.batch_times)
    return total
