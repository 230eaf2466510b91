"""What may run in a slot: experts, and copies that stand in for them.

A slot runs an expert, or a copy of one in few bits, its *stand-in*. Both have a number: experts
come first, then their copies in `RUNGS[0]` bits, then those in `RUNGS[1]`, and so on. Servers tell
each other these numbers, so that a further rung comes last, however many bits it has.

Shapes: E experts.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.specs import IntArray

RUNGS = (2, 4, 8, 3)
"""Bits of copies, in the order of their numbers."""
ASCENDING = tuple(sorted(RUNGS))
"""The same, least first."""
FORMS = 1 + len(RUNGS)
"""In how many an expert may run: as served, and on every rung."""
NO_STAND_IN = -1


def number_of(expert: int, bits: int, expert_count: int) -> int:
    """The number of an expert's copy in so many bits."""
    return (1 + RUNGS.index(bits)) * expert_count + expert


def numbered(bits: IntArray) -> IntArray:
    """The number of every expert's copy in so many bits, `NO_STAND_IN` where that is 0;
    [..., E] both."""
    experts = np.arange(bits.shape[-1])
    found = np.full(bits.shape, NO_STAND_IN)
    for rung, few in enumerate(RUNGS):
        found = np.where(bits == few, (1 + rung) * bits.shape[-1] + experts, found)
    return found


def expert_of(number: IntArray, expert_count: int) -> IntArray:
    """The expert that runs, or whose stand-in does; what is negative stays so."""
    return np.where(number < 0, number, number % expert_count)
