"""Products of sixteen lanes, written out for the compiler: the order of every sum is fixed.

Weights are stored in *panels*: sixteen rows of a matrix side by side, so that a lane is an output
and adds up its own products from the first to the last. A tile multiplies R rows of states with P
panels; whatever R and P are, an output is the same sum in the same order, bit for bit. Weights of
eight bits or fewer are multiplied as whole numbers with states of sixteen, which is three times as
quick as in floats and, within 1/65534 of the largest state of a group, the same. Addresses are
passed as integers; whoever calls keeps the arrays alive.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic as numba_intrinsic

from trimmoe.core.precision import GROUP

LANES = 16
_STRETCH = 512
"""Columns that are added up by themselves, where weights are not quantised."""
_UNROLLED = 4
LINE = 64
"""Bytes of a cache line."""
_FETCHING_ROWS = 4


class Format(IntEnum):
    """How weights are stored."""

    F32 = 0
    BF16 = 1
    """The upper half of a float32."""
    Q8 = 2
    """An int8 per weight, two columns side by side; a group is multiplied by its scale."""
    Q4 = 3
    """Four bits per weight, times the group's scale, plus its offset; both are bfloat16. A byte has
    two weights of one half of a group each, the first in its low bits, and two columns lie side by
    side as in Q8."""
    Q2 = 4
    """The same with two bits: a byte has four weights, one of each quarter of a group."""

    @property
    def panel_bytes(self) -> int:
        """What a column of a panel takes."""
        return (64, 32, 16, 8, 4)[self]

    @property
    def per_byte(self) -> int:
        """Weights that share a byte, of those quantised."""
        return {Format.Q8: 1, Format.Q4: 2, Format.Q2: 4}[self]

    @property
    def scale_bytes(self) -> int:
        """What a group's scale takes, and its offset if there is one."""
        return {Format.Q8: 4, Format.Q4: 2, Format.Q2: 2}[self]


def intrinsic(code: Any) -> Any:
    """What compiled code calls without the argument that the compiler takes for itself."""
    return numba_intrinsic(code)


def calling(count: int) -> Any:
    """Signature and code of an `intrinsic` that calls a function by its address, with so many
    integers; the function gives nothing."""

    def generate(context, builder, signature, args):  # pyright: ignore
        integer = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [integer] * count)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * (count + 1)), generate


_F32, _I64, _I32, _I16, _I8 = (ir.FloatType(), *map(ir.IntType, (64, 32, 16, 8)))
_WIDE = ir.VectorType(_F32, LANES)
_INTS = ir.VectorType(_I32, LANES)
_SHORTS, _BYTES = ir.VectorType(_I16, 2 * LANES), ir.VectorType(_I8, 2 * LANES)
# Elsewhere the same products and sums are written out: whole numbers come out alike.
_HAS_512 = bool(get_host_cpu_features().get("avx512bw"))
_PAIRS_AT_ONCE = "llvm.x86.avx512.pmaddw.d.512" if _HAS_512 else ""
_FETCHED = 0, 3 if _HAS_512 else 2, 1
"""To be read, into the first or the second cache, and data. The first one can wait for few lines at
a time, of which loads of half a line take more: measured, int8 is an eighth quicker from the first
where a load is a line, and half as quick where it is not."""


def _const(value: int) -> Any:
    return ir.Constant(_I64, value)


def _all(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * LANES)


