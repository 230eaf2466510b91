"""A server's own guesses of what its users' sequences go on with.

They make way for everything else, so they pass the layers a few at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trimmoe.models.base import TokenBatch
from trimmoe.runtime.home import home_layers
from trimmoe.runtime.node.compute.executor import Executor
from trimmoe.runtime.node.compute.passing import SLICE_S
from trimmoe.runtime.node.records.outcome import Outcome
from trimmoe.runtime.node.records.readings import Guessed, Reading
from trimmoe.runtime.processors import shaped
from trimmoe.runtime.sampling import pick

AT_ONCE = 4
"""Layers between two looks at the clock."""


def guess(worker: Executor, layer: int, readings: Sequence[Reading]) -> Outcome:
    """Readings that are about to enter a layer pass some; who finds no place is forgotten."""
    open_ones = [one for one in readings if not one.void and one.sequence in worker.state.accounts]
    ready = [one for one in worker.homes.seated(open_ones) if _may_begin(worker, one)]
    if not ready:
        return Outcome()
    layer = min(one.layer for one in ready)
    going = [one for one in ready if one.layer == layer]
    others = [one for one in ready if one.layer != layer]
    homes, began_s = worker.homes, time.perf_counter()
    batch = homes.view.batch(
        homes.cache,
        homes.slots_of(going),
        [one.positions for one in going],
    )
    hidden, layers = _entering(worker, going, batch), homes.view.spec.layer_count
    rows = sum(len(one.tokens) for one in going)
    while layer < layers:
        last = min(layer + AT_ONCE, layers)
        hidden = home_layers(homes.view, layer, last, hidden, batch, homes.cache, homes.own)
        for _ in range(layer, last):
            worker.pace.guess(rows)
        layer = last
        if all(one.void for one in going):
            return Outcome(reading=others)
        if time.perf_counter() - began_s >= SLICE_S:
            break
    if layer == layers:
        return Outcome(guessed=_guessed(worker, going, hidden, batch), reading=others)
    states = batch.pack(hidden).split([len(one.tokens) for one in going])
    for one, its in zip(going, states, strict=True):
        one.layer, one.hidden = layer, its
    return Outcome(reading=going + others)


def _may_begin(worker: Executor, reading: Reading) -> bool:
    """Whether a reading has its states, if it needs any; else it waits for them."""
    first = worker.reads_from(reading.route)
    if reading.hidden is not None or first == 0:
        return True
    reading.layer = first
    if worker.homes.found(reading):
        return True
    worker.homes.waiting[reading.sequence] = reading
    return False


def _entering(worker: Executor, going: Sequence[Reading], batch: TokenBatch) -> Tensor:
    states = [one.hidden for one in going if one.hidden is not None]
    if states:
        return batch.unpack(torch.cat(states))
    return worker.homes.view.embed(batch.pad([one.tokens for one in going]), batch)


def _guessed(
    worker: Executor, going: Sequence[Reading], hidden: Tensor, batch: TokenBatch
) -> list[Guessed]:
    homes = worker.homes
    states = batch.pack(homes.view.tail(hidden, batch, homes.cache))
    last = np.cumsum([len(one.tokens) for one in going]) - 1
    logits = homes.view.logits(states[torch.from_numpy(last)])
    made = []
    for one, scores in zip(going, logits, strict=True):
        chosen_from = shaped(scores, one.sampling, one.position, one.seen)
        confidence = float(chosen_from.float().softmax(-1).max())
        token = pick(chosen_from, one.sampling, one.position)
        made.append(Guessed(reading=one, token=token, confidence=confidence))
    return made
