"""When a user's server guesses ahead, by what is known of a plan and of the load."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimmoe.core.specs import MOST_DRAFTED, BoolArray, FloatArray, IntArray
from trimmoe.cost.crowd import Crowd, crowds
from trimmoe.cost.guessing import (
    at_home,
    guess_times_s,
    row_times_s,
    stream_share,
)
from trimmoe.cost.head_law import named_by_step
from trimmoe.cost.model import CostModel
from trimmoe.engine.lead import SWITCHES, Chunks, Lead
from trimmoe.policy.settings import PolicySettings


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftsAlong:
    """Drafts of a head that are read along with the tokens of each server's users, [M] each."""

    most: IntArray
    """With one token."""
    likely: FloatArray
    """The chance that one and all before it have to have of being right, as the head has it."""
    idle: BoolArray
    """Where nothing is guessed either, as nothing ahead brings the next token sooner."""

    @property
    def named(self) -> FloatArray:
        """The chances that a head names a first one to that end, a second one, and so on,
        [M, MOST_DRAFTED]."""
        chances = np.array([named_by_step(each) for each in self.likely.tolist()])
        return np.where(self.most[:, None] > 0, chances, 0.0)

    @classmethod
    def none(cls, servers: int) -> DraftsAlong:
        """Nowhere any."""
        nothing = np.zeros(servers, dtype=np.int64)
        return cls(most=nothing, likely=np.zeros(servers), idle=nothing > 0)


