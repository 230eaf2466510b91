"""The compiled event loop, part five: what follows what.

Nothing is decided here. Servers start when all events of an instant have happened, so that what
is ready at one server for one layer at one instant is one batch. As in `runtime.node`, whatever
enters, ends or goes on to another layer does so between two batches of its server; dispatches
leave after the dense part of a batch, whose slots on the same server follow at once.
"""

from __future__ import annotations

from trimmoe.simulator.guessing import guessing, led, through
from trimmoe.simulator.heap import inlined, njit, pop, push
from trimmoe.simulator.layers import ends_here, fan_out, gather, part, size
from trimmoe.simulator.links import handle, prepare, send, send_at, units_of
from trimmoe.simulator.references import refer
from trimmoe.simulator.service import (
    enter,
    free,
    goes_on_in_slice,
    is_dense,
    is_prompts,
    quick,
    ready,
    serve,
    take,
    wake,
)
from trimmoe.simulator.turns import (
    drafted,
    follow,
    follow_trail,
    go_on_in_turn,
    may_pass,
    next_in_turn,
    note,
    pass_on,
    trail,
    trailed,
    wanted,
    written,
)
from trimmoe.simulator.world import (
    AREA,
    CHUNK,
    DENSE,
    DISPATCH,
    DONE,
    DRAFT_BACK,
    DUE,
    EVENTS,
    EXPERTS,
    FINISHED,
    FIRST,
    FREE_ENTRIES,
    FREE_MESSAGES,
    HANDLED,
    HEAP_SIZE,
    HOME,
    IDS,
    IN_FLIGHT,
    LAYER,
    LOGGED,
    MESSAGE,
    NEXT_REQUEST,
    NONE,
    NOW,
    OWN,
    OWNER,
    PART,
    REQUEST,
    ROLE,
    RUNNING,
    SOURCE,
    STATE,
    TARGET,
    TOKEN,
    TOKEN_BACK,
    TOKEN_IN,
    TRAILING,
    VECTORS,
)

# Why the loop stopped.
TIME_UP, STARVED, NEEDS_ROOM, NEEDS_REQUESTS, LOG_FULL = range(5)


@njit
def run_until(world, rows, asked, state, end_s):
    """Handle all events before `end_s`, unless something is missing; says why it stopped."""
    world, rows, asked, state = refer(world), refer(rows), refer(asked), refer(state)
    servers = world.delay_s.shape[0]
    numbers = state.numbers
    while True:
        over = numbers[HEAP_SIZE] == 0
        starts = numbers[DUE] > 0 and (over or state.heap_time[0] > state.clock[NOW])
        if not starts and (over or state.heap_time[0] >= end_s):
            break
        code, now = state.heap_what[0], state.heap_time[0]
        kind, what = code & 7, code >> 3
        if not starts:
            if kind == TOKEN and asked.first[what] == NONE:
                return STARVED
            if kind == REQUEST and what >= asked.access.size:
                return NEEDS_REQUESTS
        units = numbers[IN_FLIGHT] + numbers[TRAILING]
        room = (units + 2) * (servers + 4) + 4 * servers
        if min(numbers[FREE_ENTRIES], numbers[FREE_MESSAGES]) < room:
            return NEEDS_ROOM
        if numbers[HEAP_SIZE] + room > state.heap_time.size:
            return NEEDS_ROOM
        if numbers[LOGGED] + units + 2 > state.log.shape[0]:
            return LOG_FULL
        if starts:
            _start_all(world, rows, asked, state)
            continue
        pop(state)
        state.clock[AREA] += numbers[IN_FLIGHT] * (now - state.clock[NOW])
        state.clock[NOW] = now
        numbers[EVENTS] += 1
        if kind == DONE:
            _done(world, rows, asked, state, what)
        elif kind == MESSAGE:
            _delivered(world, rows, asked, state, what)
        elif kind == TOKEN:
            _begun(world, rows, asked, state, what)
        else:
            _requested(world, asked, state, what)
    state.clock[AREA] += numbers[IN_FLIGHT] * (end_s - state.clock[NOW])
    state.clock[NOW] = end_s
    return TIME_UP


@njit
def _start_all(world, rows, asked, state):
    """Everything of this instant has happened: idle servers see what there is to do."""
    numbers, due = state.numbers, state.due
    count = numbers[DUE]
    for at in range(count):
        numbers[EVENTS] += 1
        server = due[at]
        state.starting[server] = False
        if state.batch_first[server] != NONE:
            # Slots here followed at once; everything else comes after them.
            continue
        if state.quick_first[server] != NONE:
            _go_on(world, rows, asked, state, server)
            # What that led to may be part of the next batch.
            wake(state, server)
        else:
            take(world, rows, asked, state, server)
    numbers[DUE] -= count
    for at in range(numbers[DUE]):
        due[at] = due[at + count]


