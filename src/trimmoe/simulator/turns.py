"""The compiled event loop, part three: units of one request that wait for one another.

As at `runtime.node.schedule.intake`, a unit enters a layer only where those before it have left the
keys and values that it attends to, or, of tokens, do so in the same batch. Chunks of a prompt are
all under way at once, and what a token that exited leaves in the layers left, its *trail*, may be
when the next token is, and so may tokens that are followed on guesses (`guessing`); all others set
out when the one before is through. A unit that may have to wait is the *follower* of its *leader*.

Where exits are drafts, the next token follows the trail of one that was right. What sets out on a
wrong one follows that token through the layers until it has come to its user, and is *withdrawn*
then. It is a copy of that token: what the real one would do is unknown, and on average alike.
Nothing follows it.
"""

from __future__ import annotations

from trimmoe.simulator.heap import inlined, push
from trimmoe.simulator.links import send
from trimmoe.simulator.service import quick, ready
from trimmoe.simulator.world import (
    CONFIRMED,
    DENSE,
    DRAFT_BACK,
    LOG_NUMBER,
    LOG_REQUEST,
    LOG_ROW,
    LOG_WORD,
    LOGGED,
    NONE,
    NOW,
    TOKEN,
    TRAILING,
)


@inlined
def follow(rows, unit, leader):
    """A unit begins while its leader has not written all layers yet."""
    rows.leader[unit], rows.follower[leader] = leader, unit


@inlined
def follow_trail(rows, asked, unit):
    """A token begins, perhaps while the trail of the one before is under way."""
    trail = asked.trail[rows.request[unit]]
    if trail != NONE and rows.written[trail] < rows.layers[trail]:
        follow(rows, unit, trail)


@inlined
def go_on_in_turn(rows, state, server, unit, since_s):
    """A unit, there since then, enters a layer unless it has overtaken its leader; after the last
    layer a chunk ends likewise."""
    layer, leader = rows.layer[unit], rows.leader[unit]
    if leader != NONE and rows.written[leader] <= layer and not _joins(rows, unit, leader):
        rows.parked[unit] = True
    elif layer < rows.layers[unit]:
        ready(rows, state, server, DENSE, layer, unit, since_s)
        # Those that wait for it may be computed with it.
        rows.due[unit] = layer + 1
        follower = rows.follower[unit]
        while follower != NONE and rows.parked[follower] and _joins(rows, follower, unit):
            rows.parked[follower] = False
            ready(rows, state, server, DENSE, layer, follower, state.clock[NOW])
            rows.due[follower] = layer + 1
            unit, follower = follower, rows.follower[follower]
    else:
        quick(state, server, unit)


@inlined
def _joins(rows, unit, leader):
    """Whether a unit may enter the queue of a layer that its leader is in, or is served from;
    prompts pass by themselves, and so does what passes apart from tokens."""
    layer = rows.layer[unit]
    alone = rows.prompt[unit] or rows.apart[unit] or rows.prompt[leader] or rows.apart[leader]
    here = rows.layer[leader] == layer and rows.due[leader] == layer + 1
    return not alone and here and layer < rows.layers[unit]


@inlined
def written(rows, state, unit):
    """A unit's keys and values of the layer it is in are there: its follower may enter."""
    layer, follower = rows.layer[unit], rows.follower[unit]
    rows.written[unit] = layer + 1
    if follower == NONE:
        return
    # What ends in turn does so after the last layer; a token attends to nothing that comes after
    # that layer's keys and values, and may be gone before its leader is.
    if layer + 1 == rows.layers[unit] + rows.in_turn[unit]:
        _part(rows, unit, follower)
    if rows.parked[follower] and rows.layer[follower] == layer:
        rows.parked[follower] = False
        # After the last layer, too, a unit is where the others of its request were.
        go_on_in_turn(rows, state, int(rows.place[follower, layer]), follower, state.clock[NOW])


@inlined
def may_pass(rows, state, entry, layer):
    """Whether the units in service enter the next layer together: none ends with this one, and none
    waits there for a leader that is not in service too."""
    while entry != NONE:
        unit = state.entry_unit[entry]
        leader = rows.leader[unit]
        if layer + 1 == rows.layers[unit]:
            return False
        if leader != NONE and rows.written[leader] <= layer + 1:
            # What is in service here is written when all of this layer is through.
            serving = rows.layer[leader] == layer and rows.due[leader] == layer + 1
            if not serving or rows.written[leader] > layer:
                return False
        entry = state.entry_next[entry]
    return True


