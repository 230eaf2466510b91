"""Which guesses bring the next token of a stream sooner while others are under way: those of its
user's own server, or the drafts of a head that are read along with the token that they follow."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np

from trimmoe.core.specs import MOST_DRAFTED, FloatArray, IntArray
from trimmoe.cost.batching import TOKEN_SHARE, batch_s, chains_s, shared_s
from trimmoe.cost.guessing import (
    interval_s,
    layer_times_s,
    machine_times_s,
    machines_of,
    rows_along,
    token_batch_times,
)
from trimmoe.cost.head_law import named_by_step, rows_among, tokens_among
from trimmoe.cost.model import CostModel

T = TypeVar("T", float, FloatArray)

IN_VAIN = 2.0
"""How many times as long as its own time a server's own guess takes it, with those behind wrong
ones and with prompts that it reads; measured on two and on five servers."""
LEAST = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Chances that a draft and all before it may have to have of being right, as the head gives them,
to be read along."""
WORTH = 0.9
"""What share of the time from token to token drafts that are read along have to bring it down to,
and a server's own guesses what is left by these: less than that is within what these times are off
by, and whatever takes machines more work makes waits between tokens longer."""
ROWS, NAMED = tuple(map(rows_among, LEAST)), tuple(map(named_by_step, LEAST))
"""Rows that are read along with a token that is known, itself included, and the chances that the
head names a first draft to that end, a second one, and so on, by `LEAST`."""


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
    batch_times: tuple[float, ...]
    """See `token_batch_times`."""
    naming_s: float = 0.0
    """What a draft head takes to name one token behind one, where the last layer is."""
    naming_there_s: float = 0.0
    """Of that, what the fullest machine computes."""
    guesses_there: bool = False
    """Whether that is where the user's server is."""
    here: float = 1
    """Streams of that server's users."""
    streams: float = 1
    """Streams in the cluster."""
    batches: float = 1
    """Of tokens under way: those of one server's users pass together, and of few with others'."""
    read_s: float = 0.0
    """What prompts take the fullest machine for each token that is generated."""

    def among(self, here: float, others: Collection[float] = (), read_s: float = 0.0) -> Crowd:
        """The same with so many of them, so many of each other server's users, and prompts that
        take so long. There are as many batches as if all were of one size and a stream met as many
        others in its own: (sum of n)^2 / sum of n^2."""
        each = [max(here, 1.0), *others]
        streams = sum(each)
        batches = streams**2 / sum(n**2 for n in each)
        return replace(self, here=each[0], streams=streams, batches=batches, read_s=read_s)

    def reading(self, rows: float, chunk: float) -> Crowd:
        """The same where so many rows of prompts, in chunks of so many, are read for each token
        that is generated."""
        each_s = self.busiest_s * batch_s(1.0, chunk, self.batch_times) / chunk
        return replace(self, read_s=rows * each_s)

    def trip_s(
        self, rows: float = 1.0, named: tuple[float, ...] = (), tokens: float = 1.0
    ) -> float:
        """Until the next token can set out where so many rows of each stream are read together,
        which bring so many `tokens`, and a head names drafts of each, with these chances so
        many."""
        alone_s = self._alone_s(rows) + chains_s(self.naming_s, named, self.here)
        there_s = self.batches * chains_s(self.naming_there_s, named, self.here)
        return max(alone_s, self._machine_s(rows) + there_s + tokens * self._read_s)

    def along(self, right: float) -> tuple[float, float]:
        """How likely a draft and all before it have to be to be worth their rows (of `LEAST`), and
        the time from one token to the next by that; `right` of a head's first drafts are."""
        return _along(self, round(right, 2))

    def among_s(self, guess_s: float, in_vain: float = IN_VAIN) -> float:
        """A guess that takes `guess_s` by itself, in a batch with those of all of its streams, and
        so many times as long with what is guessed in vain."""
        return guess_s * self._batch(1) * in_vain

    def reading_s(self, guess_s: float, rows: int) -> float:
        """What a server takes to read so many tokens of a stream by itself, where it guesses one in
        `guess_s`, with what else it has to do."""
        return batch_s(guess_s, max(rows, 1), self.batch_times) * IN_VAIN

    def own_s(self, chance: float, guess_s: float, least: float, most: int) -> float:
        """From one token to the next where the user's server guesses by itself, one token of each
        of its streams in `guess_s`, if it guesses as many of them as `least` and `most` allow; see
        `interval_s`. Infinite where none is allowed."""
        if math.isinf(least):
            return math.inf
        batch = self._batch(1)
        alone_s = interval_s(chance, guess_s, self.trip_s(), least, most)
        guessing_s = self.batches * guess_s / self.at_once
        machine_s = self._machine_s(1) + self._read_s
        if self.guesses_there:
            machine_s += guessing_s
        return max(alone_s, self.home_s * batch + guess_s, machine_s, guessing_s)

    def turn(self, right: float, own_s: float) -> tuple[bool, float]:
        """Whether drafts of a head that are `right` so often are read along with each token, and
        the time from one token to the next by what is best: not where a server's own guesses bring
        it clearly sooner, in `own_s`, nor where it is hardly sooner than with nothing ahead."""
        along_s, alone_s = self.along(right)[1], self.trip_s()
        if along_s < min(own_s / WORTH, WORTH * alone_s):
            return True, along_s
        return False, min(own_s, alone_s)

    def drafts_at_home(self, right: float) -> int:
        """How many drafts at most are read along where all is on the user's server, which would
        otherwise pass one token at a time: at least as many as in one process, more where they are
        worth it."""
        least = min(rows_along(round(self.streams)), MOST_DRAFTED)
        return MOST_DRAFTED if self.turn(right, math.inf)[0] else least

    def _alone_s(self, rows: float) -> float:
        """What a batch of so many rows of each stream of its server's users takes to full depth and
        back where nothing else is under way."""
        return _trip_s(self.whole_s, self.path_s, self._batch(rows))

    def _machine_s(self, rows: float) -> float:
        """What the fullest machine takes for so many rows of each stream in the cluster."""
        each = self.streams / self.batches * rows
        software_s = shared_s(self.software_s, each, TOKEN_SHARE)
        return self.batches * (software_s + batch_s(self.busiest_s, each, self.batch_times))

    @property
    def _read_s(self) -> float:
        """What others' prompts take the fullest machine while each stream gets a token; its own is
        read before it gets any."""
        return (self.streams - 1) * self.read_s

    def _batch(self, rows: float) -> float:
        """What a batch of so many rows of each stream takes over what one row does."""
        return batch_s(1.0, self.here * rows, self.batch_times)


