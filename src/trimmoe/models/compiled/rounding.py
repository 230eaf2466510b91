"""Weights in few bits: the scale and the offset of every group that come nearest to it.

Extremes of a group spread the few numbers that there are too thin. So narrower ranges are tried
too, for each the scale and the offset are fitted by least squares, and the best of all is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trimmoe.models.compiled import one_at_a_time

_NARROWER = 0.06
"""By which part of it the range shrinks from try to try."""
_TRIES = 7


@njit(nogil=True, error_model="numpy", cache=True)
def _short(value):
    """A float as the bits of the nearest bfloat16, and what those stand for."""
    whole = np.empty(1, dtype=np.float32)
    whole[0] = value
    bits = whole.view(np.uint32)
    upper = (
        bits[0] + np.uint32(0x7FFF) + ((bits[0] >> np.uint32(16)) & np.uint32(1))
    ) >> np.uint32(16)
    bits[0] = upper << np.uint32(16)
    return np.uint16(upper), whole[0]


@njit(nogil=True, error_model="numpy", cache=True)
def _numbers(group, scale, offset, most, out):
    """The nearest number of each weight, into `out`; the squared error."""
    over = np.float32(1.0) / scale if scale != 0.0 else np.float32(0.0)
    error = np.float32(0.0)
    for i in range(group.shape[0]):
        number = min(max(np.rint((group[i] - offset) * over), np.float32(0.0)), most)
        out[i] = np.uint8(number)
        off = group[i] - offset - number * scale
        error += off * off
    return error


@njit(nogil=True, error_model="numpy", cache=True)
def _fitted(group, numbers):
    """Scale and offset of least squares for the numbers that weights have."""
    n, sums, mean = group.shape[0], np.float32(0.0), np.float32(0.0)
    for i in range(n):
        sums += numbers[i]
        mean += group[i]
    middle, mean = sums / n, mean / n
    both, spread = np.float32(0.0), np.float32(0.0)
    for i in range(n):
        away = numbers[i] - middle
        both += away * (group[i] - mean)
        spread += away * away
    scale = both / spread if spread > 0.0 else np.float32(0.0)
    return np.float32(scale), np.float32(mean - scale * middle)


@njit(nogil=True, error_model="numpy", cache=True)
def fit_groups(groups, most):
    """Numbers from 0 to `most` for groups [n, g], uint8 [n, g], with the bits of their scales and
    offsets in bfloat16, uint16 [n] each: a weight is offset + scale * number."""
    count, size = groups.shape
    numbers = np.zeros((count, size), dtype=np.uint8)
    scales, offsets = np.zeros(count, dtype=np.uint16), np.zeros(count, dtype=np.uint16)
    tried = np.empty(size, dtype=np.uint8)
    top = np.float32(most)
    for g in range(count):
        group = groups[g]
        low, high = group[0], group[0]
        for i in range(size):
            low, high = min(low, group[i]), max(high, group[i])
        middle, half = (low + high) * np.float32(0.5), (high - low) * np.float32(0.5)
        best = np.float32(np.inf)
        for attempt in range(_TRIES):
            reach = half * np.float32(1.0 - _NARROWER * attempt)
            scale, offset = reach * np.float32(2.0) / top, middle - reach
            _numbers(group, scale, offset, top, tried)
            scale, offset = _fitted(group, tried)
            scale_bits, scale = _short(scale)
            offset_bits, offset = _short(offset)
            error = _numbers(group, scale, offset, top, tried)
            if error < best:
                best = error
                scales[g], offsets[g] = scale_bits, offset_bits
                for i in range(size):
                    numbers[g, i] = tried[i]
    return numbers, scales, offsets


@cache
def compiled() -> Callable[[Any, int], tuple[Any, Any, Any]]:
    """`fit_groups`, which one process at a time compiles or reads from where it is kept: servers
    that start together on a new machine would otherwise all compile it."""
    with one_at_a_time():
        fit_groups(np.zeros((1, 1), dtype=np.float32), 1)
    return fit_groups


def fit(groups: NDArray[np.float32], bits: int) -> tuple[NDArray, NDArray, NDArray]:
    """`fit_groups` for groups [..., g], of the same leading shape."""
    flat = np.ascontiguousarray(groups.reshape(-1, groups.shape[-1]), dtype=np.float32)
    numbers, scales, offsets = compiled()(flat, (1 << bits) - 1)
    lead = groups.shape[:-1]
    return numbers.reshape(groups.shape), scales.reshape(lead), offsets.reshape(lead)
