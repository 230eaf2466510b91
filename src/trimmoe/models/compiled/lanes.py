"""Vectors of sixteen lanes, written out for the compiler: how weights are stored, and the
instructions that `tiles` and `lane_functions` are made of.

Weights are stored in *panels*: sixteen rows of a matrix side by side, so that a lane is an output
and adds up its own products from the first to the last. Addresses are passed as integers; whoever
calls keeps the arrays alive.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, llvm_version_info
from numba import types
from numba.extending import intrinsic as numba_intrinsic

LANES = 16
LINE = 64
"""Bytes of a cache line."""
FACTOR_BYTES = 4
"""What is before a panel's scales, and before its offsets, where groups have both."""
SCALE_SHIFT, SCALE_POWER = 13, 80
"""What a Q8 scale's bits stand for: shifted up by so many they are those of a float32, which counts
two to so many times. So a scale has no sign, an exponent of six bits and a fraction of ten, and
holds without a loss what a positive half does, as GGUF has them, and what is smaller."""


class Format(IntEnum):
    """How weights are stored."""

    F32 = 0
    BF16 = 1
    """The upper half of a float32."""
    Q8 = 2
    """An int8 per weight, two columns side by side; a group is multiplied by its scale, in sixteen
    bits as `SCALE_SHIFT` tells them."""
    Q4 = 3
    """Four bits per weight, times the group's scale, plus its offset; both are whole numbers of
    eight bits, with and without a sign, times a float32 that is the panel's and lies before them. A
    byte has two weights of one half of a group each, the first in its low bits, and two columns lie
    side by side as in Q8."""
    Q2 = 4
    """The same with two bits: a byte has four weights, one of each quarter of a group."""
    Q3 = 5
    """The same with three: of each group first the lower two bits of its weights as in Q2, then the
    third ones, eight of them in a byte, one of each eighth of the group."""

    @property
    def bits(self) -> int:
        """Of a weight, without its group's scale and offset."""
        return (32, 16, 8, 4, 2, 3)[self]

    @property
    def planes(self) -> tuple[int, ...]:
        """How many bits of a quantised weight lie together in a byte, the lowest first."""
        return (2, 1) if self is Format.Q3 else (self.bits,)

    @property
    def scale_bytes(self) -> int:
        """What a group's scale takes, and its offset if there is one."""
        return 2 if self is Format.Q8 else 1

    @property
    def panel_bytes(self) -> int:
        """What a column of a panel takes."""
        return LANES * self.bits // 8


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


F32, I64, I32, I16, I8 = (ir.FloatType(), *map(ir.IntType, (64, 32, 16, 8)))
WIDE = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)
SHORTS, BYTES = ir.VectorType(I16, 2 * LANES), ir.VectorType(I8, 2 * LANES)
# Elsewhere the same products and sums are written out: whole numbers come out alike.
_HAS_512 = bool(get_host_cpu_features().get("avx512bw"))
_PAIRS_AT_ONCE = "llvm.x86.avx512.pmaddw.d.512" if _HAS_512 else ""
# The one that saturates, which no sum of a group is large enough for: the compiler takes the other
# one apart wherever it finds that to be quicker, which made tiles of many rows twice as slow.
# Before this version it takes other vectors.
_HAS_SUM = bool(get_host_cpu_features().get("avx512vnni")) and llvm_version_info >= (22, 0, 0)
_SUM_AT_ONCE = "llvm.x86.avx512.vpdpwssds.512"
SUMS_AT_ONCE = bool(_PAIRS_AT_ONCE) and _HAS_SUM
"""Whether products are multiplied and added up in one instruction."""
_WORTH_SUM = 3
"""Sums under way from which on that pays: each has to wait five cycles for the one before it."""
_FETCHED = 0, 2, 1
"""To be read, into the second cache, and data. The first one can wait for few lines at a time:
measured, int8 comes a quarter quicker into the second one, and int4 twice as quick."""


def const(value: int) -> Any:
    return ir.Constant(I64, value)


def all_lanes(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * LANES)


