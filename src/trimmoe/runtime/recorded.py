"""Tokens once executed, decided again: what a model said of them, and the engine asked anew.

What the model computes for a token hangs on the tokens before it and on what the engine decides
about it. Where both stay as they were, what it computed stays too, and only the books change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trimmoe.core.events import (
    Attend,
    Command,
    Complete,
    Depart,
    Execute,
    Executed,
    Probe,
    Receipt,
    Routed,
    TokensExported,
    TokensImported,
    Trailed,
)
from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.wave import NOT_PROBED, Wave
from trimmoe.engine.books import checked, receipts
from trimmoe.engine.step import Engine
from trimmoe.policy.relaxed import NOBODY

WAVE = 0


@dataclass(kw_only=True, slots=True)
class Recording:
    """n tokens as they were executed together: N layers, E experts, k slots.

    Rows are those of the wave; a layer that a token did not reach holds zeros.
    """

    experts: IntArray
    """[n, N, k], like `slot_expert` and `masses`."""
    masses: FloatArray
    importance: FloatArray
    """[n, N], like `steadiness`, `confidence` and `exit_at`."""
    steadiness: IntArray
    probabilities: FloatArray
    """[n, N, E]."""
    slot_expert: IntArray
    confidence: FloatArray
    exit_at: IntArray
    depth: IntArray
    """Layers passed when it was predicted, [n]."""
    passed: IntArray
    """Layers passed in the end, [n]."""
    probed: IntArray
    """Layer after which its exit was audited, or NOT_PROBED, [n]."""
    at_probe: IntArray
    """What it would have predicted there, [n]."""
    prediction: IntArray
    """Most probable next token, [n]."""
    at_end: IntArray
    """The same after all layers passed, [n]."""
    second: IntArray
    """The `policy.relaxed.runner_up` of its prediction, where guesses may be kept, [n]."""
    logprob: FloatArray
    """Of the token that really follows, [n]; after a draft as full depth has it."""

    @staticmethod
    def empty(count: int, *, layers: int, experts: int, top_k: int) -> Recording:
        """To be filled while `count` tokens run."""
        by_slot, by_layer = (count, layers, top_k), (count, layers)
        return Recording(
            experts=np.zeros(by_slot, dtype=np.int64),
            masses=np.zeros(by_slot),
            importance=np.zeros(by_layer),
            steadiness=np.zeros(by_layer, dtype=np.int64),
            probabilities=np.zeros((count, layers, experts)),
            slot_expert=np.zeros(by_slot, dtype=np.int64),
            confidence=np.zeros(by_layer),
            exit_at=np.zeros(by_layer, dtype=np.int64),
            depth=np.zeros(count, dtype=np.int64),
            passed=np.zeros(count, dtype=np.int64),
            probed=np.full(count, NOT_PROBED),
            at_probe=np.zeros(count, dtype=np.int64),
            prediction=np.zeros(count, dtype=np.int64),
            at_end=np.zeros(count, dtype=np.int64),
            second=np.full(count, NOBODY),
            logprob=np.zeros(count),
        )

    def routed(self, command: Attend, event: Routed) -> None:
        """Note what a router said."""
        at = (command.rows, command.layer)
        self.experts[at], self.masses[at] = event.experts, event.masses
        self.importance[at], self.steadiness[at] = event.importance, event.steadiness
        assert event.probabilities is not None
        self.probabilities[at] = event.probabilities

    def executed(self, command: Execute, event: Executed) -> None:
        """Note what ran and what the exit heads said of it."""
        at = (command.rows, command.layer)
        self.slot_expert[at] = command.slot_expert
        self.confidence[at], self.exit_at[at] = event.confidence, event.exit_at

    def probe(self, command: Probe, predictions: IntArray) -> None:
        """Note what audited exits would have predicted, [rows]."""
        self.probed[command.rows], self.at_probe[command.rows] = command.layer, predictions

    def complete(self, command: Complete, predictions: IntArray, logprobs: FloatArray) -> None:
        """Note what was predicted, [rows] each."""
        rows = command.rows
        self.depth[rows] = self.passed[rows] = command.layer
        self.prediction[rows] = self.at_end[rows] = predictions
        self.logprob[rows] = logprobs

    def trailed(self, command: Trailed, predictions: IntArray, logprobs: FloatArray) -> None:
        """Note what full depth says of those that had exited, [rows] each."""
        rows = command.rows
        self.passed[rows] = self.experts.shape[1]
        self.at_end[rows] = predictions
        if command.missed:
            self.logprob[rows] = logprobs

    @staticmethod
    def gathered(rows: Sequence[tuple[Recording, int]]) -> Recording:
        """One recording of single rows of many."""
        return Recording(
            **{
                name: np.stack([getattr(recording, name)[row] for recording, row in rows])
                for name in Recording.__slots__
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Books:
    """What the engine has to say of one finished token."""

    depth: int
    receipt: Receipt
    ledger: Ledger | None
    """None where the token was followed only as far as it is known."""
    agrees: bool | None = None
    """Whether its audited exit would have predicted what full depth did; None: no audit."""


@dataclass(kw_only=True)
class Replay:
    """Drives an engine with recorded tokens as a driver does with a model."""

    engine: Engine
    recorded: Recording
    """Of the tokens, row by row."""
    same: BoolArray = field(init=False)
    """Whether the engine decided as it had when the tokens ran, [n]."""
    books: dict[int, Books] = field(init=False, default_factory=dict)
    """By row. A token that decided otherwise is followed with what is known of later layers: a
    guess, the better the less hangs on it."""

    def run(self, tokens: Wave) -> None:
        """Decide about `tokens`, which are about to enter the first layer, again."""
        self.same = np.ones(len(tokens.sequences), dtype=bool)
        self._probed = np.full(len(tokens.sequences), NOT_PROBED)
        self._state = self.engine.start()
        arrived = TokensImported(wave=WAVE, tokens=tokens, executing=False)
        pending = self._tell(arrived)
        while pending:
            pending += self._obey(pending.pop(0))

    def _tell(self, event: TokensImported | TokensExported | Routed | Executed) -> list[Command]:
        self._state, commands = self.engine.step(self._state, event)
        return list(commands)

    def _obey(self, command: Command) -> list[Command]:
        match command:
            case Attend():
                return self._attend(command)
            case Execute():
                rows, at = command.rows, (command.rows, command.layer)
                self._note(rows, (self.recorded.slot_expert[at] == command.slot_expert).all(1))
                return self._tell(
                    Executed(
                        wave=WAVE,
                        confidence=self.recorded.confidence[at],
                        exit_at=self.recorded.exit_at[at],
                    )
                )
            case Probe():
                self._probed[command.rows] = command.layer
                self._note(command.rows, self.recorded.probed[command.rows] == command.layer)
            case Complete():
                self._complete(command)
            case Trailed():
                follow_up(self.books, command, self.recorded)
            case _:
                raise AssertionError(f"{command} does not follow from recorded tokens")
        return []

    def _note(self, rows: IntArray, same: BoolArray) -> None:
        self.same[rows] &= same

    def _attend(self, command: Attend) -> list[Command]:
        known = self.recorded.passed[command.rows] > command.layer
        if not known.all():
            self._abandon(command, command.rows[~known])
        rows = command.rows[known]
        if not rows.size:
            return []
        at = (rows, command.layer)
        return self._tell(
            Routed(
                wave=WAVE,
                experts=self.recorded.experts[at],
                masses=self.recorded.masses[at],
                importance=self.recorded.importance[at],
                steadiness=self.recorded.steadiness[at],
                probabilities=self.recorded.probabilities[at],
            )
        )

    def _abandon(self, command: Attend, rows: IntArray) -> None:
        """Tokens go on where they had exited: take it that they spend nothing more."""
        self._note(rows, np.zeros(rows.size, dtype=bool))
        (depart,) = self._tell(TokensExported(wave=WAVE, rows=rows))
        assert isinstance(depart, Depart)
        cost, tokens = self.engine.cost, depart.tokens
        for row, told in zip(rows.tolist(), receipts(cost, tokens), strict=True):
            unexited = replace(told, exit_confidence=None)
            self.books[row] = Books(depth=cost.layer_count, receipt=unexited, ledger=None)

    def _complete(self, command: Complete) -> None:
        self._note(command.rows, self.recorded.depth[command.rows] == command.layer)
        self.books.update(books_of(command, self._probed, self.recorded))


def books_of(command: Complete, probed: IntArray, recorded: Recording) -> dict[int, Books]:
    """Of completed rows, by row; `probed` [n] as in `Recording`."""
    books = {}
    for at, row in enumerate(command.rows.tolist()):
        audited = probed[row] != NOT_PROBED
        agrees = bool(recorded.at_probe[row] == recorded.prediction[row]) if audited else None
        books[row] = Books(
            depth=command.layer,
            receipt=command.receipts[at],
            ledger=command.ledgers[at],
            agrees=agrees,
        )
    return books


def follow_up(books: dict[int, Books], command: Trailed, recorded: Recording) -> None:
    """Add to the books of rows that had exited what became of them."""
    rows = command.rows
    agrees = (recorded.prediction[rows] == recorded.at_end[rows]).tolist()
    for row, right, after in zip(rows.tolist(), agrees, checked(command, agrees), strict=True):
        ledger = books[row].ledger
        assert ledger is not None
        books[row] = replace(books[row], ledger=ledger + after, agrees=right)
