"""In how many bits weights are held and served."""

from __future__ import annotations

from enum import StrEnum

GROUP = 32
"""Weights of a row that share a scale, where they are quantised."""


class Precision(StrEnum):
    """In what weights are held and served."""

    NONE = "none"
    """As the dtype says."""
    INT8 = "int8"
    INT4 = "int4"

    def size_bytes(self, weights: int, dtype_bytes: int) -> int:
        """What so many weights take, scales and offsets included."""
        bits = {"none": 8 * dtype_bytes, "int8": 8 + 32 / GROUP, "int4": 4 + 32 / GROUP}
        return round(weights * bits[self.value] / 8)
