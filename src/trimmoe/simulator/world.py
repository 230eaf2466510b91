"""The arrays of the compiled event loop: what does not change in a run, and what does.

Shapes: M servers, N layers, E experts, k slots, R requests, T rows of decided tokens, H heap, Q
queue entries, G messages. A *unit* is what moves through the layers as one: a decoded token (one
row) or a chunk of a prompt (one row per token); it goes by its first row. A request's chunks are
all on their way at once, its decoded tokens one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.specs import ClusterSpec, FloatArray, IntArray
from trimmoe.cost.model import Accounting, CostModel

NONE = -1

# Kinds of events; the first two happen before the others of the same instant.
DONE, MESSAGE, TOKEN, REQUEST = range(4)
# Words of `State.numbers`.
HEAP_SIZE, TICKET, FREE_ENTRIES, FREE_MESSAGES, NEXT_REQUEST, IN_FLIGHT, LOGGED, EVENTS = range(8)
RUNNING, DUE, TRAILING = 8, 9, 10
# Words of `State.clock`.
NOW, AREA = range(2)
# Roles of messages.
TOKEN_IN, DISPATCH, PART, TOKEN_BACK, STATE = range(5)
# Words of a message.
ROLE, SOURCE, TARGET, LAYER, FIRST, VECTORS, IDS, OWNER = range(8)
# Columns of the log of finished units.
LOG_REQUEST, LOG_ROW = range(2)
# Kinds of work that queues; those of prompts take turns with those of tokens.
DENSE, EXPERTS, CHUNK, CHUNK_EXPERTS = range(4)
KINDS = 4
OWN = 4
"""A batch's slots on the server of its dense part, which follow it at once."""


class World(NamedTuple):
    """What does not change."""

    dense_s: FloatArray
    """[M, N]."""
    expert_s: FloatArray
    """[M, N, E]."""
    delay_s: FloatArray
    """Propagation, [M, M]."""
    vector_s: FloatArray
    """Serialisation of one hidden vector, [M, M]."""
    id_s: FloatArray
    """Serialisation of one token id, [M, M]."""
    seat_s: FloatArray
    """Of a prompt from each server: a place is asked for on every server of its route, [M]."""
    later: np.ndarray
    """Whether a route has a layer from l on at a server, bool [R', N+1, M]."""
    batch_share: float
    max_batch: int
    link_queues: bool
    closed: bool
    """Whether a finished request is replaced at once."""
    endless: bool
    """Whether there is always another one."""
    migrates: bool
    frozen: bool
    """Whether an exited token's state stands still; otherwise it passes the layers left."""


class Rows(NamedTuple):
    """Decided tokens, one row each."""

    expert: NDArray[np.int16]
    """-1 = dropped, [T, N, k]."""
    server: NDArray[np.int16]
    """[T, N, k]."""
    place: NDArray[np.int16]
    """Where the token is at each layer and after the last one it passes, [T, N+1]."""
    layers: IntArray
    """Layers it passes, [T]."""
    sibling: IntArray
    """Next row of the same unit, [T]."""
    after: IntArray
    """First row of the request's next unit, [T]."""
    prompt: np.ndarray
    """Whether the token is a prompt's, bool [T]."""
    request: IntArray
    """Of a unit that has begun, [T]; this and what follows only in a unit's first row."""
    layer: IntArray
    """That the unit is about to enter or whose results it gathers, [T]."""
    pending: IntArray
    """Parts of the layer's result that are still to come, [T]."""
    began_s: FloatArray
    """When the unit entered, [T]."""
    open_to: IntArray
    """Layers whose keys and values the chunk before has written, which this one may enter; the
    step after the last layer counts as one, [T]."""
    parked: np.ndarray
    """Whether a chunk waits for the chunk before, bool [T]."""
    trailing: np.ndarray
    """Whether a token exited and its state is still passing layers, bool [T]."""


