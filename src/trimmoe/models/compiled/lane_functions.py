"""Functions of whole vectors beside products of weights: rounding to sixteen bits, dot products and
weighted sums of rows as attention takes them, and exp."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from trimmoe.core.precision import GROUP
from trimmoe.models.compiled.lanes import (
    F32,
    I16,
    INTS,
    LANES,
    WIDE,
    Emit,
    all_lanes,
    intrinsic,
)


@intrinsic
def round_lanes(typingctx, x, out, scales, groups):  # pyright: ignore
    """Floats as whole numbers of sixteen bits, group by group: x is out times the group's scale.

    Addresses of floats, of int16 and of a float for each of `groups` groups.
    """

    def generate(context, builder, signature, args):
        x, out, scales, groups = args
        emit, b = Emit(builder), builder
        half = LANES * 4
        assert GROUP == 2 * LANES

        def body(group: Any, carried: list[Any]) -> list[Any]:
            there = emit.add(x, emit.times(group, 2 * half))
            values = [emit.load(emit.add(there, i * half), WIDE, 4) for i in range(2)]
            largest = emit.largest(emit.larger(*[emit.magnitude(value) for value in values]))
            scale = b.fdiv(largest, ir.Constant(F32, 32767.0))
            emit.store(scale, emit.add(scales, emit.times(group, 4)))
            is_zero = b.fcmp_ordered("==", largest, ir.Constant(F32, 0.0))
            over = b.fdiv(ir.Constant(F32, 32767.0), largest)
            factor = emit.everywhere(b.select(is_zero, ir.Constant(F32, 0.0), over))
            for i, value in enumerate(values):
                # Adding 1.5 * 2^23 rounds to the nearest integer, which its low bits then are.
                rounded = b.fadd(b.fmul(value, factor), all_lanes(WIDE, 12582912.0))
                whole = b.trunc(b.bitcast(rounded, INTS), ir.VectorType(I16, LANES))
                to = emit.add(emit.times(group, 2 * LANES * 2), i * LANES * 2)
                emit.store(whole, emit.add(out, to))
            return []

        emit.loop(groups, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def sum_lanes(typingctx, whole, scales, groups):  # pyright: ignore
    """What the whole numbers of `round_lanes` stand for, added up group by group, into the floats
    behind the scales. Addresses of int16 and of two floats for each of `groups` groups."""

    def generate(context, builder, signature, args):
        whole, scales, groups = args
        emit, b = Emit(builder), builder
        shorts = ir.VectorType(I16, LANES)

        def body(group: Any, carried: list[Any]) -> list[Any]:
            there = emit.add(whole, emit.times(group, 2 * LANES * 2))
            total = all_lanes(INTS, 0)
            for i in range(2):
                values = emit.load(emit.add(there, i * LANES * 2), shorts, 2)
                total = b.add(total, b.sext(values, INTS))
            scale = emit.load(emit.add(scales, emit.times(group, 4)), F32, 4)
            added = b.fmul(b.sitofp(emit.halved(total, b.add), F32), scale)
            emit.store(added, emit.add(scales, emit.times(b.add(groups, group), 4)))
            return []

        emit.loop(groups, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


def make_dots(rows: int, columns: int) -> Any:
    """An intrinsic: out[r, j] = sum over k of x[r, k] * w[j, k], rows as they lie in memory.

    Sums go by lane and are folded in halves at the end. Arguments, int64: address of w's row 0 and
    bytes between its rows; of x's row 0 and bytes between rows; steps (K over `LANES`); of
    out[0, 0] and bytes between its rows.
    """

    @intrinsic
    def dots(typingctx, w, w_next, x, x_next, steps, out, out_next):  # pyright: ignore
        def generate(context, builder, signature, args):
            w, w_next, x, x_next, steps, out, out_next = args
            emit = Emit(builder)
            ws = [emit.add(w, emit.times(w_next, j)) for j in range(columns)]
            xs = [emit.add(x, emit.times(x_next, r)) for r in range(rows)]

            def body(step: Any, sums: list[Any]) -> list[Any]:
                sums, there = list(sums), emit.times(step, LANES * 4)
                columns_here = [emit.load(emit.add(at, there), WIDE, 4) for at in ws]
                for r in range(rows):
                    row = emit.load(emit.add(xs[r], there), WIDE, 4)
                    for j, column in enumerate(columns_here):
                        sums[r * columns + j] = emit.fused(row, column, sums[r * columns + j])
                return sums

            sums = emit.loop(steps, [all_lanes(WIDE, 0.0)] * (rows * columns), body)
            for r in range(rows):
                for j in range(columns):
                    to = emit.add(emit.add(out, emit.times(out_next, r)), j * 4)
                    emit.store(emit.folded(sums[r * columns + j]), to)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return dots


def make_mix(rows: int, width: int) -> Any:
    """An intrinsic: out[r, c] = sum over t of p[r, t] * v[t, c], c < width * LANES, in t's order.

    Arguments, int64: address of p's row 0 and bytes between rows; of v's row 0 and bytes between
    rows; count of t; of out[0, 0] and bytes between its rows.
    """

    @intrinsic
    def mix(typingctx, p, p_next, v, v_next, count, out, out_next):  # pyright: ignore
        def generate(context, builder, signature, args):
            p, p_next, v, v_next, count, out, out_next = args
            emit = Emit(builder)
            ps = [emit.add(p, emit.times(p_next, r)) for r in range(rows)]

            def body(t: Any, sums: list[Any]) -> list[Any]:
                sums = list(sums)
                start = emit.add(v, builder.mul(t, v_next))
                values = [emit.load(emit.add(start, c * LANES * 4), WIDE, 4) for c in range(width)]
                for r in range(rows):
                    weight = emit.spread(emit.add(ps[r], emit.times(t, 4)))
                    for c, value in enumerate(values):
                        sums[r * width + c] = emit.fused(weight, value, sums[r * width + c])
                return sums

            sums = emit.loop(count, [all_lanes(WIDE, 0.0)] * (rows * width), body)
            for r in range(rows):
                for c in range(width):
                    to = emit.add(emit.add(out, emit.times(out_next, r)), c * LANES * 4)
                    emit.store(sums[r * width + c], to)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return mix


@intrinsic
def exp_lanes(typingctx, x, out, steps):  # pyright: ignore
    """out = exp(x) for `steps` times `LANES` floats at two addresses, which may be the same.

    Cephes' polynomial after taking out powers of two: within 2 units in the last place from -87 to
    88, where it saturates.
    """

    def generate(context, builder, signature, args):
        x, out, steps = args
        emit, b = Emit(builder), builder

        def all_of(value: float) -> Any:
            return all_lanes(WIDE, float(np.float32(value)))

        def body(step: Any, carried: list[Any]) -> list[Any]:
            there = emit.times(step, LANES * 4)
            value = emit.load(emit.add(x, there), WIDE, 4)
            value = b.select(b.fcmp_ordered("<", value, all_of(-87.0)), all_of(-87.0), value)
            value = b.select(b.fcmp_ordered(">", value, all_of(88.0)), all_of(88.0), value)
            scaled = b.fmul(value, all_of(1.44269504088896341))
            # Adding and taking away 1.5 * 2^23 rounds to the nearest integer.
            magic = all_of(12582912.0)
            power = b.fsub(b.fadd(scaled, magic), magic)
            rest = emit.fused(power, all_of(-0.693359375), value)
            rest = emit.fused(power, all_of(2.12194440e-4), rest)
            total = all_of(1.9875691500e-4)
            for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
                total = emit.fused(total, rest, all_of(term))
            total = emit.fused(total, b.fmul(rest, rest), rest)
            total = b.fadd(total, all_of(1.0))
            exponent = b.add(b.fptosi(power, INTS), all_lanes(INTS, 127))
            total = b.fmul(total, b.bitcast(b.shl(exponent, all_lanes(INTS, 23)), WIDE))
            emit.store(total, emit.add(out, there))
            return []

        emit.loop(steps, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
