"""Rows times matrices of any format, tile by tile.

Each format's product is compiled by itself when a matrix of it is first made, and called by its
address, which the matrix's record holds: the compiler would otherwise go through all tiles again
for every function that multiplies.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, prange, types

from trimmoe.core.precision import GROUP
from trimmoe.models.compiled.lanes import LANES, Format, intrinsic, make_tile

RUN, DATA, SCALES, OFFSETS, FORMAT, OUT, IN = range(7)
"""Columns of a matrix: addresses of its product and its parts, its `Format`, its rows, and its
columns with padding."""
RECORD = 7
_WORTH_THREADS = 1 << 17
"""Steps of sixteen products from which on starting threads pays."""
_BLOCK = 48
"""Rows that stay in the cache while the weights go by."""
_ARGUMENTS = 13
_Q4 = int(Format.Q4)


@cache
def product_of(form: Format) -> Any:
    """The compiled product of a format: panels [first, last) times rows.

    The tiles that it is made of all give the same bits.
    """
    size, grouped = form.panel_bytes, form in (Format.Q8, Format.Q4)
    one8, one4, one2, one1 = (make_tile(form, 1, panels) for panels in (8, 4, 2, 1))
    two4, two1 = make_tile(form, 2, 4), make_tile(form, 2, 1)
    six2, six1 = make_tile(form, 6, 2), make_tile(form, 6, 1)

    def run(w, s, o, k, first, last, x, x_next, rows, g, g_next, out, out_next):
        w_next, s_next = k * size, k // GROUP * LANES * 4 if grouped else 0
        for start in range(0, rows, _BLOCK):
            r, stop = start, min(rows, start + _BLOCK)
            sixes = start + (stop - start) // 6 * 6
            p = first
            while p < last and sixes > start:
                at, a, b = w + p * w_next, s + p * s_next, o + p * s_next
                for r in range(start, sixes, 6):
                    xr, gr, to = x + r * x_next, g + r * g_next, out + r * out_next + p * 64
                    if last - p >= 2:
                        six2(at, w_next, a, b, s_next, xr, x_next, k, gr, g_next, to, out_next)
                    else:
                        six1(at, w_next, a, b, s_next, xr, x_next, k, gr, g_next, to, out_next)
                p += 2
            r = sixes
            while r < stop:
                pair = stop - r >= 2
                xr, gr = x + r * x_next, g + r * g_next
                p = first
                while p < last:
                    at, a, b = w + p * w_next, s + p * s_next, o + p * s_next
                    to = out + r * out_next + p * 64
                    left = last - p
                    if pair and left >= 4:
                        two4(at, w_next, a, b, s_next, xr, x_next, k, gr, g_next, to, out_next)
                        p += 4
                    elif pair:
                        two1(at, w_next, a, b, s_next, xr, x_next, k, gr, g_next, to, out_next)
                        p += 1
                    elif left >= 8:
                        one8(at, w_next, a, b, s_next, xr, x_next, k, gr, g_next, to, out_next)
                        p += 8
                    elif left >= 4:
                        one4(at, w_next, a, b, s_next, xr, x_next, k, gr, g_next, to, out_next)
                        p += 4
                    elif left >= 2:
                        one2(at, w_next, a, b, s_next, xr, x_next, k, gr, g_next, to, out_next)
                        p += 2
                    else:
                        one1(at, w_next, a, b, s_next, xr, x_next, k, gr, g_next, to, out_next)
                        p += 1
                r += 2 if pair else 1

    return cfunc(types.void(*[types.int64] * _ARGUMENTS), cache=True)(run)


@intrinsic
def _call(typingctx, function, w, s, o, k, first, last, x, x_next, rows, g, g_next, out, out_next):  # pyright: ignore
    """Call a product by its address."""

    def generate(context, builder, signature, args):
        integer = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [integer] * _ARGUMENTS)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * (_ARGUMENTS + 1)), generate


@njit(nogil=True, error_model="numpy", cache=True, parallel=True)
def _shared(matrix, panels, threads, x, x_next, rows, g, g_next, out, out_next):
    for part in prange(threads):
        first, last = panels * part // threads, panels * (part + 1) // threads
        _call(
            matrix[RUN], matrix[DATA], matrix[SCALES], matrix[OFFSETS], matrix[IN],
            first, last, x, x_next, rows, g, g_next, out, out_next,
        )  # fmt: skip


@njit(nogil=True, error_model="numpy", cache=True)
def product(matrix, x, rows, out, threads):
    """out[r] = matrix @ x[r] for the first `rows` rows of x [n, >= K] and out [n, >= J].

    `matrix` is a record. Rows of x have zeros behind their end up to the matrix's padded columns;
    rows of out have room for whole panels.
    """
    groups = np.zeros((1, 1), dtype=np.float32)
    if matrix[FORMAT] == _Q4:
        groups = _group_sums(x, rows, matrix[IN])
    panels = (matrix[OUT] + LANES - 1) // LANES
    x_at, x_next = np.int64(x.ctypes.data), x.shape[1] * 4
    g_at, g_next = np.int64(groups.ctypes.data), groups.shape[1] * 4
    out_at, out_next = np.int64(out.ctypes.data), out.shape[1] * 4
    if threads > 1 and panels > threads and rows * panels * matrix[IN] > _WORTH_THREADS:
        _shared(matrix, panels, threads, x_at, x_next, rows, g_at, g_next, out_at, out_next)
    else:
        _call(
            matrix[RUN], matrix[DATA], matrix[SCALES], matrix[OFFSETS], matrix[IN],
            0, panels, x_at, x_next, rows, g_at, g_next, out_at, out_next,
        )  # fmt: skip


@njit(nogil=True, error_model="numpy", cache=True)
def _group_sums(x, rows, k):
    """Sums of the groups of each row, [rows, K / GROUP]."""
    sums = np.zeros((rows, k // GROUP), dtype=np.float32)
    for r in range(rows):
        for j in range(k // GROUP):
            total = np.float32(0.0)
            for i in range(GROUP):
                total += x[r, j * GROUP + i]
            sums[r, j] = total
    return sums
