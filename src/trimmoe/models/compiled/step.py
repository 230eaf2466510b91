"""Blocks of a decoder for rows of any sequences: one call for as many layers as need no decision.

Shapes: n rows, d the hidden size, E experts of which k are activated. Buffers are `wide`: rows
padded with zeros to a multiple of `GROUP`. What blocks are made of is in `tables.py`.
"""

from __future__ import annotations

import numpy as np
from numba import types

from trimmoe.models.compiled.apart import apart
from trimmoe.models.compiled.attending import attend, leave, times
from trimmoe.models.compiled.attention import (
    D2,
    F2,
    I1,
    I2,
    PLACES,
    ROTARY,
    SHAPE,
    Shape,
    address,
    floats,
    jit,
    norm,
    whole_panels,
    wide,
)
from trimmoe.models.compiled.columns import (
    BOTH_POST,
    DOWN,
    DOWN_BIAS,
    EXPERTS_NORM,
    LAYER,
    OUTPUT_SCALE,
    QUERY,
    ROUTED_POST,
    SHARED_DOWN,
    SHARED_MIX,
    SHARED_NORM,
    SHARED_POST,
    SHARED_UP,
    UP,
    UP_BIAS,
)
from trimmoe.models.compiled.gating import between, gated
from trimmoe.models.compiled.lane_functions import exp_lanes
from trimmoe.models.compiled.lanes import LANES
from trimmoe.models.compiled.product import DATA, OUT, RECORD, product
from trimmoe.models.compiled.routing import asked, route

__all__ = ["Shape", "asked", "attend", "leave", "norm", "route", "wide"]


@jit
def read(shape, block, hidden, normed):
    """What the router and the experts of a block read of hidden [n, wide], into `normed`."""
    norm(hidden, block[EXPERTS_NORM], shape.hidden, shape.epsilon, normed)


@apart(SHAPE, I1, F2, types.int64, F2)
def dense(shape, block, normed, after, out):
    """The shared expert of a block, or its whole MLP where nothing is routed: [n, wide(d)]. What is
    read `after` it is as in `routed`."""
    count, size = normed.shape[0], block[SHARED_UP + OUT] // 2
    both = np.empty((count, 2 * size), dtype=np.float32)
    product(block[SHARED_UP : SHARED_UP + RECORD], normed, count, both, shape.threads, after)
    inner = gated(shape, both, count, size)
    product(block[SHARED_DOWN : SHARED_DOWN + RECORD], inner, count, out, shape.threads, after)
    if block[SHARED_MIX + OUT] > 0:
        share = np.zeros((count, LANES), dtype=np.float32)
        times(shape, block, SHARED_MIX, normed, count, share)
        for r in range(count):
            share[r, 0] = -share[r, 0]
            at = address(share) + r * LANES * 4
            exp_lanes(at, at, 1)
            factor = np.float32(1.0) / (np.float32(1.0) + share[r, 0])
            for i in range(shape.hidden):
                out[r, i] *= factor


@jit
def _slots_of(weights, experts):
    """How many slots of `experts` [n, k] each of those in `weights` has, [F]."""
    counts = np.zeros(weights.shape[0], dtype=np.int64)
    for r in range(experts.shape[0]):
        for j in range(experts.shape[1]):
            if experts[r, j] >= 0:
                counts[experts[r, j]] += 1
    return counts


@jit
def _following(counts, weights, expert, after):
    """Where the first matrix of the next expert lies that has slots, or else `after`."""
    for e in range(expert + 1, counts.shape[0]):
        if counts[e] > 0:
            return weights[e, UP + DATA]
    return after