class _Emit:
    """What tiles are made of, on one IR builder."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def at(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: Any, kind: Any, align: int) -> Any:
        return self.builder.load(self.at(address, kind), align=align)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.at(address, value.type), align=4)

    def add(self, address: Any, offset: Any) -> Any:
        return self.builder.add(address, _const(offset) if isinstance(offset, int) else offset)

    def times(self, value: Any, factor: int) -> Any:
        return self.builder.mul(value, _const(factor))

    def spread(self, address: Any) -> Any:
        """The float at an address in all lanes."""
        return self.everywhere(self.load(address, _F32, 4))

    def everywhere(self, scalar: Any) -> Any:
        """A scalar in all lanes."""
        nothing = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        one = self.builder.insert_element(nothing, scalar, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(one, nothing, _all(_INTS, 0))

    def widened(self, address: Any) -> Any:
        """Sixteen bfloat16 at an address as floats."""
        halves = self.builder.zext(self.load(address, ir.VectorType(_I16, LANES), 2), _INTS)
        return self.builder.bitcast(self.builder.shl(halves, _all(_INTS, 16)), _WIDE)

    def fetch(self, address: Any) -> None:
        """Have the cache line at an address brought near; nothing where there is none."""
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        how = (ir.Constant(_I32, each) for each in _FETCHED)
        self._called("llvm.prefetch.p0", kind, [self.at(address, _I8), *how])

    def pair(self, address: Any) -> Any:
        """The two int16 at an address in all pairs of lanes."""
        return self.builder.bitcast(self.everywhere(self.load(address, _I32, 4)), _SHORTS)

    def multiplied(self, a: Any, b: Any) -> Any:
        """Products of int16, pairs of neighbours added up."""
        if _PAIRS_AT_ONCE:
            return self._called(_PAIRS_AT_ONCE, ir.FunctionType(_INTS, [_SHORTS] * 2), [a, b])
        long = ir.VectorType(_I32, 2 * LANES)
        products = self.builder.mul(self.builder.sext(a, long), self.builder.sext(b, long))
        nothing = ir.Constant(long, ir.Undefined)
        even, odd = (
            self.builder.shuffle_vector(
                products, nothing, ir.Constant(_INTS, list(range(first, 2 * LANES, 2)))
            )
            for first in (0, 1)
        )
        return self.builder.add(even, odd)

    def magnitude(self, value: Any) -> Any:
        """Floats without their signs."""
        bits = self.builder.and_(self.builder.bitcast(value, _INTS), _all(_INTS, 0x7FFFFFFF))
        return self.builder.bitcast(bits, _WIDE)

    def larger(self, a: Any, b: Any) -> Any:
        """The larger one in each lane."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def largest(self, vector: Any) -> Any:
        """The largest lane."""
        return self.halved(vector, self.larger)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once where the processor can."""
        kind = ir.FunctionType(_WIDE, [_WIDE] * 3)
        return self._called(f"llvm.fmuladd.v{LANES}f32", kind, [a, b, c])

    def _called(self, name: str, kind: Any, values: list[Any]) -> Any:
        function = self.builder.module.globals.get(name)
        if function is None:
            function = ir.Function(self.builder.module, kind, name=name)
        return self.builder.call(function, values)

    def folded(self, vector: Any) -> Any:
        """The sum of the lanes, in halves."""
        return self.halved(vector, self.builder.fadd)

    def halved(self, vector: Any, joined: Callable[[Any, Any], Any]) -> Any:
        """All lanes joined, half with half."""
        width = LANES
        while width > 1:
            width //= 2
            undefined = ir.Constant(vector.type, ir.Undefined)
            kind = ir.VectorType(_I32, width)
            low = ir.Constant(kind, list(range(width)))
            high = ir.Constant(kind, list(range(width, 2 * width)))
            vector = joined(
                self.builder.shuffle_vector(vector, undefined, low),
                self.builder.shuffle_vector(vector, undefined, high),
            )
        return self.builder.extract_element(vector, ir.Constant(_I32, 0))

    def loop(
        self, count: Any, starts: list[Any], body: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """Run `body` for 0 .. count - 1, at least once, carrying values along."""
        builder = self.builder
        before, inside = builder.block, builder.append_basic_block("inside")
        after = builder.append_basic_block("after")
        builder.branch(inside)
        builder.position_at_end(inside)
        index = builder.phi(_I64)
        index.add_incoming(_const(0), before)
        carried = []
        for start in starts:
            phi = builder.phi(start.type)
            phi.add_incoming(start, before)
            carried.append(phi)
        results = body(index, carried)
        following = builder.add(index, _const(1))
        last = builder.block
        index.add_incoming(following, last)
        for phi, result in zip(carried, results, strict=True):
            phi.add_incoming(result, last)
        builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
        builder.position_at_end(after)
        return results


def _column(emit: _Emit, form: Format, address: Any) -> Any:
    """The column stored at an address of a panel, as floats."""
    if form is Format.F32:
        return emit.load(address, _WIDE, 4)
    return emit.widened(address)


class _Tile(_Emit):
    """A tile being written: R rows of states at `xs` times P panels at `ws`."""

    def __init__(
        self, builder: Any, form: Format, xs: list[Any], ws: list[Any], ahead: Any
    ) -> None:
        super().__init__(builder)
        self.form, self.xs, self.ws, self.ahead = form, xs, ws, ahead

    def fetch_ahead(self, starts: list[Any], offset: Any, size: int) -> None:
        """Have fetched what lies `ahead` of so many bytes from an offset on, of each panel, if few
        rows leave time for it: more rows take longer to multiply than weights to come."""
        if len(self.xs) > _FETCHING_ROWS:
            return
        for start in starts:
            there = self.add(self.add(start, offset), self.ahead)
            for line in range(0, size, LINE):
                self.fetch(self.add(there, line))

    def stretch(self, start: Any, columns: Any) -> list[Any]:
        """Sums over so many columns from `start` on, by row and panel."""

        def body(step: Any, sums: list[Any]) -> list[Any]:
            sums = list(sums)
            first = self.times(step, _UNROLLED)
            offset = self.times(self.add(start, first), self.form.panel_bytes)
            self.fetch_ahead(self.ws, offset, _UNROLLED * self.form.panel_bytes)
            for more in range(_UNROLLED):
                self._one(start, self.add(first, more), sums)
            return sums

        count = self.builder.udiv(columns, _const(_UNROLLED))
        return self.loop(count, [_all(_WIDE, 0.0)] * (len(self.xs) * len(self.ws)), body)

    def _one(self, start: Any, at: Any, sums: list[Any]) -> None:
        column = self.add(start, at)
        offset = self.times(column, self.form.panel_bytes)
        columns = [_column(self, self.form, self.add(w, offset)) for w in self.ws]
        for r, x in enumerate(self.xs):
            spread = self.spread(self.add(x, self.times(column, 4)))
            for p, weights in enumerate(columns):
                i = r * len(self.ws) + p
                sums[i] = self.fused(spread, weights, sums[i])

    def pairs(self, panel: Any, group: Any, number: int) -> list[Any]:
        """The pairs of columns whose weights share the bytes of this number in a group, as int16.

        They are every `pairs_apart`th pair of the group.
        """
        b, here = self.builder, self.times(group, GROUP * self.form.panel_bytes)
        stored = self.load(self.add(self.add(panel, here), number * 2 * LANES), _BYTES, 1)
        if self.form is Format.Q8:
            return [b.sext(stored, _SHORTS)]
        bits, whole = 8 // self.form.per_byte, b.zext(stored, _SHORTS)
        low = ir.Constant(_SHORTS, [(1 << bits) - 1] * (2 * LANES))
        shifts = (ir.Constant(_SHORTS, [bits * i] * (2 * LANES)) for i in range(8 // bits))
        return [b.and_(b.lshr(whole, shift), low) for shift in shifts]

    @property
    def pairs_apart(self) -> int:
        return GROUP // 2 // self.form.per_byte


@intrinsic
def tile(
    typingctx, form, rows, panels, w, s, o, w_next, x, x_next, k, g, g_next, out, out_next, ahead
):  # pyright: ignore
    """out[r, 16 p + lane] = sum over k of x[r, k] * panel p [k, lane].

    Arguments, int64: the format, how many rows and panels, all three literal; addresses of the
    first panel's weights, its scales and its offsets, and bytes between panels; of x's row 0 and
    bytes between rows; columns K, a multiple of `GROUP`; of what is known of x's groups and bytes
    between rows; of out and bytes between its rows; how many bytes `ahead` of what is read that
    lies which is read later. Of quantised weights x is int16, as `round_lanes` gives it, with the
    scales of its groups and, where weights have offsets, behind all of those the sums of its
    groups.
    """
    if not all(isinstance(each, types.IntegerLiteral) for each in (form, rows, panels)):
        raise RequireLiteralValue("a tile's format and size")
    made = Format(form.literal_value), rows.literal_value, panels.literal_value

    def generate(context, builder, signature, args):
        _tiled(_Emit(builder), *made, *args[3:])
        return context.get_dummy_value()

    return types.void(form, rows, panels, *[types.int64] * 12), generate


def _tiled(
    emit: _Emit, form: Format, rows: int, panels: int,
    w: Any, s: Any, o: Any, w_next: Any, x: Any, x_next: Any, k: Any,
    g: Any, g_next: Any, out: Any, out_next: Any, ahead: Any,
) -> None:  # fmt: skip
    def spaced(first: Any, distance: Any, count: int) -> list[Any]:
        return [emit.add(first, emit.times(distance, i)) for i in range(count)]

    xs, ws = spaced(x, x_next, rows), spaced(w, w_next, panels)
    tile, outs = _Tile(emit.builder, form, xs, ws, ahead), spaced(out, out_next, rows)
    places = [emit.add(at, p * LANES * 4) for at in outs for p in range(panels)]
    if form in (Format.F32, Format.BF16):
        _stretched(tile, places, k)
        return
    offsets = None if form is Format.Q8 else spaced(o, w_next, panels)
    sums = _integers(tile, spaced(s, w_next, panels), offsets, spaced(g, g_next, rows), k)
    for place, total in zip(places, sums, strict=True):
        emit.store(total, place)


def _stretched(tile: _Tile, places: list[Any], k: Any) -> None:
    """Add up stretch by stretch, in the place of the result."""
    b = tile.builder
    for place in places:
        tile.store(_all(_WIDE, 0.0), place)

    def body(block: Any, carried: list[Any]) -> list[Any]:
        start = tile.times(block, _STRETCH)
        left = b.sub(k, start)
        short = b.icmp_signed("<", left, _const(_STRETCH))
        sums = tile.stretch(start, b.select(short, left, _const(_STRETCH)))
        for place, total in zip(places, sums, strict=True):
            tile.store(b.fadd(tile.load(place, _WIDE, 4), total), place)
        return []

    tile.loop(b.udiv(tile.add(k, _STRETCH - 1), _const(_STRETCH)), [], body)


def _integers(
    tile: _Tile, scales: list[Any], offsets: list[Any] | None, groups: list[Any], k: Any
) -> list[Any]:
    """Whole numbers within a group, then times the scales of weights and states; and the group's
    sum of states times the offset, where there are offsets."""
    b, many = tile.builder, len(tile.ws)
    size = tile.form.scale_bytes
    count = b.udiv(k, _const(GROUP))

    def factor_at(address: Any, group: Any) -> Any:
        there = tile.add(address, tile.times(group, LANES * size))
        return tile.load(there, _WIDE, 4) if size == 4 else tile.widened(there)

    def body(group: Any, totals: list[Any]) -> list[Any]:
        totals = list(totals)
        sums: list[Any] = [_all(_INTS, 0)] * (len(tile.xs) * many)
        stored = GROUP * tile.form.panel_bytes
        tile.fetch_ahead(tile.ws, tile.times(group, stored), stored)
        for each in (scales, offsets or []):
            tile.fetch_ahead(each, tile.times(group, LANES * size), LANES * size)
        for number in range(tile.pairs_apart):
            columns = [tile.pairs(w, group, number) for w in tile.ws]
            for part in range(tile.form.per_byte):
                pair = number + part * tile.pairs_apart
                at = tile.add(tile.times(group, GROUP * 2), pair * 4)
                for r, x in enumerate(tile.xs):
                    states = tile.pair(tile.add(x, at))
                    for p in range(many):
                        product = tile.multiplied(columns[p][part], states)
                        sums[r * many + p] = b.add(sums[r * many + p], product)
        known = tile.times(group, 4)
        for p, scale in enumerate(scales):
            factor = factor_at(scale, group)
            shift = None if offsets is None else factor_at(offsets[p], group)
            for r, of_row in enumerate(groups):
                i, here = r * many + p, tile.add(of_row, known)
                both = b.fmul(factor, tile.spread(here))
                totals[i] = tile.fused(b.sitofp(sums[i], _WIDE), both, totals[i])
                if shift is not None:
                    sum_here = tile.spread(tile.add(here, tile.times(count, 4)))
                    totals[i] = tile.fused(shift, sum_here, totals[i])
        return totals

    return tile.loop(count, [_all(_WIDE, 0.0)] * (len(tile.xs) * many), body)


@intrinsic
def round_lanes(typingctx, x, out, scales, groups):  # pyright: ignore
    """Floats as whole numbers of sixteen bits, group by group: x is out times the group's scale.

    Addresses of floats, of int16 and of a float for each of `groups` groups.
    """

    def generate(context, builder, signature, args):
        x, out, scales, groups = args
        emit, b = _Emit(builder), builder
        half = LANES * 4
        assert GROUP == 2 * LANES

        def body(group: Any, carried: list[Any]) -> list[Any]:
            there = emit.add(x, emit.times(group, 2 * half))
            values = [emit.load(emit.add(there, i * half), _WIDE, 4) for i in range(2)]
            largest = emit.largest(emit.larger(*[emit.magnitude(value) for value in values]))
            scale = b.fdiv(largest, ir.Constant(_F32, 32767.0))
            emit.store(scale, emit.add(scales, emit.times(group, 4)))
            is_zero = b.fcmp_ordered("==", largest, ir.Constant(_F32, 0.0))
            over = b.fdiv(ir.Constant(_F32, 32767.0), largest)
            factor = emit.everywhere(b.select(is_zero, ir.Constant(_F32, 0.0), over))
            for i, value in enumerate(values):
                # Adding 1.5 * 2^23 rounds to the nearest integer, which its low bits then are.
                rounded = b.fadd(b.fmul(value, factor), _all(_WIDE, 12582912.0))
                whole = b.trunc(b.bitcast(rounded, _INTS), ir.VectorType(_I16, LANES))
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
        emit, b = _Emit(builder), builder
        shorts = ir.VectorType(_I16, LANES)

        def body(group: Any, carried: list[Any]) -> list[Any]:
            there = emit.add(whole, emit.times(group, 2 * LANES * 2))
            total = _all(_INTS, 0)
            for i in range(2):
                values = emit.load(emit.add(there, i * LANES * 2), shorts, 2)
                total = b.add(total, b.sext(values, _INTS))
            scale = emit.load(emit.add(scales, emit.times(group, 4)), _F32, 4)
            added = b.fmul(b.sitofp(emit.halved(total, b.add), _F32), scale)
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
            emit = _Emit(builder)
            ws = [emit.add(w, emit.times(w_next, j)) for j in range(columns)]
            xs = [emit.add(x, emit.times(x_next, r)) for r in range(rows)]

            def body(step: Any, sums: list[Any]) -> list[Any]:
                sums, there = list(sums), emit.times(step, LANES * 4)
                columns_here = [emit.load(emit.add(at, there), _WIDE, 4) for at in ws]
                for r in range(rows):
                    row = emit.load(emit.add(xs[r], there), _WIDE, 4)
                    for j, column in enumerate(columns_here):
                        sums[r * columns + j] = emit.fused(row, column, sums[r * columns + j])
                return sums

            sums = emit.loop(steps, [_all(_WIDE, 0.0)] * (rows * columns), body)
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
            emit = _Emit(builder)
            ps = [emit.add(p, emit.times(p_next, r)) for r in range(rows)]

            def body(t: Any, sums: list[Any]) -> list[Any]:
                sums = list(sums)
                start = emit.add(v, builder.mul(t, v_next))
                values = [emit.load(emit.add(start, c * LANES * 4), _WIDE, 4) for c in range(width)]
                for r in range(rows):
                    weight = emit.spread(emit.add(ps[r], emit.times(t, 4)))
                    for c, value in enumerate(values):
                        sums[r * width + c] = emit.fused(weight, value, sums[r * width + c])
                return sums

            sums = emit.loop(count, [_all(_WIDE, 0.0)] * (rows * width), body)
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
        emit, b = _Emit(builder), builder

        def all_of(value: float) -> Any:
            return _all(_WIDE, float(np.float32(value)))

        def body(step: Any, carried: list[Any]) -> list[Any]:
            there = emit.times(step, LANES * 4)
            value = emit.load(emit.add(x, there), _WIDE, 4)
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
            exponent = b.add(b.fptosi(power, _INTS), _all(_INTS, 127))
            total = b.fmul(total, b.bitcast(b.shl(exponent, _all(_INTS, 23)), _WIDE))
            emit.store(total, emit.add(out, there))
            return []

        emit.loop(steps, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
