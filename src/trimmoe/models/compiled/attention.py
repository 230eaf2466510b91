"""Norms, rotary embedding and attention over the cache, row by row.

Shapes: n rows, d the hidden size, H heads and G of keys and values. Buffers are `wide`: rows padded
with zeros to a multiple of `GROUP`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numba import njit, prange, types
from numba.core import cgutils
from numba.np.numpy_support import carray

from trimmoe.models.compiled.apart import apart
from trimmoe.models.compiled.columns import HEAD, KV_HEADS, TURNED
from trimmoe.models.compiled.kinds import GATED_SILU, SCORES_SOFTMAX
from trimmoe.models.compiled.lane_functions import exp_lanes, make_dots, make_mix
from trimmoe.models.compiled.lanes import LANES, intrinsic

_keys3x2, _keys3x1, _keys1x4, _keys1x1 = (
    make_dots(heads, keys) for heads, keys in ((3, 2), (3, 1), (1, 4), (1, 1))
)
_mix1x1, _mix1x2, _mix1x4 = make_mix(1, 1), make_mix(1, 2), make_mix(1, 4)
_mix3x2, _mix3x4 = make_mix(3, 2), make_mix(3, 4)
jit: Any = njit(nogil=True, error_model="numpy", cache=True)
_FEW_ROWS = 8
"""With fewer, threads are not worth starting."""


class Shape(NamedTuple):
    """What all blocks have in common."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    head_wide: int
    experts: int
    top_k: int
    epsilon: float
    renormalise: bool
    qk_norm: int
    """One of `NORM_NONE`, `NORM_HEADS`, `NORM_WHOLE`."""
    clip: float
    """Queries, keys and values are clipped to it; infinite for no limit."""
    routed: int
    """Width of a routed expert."""
    scale: float
    """Of products of queries and keys."""
    rotary: int
    """Numbers of each head that are turned: its first ones, or those behind the `latent` ones."""
    scores: int = SCORES_SOFTMAX
    """What the router makes of its logits."""
    groups: int = 1
    """Of experts."""
    kept_groups: int = 1
    """Of which experts are chosen."""
    best_of_group: int = 0
    """How many best scores a group is judged by."""
    gate_scale: float = 1.0
    """Of what gates are besides."""
    gated: int = GATED_SILU
    """What lies between the projections of routed experts."""
    steepness: float = 1.0
    """Of a clamped gate's sigmoid."""
    limit: float = float("inf")
    """That a clamped gate and what it multiplies are held to."""
    latent: int = 0
    """Numbers that keys and values are compressed to; 0 where they are not. A head of queries and
    the one of keys are then so many, and the `rotary` ones; values are the keys."""
    value: int = 0
    """Numbers that a head gives there."""
    threads: int = 1
    """That large products and long prompts may use."""


_OF = {int: types.int64, float: types.float64, bool: types.boolean}
SHAPE = types.NamedTuple([_OF[each] for each in get_type_hints(Shape).values()], Shape)
# Of numbers: vectors, tables, and what is kept of sequences.
I1, I2 = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
F2, F4 = types.Array(types.float32, 2, "C"), types.Array(types.float32, 4, "C")
D2 = types.Array(types.float64, 2, "C")
ROTARY, PLACES = types.UniTuple(F2, 2), types.UniTuple(I1, 2)


@jit
def own_shape(shape, block):
    """The shape of a block, whose attention need not be as large as that of others."""
    head = block[HEAD]
    return Shape(
        shape.hidden, shape.heads, block[KV_HEADS], head, whole_panels(head), shape.experts,
        shape.top_k, shape.epsilon, shape.renormalise, shape.qk_norm, shape.clip, shape.routed,
        shape.scale, block[TURNED], shape.scores, shape.groups, shape.kept_groups,
        shape.best_of_group, shape.gate_scale, shape.gated, shape.steepness, shape.limit,
        shape.latent, shape.value, shape.threads,
    )  # fmt: skip


@jit
def wide(size):
    """`size` with padding."""
    return (size + 31) // 32 * 32


@jit
def whole_panels(size):
    """`size` rounded up to panels."""
    return (size + LANES - 1) // LANES * LANES


@jit
def address(array):
    """Where an array is."""
    return np.int64(array.ctypes.data)


