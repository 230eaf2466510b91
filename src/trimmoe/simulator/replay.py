"""Replaying a trace through the engine without load: what every token would cost.

A driver without a clock: expected delays are the cost model's own, nothing queues. Sequences
advance together, one token each, as a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimmoe.core.events import (
    Attend,
    Audited,
    Complete,
    Depart,
    Event,
    Execute,
    Probe,
    SequenceClosed,
    SequenceOpened,
    Strand,
    TokensArrived,
    Trailed,
)
from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import IntArray
from trimmoe.core.trace import Trace
from trimmoe.engine.books import checked
from trimmoe.engine.step import Engine
from trimmoe.simulator.feed import TraceFeed, require_guesses

WAVE = 0


def replay(
    engine: Engine,
    trace: Trace,
    access: IntArray,
    *,
    budget: float,
    confidence: float,
    seed: int = 0,
) -> list[Ledger]:
    """The ledger of every token, in the order of the trace, [T].

    `access` [S]: the server each sequence enters at. `budget` is D-bar, `confidence` p_J. Audited
    exits and drafts are right as `TraceFeed.agrees` has it. Where users' servers guess, a token
    takes until the next one of its sequence sets out; nothing follows the last. Raises `UserError`
    if the trace does not say what they guess, or under `migrate` accounting, where no server could.
    """
    require_guesses(engine.settings, engine.cost.server_count, trace)
    feed, draws = TraceFeed(trace=trace), np.random.default_rng(seed)
    state, ledgers = engine.start(), dict[int, Ledger]()
    sequences = tuple(range(trace.sequence_count))
    for sequence in sequences:
        opened = SequenceOpened(
            sequence=sequence, access=int(access[sequence]), budget=budget, confidence=confidence
        )
        state, _ = engine.step(state, opened)
    for position in range(trace.length):
        tokens = np.arange(trace.sequence_count) * trace.length + position
        drawn = draws.random(len(sequences))
        led = np.zeros(len(sequences), dtype=bool)
        if engine.settings.guesses and position:
            least = engine.guess_rules.least_among(1)[access]
            led = feed.guesses(tokens - 1, access, least, engine.settings)[1]
        event: Event = TokensArrived(wave=WAVE, sequences=sequences, draws=drawn, guessed=led)
        depth = np.zeros(len(sequences), dtype=np.int64)
        pending: list[Event] = [event]
        probed: dict[int, bool] = {}
        while pending:
            state, commands = engine.step(state, pending.pop(0))
            for command in commands:
                match command:
                    case Attend():
                        pending.append(feed.routed(WAVE, command.layer, tokens[command.rows]))
                    case Execute():
                        pending.append(feed.executed(WAVE, command.layer, tokens[command.rows]))
                    case Complete():
                        rows = command.rows.tolist()
                        depth[command.rows] = command.layer
                        for row, ledger in zip(rows, command.ledgers, strict=True):
                            ledgers[int(tokens[row])] = ledger
                        checked_now = [probed[row] for row in rows if row in probed]
                        if checked_now:
                            pending.append(Audited(wave=WAVE, agrees=np.array(checked_now)))
                    case Trailed(rows=trailed):
                        agrees = feed.agrees(tokens[trailed], depth[trailed], drawn[trailed])
                        after = checked(command, agrees.tolist())
                        for row, ledger in zip(trailed.tolist(), after, strict=True):
                            ledgers[int(tokens[row])] += ledger
                        pending.append(Audited(wave=WAVE, agrees=agrees))
                    case Probe(layer=layer, rows=rows):
                        agrees = feed.audited(tokens[rows], layer, drawn[rows], engine.settings)
                        probed |= zip(rows.tolist(), agrees.tolist(), strict=True)
                    case Depart() | Strand():
                        raise AssertionError("nothing leaves, and every expert has a host")
    for sequence in sequences:
        state, _ = engine.step(state, SequenceClosed(sequence=sequence))
    found = [ledgers[token] for token in range(trace.token_count)]
    return _followed(engine, feed, access, found) if engine.settings.guesses else found


def _followed(
    engine: Engine, feed: TraceFeed, access: IntArray, whole: Sequence[Ledger]
) -> list[Ledger]:
    """The ledgers of tokens [T] that take `whole` by themselves and follow one another on guesses;
    `access` [S]."""
    settings, length = engine.settings, feed.trace.length
    tokens = np.arange(feed.trace.token_count)
    at = access[tokens // length]
    least = engine.guess_rules.least_among(1)
    guessed, right = feed.guesses(tokens, at, least[at], settings)
    guessed &= tokens % length < length - 1
    known = engine.guess_rules.leads(least[: engine.cost.server_count])
    leads = [known.of(int(server)) for server in access]
    return [
        leads[token // length]
        .after(ledger.delay_s, guessed=bool(guessed[token]), right=bool(right[token]))
        .booked(ledger)
        for token, ledger in enumerate(whole)
    ]