class Asked(NamedTuple):
    """Requests."""

    arrival_s: FloatArray
    access: IntArray
    prompts: IntArray
    """Units that are chunks of its prompt, [R]."""
    units: IntArray
    """Units that the request consists of, [R]."""
    done: IntArray
    """Units that are through, [R]."""
    first: IntArray
    """First row of the next decided unit, [R]."""
    last: IntArray
    """First row of the last decided unit, [R]."""
    ahead: IntArray
    """Decided units that have not begun, [R]."""
    row: IntArray
    """Of the decoded token in flight, [R]."""
    running: np.ndarray
    """Whether it has arrived and is not finished, bool [R]."""


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
    starting: np.ndarray
    """Whether a start is due at the end of this instant, bool [M]."""
    due: IntArray
    """Servers whose start is due, [2 M]."""
    serving_until_s: FloatArray
    """[M]; in the past if idle."""
    busy_s: FloatArray
    """Service time begun, [M]."""
    served: IntArray
    """Batches and units served out of queues, [M, kind, 2]."""
    waited_s: FloatArray
    """Sum over those units of the time between ready and start, [M, kind]."""
    link_free_s: FloatArray
    """[M, M]."""
    link_busy_s: FloatArray
    desk_free_s: FloatArray
    """When the last prompt of a server's users got its places, [M]."""
    sent: IntArray
    """Hidden vectors and token ids sent, [2, M, M]."""
    received: IntArray
    log: IntArray
    """[L, 2]."""
    log_time: FloatArray
    """Began and finished, [L, 2]."""
    used: IntArray
    """Scratch, [M]."""
    group_first: IntArray
    """Scratch, [2, M]."""
    group_vectors: IntArray
    """Scratch: vectors that take time and vectors that count, [2, 2, M]."""
    per_expert: IntArray
    """Scratch, [E]."""


def make_world(
    cost: CostModel,
    cluster: ClusterSpec,
    routes: IntArray,
    *,
    batch_share: float,
    max_batch: int | None,
    link_queues: bool,
    closed: bool,
    endless: bool,
    frozen: bool,
) -> World:
    """The constants of a run; seconds are the cost model's, split at the propagation delay."""
    layers, servers = cost.layer_count, cost.server_count
    later = np.zeros((routes.shape[0], layers + 1, servers), dtype=bool)
    for layer in range(layers - 1, -1, -1):
        later[:, layer] = later[:, layer + 1]
        later[np.arange(routes.shape[0]), layer, routes[:, layer]] = True
    return World(
        dense_s=np.ascontiguousarray(cost.dense_s),
        expert_s=np.ascontiguousarray(cost.expert_s),
        delay_s=np.ascontiguousarray(cluster.delay_s),
        vector_s=np.maximum(cost.transfer_s - cluster.delay_s, 0.0),
        id_s=np.maximum(cost.token_transfer_s - cluster.delay_s, 0.0),
        seat_s=_round_trips(cluster.delay_s, routes),
        later=later,
        batch_share=batch_share,
        max_batch=max_batch or np.iinfo(np.int64).max,
        link_queues=link_queues,
        closed=closed,
        endless=endless,
        migrates=cost.accounting is Accounting.MIGRATE,
        frozen=frozen,
    )


def _round_trips(delay_s: FloatArray, routes: IntArray) -> FloatArray:
    """To the server of its route that is farthest from each, there and back, [M]."""
    here = np.arange(delay_s.shape[0])
    both_s = delay_s + delay_s.T
    return both_s[here[:, None], routes[: here.size]].max(1)


def make_rows(count: int, layers: int, slots: int) -> Rows:
    """Room for `count` decided tokens."""
    return Rows(
        expert=np.full((count, layers, slots), NONE, dtype=np.int16),
        server=np.zeros((count, layers, slots), dtype=np.int16),
        place=np.zeros((count, layers + 1), dtype=np.int16),
        layers=np.zeros(count, dtype=np.int64),
        sibling=np.full(count, NONE),
        after=np.full(count, NONE),
        prompt=np.zeros(count, dtype=bool),
        request=np.full(count, NONE),
        layer=np.zeros(count, dtype=np.int64),
        pending=np.zeros(count, dtype=np.int64),
        began_s=np.zeros(count),
        open_to=np.zeros(count, dtype=np.int64),
        parked=np.zeros(count, dtype=bool),
        trailing=np.zeros(count, dtype=bool),
    )


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
        starting=np.zeros(servers, dtype=bool),
        due=np.zeros(2 * servers, dtype=np.int64),
        serving_until_s=np.zeros(servers),
        busy_s=np.zeros(servers),
        served=np.zeros((servers, KINDS, 2), dtype=np.int64),
        waited_s=np.zeros((servers, KINDS)),
        link_free_s=np.zeros((servers, servers)),
        link_busy_s=np.zeros((servers, servers)),
        desk_free_s=np.zeros(servers),
        sent=np.zeros((2, servers, servers), dtype=np.int64),
        received=np.zeros((2, servers, servers), dtype=np.int64),
        log=np.zeros((4096, 2), dtype=np.int64),
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
