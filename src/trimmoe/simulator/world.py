"""The arrays of the compiled event loop, but for the state of servers and links, and its words.

Shapes: M servers, N layers, E experts, k slots, R requests, T rows of decided tokens. A *unit* is
what moves through the layers as one: a decoded token (one row) or a chunk of a prompt (one row per
token); it goes by its first row. A request's chunks are all on their way at once, its decoded
tokens one after the other, but for what a token that exited leaves in the layers left, for those
that set out on guesses, and for what sets out on a wrong draft or guess, which is *withdrawn*.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.specs import MOST_DRAFTED, BoolArray, ClusterSpec, FloatArray, IntArray
from trimmoe.cost.batching import TOKEN_SHARE
from trimmoe.cost.guessing import (
    guess_times_s,
    own_guess_times_s,
    token_batch_times,
    visits,
)
from trimmoe.cost.head_law import tokens_per_pass
from trimmoe.cost.kernels import plain
from trimmoe.cost.model import Accounting, CostModel
from trimmoe.cost.warmth import rests_s, times_as_long, warm_shares

NONE = -1

# Kinds of events; the first two happen before the others of the same instant.
DONE, MESSAGE, TOKEN, REQUEST = range(4)
# Words of `State.numbers`.
HEAP_SIZE, TICKET, FREE_ENTRIES, FREE_MESSAGES, NEXT_REQUEST, IN_FLIGHT, LOGGED, EVENTS = range(8)
RUNNING, DUE, TRAILING = 8, 9, 10
# Words of `State.clock`.
NOW, AREA = range(2)
# Roles of messages.
TOKEN_IN, DISPATCH, PART, TOKEN_BACK, STATE, DRAFT_BACK = range(6)
# Words of a message.
ROLE, SOURCE, TARGET, LAYER, FIRST, VECTORS, IDS, OWNER = range(8)
# In the place of a message's layer: its receiver's software is through with it.
HANDLED = -2
# Columns of the log.
LOG_REQUEST, LOG_ROW, LOG_NUMBER, LOG_WORD = range(4)
# Its words: a unit is through, or full depth has confirmed what it was predicted early.
FINISHED, CONFIRMED = range(2)
# Kinds of work that queues; those of prompts, which come last, take turns with those of tokens.
DENSE, EXPERTS, TRAIL, HOME, CHUNK, CHUNK_EXPERTS = range(6)
KINDS = 6
OWN = 6
"""A batch's slots on the server of its dense part, which follow it at once."""
# What becomes of a guess, not sure enough that anything follows it; NONE where none is made.
RIGHT, WRONG, UNSURE = range(3)


