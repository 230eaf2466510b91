"""The compiled event loop, part six: tokens that set out on guesses of their user's server.

When a token has set out, the server guesses what it predicts, and `guess_s` later the next token
follows behind it through the layers, unless `guesses` of them are ahead of what is through; then as
soon as one is. Tokens are through in turn. A wrong guess is followed by copies of the token that
it was made after, each as long after the last one as a guess takes, and these are withdrawn when
that token has come to its user (see `turns`).

A guess takes time but no server from others: where servers are busy, that is too good to be true.
"""

from __future__ import annotations

import numpy as np

from trimmoe.simulator.heap import inlined, push
from trimmoe.simulator.service import quick
from trimmoe.simulator.turns import copied, follow
from trimmoe.simulator.world import GUESS, NONE, NOW, RIGHT, TOKEN


@inlined
def led(world, rows, asked, state, unit, request):
    """A token begins, perhaps behind others, and what it predicts is guessed meanwhile."""
    newest = asked.newest[request]
    if newest == NONE:
        asked.row[request] = unit
    else:
        rows.after[newest] = unit
        _behind(rows, unit, newest)
    asked.newest[request], asked.coming[request] = unit, False
    asked.under_way[request] += 1
    asked.hindmost[request], asked.copies[request] = unit, 0
    if rows.guess[unit] != NONE:
        _guess(world, asked, state, request)


@inlined
def guessed(world, rows, asked, state, request):
    """A guess is made, unless full depth was faster; the next token may have to wait for room."""
    if asked.guess_due_s[request] != state.clock[NOW]:
        return
    asked.guess_due_s[request] = np.inf
    if asked.under_way[request] + asked.copies[request] > world.guesses:
        asked.held[request] = True
    else:
        _follow_up(world, rows, asked, state, request)


@inlined
def through(world, rows, asked, state, unit, request):
    """A token, the first of those under way, is with its user. Whether the next one has yet to set
    out, because it was not guessed, not rightly or not in time."""
    asked.under_way[request] -= 1
    if unit != asked.newest[request]:
        asked.row[request] = rows.after[unit]
        if asked.held[request]:
            asked.held[request] = False
            _follow_up(world, rows, asked, state, request)
        return False
    asked.row[request] = asked.newest[request] = NONE
    asked.guess_due_s[request], asked.held[request] = np.inf, False
    copy = rows.draft[unit]
    for _ in range(asked.copies[request]):
        rows.over_s[copy] = state.clock[NOW]
        copy = rows.after[copy]
    return not asked.coming[request]


@inlined
def _guess(world, asked, state, request):
    due_s = state.clock[NOW] + world.guess_s[asked.access[request]]
    asked.guess_due_s[request] = due_s
    push(state, due_s, 1, GUESS, request)


@inlined
def _follow_up(world, rows, asked, state, request):
    """What was guessed sets out: the next token, or another copy of the newest one."""
    newest, hindmost = asked.newest[request], asked.hindmost[request]
    rows.followed[newest] = True
    if rows.guess[newest] == RIGHT:
        asked.coming[request] = True
        push(state, state.clock[NOW], 1, TOKEN, request)
        return
    copy = rows.draft[newest] if hindmost == newest else rows.after[hindmost]
    copied(rows, state, copy, request)
    _behind(rows, copy, hindmost)
    quick(state, asked.access[request], copy)
    asked.hindmost[request] = copy
    asked.copies[request] += 1
    if rows.after[copy] != NONE:
        _guess(world, asked, state, request)


@inlined
def _behind(rows, unit, leader):
    """A unit follows another one, unless that is through all layers."""
    if rows.written[leader] < rows.layers[leader] + rows.in_turn[leader]:
        follow(rows, unit, leader)
