"""Products of matrices, tile by tile: the order of every sum is fixed.

A tile multiplies R rows of states with P panels of weights (see `lanes`); whatever R and P are, an
output is the same sum in the same order, bit for bit. Weights of eight bits or fewer are multiplied
as whole numbers with states of sixteen, which is three times as quick as in floats and, within
1/65534 of the largest state of a group, the same.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue

from trimmoe.core.precision import GROUP
from trimmoe.models.compiled.lanes import (
    BYTES,
    FACTOR_BYTES,
    INTS,
    LANES,
    LINE,
    SHORTS,
    WIDE,
    Emit,
    Format,
    all_lanes,
    const,
    intrinsic,
)

_STRETCH = 512
"""Columns that are added up by themselves, where weights are not quantised."""
_UNROLLED = 4
_FETCHING_ROWS = 4


def _column(emit: Emit, form: Format, address: Any) -> Any:
    """The column stored at an address of a panel, as floats."""
    if form is Format.F32:
        return emit.load(address, WIDE, 4)
    return emit.widened(address)


class _Tile(Emit):
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

        count = self.builder.udiv(columns, const(_UNROLLED))
        return self.loop(count, [all_lanes(WIDE, 0.0)] * (len(self.xs) * len(self.ws)), body)

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
        """The pairs of columns whose weights share the bytes of this number in a group's first
        plane, as int16.

        They are every `pairs_apart`th pair of the group.
        """
        start = self.add(panel, self.times(group, GROUP * self.form.panel_bytes))
        if self.form is Format.Q8:
            return [self.builder.sext(self._bytes(start, number), SHORTS)]
        low, *rest = self.form.planes
        found = [self._cut(start, number, low, low * part, 0) for part in range(8 // low)]
        first, below = self.pairs_apart, low
        for bits in rest:
            for part in range(len(found)):
                each, at = divmod(number + part * self.pairs_apart, 2 * bits)
                more = self._cut(start, first + at, bits, bits * each, below)
                found[part] = self.builder.or_(found[part], more)
            first, below = first + 2 * bits, below + bits
        return found

    def _bytes(self, start: Any, number: int) -> Any:
        return self.load(self.add(start, number * 2 * LANES), BYTES, 1)

    def _cut(self, start: Any, number: int, bits: int, at: int, to: int) -> Any:
        """So many bits of the bytes of a number, those from `at` on, moved to `to`."""
        b, whole = self.builder, self.builder.zext(self._bytes(start, number), SHORTS)
        shift = b.lshr if at >= to else b.shl
        moved = shift(whole, ir.Constant(SHORTS, [abs(at - to)] * (2 * LANES)))
        return b.and_(moved, ir.Constant(SHORTS, [((1 << bits) - 1) << to] * (2 * LANES)))

    @property
    def pairs_apart(self) -> int:
        """Half as many as a group has bytes in the first plane, which two columns share."""
        return 2 * self.form.planes[0]


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
        _tiled(Emit(builder), *made, *args[3:])
        return context.get_dummy_value()

    return types.void(form, rows, panels, *[types.int64] * 12), generate


def _tiled(
    emit: Emit, form: Format, rows: int, panels: int,
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
        tile.store(all_lanes(WIDE, 0.0), place)

    def body(block: Any, carried: list[Any]) -> list[Any]:
        start = tile.times(block, _STRETCH)
        left = b.sub(k, start)
        short = b.icmp_signed("<", left, const(_STRETCH))
        sums = tile.stretch(start, b.select(short, left, const(_STRETCH)))
        for place, total in zip(places, sums, strict=True):
            tile.store(b.fadd(tile.load(place, WIDE, 4), total), place)
        return []

    tile.loop(b.udiv(tile.add(k, _STRETCH - 1), const(_STRETCH)), [], body)


class _Factors:
    """The scales of a panel's groups at an address, or their offsets."""

    def __init__(self, tile: _Tile, address: Any, *, signed: bool) -> None:
        self._tile, self._at, self._signed = tile, address, signed
        self._of_panel = None if tile.form is Format.Q8 else tile.spread(address)

    def of(self, group: Any) -> Any:
        """Those of a group, by lane."""
        tile = self._tile
        there = tile.add(self._at, tile.times(group, LANES * tile.form.scale_bytes))
        if self._of_panel is None:
            return tile.scales(there)
        whole = tile.whole(tile.add(there, FACTOR_BYTES), signed=self._signed)
        return tile.builder.fmul(whole, self._of_panel)


def _integers(
    tile: _Tile, scales: list[Any], offsets: list[Any] | None, groups: list[Any], k: Any
) -> list[Any]:
    """Whole numbers within a group, then times the scales of weights and states; and the group's
    sum of states times the offset, where there are offsets."""
    b, many = tile.builder, len(tile.ws)
    count, size = b.udiv(k, const(GROUP)), LANES * tile.form.scale_bytes
    factors = [_Factors(tile, scale, signed=False) for scale in scales]
    shifts = None if offsets is None else [_Factors(tile, at, signed=True) for at in offsets]

    def body(group: Any, totals: list[Any]) -> list[Any]:
        totals = list(totals)
        sums: list[Any] = [all_lanes(INTS, 0)] * (len(tile.xs) * many)
        stored = GROUP * tile.form.panel_bytes
        tile.fetch_ahead(tile.ws, tile.times(group, stored), stored)
        for each in (scales, offsets or []):
            tile.fetch_ahead(each, tile.times(group, size), size)
        for number in range(tile.pairs_apart):
            columns = [tile.pairs(w, group, number) for w in tile.ws]
            for part in range(len(columns[0])):
                pair = number + part * tile.pairs_apart
                at = tile.add(tile.times(group, GROUP * 2), pair * 4)
                for r, x in enumerate(tile.xs):
                    states = tile.pair(tile.add(x, at))
                    for p in range(many):
                        i, weights = r * many + p, columns[p][part]
                        sums[i] = tile.added(sums[i], weights, states, beside=len(sums))
        known = tile.times(group, 4)
        for p, scale in enumerate(factors):
            factor = scale.of(group)
            shift = None if shifts is None else shifts[p].of(group)
            for r, of_row in enumerate(groups):
                i, here = r * many + p, tile.add(of_row, known)
                both = b.fmul(factor, tile.spread(here))
                totals[i] = tile.fused(b.sitofp(sums[i], WIDE), both, totals[i])
                if shift is not None:
                    sum_here = tile.spread(tile.add(here, tile.times(count, 4)))
                    totals[i] = tile.fused(shift, sum_here, totals[i])
        return totals

    return tile.loop(count, [all_lanes(WIDE, 0.0)] * (len(tile.xs) * many), body)
