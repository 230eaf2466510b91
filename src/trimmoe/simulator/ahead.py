"""Deciding tokens before their time has come, many requests at once.

What the engine decides about a token depends on the account of its sequence and on the feedback
in force when the token begins, never on the clock. Between two control instants the feedback does
not change, so the next tokens of all running requests can be decided together, in waves as wide
as there are requests, and the clock only has to find out when they happen. Two states of the
engine are kept: `settled` knows the tokens that are through, `ahead` those that were decided too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from trimmoe.core.events import (
    Attend,
    Audited,
    Command,
    Complete,
    Depart,
    Event,
    Execute,
    Probe,
    Receipt,
    SequenceClosed,
    SequenceOpened,
    Settled,
    Strand,
    TokensArrived,
    TokensExported,
    TokensImported,
)
from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.core.wave import Wave
from trimmoe.engine.state import EngineState
from trimmoe.engine.step import Engine
from trimmoe.policy.trim import rounded_weight
from trimmoe.simulator.feed import TraceFeed
from trimmoe.simulator.world import NONE

ENTERING, TRAVELLING = 0, 1
_NEVER = 2.0
"""A confidence that no exit meets."""


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
    ledgers: list[Ledger]
    receipts: list[Receipt]

    @staticmethod
    def blank(count: int, layers: int, slots: int) -> Itinerary:
        """Of n tokens that have not set out."""
        return Itinerary(
            expert=np.full((count, layers, slots), NONE),
            server=np.zeros((count, layers, slots), dtype=np.int64),
            place=np.zeros((count, layers + 1), dtype=np.int64),
            layers=np.zeros(count, dtype=np.int64),
            ledgers=[None] * count,  # type: ignore[list-item]
            receipts=[None] * count,  # type: ignore[list-item]
        )


def travel(engine: Engine, state: EngineState, wave: Wave, feed: TraceFeed, tokens: IntArray):
    """Take a wave through all its layers; tokens [n] are rows of the trace.

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
                closed = zip(rows.tolist(), command.ledgers, command.receipts, strict=True)
                for row, ledger, receipt in closed:
                    journey.ledgers[row], journey.receipts[row] = ledger, receipt
                continue
            case Probe():
                continue
            case Depart() | Strand():
                raise AssertionError("nothing leaves, and every expert has a host")
        state, commands = engine.step(state, event)
        pending.extend(commands)
    return journey


@dataclass(kw_only=True)
class Ahead:
    """The engine's two states and how they are told what happened."""

    engine: Engine
    feed: TraceFeed
    seed: int
    budget: float
    confidence: float
    settled: EngineState = field(init=False)
    ahead: EngineState = field(init=False)

    def __post_init__(self) -> None:
        self.settled = self.ahead = self.engine.start()

    def open(self, request: int, access: int) -> None:
        """A request's account; before any of its tokens is decided."""
        event = SequenceOpened(
            sequence=request, access=access, budget=self.budget, confidence=self.confidence
        )
        self.settled, _ = self.engine.step(self.settled, event)
        self.ahead, _ = self.engine.step(self.ahead, event)

    def close(self, request: int) -> None:
        """A request is finished."""
        event = SequenceClosed(sequence=request)
        self.settled, _ = self.engine.step(self.settled, event)
        self.ahead, _ = self.engine.step(self.ahead, event)

    def decide(self, requests: IntArray, numbers: IntArray, tokens: IntArray) -> Itinerary:
        """The next token of each of these requests [n]: their `numbers`-th, `tokens` in the trace.

        Afterwards the next ones may be decided."""
        draws = uniform(self.seed, requests, numbers)
        arrived = TokensArrived(wave=ENTERING, sequences=tuple(requests.tolist()), draws=draws)
        journey = self._through(self.ahead, arrived, tokens)
        frozen = self.ahead.feedback
        self.ahead, _ = self.engine.step(self.ahead, Settled(receipts=tuple(journey.receipts)))
        self.ahead = replace(self.ahead, feedback=frozen)
        return journey

    def prefill(self, requests: IntArray, access: IntArray, tokens: IntArray) -> Itinerary:
        """Prompt tokens [n], which run exactly: without budget, without exit."""
        state = EngineState(feedback=self.ahead.feedback)
        for request, server in dict(zip(requests.tolist(), access.tolist(), strict=True)).items():
            opened = SequenceOpened(sequence=request, access=server, budget=0.0, confidence=_NEVER)
            state, _ = self.engine.step(state, opened)
        sequences = tuple(requests.tolist())
        arrived = TokensArrived(wave=ENTERING, sequences=sequences, draws=np.ones(tokens.size))
        return self._through(state, arrived, tokens)

    def _through(self, state: EngineState, arrived: TokensArrived, tokens: IntArray) -> Itinerary:
        state, (attend,) = self.engine.step(state, arrived)
        assert isinstance(attend, Attend)
        exported = TokensExported(wave=ENTERING, rows=attend.rows)
        _, (depart,) = self.engine.step(state, exported)
        assert isinstance(depart, Depart)
        elsewhere = EngineState(feedback=state.feedback)
        return travel(self.engine, elsewhere, depart.tokens, self.feed, tokens)

    def control(self, finished: list[Receipt], audits: int, engine: Engine) -> bool:
        """Tell the settled state what happened since the last control instant; whether decisions
        made ahead no longer hold. `engine` decides from now on."""
        before, same = _felt(self.settled), engine is self.engine
        if audits:
            event = Audited(wave=TRAVELLING, agrees=np.ones(audits, dtype=bool))
            self.settled, _ = self.engine.step(self.settled, event)
        if finished:
            self.settled, _ = self.engine.step(self.settled, Settled(receipts=tuple(finished)))
        self.engine = engine
        if same and before == _felt(self.settled):
            self.ahead = replace(self.ahead, feedback=self.settled.feedback)
            return False
        return True

    def rewind(self, in_flight: list[Receipt]) -> None:
        """Forget what was decided, but for the tokens that have begun."""
        self.ahead, _ = self.engine.step(self.settled, Settled(receipts=tuple(in_flight)))
        self.ahead = replace(self.ahead, feedback=self.settled.feedback)


def _felt(state: EngineState) -> tuple[float, ...]:
    """The part of the feedback that decisions about arriving tokens look at."""
    feedback = state.feedback
    weights = (feedback.loss_weight, *feedback.route_weights)
    return (*(rounded_weight(weight) for weight in weights), feedback.exit_raise)


def uniform(seed: int, requests: IntArray, numbers: IntArray) -> FloatArray:
    """One number in [0, 1) per token, the same whenever it is asked for (splitmix64), [n]."""
    key = np.uint64(seed * 0xD1342543DE82EF95 % 2**64)
    with np.errstate(over="ignore"):
        mixed = requests.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed += numbers.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + key
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
