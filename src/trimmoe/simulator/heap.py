"""The event heap, compiled: events ordered by (time, priority, ticket)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimmoe.simulator.world import HEAP_SIZE, TICKET

if TYPE_CHECKING:

    def njit(function: Any) -> Any: ...

else:
    import numba

    njit = numba.njit(cache=True, nogil=True)

_PRIORITY = 1 << 52
"""A ticket is smaller."""


@njit
def _less(state, a, b):
    if state.heap_time[a] != state.heap_time[b]:
        return state.heap_time[a] < state.heap_time[b]
    return state.heap_order[a] < state.heap_order[b]


@njit
def _swap(state, a, b):
    for array in (state.heap_order, state.heap_kind, state.heap_what):
        array[a], array[b] = array[b], array[a]
    state.heap_time[a], state.heap_time[b] = state.heap_time[b], state.heap_time[a]


@njit
def push(state, time_s, priority, kind, what):
    """Schedule an event; of equal time and priority the one pushed first comes first."""
    at = state.numbers[HEAP_SIZE]
    state.numbers[HEAP_SIZE] += 1
    state.heap_time[at] = time_s
    state.heap_order[at] = priority * _PRIORITY + state.numbers[TICKET]
    state.numbers[TICKET] += 1
    state.heap_kind[at], state.heap_what[at] = kind, what
    while at > 0 and _less(state, at, (at - 1) // 2):
        _swap(state, at, (at - 1) // 2)
        at = (at - 1) // 2


@njit
def pop(state):
    """Drop the first event, which is at index 0."""
    state.numbers[HEAP_SIZE] -= 1
    size = state.numbers[HEAP_SIZE]
    _swap(state, 0, size)
    at = 0
    while True:
        least = at
        for child in (2 * at + 1, 2 * at + 2):
            if child < size and _less(state, child, least):
                least = child
        if least == at:
            return
        _swap(state, at, least)
        at = least
