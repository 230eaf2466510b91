"""Attention of one block: queries, keys and values of its rows, compressed or not.

Shapes: n rows, d the hidden size, H heads and G of keys and values. Buffers are `wide`.
"""

from __future__ import annotations

import numpy as np

from trimmoe.models.compiled.attention import (
    attention,
    floats,
    head_norm,
    jit,
    norm,
    rotate,
    whole_panels,
    wide,
    write,
)
from trimmoe.models.compiled.columns import (
    ATTENTION_NORM,
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
    VALUE_BIAS,
    WINDOW,
)
from trimmoe.models.compiled.kinds import NORM_HEADS, NORM_WHOLE
from trimmoe.models.compiled.latent_step import RUN_EXPAND, RUN_KEYS, RUN_QUERIES, latent
from trimmoe.models.compiled.product import DATA, RECORD, product


@jit
def times(shape, block, column, x, rows, out):
    product(block[column : column + RECORD], x, rows, out, shape.threads, 0)


@jit
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
def _shaped(shape, x, heads, weight, rotary, positions):
    """Norm, clip and turn queries or keys [n, heads * head] in place; `weight` is the norm's."""
    size = heads * shape.head
    if shape.qk_norm == NORM_WHOLE:
        norm(x, weight, size, shape.epsilon, x)
    if shape.clip < np.inf:
        _clip(x, size, shape.clip)
    if shape.qk_norm == NORM_HEADS:
        head_norm(x, heads, shape.head, weight, shape.epsilon)
    rotate(x, heads, shape.head, 0, shape.rotary, rotary, positions)


@jit
def _queries(shape, block, normed, rotary, positions):
    """Queries [n, wide(H * head)] of rows [n, wide(d)]."""
    count, size = normed.shape[0], shape.heads * shape.head
    query = np.zeros((count, wide(size)), dtype=np.float32)
    if shape.latent > 0:
        latent(shape, block, RUN_QUERIES, normed, rotary, positions, query)
        return query
    times(shape, block, QUERY, normed, count, query)
    biased(query, block[QUERY_BIAS], size)
    _shaped(shape, query, shape.heads, block[QUERY_NORM], rotary, positions)
    return query


@jit
def _keys_values(shape, block, normed, rotary, positions):
    """Keys and values [n, wide(G * head)] of rows [n, wide(d)]."""
    if shape.latent > 0:
        compressed = np.zeros((normed.shape[0], wide(shape.head)), dtype=np.float32)
        latent(shape, block, RUN_KEYS, normed, rotary, positions, compressed)
        return compressed, compressed
    count, size = normed.shape[0], shape.kv_heads * shape.head
    padded = whole_panels(size)
    both = np.empty((count, 2 * padded), dtype=np.float32)
    times(shape, block, KEY_VALUE, normed, count, both)
    key = np.zeros((count, wide(size)), dtype=np.float32)
    value = np.zeros((count, wide(size)), dtype=np.float32)
    # Element by element here and elsewhere: slices take the compiler seconds.
    for r in range(count):
        for i in range(size):
            key[r, i], value[r, i] = both[r, i], both[r, padded + i]
    biased(key, block[KEY_BIAS], size)
    biased(value, block[VALUE_BIAS], size)
    _shaped(shape, key, shape.kv_heads, block[KEY_NORM], rotary, positions)
    if shape.clip < np.inf:
        _clip(value, size, shape.clip)
    return key, value


@jit
def attend(shape, block, hidden, rotary, places, keys, values, aside):
    """Attention of one block with its residual, on hidden [n, wide(d)] in place."""
    count = hidden.shape[0]
    normed = np.zeros_like(hidden)
    norm(hidden, block[ATTENTION_NORM], shape.hidden, shape.epsilon, normed)
    query = _queries(shape, block, normed, rotary, places[1])
    key, value = _keys_values(shape, block, normed, rotary, places[1])
    mixed, window, sinks = np.zeros_like(query), block[WINDOW], block[SINKS]
    attention(shape, window, sinks, query, key, value, places, keys, values, aside, mixed)
    if shape.latent > 0:
        expanded = np.zeros((count, wide(shape.heads * shape.value)), dtype=np.float32)
        latent(shape, block, RUN_EXPAND, mixed, rotary, places[1], expanded)
        mixed = expanded
    after = block[SHARED_UP + DATA]
    product(block[OUTPUT : OUTPUT + RECORD], mixed, count, normed, shape.threads, after)
    biased(normed, block[OUTPUT_BIAS], shape.hidden)
    for r in range(count):
        for i in range(shape.hidden):
            hidden[r, i] += normed[r, i]


@jit
def leave(shape, block, hidden, rotary, places, keys, values):
    """Only write the keys and values that hidden [n, wide] has in a block."""
    normed = np.zeros_like(hidden)
    norm(hidden, block[ATTENTION_NORM], shape.hidden, shape.epsilon, normed)
    key, value = _keys_values(shape, block, normed, rotary, places[1])
    for r in range(hidden.shape[0]):
        write(shape, key, value, places, r, keys, values)