@njit
def _go_on(world, rows, asked, state, server):
    """Units that only waited for the server to be free enter, go on or end."""
    state.begun[server] += 1
    entry = state.quick_first[server]
    state.quick_first[server] = state.quick_last[server] = NONE
    while entry != NONE:
        unit, following = state.entry_unit[entry], state.entry_next[entry]
        free(state, entry)
        layer, since_s = rows.layer[unit], state.entry_ready_s[entry]
        if layer == rows.draft_at[unit]:
            drafted(world, rows, asked, state, server, unit)
        if layer < rows.layers[unit] and wanted(world, rows, asked, state, server, unit):
            if layer == 0:
                _set_out(world, rows, asked, state, unit, 1, since_s)
            else:
                go_on_in_turn(rows, state, server, unit, since_s)
        elif rows.trailing[unit]:
            trailed(world, rows, asked, state, unit)
        else:
            _completed(world, rows, asked, state, server, unit)
        entry = following


@njit
def _requested(world, asked, state, request):
    """A request enters; in the open loop it brings the next one's arrival."""
    state.numbers[RUNNING] += 1
    asked.running[request] = True
    asked.arrival_s[request] = state.clock[NOW]
    push(state, state.clock[NOW], 1, TOKEN, request)
    if not world.closed and request + 1 < asked.access.size:
        push(state, asked.arrival_s[request + 1], 1, REQUEST, request + 1)


@njit
def _begun(world, rows, asked, state, request):
    """The next token of a request, or its whole prompt: a token waits for its access server, a
    prompt for nobody. Its chunks are all there at once, each waits for the one before."""
    first, now = asked.first[request], state.clock[NOW]
    if not rows.prompt[first]:
        _unit_begun(rows, asked, state, request, first)
        if world.guesses > 0:
            rows.in_turn[first] = True
            led(world, rows, asked, state, first, request, 1)
        else:
            asked.row[request] = first
            follow_trail(rows, asked, first)
        quick(state, asked.access[request], first)
        return
    unit, last, tokens = first, first, 0
    while unit != NONE and rows.prompt[unit]:
        _unit_begun(rows, asked, state, request, unit)
        if unit != first:
            follow(rows, unit, last)
            rows.parked[unit] = True
        tokens += size(rows, unit)
        last, unit = unit, rows.after[unit]
    if world.guesses > 0:
        led(world, rows, asked, state, last, request, tokens)
    _set_out(world, rows, asked, state, first, tokens, now)


@inlined
def _unit_begun(rows, asked, state, request, unit):
    asked.first[request] = rows.after[unit]
    asked.ahead[request] -= 1
    rows.request[unit], rows.layer[unit] = request, 0
    rows.began_s[unit] = state.clock[NOW]
    rows.written[unit], rows.due[unit] = 0, 0
    rows.leader[unit], rows.follower[unit] = NONE, NONE
    rows.in_turn[unit] = rows.prompt[unit]
    state.numbers[IN_FLIGHT] += 1


@inlined
def _set_out(world, rows, asked, state, unit, tokens, since_s):
    """Tokens leave their access server for the first layer's."""
    source, target = asked.access[rows.request[unit]], int(rows.place[unit, 0])
    if source == target:
        go_on_in_turn(rows, state, target, unit, since_s)
    else:
        now = state.clock[NOW]
        when_s = now if rows.prompt[unit] else prepare(world, state, source, size(rows, unit))
        send_at(world, state, when_s, TOKEN_IN, source, target, 0, NONE, 0, 0, tokens, unit)


@njit
def _done(world, rows, asked, state, server):
    """A batch is through: its units go where the engine sends them."""
    entry, kind = state.batch_first[server], state.batch_kind[server]
    layer = state.batch_layer[server]
    state.batch_first[server] = NONE
    state.group_first[:] = NONE
    state.group_vectors[:] = 0
    own, own_last = NONE, NONE
    chunk = is_prompts(rows, state, kind, entry)
    if kind == OWN and state.batch_stays[server]:
        passes = goes_on_in_slice(world, state, server) if chunk else world.segments
        if passes and may_pass(rows, state, entry, layer):
            dense = CHUNK if chunk else DENSE
            pass_on(rows, state, server, entry, dense, layer)
            serve(world, rows, asked, state, server, entry, dense, layer + 1)
            return
    if not chunk and kind in (DENSE, OWN):
        state.token_turn_s[server] = state.clock[NOW] - state.taken_s[server]
    stays = kind in (DENSE, CHUNK)
    while entry != NONE:
        unit, following = state.entry_unit[entry], state.entry_next[entry]
        ticket = state.entry_ticket[entry]
        free(state, entry)
        if kind == HOME:
            guessing(world, rows, asked, state, unit, ticket, layer)
        elif is_dense(kind):
            if fan_out(world, rows, state, server, unit):
                mine = enter(state, unit)
                if own == NONE:
                    own = mine
                else:
                    state.entry_next[own_last] = mine
                own_last = mine
            stays = stays and ends_here(rows, state, server, unit)
        else:
            if kind == OWN:
                written(rows, state, unit)
            gather(world, rows, state, server, unit)
        entry = following
    for target in range(world.delay_s.shape[0]):
        for group in range(2):
            first = state.group_first[group, target]
            if first != NONE:
                role = DISPATCH if group == 0 else PART
                taking = state.group_vectors[0, group, target]
                counted = state.group_vectors[1, group, target]
                send(world, state, role, server, target, layer, first, taking, counted, 0, NONE)
    state.batch_stays[server] = stays
    if own != NONE:
        serve(world, rows, asked, state, server, own, OWN, layer)
    else:
        wake(state, server)


