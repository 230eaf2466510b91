"""The arrays of the compiled event loop that change as servers work and links carry.

Shapes: M servers, N layers, E experts, H heap, Q queue entries, G messages, L log.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.simulator.world import FREE_ENTRIES, FREE_MESSAGES, KINDS, NONE


class State(NamedTuple):
    """What changes."""

    heap_time: FloatArray
    heap_order: IntArray
    heap_what: IntArray
    """8 times what the event is about, plus its kind."""
    numbers: IntArray
    clock: FloatArray
    entry_unit: IntArray
    entry_next: IntArray
    entry_ticket: IntArray
    entry_begun: IntArray
    """Batches that its server had begun when it came."""
    entry_ready_s: FloatArray
    free_entries: IntArray
    message: IntArray
    """[G, 8]."""
    free_messages: IntArray
    queue_first: IntArray
    """[M, kind, N]."""
    queue_last: IntArray
    line_first: IntArray
    """One of the queues that are not empty, as kind * N + layer, of tokens and of prompts,
    [M, 2]."""
    line_next: IntArray
    """[M, kind * N]."""
    begun: IntArray
    """Batches so far, quick steps included, [M]."""
    prompts_turn: np.ndarray
    """Whether prompts come next if there are any, bool [M]."""
    quick_first: IntArray
    """Entries that only wait for the server to be free: they take no time, [M]."""
    quick_last: IntArray
    batch_first: IntArray
    """Entries in service, [M]."""
    batch_kind: IntArray
    batch_layer: IntArray
    batch_stays: np.ndarray
    """Whether all units in service run here whatever they run in this layer, and stay, bool [M]."""
    batch_several: np.ndarray
    """Whether they are several guesses, bool [M]."""
    taken_s: FloatArray
    """When those were taken from their queue, [M]."""
    token_turn_s: FloatArray
    """What tokens took in their last turn, [M]."""
    starting: np.ndarray
    """Whether a start is due at the end of this instant, bool [M]."""
    due: IntArray
    """Servers whose start is due, [2 M]."""
    serving_until_s: FloatArray
    """[M]; in the past if idle."""
    listens_s: FloatArray
    """Until when a server reads no messages, as it computes a batch of tokens; what prompts need is
    computed beside, [M]."""
    handled_s: FloatArray
    """When all messages that have come are handled, [M]; no batch begins before."""
    busy_s: FloatArray
    """Service time begun, [M]."""
    served: IntArray
    """Batches, and units that passed a layer in them, [M, kind, 2]."""
    waited_s: FloatArray
    """Sum over those units of the time between ready and start, [M, kind]."""
    link_free_s: FloatArray
    """[M, M]."""
    link_busy_s: FloatArray
    sent: IntArray
    """Hidden vectors and token ids sent, [2, M, M]."""
    received: IntArray
    log: IntArray
    """Requests, rows, numbers and words, [L, 4]."""
    log_time: FloatArray
    """When units began, and what the log says happened, [L, 2]."""
    used: IntArray
    """Scratch, [M]."""
    group_first: IntArray
    """Scratch, [2, M]."""
    group_vectors: IntArray
    """Scratch: vectors that take time and vectors that count, [2, 2, M]."""
    per_expert: IntArray
    """Scratch, [E]."""


def make_state(servers: int, layers: int, experts: int) -> State:
    """An empty system at time 0."""
    empty = np.zeros(0, dtype=np.int64)
    state = State(
        heap_time=np.zeros(0),
        heap_order=empty,
        heap_what=empty,
        numbers=np.zeros(11, dtype=np.int64),
        clock=np.zeros(2),
        entry_unit=empty,
        entry_next=empty,
        entry_ticket=empty,
        entry_begun=empty,
        entry_ready_s=np.zeros(0),
        free_entries=empty,
        message=np.zeros((0, 8), dtype=np.int64),
        free_messages=empty,
        queue_first=np.full((servers, KINDS, layers), NONE),
        queue_last=np.full((servers, KINDS, layers), NONE),
        line_first=np.full((servers, 2), NONE),
        line_next=np.full((servers, KINDS * layers), NONE),
        begun=np.zeros(servers, dtype=np.int64),
        prompts_turn=np.zeros(servers, dtype=bool),
        quick_first=np.full(servers, NONE),
        quick_last=np.full(servers, NONE),
        batch_first=np.full(servers, NONE),
        batch_kind=np.zeros(servers, dtype=np.int64),
        batch_layer=np.zeros(servers, dtype=np.int64),
        batch_stays=np.zeros(servers, dtype=bool),
        batch_several=np.zeros(servers, dtype=bool),
        taken_s=np.zeros(servers),
        token_turn_s=np.zeros(servers),
        starting=np.zeros(servers, dtype=bool),
        due=np.zeros(2 * servers, dtype=np.int64),
        serving_until_s=np.zeros(servers),
        listens_s=np.zeros(servers),
        handled_s=np.zeros(servers),
        busy_s=np.zeros(servers),
        served=np.zeros((servers, KINDS, 2), dtype=np.int64),
        waited_s=np.zeros((servers, KINDS)),
        link_free_s=np.zeros((servers, servers)),
        link_busy_s=np.zeros((servers, servers)),
        sent=np.zeros((2, servers, servers), dtype=np.int64),
        received=np.zeros((2, servers, servers), dtype=np.int64),
        log=np.zeros((4096, 4), dtype=np.int64),
        log_time=np.zeros((4096, 2)),
        used=np.zeros(servers, dtype=np.int64),
        group_first=np.full((2, servers), NONE),
        group_vectors=np.zeros((2, 2, servers), dtype=np.int64),
        per_expert=np.zeros(experts, dtype=np.int64),
    )
    return with_room(state, 1024)


_GROWING = (
    "heap_time", "heap_order", "heap_what", "entry_unit", "entry_next",
    "entry_ticket", "entry_begun", "entry_ready_s", "message",
)  # fmt: skip


def with_room(state: State, more: int) -> State:
    """The same state with `more` places in the heap and in both pools."""
    before = state.entry_unit.size
    fresh = np.arange(before, before + more)
    grown = {}
    for name in _GROWING:
        array = getattr(state, name)
        grown[name] = np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])
    for name, word in (("free_entries", FREE_ENTRIES), ("free_messages", FREE_MESSAGES)):
        free = int(state.numbers[word])
        kept = getattr(state, name)[:free]
        grown[name] = np.concatenate([kept, fresh, np.zeros(before, dtype=np.int64)])[
            : before + more
        ]
        state.numbers[word] = free + more
    return state._replace(**grown)
