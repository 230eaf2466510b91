"""What lies between the two projections of an expert.

Shapes: n rows of what the first one gives, the gate's panels before the up projection's.
"""

from __future__ import annotations

import numpy as np

from trimmoe.models.compiled.attention import address, floats, jit, whole_panels, wide
from trimmoe.models.compiled.kinds import GATED_CLAMPED, GATED_GELU
from trimmoe.models.compiled.lane_functions import exp_lanes
from trimmoe.models.compiled.lanes import LANES

_SLOPE, _CUBIC = np.float32(2.0 * np.sqrt(2.0 / np.pi)), np.float32(0.044715)


@jit
def gated_silu(both, rows, size):
    """silu(gate) * up for rows of both [n, 2 * whole_panels(size)], as [rows, wide(size)]."""
    inner = np.zeros((rows, wide(size)), dtype=np.float32)
    room = np.zeros(wide(size), dtype=np.float32)
    at, steps, up = address(room), (size + LANES - 1) // LANES, whole_panels(size)
    for r in range(rows):
        for i in range(size):
            room[i] = -both[r, i]
        exp_lanes(at, at, steps)
        for i in range(size):
            inner[r, i] = both[r, i] / (np.float32(1.0) + room[i]) * both[r, up + i]
    return inner


@jit
def gated_gelu(both, rows, size):
    """gelu(gate) * up; shapes as in `gated_silu`."""
    inner = np.zeros((rows, wide(size)), dtype=np.float32)
    room = np.zeros(wide(size), dtype=np.float32)
    at, steps, up = address(room), (size + LANES - 1) // LANES, whole_panels(size)
    for r in range(rows):
        for i in range(size):
            gate = both[r, i]
            # Half of one more than tanh(y) is a sigmoid of 2 y.
            room[i] = -_SLOPE * (gate + _CUBIC * gate * gate * gate)
        exp_lanes(at, at, steps)
        for i in range(size):
            inner[r, i] = both[r, i] / (np.float32(1.0) + room[i]) * both[r, up + i]
    return inner


@jit
def gated(shape, both, rows, size):
    """What lies between the projections of a shared expert or a dense block."""
    if shape.gated == GATED_GELU:
        return gated_gelu(both, rows, size)
    return gated_silu(both, rows, size)


@jit
def _clamped(both, rows, size, steepness, limit):
    """(up + 1) * gate * sigmoid(steepness * gate), the gate at most `limit`, up within it; shapes
    as in `gated_silu`."""
    inner = np.zeros((rows, wide(size)), dtype=np.float32)
    room = np.zeros(wide(size), dtype=np.float32)
    at, steps, up = address(room), (size + LANES - 1) // LANES, whole_panels(size)
    for r in range(rows):
        for i in range(size):
            both[r, i] = min(both[r, i], np.float32(limit))
            room[i] = np.float32(-steepness) * both[r, i]
        exp_lanes(at, at, steps)
        for i in range(size):
            held = max(min(both[r, up + i], np.float32(limit)), np.float32(-limit))
            one = np.float32(1.0)
            inner[r, i] = (held + one) * (both[r, i] / (one + room[i]))
    return inner


@jit
def between(shape, both, rows, bias):
    """What lies between a routed expert's projections, as in `gated_silu`; `bias` is an address."""
    size, up = shape.routed, whole_panels(shape.routed)
    if bias != 0:
        values = floats(bias, 2 * size)
        for r in range(rows):
            for i in range(size):
                both[r, i] += values[i]
                both[r, up + i] += values[size + i]
    if shape.gated == GATED_CLAMPED:
        return _clamped(both, rows, size, shape.steepness, shape.limit)
    return gated(shape, both, rows, size)
