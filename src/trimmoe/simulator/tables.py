"""The requests and decided tokens of a run, as the event loop reads them and as Python needs them.

Rows of decided tokens are reused once their unit is through; requests are only ever added.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trimmoe.core.events import Receipt
from trimmoe.core.specs import IntArray
from trimmoe.simulator.arrivals import Requests, join_requests
from trimmoe.simulator.journey import Itinerary
from trimmoe.simulator.tally import Books
from trimmoe.simulator.world import NONE, WRONG, Asked, Rows, make_rows


@dataclass(kw_only=True)
class RowPool:
    """Rows of decided tokens with the books of those that are decoded."""

    rows: Rows
    books: Books
    copies: int = 1
    """Of each token on whose wrong draft or guess something sets out, the rows of that."""
    receipts: list[Receipt | None] = field(default_factory=list)
    """None for prompt tokens."""
    _free: list[int] = field(default_factory=list)

    @staticmethod
    def of(layers: int, slots: int, servers: int, copies: int = 1) -> RowPool:
        """An empty pool."""
        books = Books.blank(0, layers, servers)
        return RowPool(rows=make_rows(0, layers, slots), books=books, copies=copies)

    def add(self, journey: Itinerary, *, decoded: bool) -> IntArray:
        """Store n tokens; their rows, [n]."""
        at = self._taken(journey.layers.size)
        self.rows.expert[at], self.rows.server[at] = journey.expert, journey.server
        self.rows.place[at], self.rows.layers[at] = journey.place, journey.layers
        self.rows.prompt[at], self.rows.draft_at[at] = not decoded, journey.wrong_at
        self.rows.guess[at], self.rows.followed[at] = journey.guess, False
        self.rows.window[at] = journey.window
        self.books.write(at, journey.ledgers, journey.disagrees)
        for row, receipt in zip(at.tolist(), journey.receipts, strict=True):
            self.receipts[row] = receipt if decoded else None
        wrong = at[(journey.wrong_at != NONE) | (journey.guess == WRONG)]
        if wrong.size:
            self._add_drafts(wrong)
        return at

    def _add_drafts(self, wrong: IntArray) -> None:
        """Rows of what sets out on the drafts of tokens [n], or on guesses: copies of these,
        without books."""
        at = self._taken(self.copies * wrong.size).reshape(self.copies, wrong.size)
        for column in (self.rows.expert, self.rows.server, self.rows.place, self.rows.layers):
            column[at] = column[wrong]
        self.rows.prompt[at], self.rows.draft_at[at], self.rows.guess[at] = False, NONE, NONE
        self.rows.draft[wrong], self.rows.after[at[:-1]] = at[0], at[1:]

    def drafts(self, rows: IntArray) -> IntArray:
        """Rows of what sets out on wrong drafts or guesses of these tokens."""
        found, at = [], self.rows.draft[rows]
        while (at != NONE).any():
            found.append(at[at != NONE])
            at = self.rows.after[found[-1]]
        return np.concatenate([np.zeros(0, dtype=np.int64), *found])

    def _taken(self, count: int) -> IntArray:
        """Free rows, from now on in use, [n]."""
        if len(self._free) < count:
            self._grow(max(count, len(self.receipts), 1024))
        taken, self._free = self._free[-count:], self._free[:-count]
        at = np.array(taken, dtype=np.int64)
        self.rows.sibling[at] = self.rows.after[at] = self.rows.draft[at] = NONE
        self.rows.number[at] = NONE
        self.rows.over_s[at] = np.inf
        return at

    def unit(self, row: int) -> list[int]:
        """All rows of the unit that begins with `row`."""
        found = []
        while row != NONE:
            found.append(row)
            row = int(self.rows.sibling[row])
        return found

    def free(self, row: int) -> None:
        """Give back a unit's rows."""
        self._free += self.unit(row)

    def drop(self, row: int) -> None:
        """Give back a unit that has not begun, with what would set out on its draft or guess."""
        self._free += self.drafts(np.array([row])).tolist()
        self.free(row)

    def _grow(self, more: int) -> None:
        before = len(self.receipts)
        layers, slots = self.rows.expert.shape[1:]
        pairs = zip(self.rows, make_rows(more, layers, slots), strict=True)
        self.rows = Rows._make(np.concatenate(pair) for pair in pairs)
        self.books = self.books.with_room(more)
        self.receipts += [None] * more
        self._free += range(before + more - 1, before - 1, -1)


