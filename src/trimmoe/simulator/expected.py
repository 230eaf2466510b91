"""What tokens that follow one another on guesses are expected to take.

The engine says of each what it takes by itself; its stream is faster. What it really sends in vain
is counted as it is sent, so only the delay is put right, when a token is through.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from trimmoe.core.specs import IntArray
from trimmoe.engine.guesses import Leads
from trimmoe.engine.lead import Chunks, Lead
from trimmoe.simulator.tally import DELAY_S, Books
from trimmoe.simulator.world import RIGHT, WRONG


@dataclass(kw_only=True, slots=True)
class Expected:
    """The leads of all requests that have begun."""

    leads: Leads
    _leads: dict[int, Lead | Chunks] = field(default_factory=dict)

    def put_right(
        self, books: Books, rows: IntArray, guess: IntArray, requests: IntArray, access: IntArray
    ) -> None:
        """The books of tokens [n] in `rows` that are through, those of a request in turn, what
        became of the `guess` after each, their requests and these's servers."""
        delay_s = books.numbers[:, DELAY_S]
        columns = (column.tolist() for column in (rows, guess, requests, access))
        for row, made, request, server in zip(*columns, strict=True):
            if request not in self._leads:
                self._leads[request] = self.leads.of(server)
            passed = self._leads[request].after(
                float(delay_s[row]), guessed=made in (RIGHT, WRONG), right=made == RIGHT
            )
            delay_s[row] = passed.interval_s

    def forget(self, requests: Collection[int]) -> None:
        """These are over."""
        for request in self._leads.keys() & set(requests):
            del self._leads[request]
