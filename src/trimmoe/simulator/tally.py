"""The books of everything that finished in a run, kept as it finishes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import BoolArray, FloatArray, IntArray


@dataclass(kw_only=True)
class Tally:
    """Sums of ledgers, added in place: millions of them come one by one."""

    kinds: IntArray
    messages: IntArray
    numbers: FloatArray
    """Tokens, slots run and dropped, delay, loss, budget, audits."""
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

    def add(self, one: Ledger) -> None:
        """Count one ledger."""
        self.kinds += one.kinds
        self.messages += one.messages
        self.numbers += (
            one.tokens,
            one.slots_run,
            one.slots_dropped,
            one.delay_s,
            one.loss,
            one.budget,
            one.audits,
        )

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
    began_s: FloatArray
    finished_s: FloatArray
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
    _parts: list[UnitLog] = field(default_factory=list)

    @staticmethod
    def empty(layers: int, servers: int, hidden_bytes: int) -> Units:
        """Nothing yet."""
        size = (layers, servers, hidden_bytes)
        return Units(decoded=Tally.empty(*size), everything=Tally.empty(*size))

    def count(self, ledgers: list[Ledger], *, measured: bool) -> None:
        """Add the books of finished tokens."""
        for ledger in ledgers:
            self.everything.add(ledger)
            if measured:
                self.decoded.add(ledger)

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