@intrinsic
def pointer(typingctx, address):  # pyright: ignore
    """An address as a pointer."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@jit
def floats(address, size):
    """The vector at an address."""
    return carray(pointer(address), (size,), np.float32)


@jit
def integers(address, rows, columns):
    """The table [rows, columns] at an address."""
    return carray(pointer(address), (rows, columns), np.int64)


@jit
def slabs_of(shape, slab):
    """Keys and values of one block, [slots, G, capacity, head_wide]."""
    sizes = (slab[2], shape.kv_heads, slab[3], shape.head_wide)
    keys = carray(pointer(slab[0]), sizes, np.float32)
    return keys, carray(pointer(slab[1]), sizes, np.float32)


@apart(F2, types.int64, types.int64, types.float64, F2)
def norm(x, weight, size, epsilon, out):
    """RMS norm of each row of x [n, wide] into out; `weight` is an address."""
    steps = wide(size) // LANES
    total = np.empty(1, dtype=np.float32)
    scale = floats(weight, size)
    for r in range(x.shape[0]):
        here = address(x) + r * x.shape[1] * 4
        _keys1x1(here, 0, here, 0, steps, address(total), 0)
        factor = np.float32(1.0) / np.sqrt(total[0] / np.float32(size) + np.float32(epsilon))
        for i in range(size):
            out[r, i] = scale[i] * (x[r, i] * factor)


@jit
def head_norm(x, heads, head, weight, epsilon):
    """RMS norm of every head of each row of x [n, >= heads * head], in place."""
    scale = floats(weight, head)
    for r in range(x.shape[0]):
        for h in range(heads):
            total = np.float32(0.0)
            for i in range(head):
                value = x[r, h * head + i]
                total += value * value
            factor = np.float32(1.0) / np.sqrt(total / np.float32(head) + np.float32(epsilon))
            for i in range(head):
                x[r, h * head + i] = scale[i] * (x[r, h * head + i] * factor)


@jit
def rotate(x, heads, head, first, size, rotary, begin, positions):
    """Rotary embedding of the numbers [first, first + size) of every head, in place; `rotary` are
    cosine and sine [positions, >= begin + size], of which it takes those from `begin` on."""
    cosine, sine = rotary
    half = size // 2
    for r in range(x.shape[0]):
        at = positions[r]
        for h in range(heads):
            start = h * head + first
            for i in range(half):
                a, b = x[r, start + i], x[r, start + half + i]
                x[r, start + i] = a * cosine[at, begin + i] - b * sine[at, begin + i]
                far = begin + half + i
                x[r, start + half + i] = b * cosine[at, far] + a * sine[at, far]


@apart(F2, types.int64, types.Array(types.float32, 1, "C"))
def weigh(scores, count, total):
    """Softmax of the first `count` of each row of scores [R, wide], scaled already, in place."""
    whole = count // LANES * LANES
    for h in range(scores.shape[0]):
        # Lane by lane, so that sums are quick and always taken in one order.
        for i in range(LANES):
            total[i] = scores[h, 0]
        for t in range(0, whole, LANES):
            for i in range(LANES):
                total[i] = max(total[i], scores[h, t + i])
        for t in range(whole, count):
            total[0] = max(total[0], scores[h, t])
        largest = total[0]
        for i in range(LANES):
            largest = max(largest, total[i])
        for t in range(count):
            scores[h, t] -= largest
        at = address(scores) + h * scores.shape[1] * 4
        exp_lanes(at, at, (count + LANES - 1) // LANES)
        for i in range(LANES):
            total[i] = 0.0
        for t in range(0, whole, LANES):
            for i in range(LANES):
                total[i] += scores[h, t + i]
        for t in range(whole, count):
            total[t - whole] += scores[h, t]
        all_of = np.float32(0.0)
        for i in range(LANES):
            all_of += total[i]
        factor = np.float32(1.0) / all_of
        for t in range(count):
            scores[h, t] *= factor


@jit
def write(shape, key, value, places, r, keys, values):
    """The key and value of a row [n, G * head] into slabs [slots, G, capacity, head_wide]."""
    slots, positions = places
    for g in range(shape.kv_heads):
        for i in range(shape.head):
            keys[slots[r], g, positions[r], i] = key[r, g * shape.head + i]
            values[slots[r], g, positions[r], i] = value[r, g * shape.head + i]


@jit
def attention(shape, window, sinks, query, key, value, places, keys, values, aside, out):
    """Attention of rows over the cache, causal, into out [n, wide(H * head)].

    `sinks` is the address of a score of each head that takes its share and gives nothing, or 0;
    `key` and `value` [n, G * head] are the rows' own. They are written into the slabs first; those
    that are looked at `aside` see their own only, and what was there before is put back.
    """
    count, longest = query.shape[0], np.int64(0)
    for r in range(count):
        longest = max(longest, places[1][r] + 1)
    if aside:
        room = np.empty((2, 1, shape.kv_heads * shape.head), dtype=np.float32)
        for r in range(count):
            one = places[0][r : r + 1], places[1][r : r + 1]
            _exchange(shape, key, value, one, r, keys, values, room)
            attend_rows(shape, window, sinks, query, places, keys, values, out, r, r + 1, longest)
            write(shape, room[0], room[1], one, 0, keys, values)
        return
    for r in range(count):
        write(shape, key, value, places, r, keys, values)
    if shape.threads > 1 and count >= _FEW_ROWS:
        _parallel(shape, window, sinks, query, places, keys, values, out, longest)
    else:
        attend_rows(shape, window, sinks, query, places, keys, values, out, 0, count, longest)


@jit
def _exchange(shape, key, value, place, r, keys, values, room):
    """Write a row's key and value and keep what they replace in `room` [2, 1, G * head]."""
    slot, position = place[0][0], place[1][0]
    for g in range(shape.kv_heads):
        for i in range(shape.head):
            room[0, 0, g * shape.head + i] = keys[slot, g, position, i]
            room[1, 0, g * shape.head + i] = values[slot, g, position, i]
    write(shape, key[r : r + 1], value[r : r + 1], place, 0, keys, values)


