"""Attention of one block: queries, keys and values of its rows, compressed or not.

Shapes: n rows, d the hidden size, H heads and G of keys and values. Buffers are `wide`.
"""

from __future__ import annotations

import numpy as np
from numba import types

from trimmoe.models.compiled.apart import apart
from trimmoe.models.compiled.attention import (
    F2,
    I1,
    PLACES,
    ROTARY,
    SHAPE,
    address,
    attention,
    floats,
    head_norm,
    jit,
    norm,
    own_shape,
    rotate,
    slabs_of,
    whole_panels,
    wide,
    write,
)
from trimmoe.models.compiled.columns import (
    ATTENTION_NORM,
    ATTENTION_POST,
    DELTA,
    GATE,
    KEY_BIAS,
    KEY_NORM,
    KEY_VALUE,
    OUTPUT,
    OUTPUT_BIAS,
    QUERY,
    QUERY_BIAS,
    QUERY_NORM,
    SHARED_UP,
    SINKS,
    TURNED_AT,
    VALUE_BIAS,
    VALUE_NORM,
    WINDOW,
)
from trimmoe.models.compiled.delta_step import delta
from trimmoe.models.compiled.kinds import NORM_HEADS, NORM_WHOLE
from trimmoe.models.compiled.lane_functions import exp_lanes
from trimmoe.models.compiled.lanes import LANES
from trimmoe.models.compiled.latent_step import latent_keys, latent_queries, latent_values
from trimmoe.models.compiled.product import DATA, IN, OUT, RECORD, product


@apart(SHAPE, I1, types.int64, F2, types.int64, F2)
def times(shape, block, column, x, rows, out):
    product(block[column : column + RECORD], x, rows, out, shape.threads, 0)


@apart(F2, types.int64, types.int64)
def biased(x, bias, size):
    """Add a vector, of which the address is given, to each row."""
    if bias != 0:
        values = floats(bias, size)
        for r in range(x.shape[0]):
            for i in range(size):
                x[r, i] += values[i]


@jit
def _clip(x, size, limit):
    for r in range(x.shape[0]):
        for i in range(size):
            x[r, i] = min(max(x[r, i], np.float32(-limit)), np.float32(limit))


@jit
def _shaped(shape, block, x, heads, weight, rotary, positions):
    """Norm, clip and turn queries or keys [n, heads * head] in place; `weight` is the norm's."""
    size = heads * shape.head
    if shape.qk_norm == NORM_WHOLE:
        norm(x, weight, size, shape.epsilon, x)
    if shape.clip < np.inf:
        _clip(x, size, shape.clip)
    if shape.qk_norm == NORM_HEADS:
        head_norm(x, heads, shape.head, weight, shape.epsilon)
    rotate(x, heads, shape.head, 0, shape.rotary, rotary, block[TURNED_AT], positions)


@jit
def _queries(shape, block, normed, rotary, positions):
    """Queries [n, wide(H * head)] of rows [n, wide(d)]."""
    count, size = normed.shape[0], shape.heads * shape.head
    query = np.zeros((count, wide(size)), dtype=np.float32)
    if shape.latent > 0:
        latent_queries(shape, block, normed, rotary, positions, query)
        return query
    times(shape, block, QUERY, normed, count, query)
    biased(query, block[QUERY_BIAS], size)
    _shaped(shape, block, query, shape.heads, block[QUERY_NORM], rotary, positions)
    return query


@jit
def _keys_values(shape, block, normed, rotary, positions):
    """Keys and values [n, wide(G * head)] of rows [n, wide(d)]."""
    if shape.latent > 0:
        compressed = np.zeros((normed.shape[0], wide(shape.head)), dtype=np.float32)
        latent_keys(shape, block, normed, rotary, positions, compressed)
        return compressed, compressed
    count, size = normed.shape[0], shape.kv_heads * shape.head
    padded = whole_panels(size)
    both = np.empty((count, 2 * padded), dtype=np.float32)
    times(shape, block, KEY_VALUE, normed, count, both)
    key = np.zeros((count, wide(size)), dtype=np.float32)
    value = np.zeros((count, wide(size)), dtype=np.float32)
    # Of one matrix for both, values are what keys are before anything is done to them.
    behind = padded if block[KEY_VALUE + OUT] > padded else 0
    # Element by element here and elsewhere: slices take the compiler seconds.
    for r in range(count):
        for i in range(size):
            key[r, i], value[r, i] = both[r, i], both[r, behind + i]
    biased(key, block[KEY_BIAS], size)
    biased(value, block[VALUE_BIAS], size)
    _shaped(shape, block, key, shape.kv_heads, block[KEY_NORM], rotary, positions)
    if shape.clip < np.inf:
        _clip(value, size, shape.clip)
    if block[VALUE_NORM] != 0:
        head_norm(value, shape.kv_heads, shape.head, block[VALUE_NORM], shape.epsilon)
    return key, value


