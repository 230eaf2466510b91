"""Draws that are the same whenever they are asked for."""

from __future__ import annotations

import numpy as np

from trimmoe.core.specs import FloatArray, IntArray


def uniform(seed: int, requests: IntArray, numbers: IntArray) -> FloatArray:
    """One number in [0, 1) per token, the same whenever it is asked for (splitmix64), [n]."""
    key = np.uint64(seed * 0xD1342543DE82EF95 % 2**64)
    with np.errstate(over="ignore"):
        mixed = requests.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed += numbers.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + key
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
