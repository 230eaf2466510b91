"""Compressed keys and values as the compiled blocks compute them.

Compiled by itself when a model that has them is first opened, and called by its address, as
products are: functions that attend would otherwise be twice as much to compile for everybody.

Shapes: n rows, d the hidden size, H heads, l compressed numbers. Buffers are `wide`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, get_num_threads, types
from numba.np.numpy_support import carray

from trimmoe.models.compiled.attention import (
    address,
    floats,
    integers,
    jit,
    norm,
    pointer,
    rotate,
    whole_panels,
    wide,
)
from trimmoe.models.compiled.columns import (
    COLUMNS,
    KEY_NORM,
    KEY_VALUE,
    LATENTS,
    QUERY,
    QUERY_DOWN,
    QUERY_NORM,
)
from trimmoe.models.compiled.lanes import calling, intrinsic
from trimmoe.models.compiled.product import OUT, RECORD, product

RUN_QUERIES, RUN_KEYS, RUN_EXPAND, HEADS, LATENT, PLAIN, TURNED, VALUE, EPSILON = range(9)
"""Columns of what is known of a block: addresses of the three functions; heads, numbers that are
compressed, of a head those that are not turned, that are, and that it gives; the address of the
epsilon of norms. Behind them, for every head, the records of two matrices: from its query to what
meets compressed keys, and from compressed values to its own."""
KNOWN = 9
_ARGUMENTS = 11


@jit
def _product(info, block, column, x, rows, out, threads):
    product(block[column : column + RECORD], x, rows, out, threads, 0)


@jit
def _of_head(info, head, second, x, rows, out, threads):
    at = KNOWN + (2 * head + second) * RECORD
    product(info[at : at + RECORD], x, rows, out, threads, 0)


@jit
def _queries(info, block, normed, rotary, positions, query, threads):
    """What meets compressed keys, into query [n, wide(H * (l + turned))]."""
    count, heads, size = normed.shape[0], info[HEADS], info[LATENT]
    plain, turned, head = info[PLAIN], info[TURNED], size + info[TURNED]
    own = plain + turned
    read, down = normed, block[QUERY_DOWN + OUT]
    if down > 0:
        read = np.zeros((count, wide(down)), dtype=np.float32)
        _product(info, block, QUERY_DOWN, normed, count, read, threads)
        norm(read, block[QUERY_NORM], down, floats(info[EPSILON], 1)[0], read)
    given = np.empty((count, whole_panels(heads * own)), dtype=np.float32)
    _product(info, block, QUERY, read, count, given, threads)
    x = np.zeros((count, wide(plain)), dtype=np.float32)
    met = np.empty((count, whole_panels(size)), dtype=np.float32)
    for h in range(heads):
        start = h * head
        for r in range(count):
            for i in range(plain):
                x[r, i] = given[r, h * own + i]
            for i in range(turned):
                query[r, start + size + i] = given[r, h * own + plain + i]
        _of_head(info, h, 0, x, count, met, threads)
        for r in range(count):
            for i in range(size):
                query[r, start + i] = met[r, i]
    rotate(query, heads, head, size, turned, rotary, 0, positions)


@jit
def _keys(info, block, normed, rotary, positions, key, threads):
    """Compressed keys, which are the values too, and what is turned of them, into key
    [n, wide(l + turned)]."""
    count, size, head = normed.shape[0], info[LATENT], info[LATENT] + info[TURNED]
    both = np.empty((count, whole_panels(head)), dtype=np.float32)
    _product(info, block, KEY_VALUE, normed, count, both, threads)
    compressed = np.zeros((count, wide(size)), dtype=np.float32)
    for r in range(count):
        for i in range(size):
            compressed[r, i] = both[r, i]
        for i in range(size, head):
            key[r, i] = both[r, i]
    norm(compressed, block[KEY_NORM], size, floats(info[EPSILON], 1)[0], key)
    rotate(key, 1, head, size, info[TURNED], rotary, 0, positions)


@jit
def _expand(info, block, mixed, rotary, positions, out, threads):
    """What heads give of compressed values that were mixed [n, wide(H * (l + turned))], into out
    [n, wide(H * value)]."""
    count, size, value = mixed.shape[0], info[LATENT], info[VALUE]
    head = size + info[TURNED]
    x = np.zeros((count, wide(size)), dtype=np.float32)
    given = np.empty((count, whole_panels(value)), dtype=np.float32)
    for h in range(info[HEADS]):
        for r in range(count):
            for i in range(size):
                x[r, i] = mixed[r, h * head + i]
        _of_head(info, h, 1, x, count, given, threads)
        for r in range(count):
            for i in range(value):
                out[r, h * value + i] = given[r, i]


@jit
def _table(at, rows, columns):
    return carray(pointer(at), (rows, columns), np.float32)


@jit
def _arrays(info, block, x, x_next, count, cosine, sine, positions, out, out_next):
    """Arrays at these addresses; `x_next` and `out_next` are floats from row to row."""
    known = integers(info, 1, KNOWN)[0]
    whole = integers(info, 1, KNOWN + 2 * RECORD * known[HEADS])[0]
    turned = known[TURNED]
    places = integers(positions, 1, count)[0]
    last = places.max() + 1
    tables = _table(cosine, last, turned), _table(sine, last, turned)
    rows, made = _table(x, count, x_next), _table(out, count, out_next)
    return whole, integers(block, 1, COLUMNS)[0], rows, tables, places, made


def _run_queries(info, block, x, x_next, count, cosine, sine, positions, out, out_next, threads):
    known, its, rows, tables, places, made = _arrays(
        info, block, x, x_next, count, cosine, sine, positions, out, out_next
    )
    _queries(known, its, rows, tables, places, made, threads)


def _run_keys(info, block, x, x_next, count, cosine, sine, positions, out, out_next, threads):
    known, its, rows, tables, places, made = _arrays(
        info, block, x, x_next, count, cosine, sine, positions, out, out_next
    )
    _keys(known, its, rows, tables, places, made, threads)


def _run_expand(info, block, x, x_next, count, cosine, sine, positions, out, out_next, threads):
    known, its, rows, tables, places, made = _arrays(
        info, block, x, x_next, count, cosine, sine, positions, out, out_next
    )
    _expand(known, its, rows, tables, places, made, threads)


_FUNCTIONS: tuple[Callable[..., None], ...] = (_run_queries, _run_keys, _run_expand)


@cache
def functions() -> tuple[Any, Any, Any]:
    """What is compiled, by column of its address."""
    # What threads need is named in what is kept of these functions, and is not there before.
    get_num_threads()
    kind = types.void(*[types.int64] * _ARGUMENTS)
    first, second, third = (cfunc(kind, cache=True)(one) for one in _FUNCTIONS)
    return first, second, third


@intrinsic
def _call(
    typingctx, function, info, block, x, x_next, count, cosine, sine, positions, out, out_next,
    threads,
):  # fmt: skip  # pyright: ignore
    """Call one of them by its address."""
    return calling(_ARGUMENTS)


@jit
def latent(shape, block, column, x, rotary, positions, out):
    """Run the function of a column on rows x [n, wide] into `out`."""
    known = integers(block[LATENTS], 1, KNOWN)
    _call(
        known[0, column], block[LATENTS], address(block), address(x), x.shape[1], x.shape[0],
        address(rotary[0]), address(rotary[1]), address(positions), address(out), out.shape[1],
        shape.threads,
    )  # fmt: skip
    # Only their addresses went into the call: without a use after it they would be freed before.
    if x.size < 0 or out.size < 0:
        out[0, 0] = 0.0
