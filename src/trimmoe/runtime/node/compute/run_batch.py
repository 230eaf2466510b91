"""Running one batch of work, whatever its step."""

from __future__ import annotations

import time

import torch

from trimmoe.runtime.node.compute.guesses import guess
from trimmoe.runtime.node.compute.passing import pass_layers, pass_segment
from trimmoe.runtime.node.compute.prefill import end_chunk, pass_layer, run_slots
from trimmoe.runtime.node.compute.propagation import propagate, trail
from trimmoe.runtime.node.compute.states import leaving
from trimmoe.runtime.node.compute.worker import Worker
from trimmoe.runtime.node.records.exact_hosts import ExactHosts
from trimmoe.runtime.node.records.output import BatchOutput
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
        result = _performed(worker, exact_hosts, work)
    result.parcels = leaving(result.parcels)
    if slowdown > 1.0:
        time.sleep((time.perf_counter() - began_s) * (slowdown - 1.0))
    return result


def _performed(worker: Worker, exact_hosts: ExactHosts, work: Work) -> BatchOutput:
    layer, items = work.layer, work.items
    match work.step:
        case Step.ARRIVE:
            return worker.arrive(items)
        case Step.ATTEND:
            if worker.segments.in_force:
                return pass_segment(worker, layer, items)
            return pass_layers(worker, layer, items, alone=work.alone)
        case Step.FINISH:
            return worker.finish(layer, items)
        case Step.SLOTS | Step.CHUNK_SLOTS:
            return run_slots(worker, layer, items)
        case Step.PROPAGATE:
            return propagate(worker, layer, items)
        case Step.TRAIL:
            return trail(worker, layer, items)
        case Step.CHUNK:
            return pass_layer(worker, exact_hosts, layer, items[0])
        case Step.CHUNK_END:
            return end_chunk(worker, items[0])
        case Step.GUESS:
            return guess(worker, layer, items)
