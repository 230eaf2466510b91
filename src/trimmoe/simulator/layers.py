"""The compiled event loop, part four: how a unit passes a layer, from server to server."""

from __future__ import annotations

from trimmoe.simulator.heap import inlined
from trimmoe.simulator.links import join
from trimmoe.simulator.service import quick
from trimmoe.simulator.turns import go_on_in_turn, written
from trimmoe.simulator.world import NONE, NOW


@inlined
def size(rows, row):
    """Rows of a unit."""
    count = 0
    while row != NONE:
        count += 1
        row = rows.sibling[row]
    return count


@inlined
def uses(rows, row, layer, server):
    """Whether a row runs a slot on a server."""
    for slot in range(rows.expert.shape[2]):
        if rows.expert[row, layer, slot] >= 0 and rows.server[row, layer, slot] == server:
            return True
    return False


@inlined
def fan_out(world, rows, state, server, unit):
    """After attention and router: dispatches and the residual; see `cost.model.add_layer_messages`
    for which of them are one message. Whether there are slots here, which come before the batch
    is through."""
    row, layer, used = unit, rows.layer[unit], state.used
    target = int(rows.place[row, layer + 1])
    used[:] = 0
    residuals = 0
    while row != NONE:
        for slot in range(rows.expert.shape[2]):
            if rows.expert[row, layer, slot] < 0:
                continue
            place, seen = int(rows.server[row, layer, slot]), False
            for earlier in range(slot):
                if rows.expert[row, layer, earlier] >= 0:
                    seen = seen or rows.server[row, layer, earlier] == place
            if not seen:
                used[place] += 1
        apart = not uses(rows, row, layer, server) and not uses(rows, row, layer, target)
        if server != target and apart:
            residuals += 1
        row = rows.sibling[row]
    if used[server] == 0:
        written(rows, state, unit)
    parts = 1 if residuals > 0 else 0
    for place in range(used.size):
        if used[place] > 0:
            parts += 1
    rows.pending[unit] = parts
    for place in range(used.size):
        if used[place] > 0 and place != server:
            join(state, 0, place, unit, used[place], used[place])
    if residuals > 0:
        join(state, 1, target, unit, residuals, residuals)
    elif parts == 0:
        gathered(rows, state, target, unit)
    return used[server] > 0


@inlined
def ends_here(rows, state, server, unit):
    """Whether all slots of a unit that has fanned out run on its server, where it stays."""
    target = int(rows.place[unit, rows.layer[unit] + 1])
    return target == server and rows.pending[unit] == 1 and state.used[server] > 0


@inlined
def gather(world, rows, state, server, unit):
    """After the experts here: their sum goes to where the layer gathers."""
    row, layer = unit, rows.layer[unit]
    target, source = int(rows.place[row, layer + 1]), int(rows.place[row, layer])
    if server == target:
        part(rows, state, target, unit)
        return
    taking, counted = 0, 0
    while row != NONE:
        if uses(rows, row, layer, server):
            taking += 1
            # The paper's ledger counts one vector where dispatch and residual meet.
            if not (world.migrates and server == source and uses(rows, row, layer, target)):
                counted += 1
        row = rows.sibling[row]
    join(state, 1, target, unit, taking, counted)


@inlined
def part(rows, state, server, unit):
    rows.pending[unit] -= 1
    if rows.pending[unit] == 0:
        gathered(rows, state, server, unit)


@inlined
def gathered(rows, state, server, unit):
    """A layer's result is whole. Whether a token goes on is for the server to find out; a chunk
    does, in its turn, and so does what ends in turn."""
    rows.layer[unit] += 1
    ends = rows.in_turn[unit] and rows.layer[unit] == rows.layers[unit]
    if rows.prompt[unit] or ends:
        go_on_in_turn(rows, state, server, unit, state.clock[NOW])
    else:
        quick(state, server, unit)
