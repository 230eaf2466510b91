"""Generated tokens through several layers in one batch.

Under a policy that leaves layers settled these are segments, of one call and one event. Where every
layer is decided upon they are layers one after another, without waiting for a turn in between while
nobody else has one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from trimmoe.core.events import (
    Attend,
    Command,
    Complete,
    Depart,
    Execute,
    Routed,
    SegmentRan,
    Strand,
    TokensImported,
    Trailed,
)
from trimmoe.core.specs import BoolArray
from trimmoe.cost.batching import SLICE_S
from trimmoe.models.batch import TokenBatch
from trimmoe.models.passed import Routing, Segment
from trimmoe.runtime.node.compute.shipping import whole
from trimmoe.runtime.node.compute.worker import Worker
from trimmoe.runtime.node.records.output import BatchOutput
from trimmoe.runtime.node.records.units import Unit, foremost


def in_turn(
    worker: Worker, layer: int, units: Sequence[Unit]
) -> tuple[Sequence[Unit], Sequence[Unit]]:
    """Those of the units that may pass a layer now, and those that are to come again: tokens behind
    others of their sequence, where these were to end with them and no longer do, since the engine
    has changed."""
    if layer < worker.view.spec.layer_count - 1 or worker.segments.end_here:
        return units, ()
    ahead = foremost(units)
    return ahead, [unit for unit in units if unit not in ahead]


def pass_segment(worker: Worker, layer: int, units: Sequence[Unit]) -> BatchOutput:
    """Units pass the layers from `layer` on that leave nothing to decide, if there are any, and
    attention, router and own slots of the one after them.

    The layer behind which all of them leave for one other server passes with those before it where
    all of its slots run here: what it gives sets out as it is."""
    ordered, tokens = worker.boarded(units)
    batch, identity = worker.batch(ordered), worker.new_wave()
    reach = _Reach.of(worker, layer, ordered)
    table = reach.settled
    last, kept_at = _kept_at(worker, layer, reach.last, ordered)
    known = None if layer else worker.draft_runner.known(ordered)
    if known is not None and known.layers < last:
        hidden, rest = known.hidden, (batch, worker.cache, table, kept_at)
        ran = worker.view.run(known.layers, last, hidden, *rest)
        ran = replace(ran, experts=np.concatenate([known.experts, ran.experts], axis=1))
    else:
        hidden = worker.states(layer, ordered, batch)
        ran = worker.view.run(layer, last, hidden, batch, worker.cache, table, kept_at)
    worker.pace.segment(layer, ran.experts)
    written = range(layer, ran.layer + (ran.routing is not None))
    result = BatchOutput(written=[(unit, written) for unit in ordered])
    if ran.kept is not None:
        for row, unit in enumerate(ordered):
            if worker.kept_at(unit) == kept_at:
                worker.keep(unit, ran.kept[row : row + 1], result)
    experts = ran.experts
    if ran.routing is not None:
        worker.pace.dense(ran.layer, len(ordered))
        experts = np.concatenate([experts, ran.routing.experts.cpu().numpy()[:, None]], axis=1)
    leaves = ran.routing is None and reach.leaves and ran.layer == reach.last
    event = SegmentRan(
        wave=identity,
        tokens=tokens,
        experts=experts,
        settled=ran.experts.shape[1] - leaves,
        routed=_routed(worker, identity, ran),
    )
    _follow(worker, worker.tell(event), ordered, ran, result)
    return result


def _routed(worker: Worker, wave: int, ran: Segment) -> Routed | None:
    """What the engine wants to know of the layer that rows stopped at, if it decides upon it."""
    if ran.routing is None or not worker.engine.decides:
        return None
    return worker.observer.routed(wave, ran.layer, ran.hidden, ran.routing)


def pass_layers(worker: Worker, layer: int, units: Sequence[Unit], *, alone: bool) -> BatchOutput:
    """Units pass attention, router, decision and own slots of a layer; if they are alone, and all
    of them stay, of the next ones too, for as long as what comes meanwhile may wait."""
    until_s = time.perf_counter() + (SLICE_S if alone else 0.0)
    ordered, wave = worker.boarded(units)
    batch, identity, rows = worker.batch(ordered), worker.new_wave(), _all(ordered)
    hidden, result = worker.states(layer, ordered, batch), BatchOutput()
    worker.tell(TokensImported(wave=identity, tokens=wave, executing=False))
    while True:
        attended, routing, commands = _decided(worker, identity, layer, ordered, hidden, batch)
        result.written += [(unit, range(layer, layer + 1)) for unit in ordered]
        execute = commands[0]
        if len(commands) > 1 or not _runs_here(worker, execute):
            _carry_out(worker, layer, commands, ordered, attended, routing, result)
            return result
        assert isinstance(execute, Execute)
        experts = execute.slot_expert
        hidden = worker.view.give(layer, attended, experts, routing.gates, normed=routing.normed)
        worker.pace.experts(layer, experts)
        commands = worker.tell(worker.observer.executed(identity, layer, hidden))
        layer += 1
        goes_on = len(commands) == 1 and isinstance(commands[0], Attend)
        if not goes_on or time.perf_counter() >= until_s or not may_enter(worker, layer, ordered):
            worker.obey(commands, identity, rows, hidden, ordered, result)
            return result


def _decided(
    worker: Worker,
    wave: int,
    layer: int,
    units: Sequence[Unit],
    hidden: Tensor,
    batch: TokenBatch,
) -> tuple[Tensor, Routing, tuple[Command, ...]]:
    """What attention and router of a layer give, and what the engine says to that."""
    view = worker.view
    attended = batch.pack(view.attend(layer, batch.unpack(hidden), batch, worker.cache))
    routing = view.route(layer, attended)
    worker.pace.dense(layer, len(units))
    return attended, routing, worker.tell(worker.observer.routed(wave, layer, attended, routing))


def _runs_here(worker: Worker, command: Command) -> bool:
    """Whether all rows of a batch stay and nobody else has to do with them."""
    if not isinstance(command, Execute):
        return False
    away = (command.slot_server != worker.server) & (command.slot_expert >= 0)
    return not away.any() and bool((command.destination == worker.server).all())


def _carry_out(
    worker: Worker,
    layer: int,
    commands: Sequence[Command],
    units: Sequence[Unit],
    attended: Tensor,
    routing: Routing,
    result: BatchOutput,
) -> None:
    """Execute a layer of which some rows leave, or that some rows cannot pass."""
    for command in commands:
        if isinstance(command, Strand):
            _strand(command, layer, units, result)
        else:
            assert isinstance(command, Execute)
            worker.execute(command, None, units, attended, routing, result)


def _strand(command: Strand, layer: int, units: Sequence[Unit], result: BatchOutput) -> None:
    """Nobody can serve some of the units in a layer."""
    for unit in (units[row] for row in command.rows.tolist()):
        unit.layer = layer
        result.stranded.append(unit)


def may_enter(worker: Worker, layer: int, units: Sequence[Unit]) -> bool:
    """Whether units need not wait for anybody to enter a layer here."""
    if not all(
        layer in unit.seat.written and unit.seat.open and not unit.is_void for unit in units
    ):
        return False
    return _together_until(worker, layer, layer + 1, units, whole=False) > layer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reach:
    """How far units go in one batch at the most."""

    last: int
    """The layer before which they stop."""
    settled: BoolArray
    """What needs no decision before it, [N, E]."""
    leaves: bool
    """Whether all leave for the same server once they have passed the layer before that."""

    @staticmethod
    def of(worker: Worker, layer: int, units: Sequence[Unit]) -> _Reach:
        """See the class."""
        segments, routes = worker.segments, {unit.seat.route for unit in units}
        until = min(segments.end(route, layer) for route in routes)
        count, settled = worker.view.spec.layer_count, segments.settled(until)
        last, whole = min(until + 1, count), until == count and segments.end_here
        reached = _together_until(worker, layer + 1, last, units, whole=whole)
        going = {segments.leaves_for(route, until) for route in routes}
        to = going.pop() if len(going) == 1 and worker.sends_whole else None
        if to is None or reached < last:
            return _Reach(last=reached, settled=settled, leaves=False)
        return _Reach(last=reached, settled=segments.settled(until, to), leaves=True)


def _together_until(
    worker: Worker, first: int, last: int, units: Sequence[Unit], *, whole: bool
) -> int:
    """The first of the layers [first, last) that units in one batch may not enter yet; `last` if
    there is none. `whole`: whether all slots of the model's last layer run here, so that those of
    one sequence end together; else they enter it one by one."""
    ahead, count = foremost(units), worker.view.spec.layer_count
    if len(ahead) < len(units) and not whole:
        last = min(last, max(first, count - 1))
    return min(unit.waits_before(first, last, count) for unit in ahead)


def _kept_at(
    worker: Worker, layer: int, last: int, units: Sequence[Unit]
) -> tuple[int, int | None]:
    """The first layer of those before `last` whose states are kept, and `last`, or the next such
    layer if there is one before it."""
    wanted = {worker.kept_at(unit) for unit in units}
    first, *more = [*sorted(at for at in wanted if at and layer <= at < last), None]
    return (more[0] or last) if more else last, first


def _follow(
    worker: Worker,
    commands: Sequence[Command],
    units: Sequence[Unit],
    ran: Segment,
    result: BatchOutput,
) -> None:
    """Do what the engine says of rows that have come so far."""
    execute: Execute | None = None
    tokens = None
    for command in commands:
        match command:
            case Strand():
                _strand(command, ran.layer, units, result)
            case Execute():
                execute = command
            case Depart():
                tokens = command.tokens
            case Complete() | Trailed():
                worker.obey([command], command.wave, _all(units), ran.hidden, units, result)
            case _:
                raise AssertionError(command)
    if execute is not None and ran.routing is None:
        # All slots ran here, so that nobody is stranded.
        assert tokens is not None
        assert execute.rows.size == len(units)
        to = int(execute.destination[0])
        result.parcels.append(whole(execute.layer, units, ran.hidden, tokens, to))
    elif execute is not None:
        assert ran.routing is not None
        worker.execute(execute, tokens, units, ran.hidden, ran.routing, result)
    elif tokens is not None:
        worker.go_on(units, tokens, ran.hidden, result)


def _all(units: Sequence[Unit]) -> np.ndarray:
    return np.arange(len(units))