class World(NamedTuple):
    """What does not change."""

    dense_s: FloatArray
    """[M, N]."""
    token_s: FloatArray
    """Software: what a token takes where it begins beside its layers, [M]."""
    expert_s: FloatArray
    """Of all that may run in a slot, [M, N, F * E]."""
    delay_s: FloatArray
    """Propagation, and what its receiver's software does with a message, [M, M]."""
    hop_s: FloatArray
    """The latter, [M]."""
    vector_s: FloatArray
    """Serialisation of one hidden vector, [M, M]."""
    id_s: FloatArray
    """Serialisation of one token id, [M, M]."""
    later: np.ndarray
    """Whether a route has a layer from l on at a server, bool [R', N+1, M]."""
    batch_times: FloatArray
    """As in `Speeds`, [B]."""
    token_batch_times: FloatArray
    """As in `cost.guessing`, [B]."""
    warm: FloatArray
    """Share of `hop_s` and `token_s` that is due to caches, see `cost.warmth`, [M]."""
    usual: FloatArray
    """What is left of the two between tokens of one stream, over what they are after a long wait,
    [M]."""
    visits: float
    """See `cost.guessing.visits`."""
    token_share: float
    """Of `hop_s` and `token_s`, what a batch takes only once."""
    max_batch: int
    link_queues: bool
    closed: bool
    """Whether a finished request is replaced at once."""
    endless: bool
    """Whether there is always another one."""
    migrates: bool
    frozen: bool
    """Whether an exited token's state stands still; otherwise it passes the layers left."""
    whole: bool
    """Whether they go on as if they had not, or else apart, without routed experts."""
    drafts: bool
    """Whether exits are drafts: nothing sets out on one before that ahead of it is confirmed."""
    guesses: int
    """The most guesses of a request that may be ahead of what full depth has confirmed."""
    chunks: bool
    """Whether they are made so many at a time, and the next ones when all are through."""
    segments: bool
    """Whether tokens pass the layers that leave nothing to decide in one batch."""
    pass_s: FloatArray
    """Time of a pass that guesses for one stream, also behind what a draft head names, [M]."""
    pass_ends_s: FloatArray
    """Of that, what is no layer's, [M]."""
    brings: float
    """Guesses that it brings on average."""
    several_s: FloatArray
    """Of one of several guesses that are made at once, behind which a draft head names nothing,
    [M]."""
    several_ends_s: FloatArray
    """Of that, what is no layer's, [M]."""
    along: IntArray
    """Drafts of a head that are read along with each token of a server's users, which guesses
    nothing by itself then, [M]."""
    naming_s: FloatArray
    """What a draft head takes to name a token behind one that nothing drafted follows, where layers
    end, [M]."""
    named: FloatArray
    """The chances that it names a first one, a second one, and so on, [MOST_DRAFTED]."""
    machine: IntArray
    """Of each server, [M]."""
    at_once: FloatArray
    """Servers of that machine that may work at once without holding one another up, [M]."""


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
    """First row of the request's next decided unit, [T]."""
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
    number: IntArray
    """The how-manieth of its request the unit is, from 0; NONE before it is through, [T]."""
    written: IntArray
    """Layers whose keys and values it has written; of a chunk the step after the last layer counts
    as one, [T]."""
    due: IntArray
    """Layers that it has been queued for as a token, [T]."""
    leader: IntArray
    """Of the same request, the unit that has not written all layers yet and that this one attends
    to: it enters none before that one has written it, [T]."""
    follower: IntArray
    """The unit that this one is the leader of, [T]."""
    parked: np.ndarray
    """Whether it waits for its leader, bool [T]."""
    trailing: np.ndarray
    """Whether a token exited and its state is still passing layers, or it is to be withdrawn and
    may not be through, bool [T]."""
    apart: np.ndarray
    """Whether it does so without decisions, apart from tokens."""
    draft_at: IntArray
    """Layers after which a token's prediction is a draft that is wrong and that something follows;
    otherwise NONE, [T]."""
    draft: IntArray
    """Of such a token or one followed by a wrong guess, the row of what sets out on that and is
    withdrawn, the first of a chain by `after`; otherwise NONE, [T]."""
    over_s: FloatArray
    """Of what is withdrawn, when the token it follows came to its user; otherwise infinite, [T]."""
    guess: IntArray
    """What becomes of the guess of what a token predicts: RIGHT, WRONG, UNSURE, or NONE is made,
    [T]."""
    window: IntArray
    """Guesses of its request that may be ahead of what is confirmed, [T]."""
    followed: np.ndarray
    """Whether something set out on that, bool [T]."""
    in_turn: np.ndarray
    """Whether it ends, too, after the unit before: a chunk, or a token that others follow before
    it is through, bool [T]."""


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
    """Of the decoded token in flight, or the first of them, [R]."""
    newest: IntArray
    """The last of those in flight that may set out on guesses, [R]; so is what follows."""
    under_way: IntArray
    """How many of them there are, [R]."""
    coming: np.ndarray
    """Whether the next one sets out at this instant, bool [R]."""
    ticket: IntArray
    """Of the entry of the guess that is being made, or NONE, [R]."""
    reads: IntArray
    """Tokens that are read for it, [R]."""
    more: IntArray
    """Guesses behind those that were made, which the last pass brought too, [R]."""
    brought: FloatArray
    """What passes have brought beyond whole guesses, [R]."""
    unread: IntArray
    """Those that its user's server has not begun to read, [R]."""
    held: np.ndarray
    """Whether a guess is made and has to wait because too many are ahead, bool [R]."""
    chunk: IntArray
    """How many set out on guesses since none was under way, [R]."""
    hindmost: IntArray
    """The newest or the last of its copies that set out on a wrong guess, [R]."""
    copies: IntArray
    """How many of these set out, [R]."""
    trail: IntArray
    """Of the last token that exited and whose state is still passing layers, [R]."""
    trail_before: IntArray
    """Of the one before that, [R]."""
    awaited: IntArray
    """That of which the end is waited for before the next token sets out, [R]."""
    running: np.ndarray
    """Whether it has arrived and is not finished, bool [R]."""
    over_s: FloatArray
    """When its last token came to its user; infinite before, [R]."""