@jit
def _gated(shape, block, normed, mixed):
    """Multiply what heads give [n, wide(H * head)] with the sigmoid of its gates, in place."""
    size = block[GATE + OUT]
    gates = np.zeros((normed.shape[0], wide(size)), dtype=np.float32)
    times(shape, block, GATE, normed, normed.shape[0], gates)
    for r in range(normed.shape[0]):
        for i in range(size):
            gates[r, i] = -gates[r, i]
        at = address(gates) + r * gates.shape[1] * 4
        exp_lanes(at, at, (size + LANES - 1) // LANES)
        for i in range(size):
            mixed[r, i] *= np.float32(1.0) / (np.float32(1.0) + gates[r, i])


@jit
def _mixed(shape, block, normed, rotary, places, slab, aside):
    """What the heads of a block give of rows [n, wide(d)], [n, wide]."""
    if block[DELTA] != 0:
        made = np.zeros((normed.shape[0], block[OUTPUT + IN]), dtype=np.float32)
        delta(shape, block, normed, places, slab, made)
        return made
    query = _queries(shape, block, normed, rotary, places[1])
    key, value = _keys_values(shape, block, normed, rotary, places[1])
    mixed, window, sinks = np.zeros_like(query), block[WINDOW], block[SINKS]
    keys, values = slabs_of(shape, slab)
    attention(shape, window, sinks, query, key, value, places, keys, values, aside, mixed)
    if shape.latent > 0:
        expanded = np.zeros((normed.shape[0], wide(shape.heads * shape.value)), dtype=np.float32)
        latent_values(shape, block, mixed, expanded)
        mixed = expanded
    if block[GATE + OUT] > 0:
        _gated(shape, block, normed, mixed)
    return mixed


@apart(SHAPE, I1, F2, ROTARY, PLACES, I1, types.boolean)
def attend(shape, block, hidden, rotary, places, slab, aside):
    """Attention of one block with its residual, on hidden [n, wide(d)] in place; `slab` is where
    what it keeps is, as `segment` has it."""
    count = hidden.shape[0]
    normed = np.zeros_like(hidden)
    norm(hidden, block[ATTENTION_NORM], shape.hidden, shape.epsilon, normed)
    mixed = _mixed(own_shape(shape, block), block, normed, rotary, places, slab, aside)
    after = block[SHARED_UP + DATA]
    product(block[OUTPUT : OUTPUT + RECORD], mixed, count, normed, shape.threads, after)
    biased(normed, block[OUTPUT_BIAS], shape.hidden)
    if block[ATTENTION_POST] != 0:
        norm(normed, block[ATTENTION_POST], shape.hidden, shape.epsilon, normed)
    for r in range(count):
        for i in range(shape.hidden):
            hidden[r, i] += normed[r, i]


@apart(SHAPE, I1, F2, ROTARY, PLACES, I1)
def leave(shape, block, hidden, rotary, places, slab):
    """Only keep what later tokens need of hidden [n, wide] in a block."""
    normed = np.zeros_like(hidden)
    norm(hidden, block[ATTENTION_NORM], shape.hidden, shape.epsilon, normed)
    if block[DELTA] != 0:
        unused = np.zeros((hidden.shape[0], block[OUTPUT + IN]), dtype=np.float32)
        delta(shape, block, normed, places, slab, unused)
        return
    own = own_shape(shape, block)
    key, value = _keys_values(own, block, normed, rotary, places[1])
    keys, values = slabs_of(own, slab)
    for r in range(hidden.shape[0]):
        write(own, key, value, places, r, keys, values)
