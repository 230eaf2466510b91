"""In how many bits weights are held and served."""

from __future__ import annotations

from enum import StrEnum

GROUP = 32
"""Weights of a row that share a scale, where they are quantised."""


def bits_in_groups(bits: int) -> float:
    """Bits that a weight takes in so many bits, its share of its group's two bytes included, which
    are a scale, or a scale and an offset. What several hundred groups share is not counted."""
    return bits + 16 / GROUP


class Precision(StrEnum):
    """In what weights are held and served."""

    NONE = "none"
    """As the dtype says."""
    INT8 = "int8"
    INT4 = "int4"

    def bits(self, dtype_bytes: int) -> float:
        """What a weight takes, its share of scale and offset included."""
        known = {"none": 8.0 * dtype_bytes, "int8": bits_in_groups(8), "int4": bits_in_groups(4)}
        return known[self.value]

    def size_bytes(self, weights: int, dtype_bytes: int) -> int:
        """What so many weights take, scales and offsets included."""
        return round(weights * self.bits(dtype_bytes) / 8)
