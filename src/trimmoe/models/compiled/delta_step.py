"""Linear attention by a gated delta rule, as the compiled blocks compute it.

A head keeps a matrix S [key, value]. A token lets it decay and writes into it by how much what its
key reads there differs from its value; its query reads it then. What comes of a token depends on
the state before it alone, so tokens of a sequence that come together pass in turn, head by head.

Compiled when a model that has it is first opened. Shapes: n rows, H heads of values, K of keys.
Buffers are `wide`.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from numba.np.numpy_support import carray

from trimmoe.models.compiled.apart import apart
from trimmoe.models.compiled.attention import (
    F2,
    I1,
    PLACES,
    SHAPE,
    address,
    floats,
    integers,
    jit,
    pointer,
    whole_panels,
    wide,
)
from trimmoe.models.compiled.columns import DELTA, KEY_VALUE, QUERY
from trimmoe.models.compiled.lane_functions import exp_lanes, make_dots, make_mix
from trimmoe.models.compiled.lanes import LANES
from trimmoe.models.compiled.product import RECORD, product

(
    KEY_HEADS, HEADS, KEY, VALUE, WIDTH, RING, INPUTS, CONVOLUTION, DECAY, STEP_BIAS, NORM, EPSILON,
) = range(12)  # fmt: skip
"""Columns of what is known of a block: heads of keys and of values and their sizes; tokens that the
convolution sees; states and inputs that are kept of a sequence; the addresses of the convolution's
weights [WIDTH, wide(channels)], of how fast heads forget and of what is added to their steps [H],
of the weights of the norm [VALUE] and its epsilon.