@inlined
def pass_on(rows, state, server, entry, kind, layer):
    """The units in service are in the next layer, without waiting for a turn."""
    state.served[server, kind, 0] += 1
    while entry != NONE:
        state.served[server, kind, 1] += 1
        unit = state.entry_unit[entry]
        written(rows, state, unit)
        rows.pending[unit] = 0
        rows.layer[unit], rows.due[unit] = layer + 1, layer + 2
        entry = state.entry_next[entry]


@inlined
def trail(world, rows, asked, state, server, unit, layers):
    """An exited token goes on through the layers left, in its turn."""
    rows.layers[unit], rows.trailing[unit], rows.apart[unit] = layers, True, not world.whole
    request = rows.request[unit]
    asked.trail_before[request], asked.trail[request] = asked.trail[request], unit
    state.numbers[TRAILING] += 1
    go_on_in_turn(rows, state, server, unit, state.clock[NOW])


@inlined
def drafted(world, rows, asked, state, server, unit):
    """A wrong draft of a token goes to its access server, where something sets out on it."""
    draft, request = rows.draft[unit], rows.request[unit]
    access = asked.access[request]
    copied(rows, state, draft, request)
    follow(rows, draft, unit)
    if server == access:
        quick(state, access, draft)
    else:
        send(world, state, DRAFT_BACK, server, access, 0, NONE, 0, 0, 1, draft)


@inlined
def copied(rows, state, copy, request):
    """A copy of a token begins that is going to be withdrawn."""
    rows.request[copy], rows.layer[copy], rows.written[copy], rows.due[copy] = request, 0, 0, 0
    rows.leader[copy], rows.follower[copy], rows.parked[copy] = NONE, NONE, False
    rows.trailing[copy], rows.in_turn[copy] = True, False
    state.numbers[TRAILING] += 1


@inlined
def next_in_turn(world, asked, state, unit, request):
    """A token is predicted: the next one sets out, unless one ahead of it is a draft still."""
    ahead = asked.trail[request]
    if ahead == unit:
        ahead = asked.trail_before[request]
    if world.drafts and ahead != NONE:
        asked.awaited[request] = ahead
    else:
        push(state, state.clock[NOW], 1, TOKEN, request)


@inlined
def wanted(world, rows, asked, state, server, unit):
    """Whether a unit is to go on: a trail is not where word has come that its request is over, nor
    what is withdrawn where word has come of that."""
    if not rows.trailing[unit]:
        return True
    request = rows.request[unit]
    over_s = min(asked.over_s[request], rows.over_s[unit])
    return state.clock[NOW] < over_s + world.delay_s[asked.access[request], server]


@inlined
def trailed(world, rows, asked, state, unit):
    """A trail or what is withdrawn is through, or nobody wants the rest of it."""
    request = rows.request[unit]
    leader, follower = rows.leader[unit], rows.follower[unit]
    rows.trailing[unit] = rows.apart[unit] = False
    state.numbers[TRAILING] -= 1
    if asked.trail[request] == unit:
        asked.trail[request] = NONE
    if asked.trail_before[request] == unit:
        asked.trail_before[request] = NONE
    last, access = rows.place[unit, rows.layers[unit]], asked.access[request]
    word_s = state.clock[NOW] + world.delay_s[last, access]
    if asked.awaited[request] == unit:
        asked.awaited[request] = NONE
        push(state, word_s, 1, TOKEN, request)
    if world.drafts and rows.number[unit] != NONE:
        note(rows, state, unit, CONFIRMED, word_s)
    # If its request is over, its leader may still pass layers elsewhere, and its follower, which
    # is a trail, too, need not wait any more.
    if leader != NONE:
        _part(rows, leader, unit)
    if follower != NONE:
        _part(rows, unit, follower)
        if rows.parked[follower]:
            rows.parked[follower] = False
            quick(state, int(rows.place[follower, rows.layer[follower]]), follower)


@inlined
def note(rows, state, unit, word, when_s):
    """Log what happened to a unit."""
    at = state.numbers[LOGGED]
    state.log[at, LOG_REQUEST], state.log[at, LOG_ROW] = rows.request[unit], unit
    state.log[at, LOG_NUMBER], state.log[at, LOG_WORD] = rows.number[unit], word
    state.log_time[at, 0], state.log_time[at, 1] = rows.began_s[unit], when_s
    state.numbers[LOGGED] += 1


@inlined
def _part(rows, leader, follower):
    rows.leader[follower] = rows.follower[leader] = NONE
