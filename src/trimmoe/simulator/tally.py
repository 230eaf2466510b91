"""The books of everything that finished in a run, kept as it finishes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.ledger import Kind, Ledger
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.model import CostModel, add_layer_messages
from trimmoe.simulator.world import RIGHT, WRONG, Rows

# Columns of `Books.numbers`.
TOKENS, RUN, DROPPED, DELAY_S, LOSS, BUDGET, AUDITS = range(7)


@dataclass(frozen=True, kw_only=True, slots=True)
class Books:
    """The ledgers of T rows of single tokens, by column: millions of them come one by one."""

    kinds: NDArray[np.uint16]
    """[T, N, 6]."""
    messages: NDArray[np.uint16]
    """[T, M, M]."""
    numbers: FloatArray
    """[T, 7]."""
    disagrees: BoolArray
    """Whether full depth checked an exit and predicted something else, [T]."""

    @staticmethod
    def blank(count: int, layers: int, servers: int) -> Books:
        """Room for `count` rows."""
        return Books(
            kinds=np.zeros((count, layers, len(Kind)), dtype=np.uint16),
            messages=np.zeros((count, servers, servers), dtype=np.uint16),
            numbers=np.zeros((count, 7)),
            disagrees=np.zeros(count, dtype=bool),
        )

    def write(self, rows: IntArray, ledgers: Sequence[Ledger], disagrees: BoolArray) -> None:
        """Keep the ledgers of n tokens in `rows` [n], and whether full depth `disagrees` [n] with
        their exits."""
        self.disagrees[rows] = disagrees
        self.kinds[rows] = [one.kinds for one in ledgers]
        self.messages[rows] = [one.messages for one in ledgers]
        self.numbers[rows] = [
            (
                one.tokens,
                one.slots_run,
                one.slots_dropped,
                one.delay_s,
                one.loss,
                one.budget,
                one.audits,
            )
            for one in ledgers
        ]

    def with_room(self, more: int) -> Books:
        """The same with `more` rows."""
        blank = Books.blank(more, self.kinds.shape[1], self.messages.shape[1])
        columns = {
            item.name: np.concatenate([getattr(self, item.name), getattr(blank, item.name)])
            for item in fields(Books)
        }
        return Books(**columns)


@dataclass(kw_only=True)
class Tally:
    """Sums of ledgers, added in place."""

    kinds: IntArray
    messages: IntArray
    numbers: FloatArray
    """As in `Books`, [7]."""
    hidden_bytes: int

    @staticmethod
    def empty(layers: int, servers: int, hidden_bytes: int) -> Tally:
        """Nothing yet."""
        blank = Ledger.empty(layers, servers, hidden_bytes)
        return Tally(
            kinds=blank.kinds,
            messages=blank.messages,
            numbers=np.zeros(7),
            hidden_bytes=hidden_bytes,
        )

    def add(self, books: Books, rows: IntArray) -> None:
        """Count these rows [n]."""
        self.kinds += books.kinds[rows].sum(0, dtype=np.int64)
        self.messages += books.messages[rows].sum(0, dtype=np.int64)
        # One after another: a sum by halves depends on how many are added at a time.
        numbers = np.concatenate([self.numbers[None], books.numbers[rows]])
        self.numbers = np.add.accumulate(numbers)[-1]

    @property
    def ledger(self) -> Ledger:
        """The sum."""
        tokens, run, dropped, delay_s, loss, budget, audits = self.numbers.tolist()
        return Ledger(
            tokens=int(tokens),
            kinds=self.kinds,
            slots_run=int(run),
            slots_dropped=int(dropped),
            messages=self.messages,
            hidden_bytes=self.hidden_bytes,
            delay_s=delay_s,
            loss=loss,
            budget=budget,
            audits=int(audits),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitLog:
    """Units in order of finishing, [U]: decoded tokens and chunks of prompts."""

    request: IntArray
    number: IntArray
    """The how-manieth unit of its request, from 0."""
    began_s: FloatArray
    finished_s: FloatArray
    """When its prediction was there, be it a draft."""
    decoded: BoolArray
    expected_s: FloatArray
    """What the cost model said; of a chunk the sum over its tokens."""
    loss: FloatArray
    """Charged to the budget."""


@dataclass(kw_only=True)
class Units:
    """Everything that finished in a run."""

    decoded: Tally
    """Decoded tokens that finished after the warm-up."""
    everything: Tally
    """All tokens that finished, warm-up and prompts included."""
    right_drafts: int = 0
    """Of decoded tokens that finished after the warm-up, guesses included."""
    wrong_drafts: int = 0
    withdrawn_layers: int = 0
    """Token-layers that were executed on the latter."""
    _parts: list[UnitLog] = field(default_factory=list)
    _words: list[FloatArray] = field(default_factory=list)

    @staticmethod
    def empty(layers: int, servers: int, hidden_bytes: int) -> Units:
        """Nothing yet."""
        size = (layers, servers, hidden_bytes)
        return Units(decoded=Tally.empty(*size), everything=Tally.empty(*size))

    def count(self, books: Books, rows: IntArray, measured: BoolArray) -> None:
        """Add the books of finished tokens [n]."""
        self.everything.add(books, rows)
        self.decoded.add(books, rows[measured])

    def count_guesses(self, guess: IntArray) -> None:
        """Add the guesses on which something set out, [n], each RIGHT or WRONG."""
        self.right_drafts += int((guess == RIGHT).sum())
        self.wrong_drafts += int((guess == WRONG).sum())

    def count_drafts(self, books: Books, rows: IntArray, wrong: BoolArray) -> None:
        """Add the drafts of tokens [n] that finished after the warm-up: of some a `wrong` one, and
        a right one of those that exited."""
        self.right_drafts += int(books.kinds[rows, -1, Kind.EXITED].sum())
        self.wrong_drafts += int(wrong.sum())

    def withdraw(self, cost: CostModel, rows: Rows, units: IntArray, measured: BoolArray) -> None:
        """Add what was executed and sent on wrong drafts by `units` [n], some of which follow
        tokens that finished after the warm-up: it is no token's, but links carried it."""
        passed = rows.layer[units]
        of, layer = np.nonzero(np.arange(cost.layer_count) < passed[:, None])
        row = units[of]
        sent = np.zeros((2, cost.server_count, cost.server_count), dtype=np.int64)
        columns = (
            measured[of],
            rows.place[row, layer],
            rows.place[row, layer + 1],
            rows.expert[row, layer],
            rows.server[row, layer],
        )
        add_layer_messages(cost, sent, *(column.astype(np.int64) for column in columns))
        self.everything.messages += sent.sum(0)
        self.decoded.messages += sent[1]
        self.withdrawn_layers += int(passed[measured].sum())

    def confirm(self, requests: IntArray, numbers: IntArray, when_s: FloatArray) -> None:
        """Word came of the drafts of these units [n]: they were right."""
        self._words.append(np.array([requests, numbers, when_s], dtype=np.float64))

    @property
    def words(self) -> FloatArray:
        """Requests and numbers of units of which drafts were confirmed, and when, [3, n]."""
        return np.concatenate([np.zeros((3, 0)), *self._words], axis=1)

    def keep(self, part: UnitLog) -> None:
        """Add finished units."""
        self._parts.append(part)

    @property
    def log(self) -> UnitLog:
        """All of them, in order of finishing."""
        if not self._parts:
            zeros, whole = np.zeros(0), np.zeros(0, dtype=np.int64)
            return UnitLog(
                request=whole,
                number=whole,
                began_s=zeros,
                finished_s=zeros,
                decoded=zeros.astype(bool),
                expected_s=zeros,
                loss=zeros,
            )
        columns = {
            item.name: np.concatenate([getattr(part, item.name) for part in self._parts])
            for item in fields(UnitLog)
        }
        return UnitLog(**columns)
