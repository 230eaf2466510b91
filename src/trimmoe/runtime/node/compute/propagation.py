"""What exited tokens leave in the layers that they did not run: work without decisions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimmoe.runtime.node.compute.completion import trailing
from trimmoe.runtime.node.compute.states import states_of
from trimmoe.runtime.node.compute.worker import Worker
from trimmoe.runtime.node.records.output import BatchOutput
from trimmoe.runtime.node.records.units import Unit


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