@lru_cache(maxsize=4096)
def _along(crowd: Crowd, right: float) -> tuple[float, float]:
    # Asked several times for every token.
    each = zip(LEAST, ROWS, NAMED, tokens_by(right), strict=True)
    times_s = (
        (crowd.trip_s(rows, named, tokens) / tokens, least) for least, rows, named, tokens in each
    )
    along_s, least = min(times_s)
    return least, along_s


def along_times_s(cost: CostModel, routes: IntArray, whole_s: FloatArray, top_k: int) -> FloatArray:
    """From one token to the next of a stream by itself where as many drafts of a head are read
    along as pay, if any do, with tokens on `routes` [A, N] that take `whole_s` [A] to full depth
    and back, [A] seconds: see `Crowd.along`."""
    layer_s = layer_times_s(cost, top_k)
    path_s = layer_s[routes, np.arange(cost.layer_count)].sum(axis=1)
    naming_s, along_s = _naming_s(cost, routes), np.full(whole_s.shape, np.inf)
    if cost.head_right:
        together = token_batch_times(cost, top_k)
        for rows, named, tokens in zip(
            ROWS, NAMED, tokens_by(round(cost.head_right, 2)), strict=True
        ):
            batch_times = batch_s(1.0, rows, together)
            each_s = _trip_s(whole_s, path_s, batch_times) + sum(named) * naming_s
            along_s = np.minimum(along_s, each_s / tokens)
    return np.where(along_s < WORTH * whole_s, along_s, whole_s)


@lru_cache(maxsize=101)
def tokens_by(right: float) -> tuple[float, ...]:
    """Tokens that a batch brings, by `LEAST`; `right` (in hundredths) of first drafts are."""
    return tuple(tokens_among(LEAST, right))


def _trip_s(whole_s: T, path_s: T, times: float) -> T:
    """What a batch takes to full depth and back where one row takes `whole_s`, of which servers
    compute `path_s`, and the batch takes them so many `times` as long."""
    return whole_s + path_s * (times - 1.0)


def _naming_s(cost: CostModel, routes: IntArray) -> FloatArray:
    """What a draft head takes for one token where routes [A, N] end, [A]."""
    zeros = np.zeros(cost.server_count)
    return (zeros if cost.naming_s is None else cost.naming_s)[routes[:, -1]]


def crowds(cost: CostModel, routes: IntArray, whole_s: FloatArray, top_k: int) -> tuple[Crowd, ...]:
    """One stream of each server's users by itself, on its row of `routes` [R, N], whose tokens
    take `whole_s` [R] to full depth and back."""
    servers, layers = np.arange(cost.server_count), np.arange(cost.layer_count)
    machine, at_once = machines_of(cost)
    work_s = machine_times_s(cost, routes[servers], servers, top_k)
    computed = replace(cost, apart_s=None, token_s=None)
    computed_s = machine_times_s(computed, routes[servers], servers, top_k)
    fullest = work_s.argmax(axis=1)
    layer_s = layer_times_s(cost, top_k)[routes[servers], layers]
    last, naming_s = routes[servers, -1], _naming_s(cost, routes[servers])
    together = token_batch_times(cost, top_k)
    there_s = np.where(machine[last] == fullest, naming_s / at_once[last], 0.0)
    return tuple(
        Crowd(
            whole_s=float(whole_s[server]),
            path_s=float(layer_s[server].sum()),
            busiest_s=float(computed_s[server, fullest[server]]),
            software_s=float((work_s - computed_s)[server, fullest[server]]),
            home_s=float(layer_s[server, routes[server] == server].sum()),
            at_once=float(at_once[server]),
            batch_times=together,
            naming_s=float(naming_s[server]),
            naming_there_s=float(there_s[server]),
            guesses_there=bool(machine[server] == fullest[server]),
        )
        for server in servers.tolist()
    )