@njit
def _completed(world, rows, asked, state, server, unit):
    """A unit has passed its last layer; of a prompt only the last chunk predicts a token."""
    request = rows.request[unit]
    access = asked.access[request]
    if rows.in_turn[unit]:
        written(rows, state, unit)
    if server == access or asked.done[request] + 1 < asked.prompts[request]:
        _finished(world, rows, asked, state, unit)
    else:
        send(world, state, TOKEN_BACK, server, access, 0, NONE, 0, 0, 1, unit)
    layers = rows.place.shape[1] - 1
    if world.migrates or rows.layer[unit] == layers:
        return
    if world.frozen:
        _propagate(world, rows, state, server, access, unit)
    else:
        trail(world, rows, asked, state, server, unit, layers)


@inlined
def _propagate(world, rows, state, server, access, unit):
    """The state of an exited token goes to the later servers of its route."""
    layer = rows.layer[unit]
    for place in range(world.delay_s.shape[0]):
        if place != server and world.later[access, layer, place]:
            send(world, state, STATE, server, place, layer, NONE, 1, 1, 0, unit)


@inlined
def _finished(world, rows, asked, state, unit):
    """The token is with its user and the next one may begin, or a chunk is through."""
    numbers, now, request = state.numbers, state.clock[NOW], rows.request[unit]
    rows.number[unit] = asked.done[request]
    note(rows, state, unit, FINISHED, now)
    numbers[IN_FLIGHT] -= 1
    asked.done[request] += 1
    follows = True
    if world.guesses > 0 and asked.done[request] >= asked.prompts[request]:
        follows = through(world, rows, asked, state, unit, request)
    else:
        asked.row[request] = NONE
        if rows.draft[unit] != NONE:
            rows.over_s[rows.draft[unit]] = now
    if asked.done[request] < asked.units[request]:
        if follows and asked.done[request] >= asked.prompts[request]:
            next_in_turn(world, asked, state, unit, request)
        return
    asked.running[request], asked.over_s[request] = False, now
    asked.ticket[request] = NONE
    numbers[RUNNING] -= 1
    if world.closed and (world.endless or numbers[NEXT_REQUEST] < asked.access.size):
        push(state, now, 1, REQUEST, numbers[NEXT_REQUEST])
        numbers[NEXT_REQUEST] += 1


@njit
def _delivered(world, rows, asked, state, at):
    """A message is there."""
    message = state.message[at]
    role, server, owner = message[ROLE], message[TARGET], message[OWNER]
    if world.hop_s[server] > 0 and message[LAYER] != HANDLED:
        handle(world, state, server, units_of(state, message))
        if role == TOKEN_BACK:
            # No batch of its own waits for it.
            message[LAYER] = HANDLED
            push(state, state.handled_s[server], 0, MESSAGE, at)
            return
    state.received[0, message[SOURCE], server] += message[VECTORS]
    state.received[1, message[SOURCE], server] += message[IDS]
    entry, layer = message[FIRST], message[LAYER]
    state.free_messages[state.numbers[FREE_MESSAGES]] = at
    state.numbers[FREE_MESSAGES] += 1
    if role == TOKEN_IN:
        go_on_in_turn(rows, state, server, owner, state.clock[NOW])
    elif role == TOKEN_BACK:
        _finished(world, rows, asked, state, owner)
    elif role == DRAFT_BACK:
        quick(state, server, owner)
    while entry != NONE:
        unit, following = state.entry_unit[entry], state.entry_next[entry]
        free(state, entry)
        if role == DISPATCH:
            ready(rows, state, server, EXPERTS, layer, unit, state.clock[NOW])
        else:
            part(rows, state, server, unit)
        entry = following
