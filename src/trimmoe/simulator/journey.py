"""What the engine decides about tokens on their way through all layers, and full depth's word of
their exits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimmoe.core.events import (
    Attend,
    Command,
    Complete,
    Depart,
    Event,
    Execute,
    Probe,
    Receipt,
    SegmentRan,
    Strand,
    TokensImported,
    Trailed,
)
from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.core.wave import Wave
from trimmoe.engine.state import EngineState
from trimmoe.engine.step import Engine
from trimmoe.simulator.feed import TraceFeed
from trimmoe.simulator.world import NONE

TRAVELLING = 1


@dataclass(kw_only=True, slots=True)
class Itinerary:
    """What the engine decided about n tokens, layer by layer."""

    expert: IntArray
    """[n, N, k], -1 = dropped."""
    server: IntArray
    place: IntArray
    """[n, N+1]."""
    layers: IntArray
    """Layers passed, [n]."""
    wrong_at: IntArray
    """After how many layers a draft was made of it that is wrong and that something follows; NONE
    where there is no such draft, [n]."""
    guess: IntArray
    """What becomes of the guess of what it predicts: RIGHT, WRONG, UNSURE, or NONE is made, [n]."""
    window: IntArray
    """Guesses that may be ahead of what is confirmed when it is under way, [n]."""
    disagrees: BoolArray
    """Whether full depth checked an exit of it and predicted something else, [n]."""
    ledgers: list[Ledger]
    receipts: list[Receipt]

    def reordered(self, order: IntArray) -> Itinerary:
        """The same tokens in another order."""
        return Itinerary(
            expert=self.expert[order],
            server=self.server[order],
            place=self.place[order],
            layers=self.layers[order],
            wrong_at=self.wrong_at[order],
            guess=self.guess[order],
            window=self.window[order],
            disagrees=self.disagrees[order],
            ledgers=[self.ledgers[row] for row in order.tolist()],
            receipts=[self.receipts[row] for row in order.tolist()],
        )

    @staticmethod
    def blank(count: int, layers: int, slots: int) -> Itinerary:
        """Of n tokens that have not set out."""
        return Itinerary(
            expert=np.full((count, layers, slots), NONE),
            server=np.zeros((count, layers, slots), dtype=np.int64),
            place=np.zeros((count, layers + 1), dtype=np.int64),
            layers=np.zeros(count, dtype=np.int64),
            wrong_at=np.full(count, NONE),
            guess=np.full(count, NONE),
            window=np.zeros(count, dtype=np.int64),
            disagrees=np.zeros(count, dtype=bool),
            ledgers=[None] * count,  # type: ignore[list-item]
            receipts=[None] * count,  # type: ignore[list-item]
        )


def travel(
    engine: Engine,
    state: EngineState,
    wave: Wave,
    feed: TraceFeed,
    tokens: IntArray,
    last: BoolArray,
) -> Itinerary:
    """Take a wave through all its layers; tokens [n] are rows of the trace, `last` [n] are the last
    of their requests.

    The accounts of its sequences must not be in `state`: receipts come back instead.
    """
    journey = Itinerary.blank(tokens.size, engine.cost.layer_count, feed.trace.experts.shape[2])
    if engine.settled is None:
        event: Event = TokensImported(wave=TRAVELLING, tokens=wave, executing=False)
    else:
        state, event = pass_segments(engine, state, wave, feed, tokens, journey)
    return pass_layers(engine, state, event, wave, feed, tokens, last, journey)


def pass_segments(
    engine: Engine,
    state: EngineState,
    wave: Wave,
    feed: TraceFeed,
    tokens: IntArray,
    journey: Itinerary,
) -> tuple[EngineState, Event]:
    """Take a wave through its layers, as many at a time as leave nothing to decide for any of its
    tokens; what is left to tell the engine, with the state to tell it in."""
    experts, layers = feed.experts(tokens), engine.cost.layer_count
    free, at = _settled(engine, wave, experts), wave.layer
    while True:
        stops = np.flatnonzero(~free[:, at:].all(0))
        stop = at + int(stops[0]) if stops.size else layers
        journey.expert[:, at:stop] = experts[:, at:stop]
        journey.server[:, at:stop] = wave.server[:, None, None]
        journey.place[:, at : stop + 1] = wave.server[:, None]
        event = SegmentRan(
            wave=TRAVELLING,
            tokens=wave,
            experts=experts[:, at : stop + 1],
            settled=stop - at,
            routed=feed.routed(TRAVELLING, stop, tokens)
            if engine.decides and stop < layers
            else None,
        )
        if stop == layers:
            return state, event
        state, (execute, *rest) = engine.step(state, event)
        assert isinstance(execute, Execute), "every expert has a host"
        journey.expert[:, stop] = execute.slot_expert
        journey.server[:, stop] = execute.slot_server
        journey.place[:, stop + 1] = execute.destination
        if not rest:
            return state, feed.executed(TRAVELLING, stop, tokens)
        (depart,) = rest
        assert isinstance(depart, Depart)
        wave, at = depart.tokens, stop + 1


def _settled(engine: Engine, wave: Wave, experts: IntArray) -> BoolArray:
    """Of tokens on their routes, which activate `experts` [n, N, k], the layers whose slots run
    where they are and after which they stay, [n, N]."""
    assert engine.settled is not None
    route, layers = engine.routes[wave.route], np.arange(engine.cost.layer_count)
    here: BoolArray = np.all(engine.settled[route[..., None], layers[:, None], experts], axis=2)
    here[:, :-1] &= route[:, 1:] == route[:, :-1]
    return here


def pass_layers(
    engine: Engine,
    state: EngineState,
    event: Event,
    wave: Wave,
    feed: TraceFeed,
    tokens: IntArray,
    last: BoolArray,
    journey: Itinerary,
) -> Itinerary:
    """Take a wave that the engine is told of by `event` through the layers that are left, one at a
    time."""
    layers = engine.cost.layer_count
    state, commands = engine.step(state, event)
    pending: list[Command] = list(commands)
    while pending:
        command = pending.pop(0)
        match command:
            case Attend(layer=layer, rows=rows):
                journey.place[rows, layer] = command.server
                event = feed.routed(TRAVELLING, layer, tokens[rows])
            case Execute(layer=layer, rows=rows):
                journey.expert[rows, layer] = command.slot_expert
                journey.server[rows, layer] = command.slot_server
                journey.place[rows, layer + 1] = command.destination
                event = feed.executed(TRAVELLING, layer, tokens[rows])
            case Complete(rows=rows):
                journey.layers[rows] = command.layer
                if command.layer < layers:
                    # What exited tokens leave in later layers they leave where these are run.
                    route, after = engine.routes[wave.route[rows]], command.layer + 1
                    journey.place[rows, after:layers] = route[:, after:]
                    journey.place[rows, layers] = route[:, -1]
                closed = zip(rows.tolist(), command.ledgers, command.receipts, strict=True)
                for row, ledger, receipt in closed:
                    journey.ledgers[row], journey.receipts[row] = ledger, receipt
                continue
            case Trailed(rows=rows):
                exited, draws = journey.layers[rows], wave.draws[rows]
                journey.disagrees[rows] = ~feed.agrees(tokens[rows], exited, draws)
                if command.missed:
                    _confirm(journey, command, last[rows])
                    continue
                for row, after in zip(rows.tolist(), command.ledgers, strict=True):
                    journey.ledgers[row] += after
                continue
            case Probe(layer=layer, rows=rows):
                draws, settings = wave.draws[rows], engine.settings
                journey.disagrees[rows] = ~feed.audited(tokens[rows], layer, draws, settings)
                continue
            case Depart() | Strand():
                raise AssertionError("nothing leaves, and every expert has a host")
        state, commands = engine.step(state, event)
        pending.extend(commands)
    return journey


def _confirm(journey: Itinerary, command: Trailed, last: BoolArray) -> None:
    """Full depth has spoken of drafts, some of them the `last` of their requests, [n].

    Everybody waits for full depth where a draft is wrong, and at the end of a request, which is not
    answered before that has confirmed it.
    """
    rows = command.rows
    exited, wrong = journey.layers[rows], journey.disagrees[rows]
    journey.wrong_at[rows] = np.where(wrong & ~last, exited, NONE)
    journey.layers[rows] = np.where(wrong | last, journey.expert.shape[1], exited)
    told = zip(rows.tolist(), command.ledgers, command.missed, (wrong | last).tolist(), strict=True)
    for row, after, missed, waited_for in told:
        journey.ledgers[row] += missed if waited_for else after