class Emit:
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
        return self.builder.add(address, const(offset) if isinstance(offset, int) else offset)

    def times(self, value: Any, factor: int) -> Any:
        return self.builder.mul(value, const(factor))

    def spread(self, address: Any) -> Any:
        """The float at an address in all lanes."""
        return self.everywhere(self.load(address, F32, 4))

    def everywhere(self, scalar: Any) -> Any:
        """A scalar in all lanes."""
        nothing = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        one = self.builder.insert_element(nothing, scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, nothing, all_lanes(INTS, 0))

    def widened(self, address: Any) -> Any:
        """Sixteen bfloat16 at an address as floats."""
        halves = self.builder.zext(self.load(address, ir.VectorType(I16, LANES), 2), INTS)
        return self.builder.bitcast(self.builder.shl(halves, all_lanes(INTS, 16)), WIDE)

    def scales(self, address: Any) -> Any:
        """Sixteen scales of Q8 at an address as floats."""
        bits = self.builder.zext(self.load(address, ir.VectorType(I16, LANES), 2), INTS)
        found = self.builder.bitcast(self.builder.shl(bits, all_lanes(INTS, SCALE_SHIFT)), WIDE)
        return self.builder.fmul(found, all_lanes(WIDE, 2.0**SCALE_POWER))

    def whole(self, address: Any, *, signed: bool) -> Any:
        """Sixteen whole numbers of eight bits at an address as floats."""
        b, stored = self.builder, self.load(address, ir.VectorType(I8, LANES), 1)
        if signed:
            return b.sitofp(b.sext(stored, INTS), WIDE)
        # What is below two to the 31st is the same either way, and this is one instruction.
        return b.sitofp(b.zext(stored, INTS), WIDE)

    def fetch(self, address: Any) -> None:
        """Have the cache line at an address brought near; nothing where there is none."""
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        how = (ir.Constant(I32, each) for each in _FETCHED)
        self._called("llvm.prefetch.p0", kind, [self.at(address, I8), *how])

    def pair(self, address: Any) -> Any:
        """The two int16 at an address in all pairs of lanes."""
        return self.builder.bitcast(self.everywhere(self.load(address, I32, 4)), SHORTS)

    def multiplied(self, a: Any, b: Any) -> Any:
        """Products of int16, pairs of neighbours added up."""
        if _PAIRS_AT_ONCE:
            return self._called(_PAIRS_AT_ONCE, ir.FunctionType(INTS, [SHORTS] * 2), [a, b])
        long = ir.VectorType(I32, 2 * LANES)
        products = self.builder.mul(self.builder.sext(a, long), self.builder.sext(b, long))
        nothing = ir.Constant(long, ir.Undefined)
        even, odd = (
            self.builder.shuffle_vector(
                products, nothing, ir.Constant(INTS, list(range(first, 2 * LANES, 2)))
            )
            for first in (0, 1)
        )
        return self.builder.add(even, odd)

    def added(self, total: Any, a: Any, b: Any, *, beside: int) -> Any:
        """`total` with the products of int16 added, pairs of neighbours; that many such sums are
        under way side by side."""
        if SUMS_AT_ONCE and beside >= _WORTH_SUM:
            kind = ir.FunctionType(INTS, [INTS, SHORTS, SHORTS])
            return self._called(_SUM_AT_ONCE, kind, [total, a, b])
        return self.builder.add(total, self.multiplied(a, b))

    def magnitude(self, value: Any) -> Any:
        """Floats without their signs."""
        bits = self.builder.and_(self.builder.bitcast(value, INTS), all_lanes(INTS, 0x7FFFFFFF))
        return self.builder.bitcast(bits, WIDE)

    def larger(self, a: Any, b: Any) -> Any:
        """The larger one in each lane."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def largest(self, vector: Any) -> Any:
        """The largest lane."""
        return self.halved(vector, self.larger)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once where the processor can."""
        kind = ir.FunctionType(WIDE, [WIDE] * 3)
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
            kind = ir.VectorType(I32, width)
            low = ir.Constant(kind, list(range(width)))
            high = ir.Constant(kind, list(range(width, 2 * width)))
            vector = joined(
                self.builder.shuffle_vector(vector, undefined, low),
                self.builder.shuffle_vector(vector, undefined, high),
            )
        return self.builder.extract_element(vector, ir.Constant(I32, 0))

    def loop(
        self, count: Any, starts: list[Any], body: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """Run `body` for 0 .. count - 1, at least once, carrying values along."""
        builder = self.builder
        before, inside = builder.block, builder.append_basic_block("inside")
        after = builder.append_basic_block("after")
        builder.branch(inside)
        builder.position_at_end(inside)
        index = builder.phi(I64)
        index.add_incoming(const(0), before)
        carried = []
        for start in starts:
            phi = builder.phi(start.type)
            phi.add_incoming(start, before)
            carried.append(phi)
        results = body(index, carried)
        following = builder.add(index, const(1))
        last = builder.block
        index.add_incoming(following, last)
        for phi, result in zip(carried, results, strict=True):
            phi.add_incoming(result, last)
        builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
        builder.position_at_end(after)
        return results
