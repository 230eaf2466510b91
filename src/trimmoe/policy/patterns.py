"""Which pattern of the profile's codebook an activated set belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.specs import IntArray
from trimmoe.cost.deciding import nearest_pattern


@dataclass(frozen=True, kw_only=True)
class PatternIndex:
    """Looks activated sets up in the codebook, the nearest one if a set is not in it."""

    members: NDArray[np.uint8]
    """Whether an expert is in a pattern, [N, E, P]."""

    @staticmethod
    def of(patterns: IntArray, expert_count: int) -> PatternIndex:
        """Index the codebook `patterns` [N, P, k]."""
        layers, count, _ = patterns.shape
        members = np.zeros((layers, expert_count, count), dtype=np.uint8)
        np.put_along_axis(members, patterns.transpose(0, 2, 1), 1, axis=1)
        return PatternIndex(members=members)

    def lookup(self, layer: int, experts: IntArray) -> IntArray:
        """The pattern with the largest overlap with each activated set [n, k]; shape [n]."""
        members = self.members[layer]
        shared = np.empty(members.shape[1], dtype=np.uint8)
        found = [nearest_pattern(members, row, shared) for row in experts]
        return np.array(found, dtype=np.int64)
