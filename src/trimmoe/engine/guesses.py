"""How long the tokens of a stream take where its user's server guesses ahead."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.cost.model import CostModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """What came of one token and the guess of what it predicts."""

    interval_s: float
    """From when it set out until the next one of its stream did."""
    in_vain: int
    """Tokens that set out behind it on a wrong guess."""

    def booked(self, whole: Ledger) -> Ledger:
        """The ledger of a token that took `whole` by itself. What is in vain is taken to send as
        much as the token does."""
        sent = whole.messages * (1 + self.in_vain)
        return replace(whole, delay_s=self.interval_s, messages=sent)


@dataclass(kw_only=True, slots=True)
class Lead:
    """One stream that has its servers to itself.

    The next token sets out `guess_s` after the last one if what that predicts is guessed, unless
    `guesses` of them are ahead of what is confirmed; otherwise when the last one is through, and so
    it is where the guess was wrong. Tokens are through in turn.
    """

    guesses: int
    guess_s: float
    """Time of a guess."""
    _through_s: deque[float] = field(default_factory=deque)
    """When those tokens are through that are under way when the next one sets out."""

    def after(self, whole_s: float, *, guessed: bool, right: bool) -> Passed:
        """The next token sets out and takes `whole_s` seconds to full depth and back; whether what
        it predicts is guessed, and rightly."""
        ahead = len(self._through_s)
        done_s = max(whole_s, self._through_s[-1]) if ahead else whole_s
        self._through_s.append(done_s)
        in_vain = 0
        interval_s = done_s
        if guessed and right:
            confirmed = len(self._through_s) - 1 - self.guesses
            free_s = self._through_s[confirmed] if confirmed >= 0 else 0.0
            interval_s = min(max(self.guess_s, free_s), done_s)
        elif guessed:
            in_vain = sum(made * self.guess_s <= done_s for made in range(1, self.guesses + 1))
        left = (at_s - interval_s for at_s in self._through_s)
        self._through_s = deque(at_s for at_s in left if at_s > 0)
        return Passed(interval_s=interval_s, in_vain=in_vain)


def stream_share(cost: CostModel, routes: IntArray, top_k: int, whole_s: FloatArray) -> FloatArray:
    """Share of what the fullest machine on each route can do that one stream of tokens at full
    depth takes of it, each of them `whole_s` [R] under way, [R]."""
    layers, servers = np.arange(cost.layer_count), cost.server_count
    machine = np.arange(servers) if cost.machine is None else cost.machine
    at_once = np.ones(servers) if cost.at_once is None else cost.at_once
    layer_s = cost.dense_s + top_k * cost.expert_s.mean(axis=2)
    able = np.ones(int(machine.max()) + 1)
    able[machine] = at_once
    work_s = [
        np.bincount(machine[route], weights=layer_s[route, layers], minlength=able.size)
        for route in routes
    ]
    return (np.stack(work_s) / able).max(axis=1) / whole_s


def guess_times_s(cost: CostModel, top_k: int) -> FloatArray:
    """What it takes each server to guess a token: attention and router of all layers, and in each
    as long as the experts that a token activates take there on average, unless that was measured;
    [M] seconds."""
    if cost.guess_s is not None:
        return cost.guess_s
    return (cost.dense_s + top_k * cost.expert_s.mean(axis=2)).sum(axis=1)
