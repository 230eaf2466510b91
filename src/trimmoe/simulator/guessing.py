"""The compiled event loop, part six: tokens that set out on guesses of their user's server.

When a token has set out, the server reads it, or the whole prompt, and guesses what it predicts,
some layers at a time and when it has nothing else to do. What sets out meanwhile is read when that
is over. Then the next token follows behind it through the layers, unless a `window` of
them are ahead of what is through; in that case as soon as one is. Tokens are through in turn. A
wrong guess is followed by copies of the token that it was made after, one guess after another, and
these are withdrawn when that token has come to its user (see `turns`).

In `chunks`, so many set out behind a token that nothing is ahead of, and none before all of them
are through. Each sets out as it is guessed, which is somewhat sooner than all in one frame.

Where drafts of a head are read along, they come with the token that is known, and set out with it.
"""

from __future__ import annotations

from trimmoe.simulator.heap import inlined, push
from trimmoe.simulator.service import line_up, quick
from trimmoe.simulator.turns import copied, follow
from trimmoe.simulator.world import HOME, NONE, NOW, RIGHT, TOKEN, UNSURE


@inlined
def led(world, rows, asked, state, unit, request, tokens):
    """A token begins, perhaps behind others, or a prompt of so many, and what it predicts is
    guessed meanwhile."""
    newest = asked.newest[request]
    if newest == NONE:
        asked.row[request], asked.chunk[request] = unit, 0
    else:
        asked.chunk[request] += 1
        rows.after[newest] = unit
        _behind(rows, unit, newest)
    asked.newest[request], asked.coming[request] = unit, False
    asked.under_way[request] += 1
    asked.hindmost[request], asked.copies[request] = unit, 0
    if rows.guess[unit] == NONE:
        return
    if world.along[asked.access[request]] == 0:
        if asked.more[request] > 0:
            # The pass that brought the guess it set out on has read it too.
            asked.more[request] -= 1
            _made(world, rows, asked, state, request)
            return
        asked.unread[request] += tokens
        if asked.ticket[request] == NONE:
            _read(asked, state, request)
        return
    # One follows, which comes here itself, or as many copies as are drafted behind a wrong one.
    most = rows.window[unit]
    while asked.chunk[request] + asked.copies[request] < most and rows.guess[unit] != UNSURE:
        _set_out(rows, asked, state, request)
        if rows.guess[unit] == RIGHT or rows.after[asked.hindmost[request]] == NONE:
            break


@inlined
def guessing(world, rows, asked, state, request, ticket, layer):
    """A guess has passed all layers up to this one. If full depth was faster, nobody wants it any
    more; if it is made and sure enough, what follows may have to wait for room."""
    if asked.ticket[request] != ticket:
        return
    if layer + 1 < world.dense_s.shape[1]:
        _guess(asked, state, request, layer + 1)
        return
    asked.ticket[request] = NONE
    if asked.unread[request] > 0:
        _read(asked, state, request)
        return
    if not state.batch_several[asked.access[request]]:
        asked.brought[request] += world.brings
        guesses = int(asked.brought[request])
        asked.brought[request] -= guesses
        asked.more[request] = guesses - 1
    _made(world, rows, asked, state, request)


@inlined
def through(world, rows, asked, state, unit, request):
    """A token, the first of those under way, is with its user. Whether the next one has yet to set
    out, because it was not guessed, not rightly or not in time."""
    asked.under_way[request] -= 1
    if unit != asked.newest[request]:
        asked.row[request] = rows.after[unit]
        if asked.held[request]:
            asked.held[request] = False
            _made(world, rows, asked, state, request)
        return False
    asked.row[request] = asked.newest[request] = NONE
    asked.held[request], asked.more[request] = False, 0
    if asked.copies[request] > 0:
        # What is read behind them is void.
        asked.ticket[request] = NONE
    copy = rows.draft[unit]
    for _ in range(asked.copies[request]):
        rows.over_s[copy] = state.clock[NOW]
        copy = rows.after[copy]
    return not asked.coming[request]


@inlined
def _read(asked, state, request):
    """What has set out and was not read is, from the first layer on."""
    asked.reads[request], asked.unread[request] = asked.unread[request], 0
    _guess(asked, state, request, 0)


@inlined
def _guess(asked, state, request, layer):
    server, now = asked.access[request], state.clock[NOW]
    asked.ticket[request] = line_up(state, server, HOME, layer, request, now)


@inlined
def _made(world, rows, asked, state, request):
    """A guess is made of what the newest token predicts. What was guessed sets out, and more is
    guessed behind a copy, unless that was in the same pass."""
    while True:
        newest = asked.newest[request]
        if newest == NONE or rows.guess[newest] == NONE or rows.guess[newest] == UNSURE:
            return
        if world.chunks:
            if asked.chunk[request] + asked.copies[request] >= world.guesses:
                return
        elif asked.under_way[request] + asked.copies[request] > rows.window[newest]:
            asked.held[request] = True
            return
        _set_out(rows, asked, state, request)
        if rows.guess[newest] == RIGHT or rows.after[asked.hindmost[request]] == NONE:
            return
        if asked.more[request] == 0:
            asked.unread[request] = 1
            _read(asked, state, request)
            return
        asked.more[request] -= 1


@inlined
def _set_out(rows, asked, state, request):
    """The next token sets out, or another copy of the newest one."""
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


@inlined
def _behind(rows, unit, leader):
    """A unit follows another one, unless that is through all layers."""
    if rows.written[leader] < rows.layers[leader] + rows.in_turn[leader]:
        follow(rows, unit, leader)
