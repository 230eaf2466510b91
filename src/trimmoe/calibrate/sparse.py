"""What-ifs for models that cannot answer them: ordinary passes with a few tokens changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.record import Advance
from trimmoe.calibrate.sampling import Changes, by_window, forced
from trimmoe.calibrate.sweep import Sweep
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.core.specs import IntArray
from trimmoe.models.base import MoEView

_SHARE = 1 / 16
"""Share of a window's tokens that one pass changes."""
_PASSES = 8
"""Passes per window; changes beyond them are not measured."""


def sparse_passes(
    view: MoEView, windows: Windows, changes: Changes, advance: Advance, folder: Path | None
) -> Iterator[tuple[IntArray, Tensor]]:
    """Indices of changes that shared a pass over a copy of their window, and their tokens' final
    states [S, d]; all passes go through the layers in one sweep. Not all changes may find room."""
    plans = [
        (window, members[chosen])
        for window, members in enumerate(by_window(changes, windows.count, windows.length))
        if members.size
        for chosen in _drawn(changes.take(members), windows.length)
    ]
    copies = windows.take(np.array([window for window, _ in plans]))
    sweep = Sweep(view, copies, at_once=1, folder=folder)
    for visit in sweep.visits():
        members = plans[visit.part][1]
        own = changes.take(members)
        position = torch.from_numpy(own.token % windows.length).to(view.device)
        here = torch.from_numpy(own.layer == visit.layer)
        routing = view.route(visit.layer, visit.attended, groups=visit.groups)
        experts, at = routing.experts.clone(), position[here]
        slots = torch.from_numpy(own.slots)[here].to(view.device)
        experts[at] = forced(experts[at], slots)
        after = run_layer(view, visit.layer, visit.attended, routing, experts)
        sweep.leave(visit, after)
        if visit.is_last:
            yield members, sweep.tail(visit, after)[position]
        advance(members.size)


def _drawn(changes: Changes, length: int) -> list[IntArray]:
    """A sparse random subset of one window's changes for each pass, one per token at most."""
    room = max(1, int(length * _SHARE))
    rng = np.random.default_rng([changes.count, int(changes.token[0])])
    waiting = rng.permutation(changes.count)
    passes: list[IntArray] = []
    while waiting.size and len(passes) < _PASSES:
        _, first = np.unique(changes.token[waiting], return_index=True)
        passes.append(waiting[np.sort(first)[:room]])
        waiting = rng.permutation(np.setdiff1d(waiting, passes[-1], assume_unique=True))
    return passes
