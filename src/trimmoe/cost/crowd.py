"""Which guesses bring the next token of a stream sooner while others are under way: those of its
user's own server, or the drafts of a head that are read along with the token that they follow."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.cost.batching import batch_s
from trimmoe.cost.guessing import (
    interval_s,
    layer_times_s,
    machine_times_s,
    machines_of,
    rows_along,
    token_times_s,
)
from trimmoe.cost.model import CostModel

IN_VAIN = 2.0
"""How many times as long as its own time a server's own guess takes it, with those behind wrong
ones and with prompts that it reads; measured on two and on five servers."""
MOST_ALONG, SURE = 4, 0.7
"""Drafts of a head that are read along with a token at most, and the share of cases in which it is
sure enough of one more, measured on the embedded model."""


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
        alone_s = self.whole_s + self.path_s * (self._batch(1 + drafts) - 1.0)
        return max(alone_s, self._machine_s(1 + drafts))

    def along(self, chance: float) -> tuple[int, float]:
        """How many drafts it pays best to read along, each of them right with `chance` where those
        before it are and the head is sure of it, and the time from one token to the next by
        that."""
        each = [
            (self.trip_s(_expected(SURE, k) - 1.0) / _expected(chance * SURE, k), k)
            for k in range(MOST_ALONG + 1)
        ]
        least_s, drafts = min(each)
        return drafts, least_s

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
        return max(self.along(right)[0], min(rows_along(self.streams), MOST_ALONG))

    def _machine_s(self, rows: float) -> float:
        """What the fullest machine takes for so many rows of each stream in the cluster."""
        return self._groups * (self.software_s + self.busiest_s * self._batch(rows))

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
    rows, tokens = (
        np.array([_expected(share, each) for each in range(MOST_ALONG + 1)])
        for share in (SURE, cost.head_right * SURE)
    )
    trips_s = whole_s[:, None] + np.outer(path_s * (1.0 - cost.batch_share), rows - 1.0)
    return (trips_s / tokens).min(axis=1)


def _expected(chance: float, drafts: int) -> float:
    """Rows that a token and at most so many drafts behind it are, where the head is sure of each
    with `chance`, or tokens that they give, where each is right with it."""
    return sum(chance**right for right in range(drafts + 1))


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
