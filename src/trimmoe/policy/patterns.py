"""Which pattern of the profile's codebook an activated set belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.cost.deciding import nearest_pattern


@dataclass(frozen=True, kw_only=True)
class PatternIndex:
    """Looks activated sets up in the codebook, the nearest one if a set is not in it."""

    members: BoolArray
    """Whether an expert is in a pattern, [N, P, E]."""

    @staticmethod
    def of(patterns: IntArray, expert_count: int) -> PatternIndex:
        """Index the codebook `patterns` [N, P, k]."""
        members = np.zeros((*patterns.shape[:2], expert_count), dtype=bool)
        np.put_along_axis(members, patterns, True, axis=2)
        return PatternIndex(members=members)

    def lookup(self, layer: int, experts: IntArray) -> IntArray:
        """The pattern with the largest overlap with each activated set [n, k]; shape [n]."""
        members = self.members[layer]
        return np.array([nearest_pattern(members, row) for row in experts], dtype=np.int64)
