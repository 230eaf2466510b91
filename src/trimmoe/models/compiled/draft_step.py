"""A draft head's layer, row by row: each row is the next pair of a sequence of its own.

Shapes: n rows, d the hidden size, H the width of queries and KV of keys, f the inner width. Of its
memory a sequence has keys and values of its pairs, [G, P, head_wide] each, one table after the
other; `places` [n, 2] gives their address and P.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.np.numpy_support import carray

from trimmoe.models.compiled.apart import apart
from trimmoe.models.compiled.attention import (
    F2,
    I1,
    I2,
    ROTARY,
    SHAPE,
    attend_rows,
    jit,
    pointer,
    rotate,
    weigh,
    whole_panels,
    wide,
    write,
)
from trimmoe.models.compiled.gating import gated_silu
from trimmoe.models.compiled.lanes import LANES
from trimmoe.models.compiled.product import product

JOIN, QUERY, KEY_VALUE, MIX, UP_1, DOWN_1, UP_2, DOWN_2 = range(8)
"""Rows of the table of a head's matrices [8, RECORD], which say where they are."""
STATE_NORM, TOKEN_NORM, QUERY_NORM, NORM_1, NORM_2, LAST_NORM = range(6)
"""Rows of the table of what its norms multiply with, [6, d]."""


@jit
def _norm(shape, x, weight, out, first):
    """RMS norm of the first d of each row of x into out, from column `first` on."""
    size = shape.hidden
    for r in range(x.shape[0]):
        total = np.float32(0.0)
        for i in range(size):
            total += x[r, i] * x[r, i]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + np.float32(shape.epsilon))
        for i in range(size):
            out[r, first + i] = weight[i] * (x[r, i] * factor)


@jit
def _keep(shape, pairs, matrices, positions, places, rotary):
    """Keys and values of pairs [n, wide(2d)] into their sequences' memories."""
    count, size = pairs.shape[0], shape.kv_heads * shape.head
    both = np.empty((count, wide(2 * size)), dtype=np.float32)
    product(matrices[KEY_VALUE], pairs, count, both, 1, 0)
    rotate(both, shape.kv_heads, shape.head, 0, shape.head, rotary, 0, positions)
    here = np.zeros(count, dtype=np.int64), positions
    for r in range(count):
        keys, values = _memory(shape, places[r])
        write(shape, both, both[:, size:], here, r, keys, values)


@jit
def _memory(shape, place):
    """Keys and values of a sequence, [1, G, P, head_wide]."""
    sizes = (1, shape.kv_heads, place[1], shape.head_wide)
    after = shape.kv_heads * place[1] * shape.head_wide * 4
    keys = carray(pointer(place[0]), sizes, np.float32)
    return keys, carray(pointer(place[0] + after), sizes, np.float32)


@jit
def _pairs(shape, norms, states, tokens):
    """States and embeddings [n, d] side by side, normed, [n, wide(2d)]."""
    pairs = np.zeros((states.shape[0], wide(2 * shape.hidden)), dtype=np.float32)
    _norm(shape, states, norms[STATE_NORM], pairs, 0)
    _norm(shape, tokens, norms[TOKEN_NORM], pairs, shape.hidden)
    return pairs


@apart(SHAPE, I2, F2, F2, F2, I1, I2, ROTARY)
def remember(shape, matrices, norms, states, tokens, positions, places, rotary):
    """Keys and values of the pairs of states and embeddings [n, d] at these positions [n]."""
    pairs = _pairs(shape, norms, states, tokens)
    _keep(shape, pairs, matrices, positions, places, rotary)


@apart(SHAPE, types.int64, I2, F2, F2, F2, types.int64, I1, I2, ROTARY, F2, F2)
def draft(
    shape, inner, matrices, norms, states, tokens, ahead, positions, places, rotary, made, named
):
    """The next states into `made` [n, wide(d)], and as the output head reads them into `named`
    [n, wide(d)], padded with zeros, of pairs that are `ahead` of the last that were read, which are
    at `positions` [n] and are these themselves if they are none ahead."""
    count, hidden = states.shape[0], shape.hidden
    pairs = _pairs(shape, norms, states, tokens)
    if ahead == 0:
        _keep(shape, pairs, matrices, positions, places, rotary)
    product(matrices[JOIN], pairs, count, made, 1, 0)
    query = np.empty((count, wide(shape.heads * shape.head)), dtype=np.float32)
    _norm(shape, made, norms[QUERY_NORM], named, 0)
    product(matrices[QUERY], named, count, query, 1, 0)
    rotate(query, shape.heads, shape.head, 0, shape.head, rotary, 0, positions + ahead)
    mixed, added = np.zeros_like(query), np.empty_like(made)
    here = np.zeros(count, dtype=np.int64), positions
    for r in range(count):
        keys, values = _memory(shape, places[r])
        last = positions[r] + 1
        attend_rows(shape, 0, 0, query, here, keys, values, mixed, r, r + 1, last)
    product(matrices[MIX], mixed, count, added, 1, 0)
    made[:, :hidden] += added[:, :hidden]
    for up, down, norm in ((UP_1, DOWN_1, NORM_1), (UP_2, DOWN_2, NORM_2)):
        _norm(shape, made, norms[norm], named, 0)
        opened = np.empty((count, wide(2 * whole_panels(inner))), dtype=np.float32)
        product(matrices[up], named, count, opened, 1, 0)
        product(matrices[down], gated_silu(opened, count, inner), count, added, 1, 0)
        made[:, :hidden] += added[:, :hidden]
    _norm(shape, made, norms[LAST_NORM], named, 0)


@apart(I1, F2, types.int64, I1, types.Array(types.float32, 1, "C"))
def best(matrix, named, count, tokens, chances):
    """The best of a matrix's rows [`count`, d] for each row of `named` [n, wide(d)] by number, into
    `tokens` [n], and the softmax of its score, into `chances` [n]."""
    rows = named.shape[0]
    scores = np.empty((rows, wide(count) + LANES), dtype=np.float32)
    product(matrix, named, rows, scores, 1, 0)
    for r in range(rows):
        found = 0
        for i in range(count):
            if scores[r, i] > scores[r, found]:
                found = i
        tokens[r] = found
    weigh(scores, count, np.empty(LANES, dtype=np.float32))
    for r in range(rows):
        chances[r] = scores[r, tokens[r]]
