"""A server's own guesses of what its users' sequences go on with.

They make way for everything else, so they pass the layers a few at a time. What a draft head takes
to follow passes them together with what is known, as few rows take little more time than one, and
counts as guessed as far as the pass over it says the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.specs import MOST_DRAFTED
from trimmoe.cost.batching import LAYERS_AT_ONCE, SLICE_S
from trimmoe.models.batch import TokenBatch
from trimmoe.runtime.home import home_layers
from trimmoe.runtime.node.compute.draft_runner import Prepared
from trimmoe.runtime.node.compute.worker import Worker
from trimmoe.runtime.node.records.output import BatchOutput
from trimmoe.runtime.node.records.readings import Foreseen, Reading
from trimmoe.runtime.node.records.sequences import Seat
from trimmoe.runtime.processors import shaped
from trimmoe.runtime.sampling import pick

AHEAD_S = 0.012
"""For so long what is guessed may wait for what is guessed upon it, to set out together."""


def guess(worker: Worker, layer: int, readings: Sequence[Reading]) -> BatchOutput:
    """Readings that are about to enter a layer pass some; who finds no place is forgotten. What was
    guessed is read as well, together with whatever else is about to enter that layer."""
    open_ones = [one for one in readings if not one.void and one.sequence in worker.state.accounts]
    if drafted := [one for one in open_ones if one.by_draft_model]:
        others = [one for one in open_ones if one is not drafted[0]]
        return draft(worker, drafted[0], others)
    ready = [one for one in worker.draft_runner.seated(open_ones) if _may_begin(worker, one)]
    if not ready:
        return BatchOutput()
    layer = min(one.layer for one in ready)
    going = [one for one in ready if one.layer == layer]
    others = [one for one in ready if one.layer != layer]
    runner, began_s = worker.draft_runner, time.perf_counter()
    if len(ready) == 1:
        _offer(worker, going[0])
    sizes = [len(one.rows) for one in going]
    batch = runner.view.batch(runner.cache, runner.slots_of(going), [one.rows for one in going])
    hidden, layers = _entering(worker, going, batch), runner.view.spec.layer_count
    while layer < layers:
        last = min(layer + LAYERS_AT_ONCE, layers)
        hidden = _through(worker, layer, last, hidden, batch, sum(sizes))
        layer = last
        if all(one.void for one in going):
            return BatchOutput(reading=others)
        if time.perf_counter() - began_s >= SLICE_S:
            break
    if layer == layers:
        return _outcome(worker, _guessed_behind(worker, going, hidden, batch), going, others)
    states = batch.pack(hidden).split(sizes)
    for one, its in zip(going, states, strict=True):
        one.layer, one.hidden = layer, its
    return BatchOutput(reading=going + others)


def _through(
    worker: Worker, first: int, last: int, hidden: Tensor, batch: TokenBatch, rows: int
) -> Tensor:
    """So many rows, [B, T, d], through the layers [first, last) with what is at hand."""
    runner = worker.draft_runner
    hidden = home_layers(runner.view, first, last, hidden, batch, runner.cache, runner.own)
    for _ in range(first, last):
        worker.pace.guess(rows)
    return hidden


def _outcome(
    worker: Worker,
    going_on: Sequence[Reading],
    made: Sequence[Reading],
    others: Sequence[Reading],
) -> BatchOutput:
    """Those that go on enter the layers left together with others that are to."""
    for one in going_on:
        one.layer = worker.reads_from(one.route)
    done = [one for one in made if one not in going_on and not one.void]
    return BatchOutput(guessed=done, reading=[*going_on, *others])


def _may_begin(worker: Worker, reading: Reading) -> bool:
    """Whether a reading has its states, if it needs any; else it waits for them."""
    if reading.hidden is not None:
        return True
    reading.layer = worker.reads_from(reading.route)
    if reading.layer == 0 or worker.draft_runner.found(reading):
        return True
    worker.draft_runner.waiting[reading.sequence] = reading
    return False


def _entering(worker: Worker, going: Sequence[Reading], batch: TokenBatch) -> Tensor:
    states = [one.hidden for one in going if one.hidden is not None]
    if states:
        return batch.unpack(torch.cat(states))
    return worker.draft_runner.view.embed(batch.pad([one.passing for one in going]), batch)


def _offer(worker: Worker, one: Reading) -> None:
    """Have a reading that is about to begin take along what a draft head takes to follow."""
    first = worker.reads_from(one.route)
    begins = one.layer == first and not one.made and len(one.tokens) == 1
    if not begins or not one.more or (first and not one.is_next):
        return
    ready = worker.draft_runner.take_prepared(one.sequence, one.rows[-1], one.passing[-1])
    if first and ready is not None:
        one.offered, one.offers = ready.offered[: one.more], ready.offers[: one.more]
    else:
        one.offered = _offered(worker, one)
    if first and one.offered:
        assert one.seat is not None
        assert one.hidden is not None
        if not one.offers:
            positions = range(one.position, one.rows.stop)
            (one.offers,) = foreseen(worker, [one.seat], [positions], [one.offered], first)
        one.hidden = torch.cat([one.hidden, *(each.hidden for each in one.offers)])


def _offered(worker: Worker, one: Reading, *, goes_on: bool = True) -> tuple[int, ...]:
    """What a draft head takes to follow the last of a reading's rows; as much as it can where that
    is for the next reading."""
    most = min(one.more - len(one.made), MOST_DRAFTED) if goes_on else MOST_DRAFTED
    return worker.draft_runner.offer(one.sequence, one.rows[-1], one.passing[-1], most)


def draft(worker: Worker, one: Reading, others: Sequence[Reading]) -> BatchOutput:
    """The draft model reads what a reading has or, at its next turns, what it has guessed last."""
    assert worker.drafter is not None
    start, tokens = one.start, one.tokens
    if one.made:
        start, tokens = one.position + len(one.made) - 1, one.made[-1:]
    scores = worker.drafter.read(one.sequence, start, tokens)
    if scores is not None:
        worker.pace.draft(len(tokens))
        _guess_next(one, scores)
        if _draft_on(worker, one):
            return BatchOutput(reading=[one, *others])
    one.failed = not one.made
    return BatchOutput(guessed=[] if one.void else [one], reading=list(others))


def _draft_on(worker: Worker, one: Reading) -> bool:
    """Whether the draft model reads what it has guessed last."""
    unlikely = one.confidence[-1] < worker.engine.settings.guess_confidence
    if one.void or unlikely or len(one.made) > one.more:
        return False
    return time.perf_counter() < one.made_s + AHEAD_S


def _guessed_behind(
    worker: Worker, going: Sequence[Reading], hidden: Tensor, batch: TokenBatch
) -> list[Reading]:
    """Guess what follows the rows of these readings, which have passed all layers, [B, T, d]; those
    that go on. Of several each has one row then, which costs as little as what a head would offer
    to one."""
    view, cache = worker.draft_runner.view, worker.draft_runner.cache
    states = batch.pack(view.tail(hidden, batch, cache))
    sizes = [len(one.rows) for one in going]
    ends = np.cumsum(sizes)
    # Of rows that were known before only the last one asks what follows.
    asking = [range(end - 1 - len(one.offered), end) for one, end in zip(going, ends, strict=True)]
    rows = np.concatenate([np.asarray(each) for each in asking])
    logits = view.logits(states[torch.from_numpy(rows)])
    each = zip(
        going, states.split(sizes), logits.split([len(some) for some in asking]), strict=True
    )
    for one, its, scores in each:
        _verify(worker, one, its, scores)
    return _going_on(worker, going)


def _verify(worker: Worker, one: Reading, states: Tensor, logits: Tensor) -> None:
    """Guess on as long as what was offered is what is guessed, by the logits [1 + o, V] after what
    was known and after each of the o offered tokens; states [n, d] are those of all rows."""
    offered, start, passing = one.offered, one.rows.start, one.passing
    _guess_next(one, logits[0])
    right = 0
    while right < len(offered) and one.made[-1] == offered[right]:
        right += 1
        _guess_next(one, logits[right])
    read = len(passing) - len(offered) + right
    worker.draft_runner.has_read(one.sequence, start, states[:read], passing[:read])
    one.offered, one.offers = (), ()


def _guess_next(one: Reading, scores: Tensor) -> None:
    """What follows a reading and what it has guessed, by the logits there, [V]."""
    position = one.position + len(one.made)
    chosen_from = shaped(scores, one.sampling, position, one.seen)
    one.made_s = one.made_s or time.perf_counter()
    one.confidence += (float(chosen_from.float().softmax(-1).max()),)
    one.made += (pick(chosen_from, one.sampling, position),)


def _going_on(worker: Worker, readings: Sequence[Reading]) -> list[Reading]:
    """Take what readings guessed last through the layers that their sequences themselves pass here
    first; those of them that are to go through all others with what is at hand."""
    likely = [one for one in readings if _is_ahead(worker, one)]
    now_s = time.perf_counter()
    going = [one for one in likely if len(one.made) <= one.more and now_s < one.made_s + AHEAD_S]
    if len(readings) == 1:
        for one in likely if readings[0].prepares else going:
            one.offered = _offered(worker, one, goes_on=one in going)
    for first in {worker.reads_from(one.route) for one in likely}:
        _foresee(worker, [one for one in likely if worker.reads_from(one.route) == first], first)
    for one in likely:
        if one not in going:
            _prepare(worker, one)
    return going


def _prepare(worker: Worker, one: Reading) -> None:
    """What passed the first layers behind the last guess of a reading that ends is kept for the
    next one."""
    if one.offers:
        worker.draft_runner.prepared[one.sequence] = Prepared(
            position=one.position + len(one.made) - 1,
            token=one.made[-1],
            offered=one.offered,
            offers=one.offers,
        )
    one.offered, one.offers = (), ()


def _is_ahead(worker: Worker, one: Reading) -> bool:
    """Whether what a reading guessed last may pass its sequence's first layers here by now."""
    unlikely = one.confidence[-1] < worker.engine.settings.guess_confidence
    behind = one.more and one.is_next and not one.void
    return bool(worker.reads_from(one.route) and behind and not unlikely)


