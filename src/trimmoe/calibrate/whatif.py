"""What-ifs: what a token would predict had one layer run other experts for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.head import Referee
from trimmoe.calibrate.mapped import States
from trimmoe.calibrate.record import Advance
from trimmoe.calibrate.sampling import Changes, by_window, forced
from trimmoe.calibrate.sparse import sparse_passes
from trimmoe.calibrate.sweep import Known, Sweep, Visit
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.models.base import MoEView
from trimmoe.models.cache import KVCache

_STREAMS = 128
"""Streams that attend in one call, neighbours in position: they need no key beyond the last one's
position, but see each other's keys, masked, so cost is quadratic."""


@torch.inference_mode()
def flips(
    view: MoEView,
    windows: Windows,
    changes: Changes,
    expected: IntArray,
    *,
    advance: Advance,
    folder: Path | None = None,
    clean: Tensor | None = None,
) -> tuple[BoolArray, BoolArray]:
    """Whether the changed tokens' predictions differ from `expected` [S], and which of the changes
    were measured [S].

    Each change is a stream of its own: the changed token runs the remaining layers against the
    clean keys and values of its window, its own later ones perturbed. Many streams share one
    clean pass. This is the efficient equivalent of forcing changes on a sparse random subset of
    the tokens of ordinary passes: there, too, a token meets almost only clean neighbours. Models
    that cannot answer what-ifs are measured by just such sparse passes. Either way all go through
    the layers in one sweep, whose states `folder` takes; `advance` is told of a step for every
    change and layer. Where the `clean` states after each layer [N, T, d] are known, streams alone
    pass the experts.
    """
    flipped, measured = np.zeros((2, changes.count), dtype=bool)
    if not changes.count:
        return flipped, measured
    referee = Referee(view)

    def judge(members: IntArray, states: Tensor) -> None:
        flipped[members] = ~referee.agrees(states, expected[members])
        measured[members] = True

    if _answers_whatifs(view):
        _streams(view, windows, changes, judge, advance, folder=folder, clean=clean)
    else:
        for members, states in sparse_passes(view, windows, changes, advance, folder):
            judge(members, states)
    return flipped, measured


def _answers_whatifs(view: MoEView) -> bool:
    """Asks of a sequence's first position, which looks at no other."""
    hidden = torch.zeros(1, view.spec.hidden_size, dtype=view.dtype, device=view.device)
    first = torch.zeros(1, dtype=torch.int64, device=view.device)
    try:
        view.attend_whatif(0, hidden, first, 0, view.new_cache(slots=1))
    except NotImplementedError:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Streams:
    """The changes of one window, ordered by layer, each a stream from there on."""

    window: int
    members: IntArray
    """Their indices among all changes, [S]."""
    first: int
    """Row of the first among the states of all streams."""
    position: Tensor
    """int64 [S]."""
    slots: Tensor
    """[S, k]."""
    bounds: IntArray
    """How many begin before each layer, [N + 1]."""

    def rows(self, count: int) -> slice:
        """Where the states of the first `count` streams are."""
        return slice(self.first, self.first + count)


def _plan(view: MoEView, windows: Windows, changes: Changes) -> list[_Streams]:
    """The streams of every window that has any."""
    plans, first = [], 0
    for window, members in enumerate(by_window(changes, windows.count, windows.length)):
        if not members.size:
            continue
        own = changes.take(members)
        plans.append(
            _Streams(
                window=window,
                members=members,
                first=first,
                position=torch.from_numpy(own.token % windows.length).to(view.device),
                slots=torch.from_numpy(own.slots).to(view.device),
                bounds=np.searchsorted(own.layer, np.arange(view.spec.layer_count + 1)),
            )
        )
        first += members.size
    return plans


def _streams(
    view: MoEView,
    windows: Windows,
    changes: Changes,
    judge: Callable[[IntArray, Tensor], None],
    advance: Advance,
    *,
    folder: Path | None,
    clean: Tensor | None,
) -> None:
    """Have `judge` told the indices of each window's changes and their final states [S, d]."""
    plans = _plan(view, windows, changes)
    states = States(changes.count, view, folder)
    own = np.array([plan.window for plan in plans])
    sweep = Sweep(
        view,
        windows.take(own),
        at_once=1,
        folder=folder,
        known=None if clean is None else _whole(view, own, clean),
    )

    def visited(visit: Visit) -> int:
        plan = plans[visit.part]
        after, moved = _run(view, visit, plan, states, clean)
        if visit.is_last:
            sweep.tail(visit, after)
            final = _beside(view.tail_whatif, moved, plan.position, visit.cache)
            judge(plan.members, final)
        else:
            sweep.leave(visit, after)
            states[plan.rows(len(moved))] = moved
        return visit.part

    for part in sweep.results(visited):
        if part == 0:
            states.release()
        advance(plans[part].members.size)


def _whole(view: MoEView, windows: IntArray, clean: Tensor) -> Known:
    """All layers of these windows, of which it is known how each is entered."""
    layers = view.spec.layer_count
    first = np.zeros(windows.size, dtype=np.int64)
    return Known(hidden=clean, windows=windows, first=first, last=first + layers)


def _run(
    view: MoEView, visit: Visit, plan: _Streams, states: States, known: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The window's clean tokens through the layer, [n, d], and the streams changed before it and
    then those changed at it, which start from their clean attended state, [S, d]. Where it is
    `known` what clean tokens are after each layer [N, T, d], they only leave keys and values."""
    layer, clean = visit.layer, visit.attended
    begun, beginning = int(plan.bounds[layer]), int(plan.bounds[layer + 1])
    whatif = partial(view.attend_whatif, layer)
    moved = _beside(whatif, states[plan.rows(begun)], plan.position, visit.cache)
    streams = torch.cat([moved, clean[plan.position[begun:beginning]]])
    rows, groups = streams, 1 + torch.arange(beginning, device=view.device)
    if known is None:
        rows, groups = torch.cat([clean, streams]), torch.cat([visit.groups, groups])
    routing = view.route(layer, rows, groups=groups)
    experts = routing.experts.clone()
    at = slice(len(rows) - beginning + begun, None)
    experts[at] = forced(experts[at], plan.slots[begun:beginning])
    after = run_layer(view, layer, rows, routing, experts)
    if known is None:
        return after[: len(clean)], after[len(clean) :]
    start = plan.window * len(clean)
    return known[layer, start : start + len(clean)].to(after), after


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
