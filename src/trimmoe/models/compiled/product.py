"""Rows times matrices of any format, tile by tile.

Each format's product is compiled by itself when a matrix of it is first made, and called by its
address, which the matrix's record holds: the compiler would otherwise go through all tiles again
for every function that multiplies.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite.binding import get_host_cpu_features
from numba import cfunc, njit, prange, types
from numba.misc.special import literally

from trimmoe.core.precision import GROUP
from trimmoe.models.compiled.apart import apart
from trimmoe.models.compiled.lane_functions import round_lanes, sum_lanes
from trimmoe.models.compiled.lanes import LANES, SUMS_AT_ONCE, Format, calling, intrinsic
from trimmoe.models.compiled.tiles import tile

RUN, DATA, SCALES, OFFSETS, NEXT, END, FORMAT, OUT, IN = range(9)
"""Columns of a matrix: addresses of its product and its first panel's parts, bytes between panels,
the address where it ends together with the matrices that are read after it, its `Format`, its rows,
and its columns with padding."""
RECORD = 9
_WORTH_THREADS = 1 << 17
"""Steps of sixteen products from which on starting threads pays."""
_BLOCK = 48
"""Rows that stay in the cache while the weights go by."""
_ARGUMENTS = 16
# Panels of a tile of many rows, and how many are many for weights in eight bits, which have two
# accumulators each: what a tile adds up must fit into the registers. Of those there are thirty-two
# of a panel's width with AVX-512; elsewhere sixteen, and a panel takes two.
_MANY, _Q8_ROWS = (2, 6) if get_host_cpu_features().get("avx512f") else (1, 3)
_Q8 = int(Format.Q8)
_I1, _F2 = types.Array(types.int64, 1, "C"), types.Array(types.float32, 2, "C")
# Weights come from memory as fast as it gives them where they are read from one end to the other, a
# panel at a time for all rows, and what comes so many bytes later is fetched meanwhile: far enough
# for memory to answer in time. That pays for so many rows, for more of them in whole numbers, with
# so few in a tile. Unpacking few bits for one row takes as long as fetching two panels.
# With an instruction that adds products up, more rows have enough to do sooner.
_FAR, _SOME, _SOME_WHOLE, _FEW = 8192, 8, 8 if SUMS_AT_ONCE else 32, 4
_ONE, _TWO = 1, 2


@njit(nogil=True, error_model="numpy", cache=True)
def _ahead(at, size, end, after):
    """How far from `at` lies what is read after `size` bytes from there: right behind them, or, if
    that is beyond `end`, at `after`, from its beginning on; 0 if nobody knows."""
    beyond = at + size - end
    if beyond < 0:
        return size
    return after + beyond - at if after != 0 else 0


@njit(nogil=True, error_model="numpy", cache=True)
def _far(size):
    """How far ahead is fetched, in whole pieces of so many bytes."""
    return (_FAR + size - 1) // size * size


@njit(nogil=True, error_model="numpy", cache=True)
def _run(form, many, one, w, s, o, wn, end, after, k, first, last, x, xn, rows, g, gn, out, on):
    # Distances: wn from panel to panel, xn, gn and on from row to row.
    form, many, one = literally(form), literally(many), literally(one)
    far, some = _far(wn), _SOME if form < _Q8 else _SOME_WHOLE
    # Panels of one tile fetch those of the next, not each other.
    far_of_tile = _far(one * wn)
    for start in range(0, rows, _BLOCK):
        stop = min(rows, start + _BLOCK)
        whole = start + (stop - start) // many * many if stop - start > some else start
        p = first
        while p < last and whole > start:
            at, a, b = w + p * wn, s + p * wn, o + p * wn
            for r in range(start, whole, many):
                xr, gr, to = x + r * xn, g + r * gn, out + r * on + p * 64
                if last - p >= _MANY:
                    tile(form, many, _MANY, at, a, b, wn, xr, xn, k, gr, gn, to, on, 0)
                else:
                    tile(form, many, 1, at, a, b, wn, xr, xn, k, gr, gn, to, on, 0)
            p += _MANY
        p = first
        while p < last and whole < stop:
            at, a, b = w + p * wn, s + p * wn, o + p * wn
            to = out + p * 64
            if one > 1 and stop - whole == 1 and last - p >= one:
                ahead = _ahead(at, far_of_tile, end, after)
                xr, gr, to = x + whole * xn, g + whole * gn, to + whole * on
                tile(form, 1, one, at, a, b, wn, xr, xn, k, gr, gn, to, on, ahead)
                p += one
                continue
            ahead = _ahead(at, far, end, after)
            for r in range(whole, stop, _FEW):
                few, xr, gr, tr = stop - r, x + r * xn, g + r * gn, to + r * on
                if few >= _FEW:
                    tile(form, _FEW, 1, at, a, b, wn, xr, xn, k, gr, gn, tr, on, ahead)
                elif few == 3:
                    tile(form, 3, 1, at, a, b, wn, xr, xn, k, gr, gn, tr, on, ahead)
                elif few == 2:
                    tile(form, 2, 1, at, a, b, wn, xr, xn, k, gr, gn, tr, on, ahead)
                else:
                    tile(form, 1, 1, at, a, b, wn, xr, xn, k, gr, gn, tr, on, ahead)
            p += 1


def _f32(w, s, o, wn, end, after, k, first, last, x, xn, rows, g, gn, out, on):
    _run(0, 6, _ONE, w, s, o, wn, end, after, k, first, last, x, xn, rows, g, gn, out, on)


def _bf16(w, s, o, wn, end, after, k, first, last, x, xn, rows, g, gn, out, on):
    _run(1, 6, _ONE, w, s, o, wn, end, after, k, first, last, x, xn, rows, g, gn, out, on)


def _q8(w, s, o, wn, end, after, k, first, last, x, xn, rows, g, gn, out, on):
    _run(2, _Q8_ROWS, _ONE, w, s, o, wn, end, after, k, first, last, x, xn, rows, g, gn, out, on)


def _q4(w, s, o, wn, end, after, k, first, last, x, xn, rows, g, gn, out, on):
    _run(3, _Q8_ROWS, _TWO, w, s, o, wn, end, after, k, first, last, x, xn, rows, g, gn, out, on)


def _q2(w, s, o, wn, end, after, k, first, last, x, xn, rows, g, gn, out, on):
    _run(4, _Q8_ROWS, _TWO, w, s, o, wn, end, after, k, first, last, x, xn, rows, g, gn, out, on)


def _q3(w, s, o, wn, end, after, k, first, last, x, xn, rows, g, gn, out, on):
    _run(5, _Q8_ROWS, _TWO, w, s, o, wn, end, after, k, first, last, x, xn, rows, g, gn, out, on)


_PRODUCTS = {
    Format.F32: _f32,
    Format.BF16: _bf16,
    Format.Q8: _q8,
    Format.Q4: _q4,
    Format.Q2: _q2,
    Format.Q3: _q3,
}


@cache
def product_of(form: Format) -> Any:
    """The compiled product of a format: panels [first, last) times rows.

    The tiles that it is made of all give the same bits. What is compiled is kept for the next
    process, which functions that close over something would not be.
    """
    return cfunc(types.void(*[types.int64] * _ARGUMENTS), cache=True)(_PRODUCTS[form])


@intrinsic
def _call(
    typingctx, function, w, s, o, w_next, end, after, k, first, last, x, x_next, rows, g, g_next,
    out, out_next,
):  # fmt: skip  # pyright: ignore
    """Call a product by its address."""
    return calling(_ARGUMENTS)


@njit(nogil=True, error_model="numpy", cache=True, parallel=True)
def _shared(matrix, panels, threads, x, x_next, rows, g, g_next, out, out_next):
    for part in prange(threads):
        first, last = panels * part // threads, panels * (part + 1) // threads
        _call(
            matrix[RUN], matrix[DATA], matrix[SCALES], matrix[OFFSETS], matrix[NEXT], matrix[END],
            0, matrix[IN], first, last, x, x_next, rows, g, g_next, out, out_next,
        )  # fmt: skip


@apart(_I1, _F2, types.int64, _F2, types.int64, types.int64)
def product(matrix, x, rows, out, threads, after):
    """out[r] = matrix @ x[r] for the first `rows` rows of x [n, >= K] and out [n, >= J].

    `matrix` is a record; `after` is the address of what is read once all is read that it ends
    with, or 0. Rows of x have zeros behind their end up to the matrix's padded columns;
    rows of out have room for whole panels.
    """
    groups = np.zeros((1, 1), dtype=np.float32)
    panels = (matrix[OUT] + LANES - 1) // LANES
    x_at, x_next = np.int64(x.ctypes.data), x.shape[1] * 4
    whole = np.zeros((1, 1), dtype=np.int16)
    if matrix[FORMAT] >= _Q8:
        whole, groups = _rounded(x, rows, matrix[IN], matrix[FORMAT] > _Q8)
        x_at, x_next = np.int64(whole.ctypes.data), whole.shape[1] * 2
    g_at, g_next = np.int64(groups.ctypes.data), groups.shape[1] * 4
    out_at, out_next = np.int64(out.ctypes.data), out.shape[1] * 4
    if threads > 1 and panels > threads and rows * panels * matrix[IN] > _WORTH_THREADS:
        _shared(matrix, panels, threads, x_at, x_next, rows, g_at, g_next, out_at, out_next)
    else:
        _call(
            matrix[RUN], matrix[DATA], matrix[SCALES], matrix[OFFSETS], matrix[NEXT], matrix[END],
            after, matrix[IN], 0, panels, x_at, x_next, rows, g_at, g_next, out_at, out_next,
        )  # fmt: skip
    # Only their addresses went into the call: without a use after it they would be freed before.
    if whole.size < 0 or groups.size < 0:
        out[0, 0] = 0.0


@njit(nogil=True, error_model="numpy", cache=True)
def _rounded(x, rows, k, with_sums):
    """Rows as whole numbers [rows, K], and of each the scales of its groups and then, where weights
    have offsets, their sums, [rows, 2 * K / GROUP]."""
    whole = np.empty((rows, k), dtype=np.int16)
    scales = np.empty((rows, 2 * (k // GROUP)), dtype=np.float32)
    for r in range(rows):
        x_at = np.int64(x.ctypes.data) + r * x.shape[1] * 4
        whole_at = np.int64(whole.ctypes.data) + r * k * 2
        scales_at = np.int64(scales.ctypes.data) + r * scales.shape[1] * 4
        round_lanes(x_at, whole_at, scales_at, k // GROUP)
        if with_sums:
            sum_lanes(whole_at, scales_at, k // GROUP)
    return whole, scales
