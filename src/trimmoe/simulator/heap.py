"""The event heap, compiled: events ordered by (time, priority, ticket)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimmoe import cost
from trimmoe.core.compiled_from import forget_outdated
from trimmoe.simulator.world import HEAP_SIZE, TICKET

if TYPE_CHECKING:

    def njit(function: Any) -> Any: ...

    def inlined(function: Any) -> Any: ...

else:
    import numba

    _FOLDER = Path(__file__).parent
    # The cost model's formulas are compiled into what is here.
    forget_outdated(_FOLDER, _FOLDER, Path(cost.__file__).parent)

    # Nothing compiled here makes an array; counting references to some forty of them, atomically
    # and at every access, takes ten times as long as all the rest.
    njit = numba.njit(cache=True, nogil=True, _nrt=False)
    inlined = numba.njit(cache=True, nogil=True, _nrt=False, forceinline=True)

_PRIORITY = 1 << 52
"""A ticket is smaller."""


@inlined
def push(state, time_s, priority, kind, what):
    """Schedule an event; of equal time and priority the one pushed first comes first."""
    times, orders, kinds = state.heap_time, state.heap_order, state.heap_what
    at = state.numbers[HEAP_SIZE]
    state.numbers[HEAP_SIZE] = at + 1
    order = priority * _PRIORITY + state.numbers[TICKET]
    state.numbers[TICKET] += 1
    while at > 0:
        above = (at - 1) >> 1
        if times[above] < time_s or (times[above] == time_s and orders[above] < order):
            break
        times[at], orders[at], kinds[at] = times[above], orders[above], kinds[above]
        at = above
    times[at], orders[at], kinds[at] = time_s, order, what * 8 + kind


@inlined
def pop(state):
    """Drop the first event, which is at index 0."""
    times, orders, kinds = state.heap_time, state.heap_order, state.heap_what
    size = state.numbers[HEAP_SIZE] - 1
    state.numbers[HEAP_SIZE] = size
    time_s, order, kind = times[size], orders[size], kinds[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            times[other] < times[child]
            or (times[other] == times[child] and orders[other] < orders[child])
        ):
            child = other
        if time_s < times[child] or (time_s == times[child] and order < orders[child]):
            break
        times[at], orders[at], kinds[at] = times[child], orders[child], kinds[child]
        at = child
    times[at], orders[at], kinds[at] = time_s, order, kind