The matrix `QUERY` gives queries, keys and values, then gates, `KEY_VALUE` how much is written and
then how much decays."""
KNOWN = 12
_LEAST = np.float32(1e-6)
_dot = make_dots(1, 1)
_mix2x4, _mix2x2, _mix2x1 = make_mix(2, 4), make_mix(2, 2), make_mix(2, 1)


@jit
def state_size(known):
    """Floats of one state, and behind them a lane that says how many tokens it has seen."""
    return known[HEADS] * known[KEY] * whole_panels(known[VALUE]) + LANES


@jit
def channels(known):
    """Numbers that the convolution passes."""
    return 2 * known[KEY_HEADS] * known[KEY] + known[HEADS] * known[VALUE]


@jit
def _state(known, states, slot, length):
    """Where the state of a sequence after so many tokens is kept."""
    size = state_size(known)
    return states + ((slot * known[RING] + length % known[RING]) * size) * 4


@jit
def _tag(known, states, slot, length):
    """The number that says which state lies there; whole numbers of single precision go beyond any
    context."""
    size = state_size(known)
    return floats(_state(known, states, slot, length) + (size - LANES) * 4, 1)


@jit
def _run_end(slots, positions, first):
    """Behind the last of the rows from `first` on that follow one another in one sequence."""
    r = first + 1
    while r < slots.shape[0] and slots[r] == slots[first] and positions[r] == positions[r - 1] + 1:
        r += 1
    return r


@jit
def _is_kept(known, r, end):
    """Whether the state after a row stays, of a run of rows that ends before `end`."""
    return end - r <= known[RING]


@jit
def _noted(known, slots, positions, states, lacking):
    """Say of states that will be kept that they are there; into `lacking` [1] how long the sequence
    was of which a state is not."""
    first = 0
    while first < slots.shape[0]:
        end, slot, at = _run_end(slots, positions, first), slots[first], positions[first]
        if at > 0 and _tag(known, states, slot, at)[0] != np.float32(at):
            lacking[0] = at
        for r in range(first, end):
            if _is_kept(known, r, end):
                _tag(known, states, slot, positions[r] + 1)[0] = np.float32(positions[r] + 1)
        first = end


@jit
def _convolved(known, given, slots, positions, inputs, out):
    """Silu of a convolution over each channel's last numbers, [n, wide]; the numbers of a row go
    into `inputs` [slots, INPUTS, wide]."""
    count = channels(known)
    padded, width = wide(count), known[WIDTH]
    weights = carray(pointer(known[CONVOLUTION]), (width, padded), np.float32)
    room = np.zeros(padded, dtype=np.float32)
    for r in range(given.shape[0]):
        base = inputs + slots[r] * known[INPUTS] * padded * 4
        own = floats(base + positions[r] % known[INPUTS] * padded * 4, padded)
        for i in range(count):
            own[i] = given[r, i]
            out[r, i] = given[r, i] * weights[width - 1, i]
        for back in range(1, min(width, positions[r] + 1)):
            before = floats(base + (positions[r] - back) % known[INPUTS] * padded * 4, padded)
            for i in range(count):
                out[r, i] += before[i] * weights[width - 1 - back, i]
        for i in range(count):
            room[i] = -out[r, i]
        exp_lanes(address(room), address(room), padded // LANES)
        for i in range(count):
            out[r, i] /= np.float32(1.0) + room[i]


@jit
def _steps(known, given, shares, decays):
    """How much each head writes and keeps, [n, H] each."""
    heads, one = known[HEADS], np.float32(1.0)
    rates, biases = floats(known[DECAY], heads), floats(known[STEP_BIAS], heads)
    for r in range(given.shape[0]):
        for h in range(heads):
            shares[r, h] = one / (one + np.exp(-given[r, h]))
            step = given[r, whole_panels(heads) + h] + biases[h]
            # As torch's softplus, which is a line where nothing would be lost.
            size = step if step > np.float32(20.0) else np.log1p(np.exp(step))
            decays[r, h] = np.exp(-rates[h] * size)


@jit
def _unit(row, at, size, scale, out, to):
    """A query or key of length `scale`, into row `to` of out [2, whole panels]."""
    for i in range(size):
        out[to, i] = row[at + i]
    total = np.empty(1, dtype=np.float32)
    here = address(out) + to * out.shape[1] * 4
    _dot(here, 0, here, 0, out.shape[1] // LANES, address(total), 0)
    factor = np.float32(scale) / np.sqrt(total[0] + _LEAST)
    for i in range(size):
        out[to, i] *= factor


@jit
def _both_read(both, before, size, values, out):
    """What key and query [2, panels] read of a state [size, values], [2, values]."""
    weights, weight_row, row = address(both), both.shape[1] * 4, values * 4
    to, c, panels = address(out), 0, values // LANES
    while c < panels:
        at, there = before + c * LANES * 4, to + c * LANES * 4
        if panels - c >= 4:
            _mix2x4(weights, weight_row, at, row, size, there, row)
            c += 4
        elif panels - c >= 2:
            _mix2x2(weights, weight_row, at, row, size, there, row)
            c += 2
        else:
            _mix2x1(weights, weight_row, at, row, size, there, row)
            c += 1


@jit
def _written(before, after, size, values, decay, key, change):
    """A state [size, values] after a token, from that before it; `change` [values] goes where its
    `key` [1, panels] points."""
    old = carray(pointer(before), (size, values), np.float32)
    new = carray(pointer(after), (size, values), np.float32)
    for i in range(size):
        share = key[0, i]
        for j in range(values):
            new[i, j] = decay * old[i, j] + share * change[j]


@jit
def _head(known, h, rows, gates, shares, decays, slots, positions, states, out):
    """One head of all rows, into out [n, wide(H * VALUE)]; `gates` lie behind what the convolution
    passed."""
    size, value = known[KEY], known[VALUE]
    values, one = whole_panels(value), np.float32(1.0)
    own_key = h * known[KEY_HEADS] // known[HEADS] * size
    keys, behind = known[KEY_HEADS] * size, whole_panels(channels(known))
    both = np.zeros((2, whole_panels(size)), dtype=np.float32)
    found = np.empty((2, values), dtype=np.float32)
    change, given = np.zeros(values, dtype=np.float32), np.zeros(values, dtype=np.float32)
    room = np.zeros(values, dtype=np.float32)
    scratch = np.zeros((size, values), dtype=np.float32)
    nothing = np.zeros((size, values), dtype=np.float32)
    weights, epsilon = floats(known[NORM], value), floats(known[EPSILON], 1)[0]
    total, offset = np.empty(1, dtype=np.float32), h * size * values * 4
    first = 0
    while first < slots.shape[0]:
        end, slot = _run_end(slots, positions, first), slots[first]
        before = address(nothing)
        if positions[first] > 0:
            before = _state(known, states, slot, positions[first]) + offset
        for r in range(first, end):
            _unit(rows[r], keys + own_key, size, 1.0, both, 0)
            _unit(rows[r], own_key, size, 1.0 / np.sqrt(size), both, 1)
            met = address(both)
            _dot(met, 0, met + both.shape[1] * 4, 0, both.shape[1] // LANES, address(total), 0)
            _both_read(both, before, size, values, found)
            share, decay, meets = shares[r, h], decays[r, h], total[0]
            for j in range(value):
                change[j] = share * (rows[r, 2 * keys + h * value + j] - decay * found[0, j])
                given[j] = decay * found[1, j] + meets * change[j]
            after = address(scratch)
            if _is_kept(known, r, end):
                after = _state(known, states, slot, positions[r] + 1) + offset
            _written(before, after, size, values, decay, both, change)
            before = after
            _dot(address(given), 0, address(given), 0, values // LANES, address(total), 0)
            factor = one / np.sqrt(total[0] / np.float32(value) + epsilon)
            for j in range(value):
                room[j] = -gates[r, behind + h * value + j]
            exp_lanes(address(room), address(room), values // LANES)
            for j in range(value):
                gate = gates[r, behind + h * value + j] / (one + room[j])
                out[r, h * value + j] = weights[j] * (given[j] * factor) * gate
        first = end


@njit(nogil=True, error_model="numpy", cache=True, parallel=True)
def _heads_apart(known, rows, gates, shares, decays, slots, positions, states, out, threads):
    for part in prange(threads):
        for h in range(part, known[HEADS], threads):
            _head(known, h, rows, gates, shares, decays, slots, positions, states, out)


@apart(SHAPE, I1, F2, PLACES, I1, F2)
def delta(shape, block, normed, places, slab, out):
    """What heads give of rows [n, wide(d)], into out [n, wide(H * VALUE)].

    `slab`: addresses of states and of inputs of the convolution, slots, and the address where it
    says how long a sequence is whose state it lacks.
    """
    known, threads = integers(block[DELTA], 1, KNOWN)[0], shape.threads
    slots, positions = places
    states, count, heads = slab[0], normed.shape[0], known[HEADS]
    _noted(known, slots, positions, states, integers(slab[3], 1, 1)[0])
    padded = whole_panels(channels(known))
    both = np.empty((count, padded + whole_panels(heads * known[VALUE])), dtype=np.float32)
    product(block[QUERY : QUERY + RECORD], normed, count, both, threads, 0)
    steps = np.empty((count, 2 * whole_panels(heads)), dtype=np.float32)
    product(block[KEY_VALUE : KEY_VALUE + RECORD], normed, count, steps, threads, 0)
    rows = np.empty((count, wide(channels(known))), dtype=np.float32)
    _convolved(known, both, slots, positions, slab[1], rows)
    shares, decays = np.empty((count, heads), np.float32), np.empty((count, heads), np.float32)
    _steps(known, steps, shares, decays)
    if threads > 1 and count > 1:
        _heads_apart(known, rows, both, shares, decays, slots, positions, states, out, threads)
    else:
        for h in range(heads):
            _head(known, h, rows, both, shares, decays, slots, positions, states, out)
