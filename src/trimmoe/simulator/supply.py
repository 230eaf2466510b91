"""Decided tokens for the event loop: whose are wanted next, and how many at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimmoe.core.specs import IntArray
from trimmoe.simulator.ahead import Ahead
from trimmoe.simulator.state import State
from trimmoe.simulator.tables import RequestTable, RowPool
from trimmoe.simulator.world import NEXT_REQUEST, NONE, NOW

AHEAD = 8
"""Tokens of a request that are decided before they begin: the more, the wider the waves, and the
more is forgotten when the feedback changes."""
AHEAD_OF_CHANGE = 2
"""The same where it changes at every control instant."""
_WIDE_SHARE = 0.5
"""Share of the requests at hand that a wave has to hold, unless a request waits for it."""
_PREFILL_ROWS = 4096
"""Prompt tokens decided at once."""


@dataclass(frozen=True, kw_only=True)
class Supply:
    """Fills the table with tokens that `decider` decides."""

    decider: Ahead
    table: RequestTable
    pool: RowPool
    trace_length: int
    closed: bool
    """Whether requests begin when others end, not when they arrive."""
    ahead: int
    """Tokens of a request to have decided before they begin."""

    def replenish(self, state: State, until_s: float) -> None:
        """Decide tokens of all requests that run or come before `until_s`, until each has enough
        ahead."""
        table, asked = self.table, self.table.asked
        requests = self._soon(state, until_s)
        self._admit(requests[~table.admitted[requests]])
        decoded = table.requests.decoded
        while True:
            wanting = requests[
                (asked.ahead[requests] < self.ahead) & (table.decided[requests] < decoded[requests])
            ]
            urgent = (asked.ahead[wanting] == 0).any()
            if not (urgent or wanting.size > _WIDE_SHARE * requests.size):
                return
            self._decide(wanting)

    def _decide(self, requests: IntArray) -> None:
        """The next token of each."""
        table, length = self.table, self.trace_length
        numbers = table.decided[requests]
        at = table.requests.prompt[requests] + numbers
        tokens, before = (table.tokens(requests, one, length) for one in (at, at - 1))
        last = numbers + 1 == table.requests.decoded[requests]
        prompted = table.requests.prompt[requests] > 0
        journey = self.decider.decide(requests, numbers, tokens, before, last, prompted=prompted)
        rows = self.pool.add(journey, decoded=True).tolist()
        for request, row in zip(requests.tolist(), rows, strict=True):
            table.append(self.pool.rows, request, row)
        table.decided[requests] += 1

    def _soon(self, state: State, until_s: float) -> IntArray:
        """Requests that run, and those that will arrive before then."""
        asked, following = self.table.asked, int(state.numbers[NEXT_REQUEST])
        running = np.flatnonzero(asked.running)
        if self.closed:
            last = min(following + 8 + running.size // 8, asked.access.size)
        else:
            following = int(np.searchsorted(asked.arrival_s, state.clock[NOW], side="right"))
            last = int(np.searchsorted(asked.arrival_s, until_s))
        return np.union1d(running, np.arange(following, max(last, following)))

    def _admit(self, requests: IntArray) -> None:
        """Open accounts and decide the prompts."""
        table = self.table
        for request in requests.tolist():
            self.decider.open(request, int(table.requests.access[request]))
        table.admitted[requests] = True
        lengths = table.requests.prompt[requests]
        owners = np.repeat(requests, lengths)
        numbers = np.arange(owners.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        tokens = table.tokens(owners, numbers, self.trace_length)
        rows = []
        for first in range(0, owners.size, _PREFILL_ROWS):
            part = slice(first, first + _PREFILL_ROWS)
            access = table.requests.access[owners[part]]
            journey = self.decider.prefill(owners[part], access, tokens[part])
            rows.append(self.pool.add(journey, decoded=False))
        if rows:
            self._chain_chunks(owners, numbers, np.concatenate(rows))
            if self.decider.engine.settings.guesses:
                self._guess_behind(owners, tokens, np.concatenate(rows))

    def _chain_chunks(self, owners: IntArray, numbers: IntArray, rows: IntArray) -> None:
        opens, siblings = numbers % self.table.chunk == 0, self.pool.rows.sibling
        inside = np.flatnonzero(~opens)
        siblings[rows[inside - 1]] = rows[inside]
        for at in np.flatnonzero(opens).tolist():
            self.table.append(self.pool.rows, int(owners[at]), int(rows[at]))

    def _guess_behind(self, owners: IntArray, tokens: IntArray, rows: IntArray) -> None:
        """Note what becomes of the guess of what follows each prompt, with its last chunk; all
        [n], its tokens one after another."""
        ends = np.flatnonzero(np.diff(owners, append=-1))
        lengths = self.table.requests.prompt[owners[ends]]
        access = self.table.requests.access[owners[ends]]
        chunks = rows[ends - (lengths - 1) % self.table.chunk]
        guess, windows = self.decider.guessed_behind(access, tokens[ends])
        guess[self.table.requests.decoded[owners[ends]] == 0] = NONE
        self.pool.rows.guess[chunks], self.pool.rows.window[chunks] = guess, windows
