"""Compressed keys and values as the compiled blocks compute them.

Compiled when a model that has them is first opened.

Shapes: n rows, d the hidden size, H heads, l compressed numbers. Buffers are `wide`.
"""

from __future__ import annotations

import numpy as np

from trimmoe.models.compiled.apart import apart
from trimmoe.models.compiled.attention import (
    F2,
    I1,
    ROTARY,
    SHAPE,
    floats,
    integers,
    jit,
    norm,
    rotate,
    whole_panels,
    wide,
)
from trimmoe.models.compiled.columns import (
    KEY_NORM,
    KEY_VALUE,
    LATENTS,
    QUERY,
    QUERY_DOWN,
    QUERY_NORM,
)
from trimmoe.models.compiled.product import OUT, RECORD, product

HEADS, LATENT, PLAIN, TURNED, VALUE, EPSILON = range(6)
"""Columns of what is known of a block: heads, numbers that are compressed, of a head those that are
not turned, that are, and that it gives; the address of the epsilon of norms. Behind them, for every
head, the records of two matrices: from its query to what meets compressed keys, and from compressed
values to its own."""
KNOWN = 6


@jit
def _known(block):
    """What is known of a block, with the records of all heads."""
    at = block[LATENTS]
    heads = integers(at, 1, KNOWN)[0, HEADS]
    return integers(at, 1, KNOWN + 2 * RECORD * heads)[0]


@jit
def _product(shape, block, column, x, out):
    product(block[column : column + RECORD], x, x.shape[0], out, shape.threads, 0)


@jit
def _of_head(shape, info, head, second, x, out):
    at = KNOWN + (2 * head + second) * RECORD
    product(info[at : at + RECORD], x, x.shape[0], out, shape.threads, 0)


@apart(SHAPE, I1, F2, ROTARY, I1, F2)
def latent_queries(shape, block, normed, rotary, positions, query):
    """What meets compressed keys, into query [n, wide(H * (l + turned))]."""
    info = _known(block)
    count, heads, size = normed.shape[0], info[HEADS], info[LATENT]
    plain, turned, head = info[PLAIN], info[TURNED], size + info[TURNED]
    own = plain + turned
    read, down = normed, block[QUERY_DOWN + OUT]
    if down > 0:
        read = np.zeros((count, wide(down)), dtype=np.float32)
        _product(shape, block, QUERY_DOWN, normed, read)
        norm(read, block[QUERY_NORM], down, floats(info[EPSILON], 1)[0], read)
    given = np.empty((count, whole_panels(heads * own)), dtype=np.float32)
    _product(shape, block, QUERY, read, given)
    x = np.zeros((count, wide(plain)), dtype=np.float32)
    met = np.empty((count, whole_panels(size)), dtype=np.float32)
    for h in range(heads):
        start = h * head
        for r in range(count):
            for i in range(plain):
                x[r, i] = given[r, h * own + i]
            for i in range(turned):
                query[r, start + size + i] = given[r, h * own + plain + i]
        _of_head(shape, info, h, 0, x, met)
        for r in range(count):
            for i in range(size):
                query[r, start + i] = met[r, i]
    rotate(query, heads, head, size, turned, rotary, 0, positions)


@apart(SHAPE, I1, F2, ROTARY, I1, F2)
def latent_keys(shape, block, normed, rotary, positions, key):
    """Compressed keys, which are the values too, and what is turned of them, into key
    [n, wide(l + turned)]."""
    info = _known(block)
    count, size, head = normed.shape[0], info[LATENT], info[LATENT] + info[TURNED]
    both = np.empty((count, whole_panels(head)), dtype=np.float32)
    _product(shape, block, KEY_VALUE, normed, both)
    compressed = np.zeros((count, wide(size)), dtype=np.float32)
    for r in range(count):
        for i in range(size):
            compressed[r, i] = both[r, i]
        for i in range(size, head):
            key[r, i] = both[r, i]
    norm(compressed, block[KEY_NORM], size, floats(info[EPSILON], 1)[0], key)
    rotate(key, 1, head, size, info[TURNED], rotary, 0, positions)


@apart(SHAPE, I1, F2, F2)
def latent_values(shape, block, mixed, out):
    """What heads give of compressed values that were mixed [n, wide(H * (l + turned))], into out
    [n, wide(H * value)]."""
    info = _known(block)
    count, size, value = mixed.shape[0], info[LATENT], info[VALUE]
    head = size + info[TURNED]
    x = np.zeros((count, wide(size)), dtype=np.float32)
    given = np.empty((count, whole_panels(value)), dtype=np.float32)
    for h in range(info[HEADS]):
        for r in range(count):
            for i in range(size):
                x[r, i] = mixed[r, h * head + i]
        _of_head(shape, info, h, 1, x, given)
        for r in range(count):
            for i in range(value):
                out[r, h * value + i] = given[r, i]