@njit(nogil=True, error_model="numpy", cache=True, parallel=True)
def _parallel(shape, window, sinks, query, places, keys, values, out, longest):
    # Strided, as later rows of a prompt have more to look at.
    count = query.shape[0]
    for part in prange(shape.threads):
        for r in range(part, count, shape.threads):
            attend_rows(shape, window, sinks, query, places, keys, values, out, r, r + 1, longest)


@apart(
    SHAPE, types.int64, types.int64, F2, PLACES, F4, F4, F2, types.int64, types.int64, types.int64
)
def attend_rows(shape, window, sinks, query, places, keys, values, out, first, last, longest):
    """The rows [first, last)."""
    slots, positions = places
    head, head_wide = shape.head, shape.head_wide
    group = shape.heads // shape.kv_heads
    scores = np.zeros((group, wide(longest) + LANES), dtype=np.float32)
    mixed = np.zeros((group, head_wide), dtype=np.float32)
    heads = np.zeros((group, head_wide), dtype=np.float32)
    total = np.zeros(LANES, dtype=np.float32)
    score_row, wide_row = scores.shape[1] * 4, head_wide * 4
    scale = np.float32(shape.scale)
    for r in range(first, last):
        stop = positions[r] + 1
        start = max(0, stop - window) if window > 0 else 0
        count = stop - start
        for g in range(shape.kv_heads):
            for h in range(group):
                for i in range(head):
                    heads[h, i] = query[r, (g * group + h) * head + i] * scale
            base = ((slots[r] * keys.shape[1] + g) * keys.shape[2] + start) * wide_row
            key, value = address(keys) + base, address(values) + base
            _scores(key, wide_row, count, address(heads), group, address(scores), score_row)
            if sinks != 0:
                own = floats(sinks, shape.heads)
                for h in range(group):
                    scores[h, count] = own[g * group + h]
            weigh(scores, count + (1 if sinks != 0 else 0), total)
            _mixed(
                address(scores), score_row, value, wide_row, count, group, head_wide,
                address(mixed), wide_row,
            )  # fmt: skip
            for h in range(group):
                for i in range(head):
                    out[r, (g * group + h) * head + i] = mixed[h, i]


@jit
def _scores(key, key_row, count, heads, group, out, out_row):
    """Products of `group` heads with `count` keys."""
    steps = key_row // (LANES * 4)
    threes = group // 3 * 3
    for h in range(0, threes, 3):
        at, to = heads + h * key_row, out + h * out_row
        for t in range(0, count - 1, 2):
            _keys3x2(key + t * key_row, key_row, at, key_row, steps, to + t * 4, out_row)
        if count % 2:
            t = count - 1
            _keys3x1(key + t * key_row, key_row, at, key_row, steps, to + t * 4, out_row)
    for h in range(threes, group):
        at, to = heads + h * key_row, out + h * out_row
        fours = count // 4 * 4
        for t in range(0, fours, 4):
            _keys1x4(key + t * key_row, key_row, at, key_row, steps, to + t * 4, out_row)
        for t in range(fours, count):
            _keys1x1(key + t * key_row, key_row, at, key_row, steps, to + t * 4, out_row)


@jit
def _mixed(weights, weight_row, value, value_row, count, group, head_wide, out, out_row):
    """Values summed by the weights of `group` heads, over `count` positions."""
    size, threes = head_wide // LANES, group // 3 * 3
    c = 0
    while c < size:
        width = 4 if size - c >= 4 else (2 if size - c >= 2 else 1)
        at = value + c * LANES * 4
        h = 0
        while h < group:
            weight, to = weights + h * weight_row, out + h * out_row + c * LANES * 4
            if h < threes and width == 4:
                _mix3x4(weight, weight_row, at, value_row, count, to, out_row)
                h += 3
            elif h < threes and width == 2:
                _mix3x2(weight, weight_row, at, value_row, count, to, out_row)
                h += 3
            elif width == 4:
                _mix1x4(weight, weight_row, at, value_row, count, to, out_row)
                h += 1
            elif width == 2:
                _mix1x2(weight, weight_row, at, value_row, count, to, out_row)
                h += 1
            else:
                _mix1x1(weight, weight_row, at, value_row, count, to, out_row)
                h += 1
        c += width