def _foresee(worker: Worker, readings: Sequence[Reading], first: int) -> None:
    """Several pass the layers before `first` in one batch."""
    seats = [one.seat for one in readings if one.seat is not None]
    tokens, positions = [one.passing for one in readings], [one.rows for one in readings]
    found = foreseen(worker, seats, positions, tokens, first)
    for one, seen in zip(readings, found, strict=True):
        one.offers, one.hidden = seen[1:], torch.cat([each.hidden for each in seen])


def foreseen(
    worker: Worker,
    seats: Sequence[Seat],
    positions: Sequence[range],
    tokens: Sequence[Sequence[int]],
    first: int,
) -> list[tuple[Foreseen, ...]]:
    """What the layers before `first`, all of whose experts are here, make of what was guessed of
    each sequence, one token upon another at these positions, as they will when it sets out. Nothing
    of the sequences may have come to these positions yet."""
    view, slots = worker.view, tuple(seat.slot for seat in seats)
    for seat in seats:
        worker.draft_runner.prepared.pop(seat.sequence, None)
    batch = view.batch(worker.cache, slots, positions)
    hidden = batch.pack(view.embed(batch.pad(tokens), batch))
    ran = view.run(0, first, hidden, batch, worker.cache, worker.segments.settled(first))
    assert ran.routing is None, "an expert of these layers is elsewhere"
    rows = enumerate(token for its in tokens for token in its)
    each = (
        Foreseen(token=token, hidden=ran.hidden[at : at + 1], experts=ran.experts[at : at + 1])
        for at, token in rows
    )
    found = [tuple(islice(each, len(its))) for its in tokens]
    for seat, where, its in zip(seats, positions, found, strict=True):
        worker.draft_runner.foresees(seat.sequence, where.start, its)
    return found
