"""Prompts, chunk by chunk; the engine keeps no books of them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trimmoe.core.specs import IntArray
from trimmoe.cost.batching import prompt_turn_s
from trimmoe.engine.prompts import decided
from trimmoe.models.batch import TokenBatch
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.passed import Routing
from trimmoe.runtime.node.compute.completion import to_users, token_of
from trimmoe.runtime.node.compute.passing import may_enter
from trimmoe.runtime.node.compute.shipping import Cargo, Split, dispatched, onward, room
from trimmoe.runtime.node.compute.states import states_of
from trimmoe.runtime.node.compute.worker import Worker
from trimmoe.runtime.node.records.exact_hosts import ExactHosts
from trimmoe.runtime.node.records.output import BatchOutput
from trimmoe.runtime.node.records.tokens import ChargeSpec
from trimmoe.runtime.node.records.units import Unit
from trimmoe.runtime.scores import scored


def pass_chunk(worker: Worker, exact_hosts: ExactHosts, layer: int, unit: Unit) -> BatchOutput:
    """One chunk through a layer and, as long as all of it stays and what comes meanwhile may wait,
    through the next ones."""
    until_s = time.perf_counter() + prompt_turn_s(worker.token_turn_s, worker.visits)
    result = _pass_some(worker, exact_hosts, layer, unit, until_s)
    while result.ready and time.perf_counter() < until_s and _goes_on(worker, unit):
        passed, result = result, _pass_some(worker, exact_hosts, unit.layer, unit, until_s)
        result.written = passed.written + result.written
        result.parcels = passed.parcels + result.parcels
        result.reading = passed.reading + result.reading
    return result


def _goes_on(worker: Worker, unit: Unit) -> bool:
    """Whether a chunk may enter its next layer at once."""
    return unit.layer < worker.view.spec.layer_count and may_enter(worker, unit.layer, [unit])


def _pass_some(
    worker: Worker, exact_hosts: ExactHosts, layer: int, unit: Unit, until_s: float
) -> BatchOutput:
    """One chunk through the next layers that leave nothing to decide, of one call, as many as are
    passed until then, or through one layer."""
    last = _stays_until(worker, layer, unit, worker.chunk_pace.layers(unit.count, until_s))
    if last == layer:
        return pass_layer(worker, exact_hosts, layer, unit)
    view, batch, kept_at = worker.view, worker.batch([unit]), worker.kept_at(unit)
    began_s, hidden = time.perf_counter(), _entering(worker, layer, unit, batch)
    here = exact_hosts.stays(worker.server)
    ran = view.run(layer, last, hidden, batch, worker.cache, here, kept_at)
    worker.pace.segment(layer, ran.experts)
    written = range(layer, ran.layer + (ran.routing is not None))
    result = BatchOutput(written=[(unit, written)])
    if ran.kept is not None:
        worker.keep(unit, ran.kept, result)
    if ran.routing is not None:
        worker.pace.dense(ran.layer, unit.count)
        unit.layer = ran.layer
        routed = _Routed(layer=ran.layer, unit=unit, attended=ran.hidden, routing=ran.routing)
        return _gathered(worker, exact_hosts, routed, result)
    worker.chunk_pace.took(time.perf_counter() - began_s, (last - layer) * unit.count)
    unit.hidden, unit.parts, unit.layer = ran.hidden, (), last
    result.ready.append(unit)
    return result


def _stays_until(worker: Worker, layer: int, unit: Unit, most: int) -> int:
    """The first layer from `layer` on, no more than `most` further, behind which a chunk goes
    elsewhere or has to wait; `layer` itself where each layer is passed by itself."""
    last, end = layer, min(layer + most, worker.view.spec.layer_count)
    if unit.start < unit.seat.trimmed or isinstance(worker.view, EncoderDecoderView):
        return layer
    while last < end:
        stays = _destination(unit, last) == worker.server
        if not stays or (last > layer and not may_enter(worker, last, [unit])):
            break
        last += 1
    return last


@dataclass(frozen=True, kw_only=True, slots=True)
class _Routed:
    """A chunk behind attention and router of a layer."""

    layer: int
    unit: Unit
    attended: Tensor
    """[n, d]."""
    routing: Routing

    @property
    def destination(self) -> int:
        """Where it is behind the layer."""
        return _destination(self.unit, self.layer)


def _destination(unit: Unit, layer: int) -> int:
    """Where a unit is behind a layer."""
    route = unit.seat.route
    return route[min(layer + 1, len(route) - 1)]


def _entering(worker: Worker, layer: int, unit: Unit, batch: TokenBatch) -> Tensor:
    """The states of a chunk about to enter a layer, [n, d]."""
    if layer == 0:
        return batch.pack(worker.view.embed(batch.pad([unit.tokens]), batch))
    return states_of(worker.view, unit, layer - 1)


def pass_layer(worker: Worker, exact_hosts: ExactHosts, layer: int, unit: Unit) -> BatchOutput:
    """One chunk through a layer, every expert exact, at the hosts of least delay, unless the policy
    trims prompts.

    Stand-ins run for experts without a live host, where the request's budget allows them: a token
    of the prompt is credited what a generated one is, and what it does not spend lapses.
    """
    view, batch = worker.view, worker.batch([unit])
    result = BatchOutput(written=[(unit, range(layer, layer + 1))])
    hidden = _entering(worker, layer, unit, batch)
    if layer and worker.kept_at(unit) == layer:
        worker.keep(unit, hidden, result)
    attended = batch.pack(view.attend(layer, batch.unpack(hidden), batch, worker.cache))
    routing = view.route(layer, attended)
    worker.pace.dense(layer, unit.count)
    routed = _Routed(layer=layer, unit=unit, attended=attended, routing=routing)
    return _gathered(worker, exact_hosts, routed, result)


def _gathered(
    worker: Worker, exact_hosts: ExactHosts, routed: _Routed, result: BatchOutput
) -> BatchOutput:
    """Its experts run here or elsewhere."""
    view, here, unit, layer = worker.view, worker.server, routed.unit, routed.layer
    choose = _decided if unit.start < unit.seat.trimmed else _nearest
    chosen = choose(worker, exact_hosts, routed)
    if chosen is None:
        result.stranded.append(unit)
        return result
    experts, server = chosen
    split = Split.of(
        experts,
        server,
        np.full(unit.count, routed.destination),
        here=here,
        server_count=exact_hosts.server.shape[1],
    )
    attended, gates, normed = routed.attended, routed.routing.gates, routed.routing.normed
    cargo = Cargo(
        layer=layer,
        units=[unit],
        unit_of=np.zeros(unit.count, dtype=np.int64),
        offset=np.arange(unit.count),
        attended=attended,
        output=room(view, attended),
        gates=gates,
    )
    rows, leaves = np.arange(unit.count), bool(split.leaves.any())
    if leaves:
        worker.verifier.choose(cargo, split, rows)
        worker.emit(dispatched(cargo, split, rows), result)
    at = split.at(here)
    give = view.gathered_part if leaves else view.gathered
    output = give(layer, attended, at, gates, normed=normed)
    worker.pace.experts(layer, at)
    if leaves:
        cargo.output[:] = output
        result.parcels += onward(cargo, split, rows, None)
    else:
        unit.hidden, unit.parts, unit.layer = output.to(view.dtype), (), layer + 1
        result.ready.append(unit)
    return result


def _nearest(
    worker: Worker, exact_hosts: ExactHosts, routed: _Routed
) -> tuple[IntArray, IntArray] | None:
    """What runs for the rows of a chunk, [n, k], and on which servers: all that is activated, or
    stand-ins for what nobody holds; None if there are none within the budget."""
    layer, unit, experts = routed.layer, routed.unit, routed.routing.experts.cpu().numpy()
    if exact_hosts.orphans[layer][experts].any():
        classes = worker.observer.steadiness(layer, routed.attended)
        spent = np.zeros(unit.count) if unit.spent is None else unit.spent
        left = unit.seat.budget - spent
        found = exact_hosts.stood_in(layer, worker.server, experts, classes, left)
        if found is None:
            return None
        experts, loss = found
        unit.spent = spent + loss
    return experts, exact_hosts.hosts(layer, worker.server, routed.destination, experts)


def _decided(worker: Worker, _: ExactHosts, routed: _Routed) -> tuple[IntArray, IntArray] | None:
    """The same as the policy has it; rows that are none of the prompt's spend nothing."""
    unit, layer = routed.unit, routed.layer
    seat, spent = unit.seat, np.zeros(unit.count) if unit.spent is None else unit.spent
    inside = np.array(unit.positions) < seat.trimmed
    decision = decided(
        worker.engine,
        worker.state,
        layer=layer,
        route=worker.route_rows[seat.route],
        access=seat.access,
        server=worker.server,
        routed=worker.observer.routed(0, layer, routed.attended, routed.routing),
        allowance=np.where(inside, np.maximum(seat.budget - spent, 0.0), 0.0),
    )
    if not np.isfinite(decision.delay_s).all():
        return None
    if decision.loss.any() or unit.spent is not None:
        unit.spent = spent + decision.loss
    return decision.slot_expert, decision.slot_server


