"""Copies in few bits of experts that a server does not hold, to guess with and to stand in.

A copy in four bits leaves most guesses as they are, one in two bits most of those. What is
activated often gets one first, and more bits first where there is memory left.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.precision import bits_in_groups
from trimmoe.core.specs import BoolArray, FloatArray, IntArray, ModelSpec
from trimmoe.core.stand_ins import RUNGS

_SINGLE_BYTES = 4


def allowance_bytes(model: ModelSpec, share: float) -> int:
    """Memory for copies on each server: a share of what all experts take in single precision."""
    return int(share * _SINGLE_BYTES * _parameters(model).sum())


def reserved_bytes(capacity: IntArray, model: ModelSpec, allowance: int) -> IntArray:
    """What of the memory for experts [M] is kept for copies: the allowance where there is room for
    it, but no more than half of what one copy of every expert leaves, [M]."""
    whole = int(capacity.sum())
    left = max(whole - model.total_expert_bytes, 0)
    return np.minimum(allowance, capacity * (left / max(2 * whole, 1))).astype(np.int64)


def copied_bits(
    model: ModelSpec, hosts: BoolArray, frequency: FloatArray, allowed: IntArray
) -> IntArray:
    """Bits of every server's copies, 0 where it has none, [M, N, E].

    `hosts` [M, N, E]; `frequency` [N, E]: how often each expert is activated; `allowed` [M]: bytes.
    """
    sizes = {bits: copy_bytes(_parameters(model), bits) for bits in RUNGS}
    order = np.argsort(-frequency, axis=None, kind="stable")
    places = [divmod(int(at), frequency.shape[1]) for at in order]
    found = np.zeros(hosts.shape, dtype=np.int64)
    for held, bits, room in zip(hosts, found, allowed, strict=True):
        left = int(room)
        for rung, before in zip(RUNGS, (0, *RUNGS), strict=False):
            for where in places:
                if held[where] or bits[where] != before:
                    continue
                more = int(sizes[rung][where]) - int(sizes[before][where] if before else 0)
                if more <= left:
                    bits[where], left = rung, left - more
    return found


def spread_bits(model: ModelSpec, capacity: IntArray, allowed: IntArray) -> IntArray:
    """The most bits of which a copy of every expert that a server does not hold fits into what is
    `allowed` [M] bytes for copies, if its memory for experts [M] is full of them; 0 where none
    does, [M]."""
    whole = model.total_expert_bytes
    missing = np.clip(1.0 - capacity / whole, 0.0, 1.0)
    found = np.zeros(capacity.shape, dtype=np.int64)
    for bits in RUNGS:
        needed = missing * float(copy_bytes(_parameters(model), bits).sum())
        found = np.where(needed <= allowed, bits, found)
    return found


def copy_bytes(weights: FloatArray, bits: int) -> IntArray:
    """What so many weights take in few bits."""
    return np.rint(weights * bits_in_groups(bits) / 8).astype(np.int64)


def copies_bytes(model: ModelSpec, bits: IntArray) -> IntArray:
    """What every server's copies take, [M], of bits [M, N, E]."""
    sizes = [np.where(bits == rung, copy_bytes(_parameters(model), rung), 0) for rung in RUNGS]
    return np.sum(sizes, axis=(0, 2, 3)).astype(np.int64)


def _parameters(model: ModelSpec) -> FloatArray:
    return model.expert_flops / 2
