"""Weights in few bits: the scale and the offset of every group that come nearest to it.

At eight bits the scale is that of the largest weight. At fewer, extremes of a group spread the few
numbers that there are too thin. So narrower ranges are tried too, for each the scale and the offset
are fitted by least squares, and the best of all is taken. Where it is known how large what a column
is multiplied with usually is, squares of errors count by that: it is the error of what comes out
that matters. Both are then held in whole steps of the largest of sixteen rows, one byte each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trimmoe.core.precision import GROUP
from trimmoe.models.compiled import one_at_a_time
from trimmoe.models.compiled.lanes import LANES, SCALE_POWER, SCALE_SHIFT

_NARROWER = 0.06
"""By which part of it the range shrinks from try to try."""
_TRIES = 7
_LEAST, _LARGEST = np.float32(-127), np.float32(127)
_DOWN, _UP = np.float32(2.0**-SCALE_POWER), np.float32(2.0**SCALE_POWER)
_DROPPED, _MOST_BITS = np.uint32(SCALE_SHIFT), np.uint32(0xFFFF)


@njit(nogil=True, error_model="numpy", cache=True)
def _scales_held(values, bits):
    """Scales [L] of eight bits become the nearest that are held, whose `bits` are put down."""
    for lane in range(LANES):
        values[lane] *= _DOWN
    whole = values.view(np.uint32)
    for lane in range(LANES):
        odd = (whole[lane] >> _DROPPED) & np.uint32(1)
        half = (np.uint32(1) << (_DROPPED - np.uint32(1))) - np.uint32(1) + odd
        upper = min((whole[lane] + half) >> _DROPPED, _MOST_BITS)
        bits[lane] = np.uint16(upper)
        whole[lane] = upper << _DROPPED
    for lane in range(LANES):
        values[lane] *= _UP


@njit(nogil=True, error_model="numpy", cache=True)
def round_panels(weights, data, scales):
    """Weights [P * L, K], rounded to the nearest of 255 numbers by group: into int8 `data`
    [P, K / 2, L, 2] and the bits of `scales` [P, K / GROUP, L], uint16."""
    scale = np.empty(LANES, np.float32)
    for panel in range(scales.shape[0]):
        for group in range(scales.shape[1]):
            first = group * GROUP
            for lane in range(LANES):
                row, largest = weights[panel * LANES + lane], np.float32(0.0)
                for i in range(first, first + GROUP):
                    largest = max(largest, abs(row[i]))
                scale[lane] = largest / np.float32(127)
            _scales_held(scale, scales[panel, group])
            for lane in range(LANES):
                row = weights[panel * LANES + lane]
                divisor = scale[lane] if scale[lane] > 0.0 else np.float32(1.0)
                for i in range(first, first + GROUP):
                    number = min(max(np.rint(row[i] / divisor), _LEAST), _LARGEST)
                    data[panel, i // 2, lane, i % 2] = np.int8(number)


@njit(nogil=True, error_model="numpy", cache=True)
def _count(counts, i, lane):
    """How much a weight counts; where that is None, the compiler leaves out all that follows."""
    if counts is None:
        return np.float32(1.0)
    return counts[i, lane]


@njit(nogil=True, error_model="numpy", cache=True)
def _counted(counts, size):
    """How much so many weights of each group count together, [L]."""
    if counts is None:
        return np.full(LANES, np.float64(size))
    return counts.astype(np.float64).sum(0)


@njit(nogil=True, error_model="numpy", cache=True)
def _numbers(weights, counts, scale, offset, most, out, error):
    """The nearest number of each weight [g, L], into `out`; the squared `error` of each group, in
    which weights count as much as `counts` [g, L] says."""
    over = np.empty_like(scale)
    for lane in range(LANES):
        over[lane] = np.float32(1.0) / scale[lane] if scale[lane] != 0.0 else np.float32(0.0)
        error[lane] = np.float32(0.0)
    for i in range(weights.shape[0]):
        for lane in range(LANES):
            above = weights[i, lane] - offset[lane]
            number = min(max(np.rint(above * over[lane]), np.float32(0.0)), most)
            off = above - number * scale[lane]
            error[lane] += off * off * _count(counts, i, lane)
            out[i, lane] = number


@njit(nogil=True, error_model="numpy", cache=True)
def _fit(weights, counts, numbers, scale, offset):
    """Scale and offset of least squares for the numbers [g, L] that weights have, which count as
    much as `counts` [g, L] says."""
    size = weights.shape[0]
    sums, total = np.zeros_like(scale), np.zeros_like(scale)
    for i in range(size):
        for lane in range(LANES):
            count = _count(counts, i, lane)
            sums[lane] += numbers[i, lane] * count
            total[lane] += weights[i, lane] * count
    whole = _counted(counts, size)
    middle, mean = sums / whole, total / whole
    both, spread = np.zeros(LANES), np.zeros(LANES)
    for i in range(size):
        for lane in range(LANES):
            away = numbers[i, lane] - middle[lane]
            count = _count(counts, i, lane)
            both[lane] += away * (weights[i, lane] - mean[lane]) * count
            spread[lane] += away * away * count
    for lane in range(LANES):
        slope = both[lane] / spread[lane] if spread[lane] > 0.0 else 0.0
        scale[lane] = np.float32(slope)
        offset[lane] = np.float32(mean[lane] - slope * middle[lane])


@njit(nogil=True, error_model="numpy", cache=True)
def fit_groups(groups, worth, most):
    """Scales and offsets of groups [n, g], [n] each, of whose weights the numbers go from 0 to
    `most`: a weight is offset + scale * number.

    How much weights count: `worth` [m, g], of the groups of a row, which repeats; None: all the
    same. `LANES` groups at a time, one beside another, as vectors take them.
    """
    count, size = groups.shape
    scales, offsets = np.zeros(count, dtype=np.float32), np.zeros(count, dtype=np.float32)
    weights = np.zeros((size, LANES), dtype=np.float32)
    counts = np.ones((size, LANES), dtype=np.float32)
    counted = None if worth is None else counts
    tried = np.empty((size, LANES), dtype=np.float32)
    scale, offset = np.empty(LANES, dtype=np.float32), np.empty(LANES, dtype=np.float32)
    error, best = np.empty_like(scale), np.empty_like(scale)
    low, high = np.empty_like(scale), np.empty_like(scale)
    top = np.float32(most)
    for first in range(0, count, LANES):
        here = min(LANES, count - first)
        for lane in range(here):
            for i in range(size):
                weights[i, lane] = groups[first + lane, i]
                if worth is not None:
                    counts[i, lane] = worth[(first + lane) % worth.shape[0], i]
        low[:], high[:], best[:] = weights[0], weights[0], np.float32(np.inf)
        for i in range(size):
            for lane in range(LANES):
                low[lane] = min(low[lane], weights[i, lane])
                high[lane] = max(high[lane], weights[i, lane])
        for attempt in range(_TRIES):
            for lane in range(LANES):
                middle = (low[lane] + high[lane]) * np.float32(0.5)
                half = (high[lane] - low[lane]) * np.float32(0.5)
                reach = half * np.float32(1.0 - _NARROWER * attempt)
                scale[lane], offset[lane] = reach * np.float32(2.0) / top, middle - reach
            _numbers(weights, counted, scale, offset, top, tried, error)
            _fit(weights, counted, tried, scale, offset)
            _numbers(weights, counted, scale, offset, top, tried, error)
            for lane in range(here):
                if error[lane] < best[lane]:
                    best[lane] = error[lane]
                    scales[first + lane] = scale[lane]
                    offsets[first + lane] = offset[lane]
    return scales, offsets


@njit(nogil=True, error_model="numpy", cache=True)
def _off(weights, counts, scale, offset, most):
    """The squared error of a group's weights [g] and the mean offset that would leave the least of
    it, with the same numbers; squares count as much as `counts` [g] says."""
    over = np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0)
    error, total, whole = np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for i in range(weights.size):
        above = weights[i] - offset
        number = min(max(np.rint(above * over), np.float32(0.0)), most)
        count = np.float32(1.0) if counts is None else counts[i]
        off = above - number * scale
        error += off * off * count
        total += off * count
        whole += count
    return error, offset + total / whole


@njit(nogil=True, error_model="numpy", cache=True)
def code_groups(groups, worth, scales, offsets, scale_steps, offset_steps, most):
    """Numbers of groups [n, g], and their scales and offsets [n] in whole steps [P] of their panel:
    uint8 [n, g], uint8 [n] and int8 [n]. Of the steps beside a scale those are taken, and with them
    of those beside the offset that then fits best, which leave the least error; `worth` as for
    `fit_groups`."""
    count, size = groups.shape
    numbers = np.zeros((count, size), dtype=np.uint8)
    scale_codes, offset_codes = np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.int8)
    of_panel = count // scale_steps.size
    for group in range(count):
        step, shift = scale_steps[group // of_panel], offset_steps[group // of_panel]
        counts = None if worth is None else worth[group % worth.shape[0]]
        weights, best = groups[group], np.float32(np.inf)
        held, from_there = np.float32(0.0), np.float32(0.0)
        first = np.floor(scales[group] / step) if step > np.float32(0.0) else np.float32(0.0)
        for up in range(2):
            code = min(first + np.float32(up), np.float32(255.0))
            scale = code * step
            _, fitting = _off(weights, counts, scale, offsets[group], most)
            below = np.floor(fitting / shift) if shift > np.float32(0.0) else np.float32(0.0)
            for further in range(2):
                steps = below + np.float32(further)
                steps = min(max(steps, np.float32(-127.0)), np.float32(127.0))
                error, _ = _off(weights, counts, scale, steps * shift, most)
                if error < best:
                    best, held, from_there = error, scale, steps * shift
                    scale_codes[group] = np.uint8(code)
                    offset_codes[group] = np.int8(steps)
        over = np.float32(1.0) / held if held > np.float32(0.0) else np.float32(0.0)
        for i in range(size):
            number = np.rint((weights[i] - from_there) * over)
            numbers[group, i] = np.uint8(min(max(number, np.float32(0.0)), most))
    return numbers, scale_codes, offset_codes


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """A matrix [P * L, K] in few bits: a weight is offset + scale * number, where scale and offset
    are its group's times its panel's."""

    numbers: NDArray[np.uint8]
    """[P * L, K / GROUP, GROUP]."""
    scales: NDArray[np.uint8]
    """[P * L, K / GROUP]."""
    offsets: NDArray[np.int8]
    """The same."""
    scale_of_panel: NDArray[np.float32]
    """[P]."""
    offset_of_panel: NDArray[np.float32]
    """[P]."""

    @property
    def held(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """What scales and offsets stand for, [P * L, K / GROUP] each."""
        rows = (np.repeat(each, LANES) for each in (self.scale_of_panel, self.offset_of_panel))
        scale, offset = (each[:, None] for each in rows)
        return self.scales * scale, self.offsets * offset


def compiled() -> None:
    """Have what is above compiled by one process at a time, or read from where it is kept: servers
    that start together on a new machine would otherwise all compile it."""
    _compiled_for_eight()
    _compiled_for_fewer()


@cache
def _compiled_for_eight() -> None:
    with one_at_a_time():
        _round(np.zeros((LANES, GROUP), dtype=np.float32))


@cache
def _compiled_for_fewer() -> None:
    nothing = np.zeros((1, 1), dtype=np.float32)
    with one_at_a_time():
        for worth in (None, nothing):
            found = fit_groups(nothing, worth, 1)
            code_groups(nothing, worth, *found, *found, np.float32(1))


def round_to_eight(weights: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    """`round_panels` of weights [P * L, K]: numbers [P, K / 2, L, 2] and the bits of scales
    [P, K / GROUP, L] of groups along rows."""
    _compiled_for_eight()
    return _round(weights)


def fit(groups: NDArray[np.float32], bits: int, worth: NDArray[np.float32] | None = None) -> Fitted:
    """Groups [P * L, m, g] in so many bits; `worth` as for `fit_groups`, None: all weights count
    the same."""
    _compiled_for_fewer()
    flat, most = groups.reshape(-1, groups.shape[-1]), (1 << bits) - 1
    scales, offsets = fit_groups(flat, worth, most)
    scales = np.maximum(scales, np.float32(0.0))
    panels = groups.shape[0] // LANES
    steps = _steps(scales, panels, 255), _steps(offsets, panels, 127)
    numbers, scale_codes, offset_codes = code_groups(
        flat, worth, scales, offsets, *steps, np.float32(most)
    )
    return Fitted(
        numbers=numbers.reshape(groups.shape),
        scales=scale_codes.reshape(groups.shape[:-1]),
        offsets=offset_codes.reshape(groups.shape[:-1]),
        scale_of_panel=steps[0],
        offset_of_panel=steps[1],
    )


def _steps(values: NDArray[np.float32], panels: int, most: int) -> NDArray[np.float32]:
    """For each panel's values in [n] that of which its largest is so many."""
    return np.abs(values).reshape(panels, -1).max(axis=1) / np.float32(most)


def _round(weights: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    panels, columns = len(weights) // LANES, weights.shape[1]
    data = np.empty((panels, columns // 2, LANES, 2), dtype=np.int8)
    scales = np.empty((panels, columns // GROUP, LANES), dtype=np.uint16)
    round_panels(weights, data, scales)
    return data, scales
