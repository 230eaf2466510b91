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
    count, layers = tokens.size, engine.cost.layer_count
    journey = Itinerary.blank(count, layers, feed.trace.experts.shape[2])
    event: Event = TokensImported(wave=TRAVELLING, tokens=wave, executing=False)
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