@dataclass(frozen=True, kw_only=True)
class GuessRules:
    """When users' servers guess what answers go on with; R routes, the first M by access server."""

    settings: PolicySettings
    cost: CostModel
    routes: IntArray
    """[R, N]."""
    reference_s: float
    """d_ref."""
    busy: FloatArray
    """Share of the time that servers along each route are busy, see `ExitRules.busy`, [R]."""
    top_k: int
    hosts: BoolArray | None = None
    """Who holds which experts, [M, N, E]; None where that is not known."""

    @cached_property
    def streams(self) -> FloatArray:
        """Answers under way from which on guesses are not worth their time, as the cost model has
        it, [R]: load as it is seen before it can be measured."""
        below = self.settings.guess_below
        if below is None:
            return np.full(self.routes.shape[0], np.inf)
        return below / stream_share(self.cost, self.routes, self.top_k, self.whole_s)

    def least_among(self, streams: int) -> FloatArray:
        """Chance that a guess and those before it are right at which what follows sets out while so
        many answers are under way, [R]: as of drafts no less than the share of time that servers
        are busy, but with others' streams; what a stream's own tokens take keeps nobody else
        waiting. Infinite where guesses are not worth their time, see `PolicySettings.guess_below`.
        """
        if self.settings.guess_chunks:
            return np.zeros(self.busy.shape)
        others = 1.0 - 1.0 / max(streams, 1)
        least = np.maximum(self.settings.guess_chance, self.busy * others)
        below = self.settings.guess_below
        if below is None:
            return least
        crowded = self.cost.occupancy[self.routes].max(1) * others >= below
        stops = crowded | self._late | (streams >= self.streams)
        return np.where(stops, np.inf, least)

    def drafts_along(
        self,
        streams: int,
        here: IntArray,
        chances: Sequence[float],
        first_right: float | None = None,
        *,
        read: float = 0.0,
        chunk: float = 1.0,
    ) -> DraftsAlong:
        """Those of a head while so many answers are under way, up to `here` [M] of each server's
        users: none where guesses of the servers' own, right with these `chances`, bring the next
        token sooner, or there is no head. `first_right` of a head's first drafts are, None: as
        many as its file says. So many tokens of prompts are `read` for each one that is generated,
        in chunks of `chunk`."""
        right, least = self.cost.head_right, self.least_among(streams)
        found = DraftsAlong.none(self.cost.server_count)
        if not (right and self.settings.reads_along):
            return found
        if first_right is not None:
            right = first_right
        # Of several that begin together prompts leave no time for guesses: drafts have the turn.
        worth = SWITCHES if streams == 1 else 1.0 / SWITCHES
        for server, chance in enumerate(chances):
            mine, others = float(here[server]), np.delete(here, server)
            others = others * max(streams - mine, 0.0) / max(others.sum(), 1)
            crowd = self.crowd(server, mine, others.tolist()).reading(read, chunk)
            guess_s, most = crowd.among_s(float(self.guess_s[server])), self.settings.guesses
            own_s = crowd.own_s(chance, guess_s, float(least[server]), most) * worth
            found.likely[server] = crowd.along(right)[0]
            if self.home[server]:
                found.most[server] = crowd.drafts_at_home(right)
                continue
            along, best_s = crowd.turn(right, own_s)
            found.most[server] = MOST_DRAFTED * along
            found.idle[server] = not along and best_s < own_s
        return found

    def crowd(
        self, server: int, here: float, others: Collection[float], read_s: float = 0.0
    ) -> Crowd:
        """What tokens of a server's users take while so many answers are under way `here`, so many
        of each of the `others`, and prompts take `read_s` for each token."""
        return self._crowds[server].among(here, others, read_s)

    @cached_property
    def _crowds(self) -> tuple[Crowd, ...]:
        return crowds(self.cost, self.routes, self.whole_s, self.top_k)

    @cached_property
    def home(self) -> BoolArray:
        """See `cost.guessing.at_home`, [M]; nowhere if it is not known who holds what."""
        servers = np.arange(self.cost.server_count)
        if self.hosts is None:
            return np.zeros(servers.size, dtype=bool)
        return at_home(self.routes[: servers.size], servers, self.hosts)

    def leads(self, least: FloatArray, others_s: Sequence[FloatArray] = ()) -> Leads:
        """How streams get on by access server, whose guesses have to have the chance `least` [M];
        other sources than the servers' own pass take `others_s` [M] each."""
        return Leads(rules=self, others_s=tuple(others_s), least=least)

    def chunks(self, access: int) -> Chunks:
        """A new stream of a server's users whose guesses are verified so many at a time."""
        return Chunks(
            guesses=self.settings.guesses,
            guess_s=float(self.guess_s[access]),
            row_s=float(self._row_s[access]),
        )

    @cached_property
    def guess_s(self) -> FloatArray:
        """What it takes each server to guess a token, [M]."""
        return guess_times_s(self.cost, self.top_k)

    @cached_property
    def _row_s(self) -> FloatArray:
        """What one more row takes a batch on the way of each server's users, [M]."""
        return row_times_s(self.cost, self.routes, self.top_k)

    @cached_property
    def whole_s(self) -> FloatArray:
        """What a token takes at full depth and on its way to and from its user, without load, [R];
        users of routes that were added are taken for the others."""
        servers = np.arange(self.cost.server_count)
        ends_s = self.cost.ends_s(self.routes[servers])
        more = np.full(self.routes.shape[0] - servers.size, ends_s.mean())
        return self.reference_s * self.cost.layer_count + np.concatenate([ends_s, more])

    @property
    def _late(self) -> BoolArray:
        """Whether a user's server takes as long for a guess as tokens do at full depth, [R]."""
        more = np.full(self.routes.shape[0] - self.guess_s.size, self.guess_s.max())
        return np.concatenate([self.guess_s, more]) >= self.whole_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Leads:
    """How streams get on, by access server."""

    rules: GuessRules
    others_s: tuple[FloatArray, ...]
    """Of other sources, [M] each."""
    least: FloatArray
    """[M]."""

    def of(self, access: int) -> Lead | Chunks:
        """A new stream's."""
        if self.rules.settings.guess_chunks:
            return self.rules.chunks(access)
        return Lead(
            guesses=self.rules.settings.guesses,
            guess_s=float(self.rules.guess_s[access]),
            others_s=tuple(float(each[access]) for each in self.others_s),
            least=float(self.least[access]),
        )
