"""A reference to named arrays reads and writes what the tuple itself would."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.testing import assert_array_equal

from trimmoe.simulator.heap import njit
from trimmoe.simulator.references import refer


class Fields(NamedTuple):
    counts: np.ndarray
    table: np.ndarray
    flags: np.ndarray
    share: float
    limit: int
    open: bool


@njit
def _deeper(fields, at):
    """Reads after writing: nothing that is read anew may be old."""
    fields.counts[at] += fields.limit
    fields.table[at] = fields.counts[at] * fields.share
    fields.flags[at] = fields.open and fields.counts[at] > fields.limit
    return fields.table[at, 0] + fields.table[at, 2]


@njit
def _summed(fields):
    fields = refer(fields)
    total = 0.0
    for at in range(fields.counts.size):
        total += _deeper(fields, at)
    return total


def _fields(limit: int, *, is_open: bool = True) -> Fields:
    counts, table = np.arange(4), np.zeros((4, 6))[:, ::2]  # The second one has gaps.
    flags = np.zeros(4, dtype=bool)
    return Fields(counts, table, flags, share=0.5, limit=limit, open=is_open)


def test_arrays_and_numbers_are_the_tuples_own() -> None:
    fields = _fields(limit=2)
    assert _summed(fields) == 0.5 * 2 * (2 + 3 + 4 + 5)
    assert_array_equal(fields.counts, [2, 3, 4, 5])
    assert_array_equal(fields.table, 0.5 * np.array([[2] * 3, [3] * 3, [4] * 3, [5] * 3]))
    assert_array_equal(fields.flags, [False, True, True, True])


def test_another_tuple_of_the_type_has_its_own() -> None:
    first, second = _fields(limit=2), _fields(limit=7, is_open=False)
    _summed(first)
    _summed(second)
    assert_array_equal(first.counts, [2, 3, 4, 5])
    assert_array_equal(second.counts, [7, 8, 9, 10])
    assert not second.flags.any()
