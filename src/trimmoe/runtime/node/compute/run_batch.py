"""Running one batch of work, whatever its step; also what exited tokens leave in the layers that
they did not run, which is work without decisions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from trimmoe.engine.lead import MOST_TOGETHER
from trimmoe.runtime.node.compute.completion import trailing
from trimmoe.runtime.node.compute.guesses import guess
from trimmoe.runtime.node.compute.passing import in_turn, pass_layers, pass_segment
from trimmoe.runtime.node.compute.prefill import end_chunk, pass_chunk
from trimmoe.runtime.node.compute.slots import run_slots
from trimmoe.runtime.node.compute.states import leaving, states_of
from trimmoe.runtime.node.compute.worker import Worker
from trimmoe.runtime.node.records.exact_hosts import ExactHosts
from trimmoe.runtime.node.records.output import BatchOutput
from trimmoe.runtime.node.records.units import Unit
from trimmoe.runtime.node.records.work import Step, Work


def use_threads(count: int) -> None:
    """Of the calling thread, in what torch computes."""
    torch.set_num_threads(count)


def run_batch(
    worker: Worker, exact_hosts: ExactHosts, work: Work, *, slowdown: float = 1.0
) -> BatchOutput:
    """In the worker thread; takes `slowdown` times as long as it would."""
    began_s = time.perf_counter()
    worker.pace.begin()
    with torch.inference_mode():
        result = _performed(worker, exact_hosts, work, began_s)
    result.parcels = leaving(result.parcels)
    if slowdown > 1.0:
        time.sleep((time.perf_counter() - began_s) * (slowdown - 1.0))
    return result


def _performed(worker: Worker, exact_hosts: ExactHosts, work: Work, began_s: float) -> BatchOutput:
    layer, items = work.layer, work.items
    match work.step:
        case Step.ARRIVE:
            return worker.arrive(items)
        case Step.ATTEND:
            units, later = in_turn(worker, layer, items)
            if worker.segments.in_force:
                result = pass_segment(worker, layer, units)
            else:
                result = pass_layers(worker, layer, units, alone=work.alone)
            result.ready += later
            worker.token_turn_s = time.perf_counter() - began_s
            return result
        case Step.FINISH:
            return worker.finish(layer, items)
        case Step.SLOTS | Step.CHUNK_SLOTS:
            return run_slots(worker, layer, items)
        case Step.PROPAGATE:
            return propagate(worker, layer, items)
        case Step.TRAIL:
            return trail(worker, layer, items)
        case Step.CHUNK:
            return pass_chunk(worker, exact_hosts, layer, items[0])
        case Step.CHUNK_END:
            return end_chunk(worker, items[0])
        case Step.GUESS:
            goes_on = all(len(one.tokens) <= MOST_TOGETHER for one in items)
            result = guess(worker, layer, items)
            if goes_on and not any(one.by_draft_model for one in items):
                made = sum(len(one.made) for one in result.guessed)
                worker.guess_pace.took(time.perf_counter() - began_s, made, len(items))
            return result


def trail(worker: Worker, layer: int, units: Sequence[Unit]) -> BatchOutput:
    """A layer without its routed experts; then the next one, here or where it is run.

    `layer` may be the one after the last: what else the model has there.
    """
    view, batch = worker.view, worker.batch(units)
    hidden = batch.unpack(torch.cat([states_of(view, unit, layer - 1) for unit in units]))
    result = BatchOutput(written=[(unit, range(layer, layer + 1)) for unit in units])
    if layer == view.spec.layer_count:
        view.tail(hidden, batch, worker.cache)
        return result
    attended = batch.pack(view.attend(layer, hidden, batch, worker.cache))
    passed = view.skip(layer, attended)
    worker.pace.dense(layer, len(units))
    away = []
    for row, unit in enumerate(units):
        unit.layer, unit.hidden = layer + 1, passed[row : row + 1]
        if layer + 1 in unit.seat.written:
            result.ready.append(unit)
        else:
            away.append(row)
    if away and layer + 1 < view.spec.layer_count:
        leaving = [units[row] for row in away]
        result.parcels += trailing(layer + 1, leaving, passed[torch.tensor(away)])
    return result


def propagate(worker: Worker, layer: int, units: Sequence[Unit]) -> BatchOutput:
    """Keys and values of exited tokens in this server's layers from `layer` on."""
    result = BatchOutput()
    layer_count = worker.view.spec.layer_count
    for later in range(layer, layer_count + 1):
        here = [unit for unit in units if later in unit.seat.written]
        if not here:
            continue
        batch = worker.batch(here)
        hidden = batch.unpack(torch.cat([states_of(worker.view, unit, later - 1) for unit in here]))
        if later == layer_count:
            worker.view.propagate_tail(hidden, batch, worker.cache)
        else:
            worker.view.propagate(later, hidden, batch, worker.cache)
        result.written += [(unit, range(later, later + 1)) for unit in here]
    return result
