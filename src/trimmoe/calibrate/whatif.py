"""What-ifs: what a token would predict had one layer run other experts for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.head import Referee
from trimmoe.calibrate.record import Advance, Windows, open_windows, run_layer
from trimmoe.calibrate.sampling import KEEP, Changes
from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.models.base import MoEView
from trimmoe.models.cache import KVCache

_STREAMS = 128
"""Streams that attend in one call, neighbours in position: they need no key beyond the last one's
position, but see each other's keys, masked, so cost is quadratic."""
_SPARSE_SHARE = 1 / 16
"""Share of a window's tokens that one sparse pass changes."""
_SPARSE_PASSES = 8
"""Sparse passes per window; changes beyond them are not measured."""


@torch.inference_mode()
def flips(
    view: MoEView, windows: Windows, changes: Changes, expected: IntArray, *, advance: Advance
) -> tuple[BoolArray, BoolArray]:
    """Whether the changed tokens' predictions differ from `expected` [S], and which of the changes
    were measured [S].

    Each change is a stream of its own: the changed token runs the remaining layers against the
    clean keys and values of its window, its own later ones perturbed. Many streams share one
    clean pass. This is the efficient equivalent of forcing changes on a sparse random subset of
    the tokens of ordinary passes: there, too, a token meets almost only clean neighbours. Models
    that cannot answer what-ifs are measured by just such sparse passes.
    """
    flipped, measured = np.zeros((2, changes.count), dtype=bool)
    referee = Referee(view)
    by_window = _by_window(changes, windows)
    run = _window_streams if _answers_whatifs(view, windows) else _window_sparse
    for index, members in enumerate(by_window):
        if members.size:
            states, found = run(view, windows.part(index, index + 1), changes.take(members))
            ran = members[found]
            flipped[ran] = ~referee.agrees(states[torch.from_numpy(found)], expected[ran])
            measured[ran] = True
        advance(members.size)
    return flipped, measured


def _by_window(changes: Changes, windows: Windows) -> list[IntArray]:
    """Indices of each window's changes, ordered by layer."""
    owner = changes.token // windows.length
    order = np.lexsort((np.arange(changes.count), changes.layer, owner))
    bounds = np.searchsorted(owner[order], np.arange(windows.count + 1))
    return [order[a:b] for a, b in pairwise(bounds)]


def _answers_whatifs(view: MoEView, windows: Windows) -> bool:
    cache, batch, hidden = open_windows(view, windows.part(0, 1))
    view.attend(0, hidden, batch, cache)
    try:
        view.attend_whatif(0, hidden[0, :1], torch.zeros(1, dtype=torch.int64), 0, cache)
    except NotImplementedError:
        return False
    return True


def _window_streams(view: MoEView, window: Windows, changes: Changes) -> tuple[Tensor, BoolArray]:
    """Final states [S, d] of one window's changes, which are ordered by layer, and which of them
    were run: all.

    At layer l the rows are the window's clean tokens, the streams changed before l, and those
    changed at l, which start from their clean attended state.
    """
    position = torch.from_numpy(changes.token % window.length)
    slots = torch.from_numpy(changes.slots)
    bounds = np.searchsorted(changes.layer, np.arange(view.spec.layer_count + 1))
    cache, batch, hidden = open_windows(view, window)
    length = window.length
    groups = torch.cat([torch.zeros(length, dtype=torch.int64), 1 + torch.arange(changes.count)])
    streams = hidden.new_zeros(0, hidden.shape[-1])
    for layer in range(view.spec.layer_count):
        clean = batch.pack(view.attend(layer, hidden, batch, cache))
        moved = _beside(partial(view.attend_whatif, layer), streams, position, cache)
        starting = slice(int(bounds[layer]), int(bounds[layer + 1]))
        rows = torch.cat([clean, moved, clean[position[starting]]])
        routing = view.route(layer, rows, groups=groups[: rows.shape[0]])
        experts = routing.experts.clone()
        at = slice(length + starting.start, length + starting.stop)
        experts[at] = _forced(experts[at], slots[starting])
        rows = run_layer(view, layer, rows, routing, experts)
        hidden, streams = batch.unpack(rows[:length]), rows[length:]
    view.tail(hidden, batch, cache)
    ended = _beside(view.tail_whatif, streams, position, cache)
    return ended, np.ones(changes.count, dtype=bool)


def _beside(
    ask: Callable[[Tensor, Tensor, int, KVCache], Tensor],
    streams: Tensor,
    position: Tensor,
    cache: KVCache,
) -> Tensor:
    """What `ask` answers for streams [n, d] whose positions begin `position`, block by block."""
    result = torch.empty_like(streams)
    if not len(streams):
        return result
    for block in position[: len(streams)].argsort(stable=True).split(_STREAMS):
        result[block] = ask(streams[block], position[block], 0, cache)
    return result


def _window_sparse(view: MoEView, window: Windows, changes: Changes) -> tuple[Tensor, BoolArray]:
    """The same by ordinary passes over copies of the window, each with a sparse random subset of
    the changes forced, one per token at most; not all changes may find room."""
    states = torch.zeros(changes.count, view.spec.hidden_size, dtype=view.dtype, device=view.device)
    found = np.zeros(changes.count, dtype=bool)
    room = max(1, int(window.length * _SPARSE_SHARE))
    rng = np.random.default_rng([changes.count, int(changes.token[0])])
    waiting = rng.permutation(changes.count)
    for _ in range(_SPARSE_PASSES):
        if not waiting.size:
            break
        _, first = np.unique(changes.token[waiting], return_index=True)
        now = waiting[np.sort(first)[:room]]
        waiting = np.setdiff1d(waiting, now, assume_unique=True)
        waiting = rng.permutation(waiting)
        states[torch.from_numpy(now)] = _sparse_pass(view, window, changes.take(now))
        found[now] = True
    return states, found


def _sparse_pass(view: MoEView, window: Windows, changes: Changes) -> Tensor:
    """Final states [S, d] of changes that share one pass."""
    position = torch.from_numpy(changes.token % window.length)
    slots = torch.from_numpy(changes.slots)
    layer_of = torch.from_numpy(changes.layer)
    cache, batch, hidden = open_windows(view, window)
    groups = batch.groups
    for layer in range(view.spec.layer_count):
        flat = batch.pack(view.attend(layer, hidden, batch, cache))
        routing = view.route(layer, flat, groups=groups)
        experts = routing.experts.clone()
        here = layer_of == layer
        at = position[here]
        experts[at] = _forced(experts[at], slots[here])
        hidden = batch.unpack(run_layer(view, layer, flat, routing, experts))
    return batch.pack(view.tail(hidden, batch, cache))[position]


def _forced(experts: Tensor, slots: Tensor) -> Tensor:
    """The activated sets [n, k] with the slots [n, k] that are not KEEP put in their place."""
    return torch.where(slots == KEEP, experts, slots)
