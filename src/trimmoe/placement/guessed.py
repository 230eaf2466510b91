"""What plans are worth where servers guess what their users' answers go on with.

The next token is known as soon as it is guessed, so what counts is how often guesses are right:
that depends on which experts a user's server holds, and in how many bits it has copies of others.

Shapes: M servers, N layers, E experts, A access servers with users.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.crowd import along_times_s
from trimmoe.cost.expected import expected_layer_delay_s, layer_table_s
from trimmoe.cost.guessing import (
    GUESS_CHANCE,
    GUESSES,
    at_home,
    interval_s,
    own_guess_times_s,
    paces_s,
)
from trimmoe.cost.model import CostModel
from trimmoe.placement.planner import Planner
from trimmoe.placement.routes import route_delay_s

WRONG = {0: 0.45, 2: 0.22, 3: 0.125, 4: 0.08, 8: 0.02}
"""Share of guesses that are wrong where a server holds no expert and has copies of all in so many
bits, 0 for none; measured, see docs/experiments.md."""
_MAPPED = 0.37
"""The same without copies where linear maps stand in."""


@dataclass(frozen=True, kw_only=True)
class GuessedObjective:
    """Expected time from one token to the next without load, by guesses: as long as servers need
    for them where they are right, and a token's way to full depth and back where they are wrong."""

    cost: CostModel
    profile: Profile
    access_share: FloatArray
    copies: Callable[[BoolArray, IntArray], IntArray | None]
    """`Planner.stand_in_bits`."""
    name: str = "guessed"

    @staticmethod
    def of(planner: Planner) -> GuessedObjective:
        """Of placements that a planner makes, with the copies that it gives them."""
        return GuessedObjective(
            cost=planner.cost,
            profile=planner.profile,
            access_share=planner.cluster.access_share,
            copies=planner.stand_in_bits,
        )

    def layer_table_s(self, layer: int, held: BoolArray) -> FloatArray:
        """As of exact execution."""
        return layer_table_s(self.cost, held, self.profile, layer)

    def value_s(self, hosts: BoolArray, routes: IntArray) -> float:
        """Expected time per token, seconds; routes [M, N]."""
        tables = expected_layer_delay_s(self.cost, hosts, self.profile)
        access = np.flatnonzero(self.access_share > 0)
        whole_s = route_delay_s(self.cost, tables, routes)[access]
        return float(self.access_share[access] @ self.worth_s(whole_s, hosts, routes[access]))

    def worth_s(self, cost_s: FloatArray, hosts: BoolArray, routes: IntArray) -> FloatArray:
        """Of the users of each server, [A] seconds per token, where tokens take `cost_s` [A] to
        full depth and back on routes [A, N]."""
        if not np.isfinite(cost_s).all():
            return cost_s
        access = np.flatnonzero(self.access_share > 0)
        chances = self.chances(hosts, routes)[access]
        top_k = self.profile.top_k
        guess_s = own_guess_times_s(self.cost, routes, access, hosts, top_k)
        paces = paces_s(self.cost, routes, access, guess_s, top_k)
        each = zip(chances.tolist(), paces.tolist(), cost_s.tolist(), strict=True)
        ahead_s = np.array([interval_s(*one, GUESS_CHANCE, GUESSES) for one in each])
        along_s = along_times_s(self.cost, routes, cost_s, top_k)
        return np.where(at_home(routes, access, hosts), along_s, np.minimum(ahead_s, along_s))

    def chances(self, hosts: BoolArray, routes: IntArray) -> FloatArray:
        """That guesses of each server are right, [M]. What is not quite an expert adds noise to
        states, as often as it is activated. Noise adds up by its squares, and predictions flip by
        its size."""
        bits = self.copies(hosts, routes)
        if bits is None:
            bits = np.zeros(hosts.shape, dtype=np.int64)
        wrong = np.where(hosts, 0.0, self._wrong_by_bits[bits])
        return 1.0 - np.sqrt(np.einsum("mlk,lk->m", wrong**2, self._weight))

    @cached_property
    def _weight(self) -> FloatArray:
        """Of each expert among all, [N, E]; of none where none was ever activated."""
        executed = self.profile.expected_executions
        return executed / max(float(executed.sum()), np.finfo(np.float64).tiny)

    @cached_property
    def _wrong_by_bits(self) -> FloatArray:
        wrong = np.zeros(max(WRONG) + 1)
        wrong[list(WRONG)] = list(WRONG.values())
        if self.profile.stand_in_read is not None:
            wrong[0] = _MAPPED
        return wrong
