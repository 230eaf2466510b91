"""Which guesses bring the next token of a stream sooner while others are under way: those of its
user's own server, or the drafts of a head that are read along with the token that they follow."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import numpy as np

from trimmoe.core.specs import MOST_DRAFTED, FloatArray, IntArray
from trimmoe.cost.batching import TOKEN_SHARE, batch_s
from trimmoe.cost.guessing import (
    interval_s,
    layer_times_s,
    machine_times_s,
    machines_of,
    rows_along,
    token_times_s,
)
from trimmoe.cost.model import CostModel

T = TypeVar("T", float, FloatArray)

IN_VAIN = 2.0
"""How many times as long as its own time a server's own guess takes it, with those behind wrong
ones and with prompts that it reads; measured on two and on five servers."""
SURE = 0.7
"""Share of cases in which a draft head is sure enough of one more, measured on the embedded model.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crowd:
    """What the tokens of one stream take while others are under way, as the cost model has it.

    Tokens of users of the same server pass in one batch; those of others keep machines busy.
    """

    whole_s: float
    """To full depth and back, without load."""
    path_s: float
    """Of that, what servers compute."""
    busiest_s: float
    """What the fullest machine computes for a token."""
    software_s: float
    """What software takes that machine for one, or for a batch of several."""
    home_s: float
    """What the user's server does for one."""
    at_once: float
    """How many servers its machine serves at once."""
    batch_share: float
    here: int = 1
    """Streams of that server's users."""
    streams: int = 1
    """Streams in the cluster."""

    def among(self, here: int, streams: int) -> Crowd:
        """The same with so many of them."""
        here = max(here, 1)
        return replace(self, here=here, streams=max(here, streams))

    def trip_s(self, drafts: float) -> float:
        """Until the next token can set out where so many drafts are read along with each."""
        return max(self._alone_s(1 + drafts), self._machine_s(1 + drafts))

    def along(self, chance: float) -> tuple[int, float]:
        """How many drafts it pays best to read along, each of them right with `chance` where those
        before it are and the head is sure of it, and the time from one token to the next by
        that."""
        each = enumerate(zip(_ROWS, _expected(chance * SURE), strict=True))
        least_s, drafts = min((self.trip_s(rows - 1.0) / tokens, k) for k, (rows, tokens) in each)
        return drafts, least_s

    def least_chance(self, chance: float) -> float:
        """Chance that a draft and all before it have to have of being right to be worth its row:
        what a row more of every stream takes, of what a token takes; `chance` as of `along`. Where
        machines are full that is what it takes them; half as much beyond what it takes its own
        batch where a server has one stream, since the rows of a batch that small are cheaper than
        those of larger ones."""
        drafts, along_s = self.along(chance)
        rows = _ROWS[drafts]
        row_s = self._alone_s(rows) - self._alone_s(rows - 1.0)
        if self._machine_s(rows) > self._alone_s(rows):
            full_s = self._machine_s(rows) - self._machine_s(rows - 1.0)
            row_s += (full_s - row_s) * (1.0 - 0.5 / self.here)
        return min(row_s / along_s, 1.0)

    def among_s(self, guess_s: float) -> float:
        """A guess that takes `guess_s` by itself, in a batch with those of all of its streams, and
        with what is guessed in vain."""
        return guess_s * self._batch(1) * IN_VAIN

    def own_s(self, chance: float, guess_s: float, least: float, most: int) -> float:
        """From one token to the next where the user's server guesses by itself, one token of each
        of its streams in `guess_s`, if it guesses as many of them as `least` and `most` allow; see
        `interval_s`. Infinite where none is allowed."""
        if math.isinf(least):
            return math.inf
        batch = self._batch(1)
        alone_s = interval_s(chance, guess_s, self.trip_s(0), least, most)
        guessing_s = self._groups * guess_s / self.at_once
        return max(alone_s, self.home_s * batch + guess_s, self._machine_s(1), guessing_s)

    def drafts(self, right: float, own_s: float) -> int:
        """How many drafts of a head that are `right` so often are read along with each token; none
        where a server's own guesses bring the next one sooner, in `own_s`."""
        drafts, along_s = self.along(right)
        return drafts if along_s < own_s else 0

    def drafts_at_home(self, right: float) -> int:
        """The same where all is on the user's server, which would otherwise pass one token at a
        time: at least as many as in one process."""
        return max(self.along(right)[0], min(rows_along(self.streams), MOST_DRAFTED))

    def _alone_s(self, rows: float) -> float:
        """What a batch of so many rows of each stream of its server's users takes to full depth and
        back where nothing else is under way."""
        return _trip_s(self.whole_s, self.path_s, self._batch(rows))

    def _machine_s(self, rows: float) -> float:
        """What the fullest machine takes for so many rows of each stream in the cluster."""
        software_s = batch_s(self.software_s, self.here * rows, TOKEN_SHARE)
        return self._groups * (software_s + self.busiest_s * self._batch(rows))

    @property
    def _groups(self) -> float:
        """Batches under way, one of each server's users."""
        return self.streams / self.here

    def _batch(self, rows: float) -> float:
        """What a batch of so many rows of each stream takes over what one row does."""
        return batch_s(1.0, self.here * rows, self.batch_share)