@apart(SHAPE, I2, F2, I2, F2, types.int64, D2)
def routed(shape, weights, normed, experts, gates, after, out):
    """Add to `out`, float64 [n, wide(d)], gate times expert of `experts` [n, k], -1 for none.

    `weights` [F, EXPERT] says where the matrices of each expert, and of copies that stand in for
    some, are, `after` what is read after them, 0 if nobody knows. Rows are grouped by expert.
    Addends are in single precision, so that their order makes no difference (`models.sums`).
    """
    count, slots = experts.shape
    size = shape.routed
    each = np.empty((count * slots, normed.shape[1]), dtype=np.float32)
    rows = np.empty(count * slots, dtype=np.int64)
    # Not as many as there are rows: an expert may run in several slots of one.
    counts = _slots_of(weights, experts)
    most = counts.max()
    x = np.empty((most, normed.shape[1]), dtype=np.float32)
    both = np.empty((most, 2 * whole_panels(size)), dtype=np.float32)
    given = np.empty((most, normed.shape[1]), dtype=np.float32)
    for e in range(counts.shape[0]):
        if counts[e] == 0:
            continue
        # Of a type of its own: what is called with a plain zero is compiled for that too.
        found = np.int64(0)
        for r in range(count):
            for j in range(slots):
                if experts[r, j] == e:
                    rows[found] = r * slots + j
                    found += 1
        for i in range(found):
            for c in range(x.shape[1]):
                x[i, c] = normed[rows[i] // slots, c]
        following = _following(counts, weights, e, after)
        product(weights[e, UP : UP + RECORD], x, found, both, shape.threads, following)
        inner = between(shape, both, found, weights[e, UP_BIAS])
        product(weights[e, DOWN : DOWN + RECORD], inner, found, given, shape.threads, following)
        if weights[e, DOWN_BIAS] != 0:
            more = floats(weights[e, DOWN_BIAS], shape.hidden)
            for i in range(found):
                for c in range(shape.hidden):
                    given[i, c] += more[c]
        for i in range(found):
            for c in range(x.shape[1]):
                each[rows[i], c] = given[i, c]
    for r in range(count):
        for j in range(slots):
            if experts[r, j] >= 0:
                gate = gates[r, j]
                for i in range(shape.hidden):
                    out[r, i] += np.float64(np.float32(gate * each[r * slots + j, i]))


@apart(SHAPE, I1, F2, ROTARY, PLACES, I1, types.boolean)
def dense_block(shape, block, hidden, rotary, places, slab, aside):
    """A whole block without routed experts, on hidden [n, wide] in place."""
    attend(shape, block, hidden, rotary, places, slab, aside)
    normed, given = np.zeros_like(hidden), np.zeros_like(hidden)
    read(shape, block, hidden, normed)
    dense(shape, block, normed, 0, given)
    for r in range(hidden.shape[0]):
        for i in range(shape.hidden):
            hidden[r, i] += given[r, i]


@apart(SHAPE, I1, F2, D2, D2)
def behind(shape, block, hidden, given, out):
    """Into `out`, float64 [n, wide], a layer's output where norms follow its experts, of which the
    routed ones gave `given`, float64 [n, wide]."""
    read_too, shared = np.zeros_like(hidden), np.zeros_like(hidden)
    norm(hidden, block[SHARED_NORM], shape.hidden, shape.epsilon, read_too)
    dense(shape, block, read_too, 0, shared)
    norm(shared, block[SHARED_POST], shape.hidden, shape.epsilon, shared)
    both = np.zeros_like(hidden)
    for r in range(hidden.shape[0]):
        for i in range(shape.hidden):
            both[r, i] = given[r, i]
    norm(both, block[ROUTED_POST], shape.hidden, shape.epsilon, both)
    for r in range(hidden.shape[0]):
        for i in range(shape.hidden):
            both[r, i] += shared[r, i]
    norm(both, block[BOTH_POST], shape.hidden, shape.epsilon, both)
    scale = floats(block[OUTPUT_SCALE], 1)[0]
    for r in range(hidden.shape[0]):
        for i in range(shape.hidden):
            out[r, i] = (hidden[r, i] + both[r, i]) * scale


@apart(SHAPE, I1, I2, F2, F2, I2, F2, types.int64, D2)
def gathered(shape, block, weights, hidden, normed, experts, gates, after, out):
    """Into `out`, float64 [n, wide], hidden and what a layer's experts give."""
    if block[BOTH_POST] != 0:
        given = np.zeros(hidden.shape, dtype=np.float64)
        routed(shape, weights, normed, experts, gates, after, given)
        behind(shape, block, hidden, given, out)
        return
    if block[SHARED_UP + OUT] > 0:
        shared = np.zeros_like(hidden)
        first = _following(_slots_of(weights, experts), weights, -1, after)
        dense(shape, block, normed, first, shared)
        for r in range(hidden.shape[0]):
            for i in range(hidden.shape[1]):
                out[r, i] = np.float32(hidden[r, i] + shared[r, i])
    else:
        for r in range(hidden.shape[0]):
            for i in range(hidden.shape[1]):
                out[r, i] = hidden[r, i]
    routed(shape, weights, normed, experts, gates, after, out)


@apart(SHAPE, I1, I2, F2, F2, I2, F2, types.int64)
def finish(shape, block, weights, hidden, normed, experts, gates, after):
    """What a layer's experts give, added to hidden [n, wide] in place; `after` is what is read
    next."""
    total = np.empty(hidden.shape, dtype=np.float64)
    gathered(shape, block, weights, hidden, normed, experts, gates, after, total)
    for r in range(hidden.shape[0]):
        for i in range(shape.hidden):
            hidden[r, i] = total[r, i]


@jit
def segment(
    shape, blocks, ends, weights, settled, hidden, rotary, places, slabs, found, kept_at, kept
):
    """Take rows through blocks until a layer has to be decided on.

    `ends` are the first block and the one after the last, of `blocks` [B, COLUMNS]. `weights`
    [B, F, EXPERT]: where an expert's matrices are, by block. `settled` [B, E]: experts whose slots
    run here without a decision. `hidden` [n, wide] is changed in place. `slabs` [B, 4]: addresses
    of keys and values, their slots, their capacity, or what `delta` takes. `found`: experts
    [B, n, k] by block and what the router said of the last layer it was asked for: logits,
    probabilities [n, wide(E)], gates [n, k], normed [n, wide]. Into `kept` [n, wide] go the rows
    as they enter block `kept_at`.

    Returns the block it stopped at, `ends[1]` if it passed all. Attention and router of the block
    it stopped at are done, its experts are not.
    """
    experts, logits, probabilities, gates, normed = found
    for b in range(ends[0], ends[1]):
        block = blocks[b]
        if b == kept_at:
            for r in range(hidden.shape[0]):
                for i in range(hidden.shape[1]):
                    kept[r, i] = hidden[r, i]
        if block[LAYER] < 0:
            dense_block(shape, block, hidden, rotary, places, slabs[b], False)
            continue
        attend(shape, block, hidden, rotary, places, slabs[b], False)
        read(shape, block, hidden, normed)
        reads = asked(shape, block, hidden, normed)
        route(shape, block, reads, logits, probabilities, experts[b], gates)
        free = True
        for r in range(hidden.shape[0]):
            for j in range(shape.top_k):
                free = free and settled[b, experts[b, r, j]]
        if not free:
            return b
        after = blocks[b + 1, QUERY + DATA] if b + 1 < ends[1] else 0
        finish(shape, block, weights[b], hidden, normed, experts[b], gates, after)
    return ends[1]


@jit
def _stood_in(shape, stands, rank, normed, experts, gates, held, out):
    """What stands in for the activated experts that are not `held` [E], [n, wide(d)].

    `stands`: records of what all experts' maps read, [E * rank, d], and of what they give.
    """
    count = normed.shape[0]
    inner = np.empty((count, wide(shape.experts * rank)), dtype=np.float32)
    product(stands[:RECORD], normed, count, inner, shape.threads, 0)
    kept = np.zeros_like(inner)
    for r in range(count):
        for j in range(experts.shape[1]):
            expert = experts[r, j]
            if not held[expert]:
                for i in range(expert * rank, (expert + 1) * rank):
                    kept[r, i] = inner[r, i] * gates[r, j]
    product(stands[RECORD:], kept, count, out, shape.threads, 0)


@jit
def _finish_both(shape, block, weights, hidden, normed, experts, gates, after, rest):
    """As `finish` where norms follow the experts, with what stands in for some, rest [n, wide]."""
    total = np.empty(hidden.shape, dtype=np.float64)
    for r in range(hidden.shape[0]):
        for i in range(hidden.shape[1]):
            total[r, i] = rest[r, i]
    routed(shape, weights, normed, experts, gates, after, total)
    whole = np.empty(hidden.shape, dtype=np.float64)
    behind(shape, block, hidden, total, whole)
    for r in range(hidden.shape[0]):
        for i in range(shape.hidden):
            hidden[r, i] = whole[r, i]


@jit
def home_segment(shape, blocks, ends, weights, held, stands, rank, hidden, rotary, places, slabs):
    """Take rows through blocks with the experts `held` [B, E] and what stands in for the others.

    `stands` [B, 2 * RECORD], unless `rank` is 0: see `_stood_in`. The rest as in `segment`.
    """
    count = hidden.shape[0]
    logits = np.zeros((count, wide(shape.experts)), dtype=np.float32)
    probabilities = np.zeros_like(logits)
    gates = np.zeros((count, shape.top_k), dtype=np.float32)
    experts = np.empty((count, shape.top_k), dtype=np.int64)
    here = np.empty_like(experts)
    normed, rest = np.zeros_like(hidden), np.zeros_like(hidden)
    for b in range(ends[0], ends[1]):
        block = blocks[b]
        if block[LAYER] < 0:
            dense_block(shape, block, hidden, rotary, places, slabs[b], False)
            continue
        attend(shape, block, hidden, rotary, places, slabs[b], False)
        read(shape, block, hidden, normed)
        reads = asked(shape, block, hidden, normed)
        route(shape, block, reads, logits, probabilities, experts, gates)
        lacking = False
        for r in range(count):
            for j in range(shape.top_k):
                is_held = held[b, experts[r, j]]
                here[r, j] = experts[r, j] if is_held else -1
                lacking = lacking or not is_held
        after = blocks[b + 1, QUERY + DATA] if b + 1 < ends[1] else 0
        has_rest = lacking and rank > 0
        if has_rest:
            _stood_in(shape, stands[b], rank, normed, experts, gates, held[b], rest)
        if has_rest and block[BOTH_POST] != 0:
            _finish_both(shape, block, weights[b], hidden, normed, here, gates, after, rest)
            continue
        finish(shape, block, weights[b], hidden, normed, here, gates, after)
        if has_rest:
            for r in range(count):
                for i in range(shape.hidden):
                    hidden[r, i] += rest[r, i]