def end_chunk(worker: Worker, unit: Unit) -> BatchOutput:
    """After the last layer: dense blocks, and the first token if this was the last chunk."""
    batch, view = worker.batch([unit]), worker.view
    hidden = view.tail(
        batch.unpack(states_of(view, unit, view.spec.layer_count - 1)), batch, worker.cache
    )
    end = view.spec.layer_count
    result = BatchOutput(written=[(unit, range(end, end + 1))])
    seat = unit.seat
    if unit.spent is not None:
        seat.charged_tokens += int(np.count_nonzero(unit.spent))
        seat.charged_loss += float(unit.spent.sum())
    wanted = seat.sampling.prompt_logprobs
    if wanted is not None and seat.seen is not None:
        known = seat.seen.tokens[: seat.seen.prompt]
        following = known[unit.start + 1 : unit.start + unit.count + 1]
        seat.scores += scored(view, batch.pack(hidden), following, wanted)
    first = None
    if unit.last:
        logits = view.logits(batch.last(hidden))[0]
        charge = ChargeSpec(seat.charged_tokens, seat.charged_loss) if seat.charged_tokens else None
        first = token_of(unit, logits, charge=charge, scores=seat.scores)
    first = worker.end_drafts.prompt(unit, batch.pack(hidden), first)
    if first is not None:
        result.parcels = to_users([unit], [first])
    return result