def along_times_s(cost: CostModel, routes: IntArray, whole_s: FloatArray, top_k: int) -> FloatArray:
    """From one token to the next of a stream by itself where as many drafts of a head are read
    along as pay, with tokens on `routes` [A, N] that take `whole_s` [A] to full depth and back,
    [A] seconds: see `Crowd.along`."""
    layer_s = layer_times_s(cost, top_k) - token_times_s(cost)
    path_s = layer_s[routes, np.arange(cost.layer_count)].sum(axis=1)
    each_s = [
        _trip_s(whole_s, path_s, batch_s(1.0, rows, cost.batch_share)) / tokens
        for rows, tokens in zip(_ROWS, _expected(cost.head_right * SURE), strict=True)
    ]
    return np.min(each_s, axis=0)


def _trip_s(whole_s: T, path_s: T, times: float) -> T:
    """What a batch takes to full depth and back where one row takes `whole_s`, of which servers
    compute `path_s`, and the batch takes them so many `times` as long."""
    return whole_s + path_s * (times - 1.0)


def _expected(chance: float) -> tuple[float, ...]:
    """By how many drafts there are behind a token at most, from none on: how many the token and
    those are until one is not what it has to be, which each is with `chance`."""
    return tuple(accumulate(chance**k for k in range(MOST_DRAFTED + 1)))


_ROWS = _expected(SURE)
"""Rows that a token and so many drafts at most are expected to be, by how sure the head is of
them; tokens come of those that are right as well."""


def crowds(cost: CostModel, routes: IntArray, whole_s: FloatArray, top_k: int) -> tuple[Crowd, ...]:
    """One stream of each server's users by itself, on its row of `routes` [R, N], whose tokens
    take `whole_s` [R] to full depth and back."""
    servers, layers = np.arange(cost.server_count), np.arange(cost.layer_count)
    _, at_once = machines_of(cost)
    work_s, layer_s = machine_times_s(cost, routes[servers], top_k), layer_times_s(cost, top_k)
    computed = replace(cost, apart_s=None, dense_s=cost.dense_s - token_times_s(cost))
    computed_s = machine_times_s(computed, routes[servers], top_k)
    fullest = work_s.argmax(axis=1)
    layer_s = (layer_s - token_times_s(cost))[routes[servers], layers]
    return tuple(
        Crowd(
            whole_s=float(whole_s[server]),
            path_s=float(layer_s[server].sum()),
            busiest_s=float(computed_s[server, fullest[server]]),
            software_s=float((work_s - computed_s)[server, fullest[server]]),
            home_s=float(layer_s[server, routes[server] == server].sum()),
            at_once=float(at_once[server]),
            batch_share=cost.batch_share,
        )
        for server in servers.tolist()
    )