@dataclass(kw_only=True)
class RequestTable:
    """Requests with the chains of their decided units."""

    requests: Requests
    asked: Asked
    prefills: IntArray
    """Units of each prompt, [R]."""
    admitted: np.ndarray
    """Whether it has an account and its prompt has been decided, bool [R]."""
    decided: IntArray
    """Decoded tokens decided so far, [R]."""
    chunk: int
    closing: set[int] = field(default_factory=set)
    """Requests that finished since the last control instant."""

    @staticmethod
    def of(requests: Requests, chunk: int) -> RequestTable:
        """None of them has arrived."""
        count, zeros = requests.count, np.zeros(requests.count, dtype=np.int64)
        prefills = -(-requests.prompt // chunk)
        return RequestTable(
            requests=requests,
            asked=Asked(
                arrival_s=requests.arrival_s.copy(),
                access=requests.access,
                prompts=prefills,
                units=prefills + requests.decoded,
                done=zeros.copy(),
                first=np.full(count, NONE),
                last=np.full(count, NONE),
                ahead=zeros.copy(),
                row=np.full(count, NONE),
                newest=np.full(count, NONE),
                under_way=zeros.copy(),
                coming=np.zeros(count, dtype=bool),
                ticket=np.full(count, NONE),
                reads=zeros.copy(),
                more=zeros.copy(),
                brought=np.zeros(count),
                unread=zeros.copy(),
                held=np.zeros(count, dtype=bool),
                chunk=np.zeros(count, dtype=np.int64),
                hindmost=np.full(count, NONE),
                copies=zeros.copy(),
                trail=np.full(count, NONE),
                trail_before=np.full(count, NONE),
                awaited=np.full(count, NONE),
                running=np.zeros(count, dtype=bool),
                over_s=np.full(count, np.inf),
            ),
            prefills=prefills,
            admitted=np.zeros(count, dtype=bool),
            decided=zeros.copy(),
            chunk=chunk,
        )

    def extend(self, more: Requests) -> None:
        """Add requests at the end."""
        other = RequestTable.of(more, self.chunk)
        self.requests = join_requests([self.requests, more])
        pairs = zip(self.asked, other.asked, strict=True)
        self.asked = Asked._make(np.concatenate(pair) for pair in pairs)
        for name in ("prefills", "admitted", "decided"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))

    def append(self, rows: Rows, request: int, row: int) -> None:
        """Chain a decided unit to its request's others."""
        asked = self.asked
        if asked.first[request] == NONE:
            asked.first[request] = row
        else:
            rows.after[asked.last[request]] = row
        asked.last[request] = row
        asked.ahead[request] += 1

    def tokens(self, requests: IntArray, numbers: IntArray, length: int) -> IntArray:
        """Rows of the trace of the `numbers`-th tokens [n] of requests [n], prompts included."""
        asked = self.requests
        at = (asked.offset[requests] + numbers) % length
        return asked.sequence[requests] * length + at

    def flying(self, rows: Rows) -> list[int]:
        """Decoded tokens in flight, those of a request in order."""
        found, asked = [], self.asked
        for request in np.flatnonzero(asked.row != NONE).tolist():
            row, newest = int(asked.row[request]), int(asked.newest[request])
            found.append(row)
            while newest not in (row, NONE):
                row = int(rows.after[row])
                found.append(row)
        return found

    def drop_ahead(self, pool: RowPool) -> None:
        """Forget decoded tokens that were decided and have not begun; prompts stay."""
        asked = self.asked
        for request in np.flatnonzero(asked.ahead).tolist():
            row, last, kept = int(asked.first[request]), NONE, 0
            while row != NONE and pool.receipts[row] is None:
                last, row, kept = row, int(pool.rows.after[row]), kept + 1
            if last == NONE:
                asked.first[request] = NONE
            else:
                pool.rows.after[last] = NONE
            asked.last[request] = last
            self.decided[request] -= asked.ahead[request] - kept
            asked.ahead[request] = kept
            while row != NONE:
                following = int(pool.rows.after[row])
                pool.drop(row)
                row = following