def make_world(
    cost: CostModel,
    cluster: ClusterSpec,
    routes: IntArray,
    *,
    batch_times: tuple[float, ...],
    max_batch: int | None,
    link_queues: bool,
    closed: bool,
    endless: bool,
    frozen: bool,
    whole: bool,
    drafts: bool,
    guesses: int,
    chunks: bool,
    segments: bool,
    slots: int,
    hosts: BoolArray | None = None,
    along: IntArray | None = None,
    named: FloatArray | None = None,
    first_right: float | None = None,
) -> World:
    """The constants of a run; seconds are the cost model's, split at the propagation delay. Tokens
    activate so many `slots`. `hosts` [M, N, E] tell which layers guesses need not pass, `along` [M]
    how many drafts are read along with tokens, none if nobody says, and `named` with what chance
    a head names a first one to that end, a second one, and so on. `first_right` of a head's first
    drafts are, None: as many as its file says."""
    layers, servers = cost.layer_count, cost.server_count
    delay_s, speeds = cluster.delay_s, cluster.speeds
    hop_s = np.zeros(servers)
    machine, at_once = np.arange(servers), np.full(servers, np.inf)
    if speeds is not None:
        hop_s = speeds.hop_s
        delay_s = delay_s + hop_s * ~np.eye(servers, dtype=bool)
        machine, at_once = speeds.machine.astype(np.int64), speeds.at_once
    several, per_pass, brings = cost, 1.0, 1.0
    if speeds is not None and cost.head_right:
        several = replace(cost, guess_s=None, guess_ends_s=speeds.head_s)
        per_pass = tokens_per_pass(cost.head_right)
        brings = per_pass if first_right is None else tokens_per_pass(first_right)
    warm, rest_s = warm_shares(cost), rests_s(cost, routes, slots)
    later = np.zeros((routes.shape[0], layers + 1, servers), dtype=bool)
    for layer in range(layers - 1, -1, -1):
        later[:, layer] = later[:, layer + 1]
        later[np.arange(routes.shape[0]), layer, routes[:, layer]] = True
    return World(
        dense_s=plain(cost.dense_s),
        token_s=plain(np.zeros(servers) if cost.token_s is None else cost.token_s),
        expert_s=plain(cost.form_s),
        delay_s=plain(delay_s),
        hop_s=plain(hop_s),
        vector_s=np.maximum(cost.transfer_s - delay_s, 0.0),
        id_s=np.maximum(cost.token_transfer_s - delay_s, 0.0),
        later=later,
        batch_times=plain(batch_times),
        token_batch_times=plain(token_batch_times(replace(cost, batch_times=batch_times), slots)),
        visits=visits(routes),
        token_share=TOKEN_SHARE,
        warm=plain(warm),
        usual=plain([times_as_long(*each) for each in zip(warm, rest_s, strict=True)]),
        max_batch=max_batch or np.iinfo(np.int64).max,
        link_queues=link_queues,
        closed=closed,
        endless=endless,
        migrates=cost.accounting is Accounting.MIGRATE,
        frozen=frozen,
        whole=whole,
        drafts=drafts,
        guesses=guesses,
        chunks=chunks,
        segments=segments,
        pass_s=plain(per_pass * _guesses_s(cost, routes, hosts, slots)),
        pass_ends_s=plain(per_pass * _ends_s(cost)),
        brings=min(brings, per_pass),
        several_s=plain(_guesses_s(several, routes, hosts, slots)),
        several_ends_s=plain(_ends_s(several)),
        along=plain(np.zeros(servers) if along is None else along, np.int64),
        naming_s=plain(np.zeros(servers) if cost.naming_s is None else cost.naming_s),
        named=plain(np.zeros(MOST_DRAFTED) if named is None else named),
        machine=plain(machine),
        at_once=plain(at_once),
    )


def _guesses_s(
    cost: CostModel, routes: IntArray, hosts: BoolArray | None, slots: int
) -> FloatArray:
    """Of each server's users, [M]."""
    if hosts is None:
        return guess_times_s(cost, slots)
    servers = np.arange(cost.server_count)
    return own_guess_times_s(cost, routes[: servers.size], servers, hosts, slots)


def _ends_s(cost: CostModel) -> FloatArray:
    return np.zeros(cost.server_count) if cost.guess_ends_s is None else cost.guess_ends_s


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
        number=np.full(count, NONE),
        written=np.zeros(count, dtype=np.int64),
        due=np.zeros(count, dtype=np.int64),
        leader=np.full(count, NONE),
        follower=np.full(count, NONE),
        parked=np.zeros(count, dtype=bool),
        trailing=np.zeros(count, dtype=bool),
        apart=np.zeros(count, dtype=bool),
        draft_at=np.full(count, NONE),
        draft=np.full(count, NONE),
        over_s=np.full(count, np.inf),
        guess=np.full(count, NONE),
        window=np.zeros(count, dtype=np.int64),
        followed=np.zeros(count, dtype=bool),
        in_turn=np.zeros(count, dtype=bool),
    )
