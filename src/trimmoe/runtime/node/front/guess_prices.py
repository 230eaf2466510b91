"""What guesses are worth to this server's users, and what they take, as busy as servers are now."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimmoe.cost.guessing import draft_times_s, guess_times_s
from trimmoe.engine.lead import FIRST_HEAD_CHANCE, OWN, Lead

if TYPE_CHECKING:
    from trimmoe.cost.crowd import Crowd
    from trimmoe.runtime.drafter import Drafter
    from trimmoe.runtime.node.compute.worker import Worker
    from trimmoe.runtime.node.watch.planner import Planner

Route = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GuessPrices:
    """Of one server; it takes so many times as long (`slowdown`) as its worker measures."""

    server: int
    worker: Worker
    planner: Planner
    drafter: Drafter | None
    slowdown: float
    here: Callable[[], int]
    """Answers under way to this server's users."""
    others: Callable[[], Collection[int]]
    """Those to each other server's."""
    leads: Callable[[], Sequence[Lead]]
    """Of this server's users' streams."""

    @property
    def drafts_along(self) -> bool:
        """Whether what a draft head names after full depth's states may be read along."""
        return self.worker.end_drafts.able and self.planner.settings.reads_along

    def lead(self, route: Route, *, at_home: bool) -> Lead:
        """A new stream's, whose layers are all here or not."""
        own_s, *others_s = self._guess_s()
        rules = self.planner.in_force.engine.guess_rules
        lead = Lead(
            guesses=self.planner.settings.guesses,
            guess_s=own_s,
            others_s=tuple(others_s),
            whole_s=float(rules.whole_s[self.server]),
            head=self.drafts_along,
        )
        # Its own pass would be full depth itself.
        lead.sources[OWN].able = not at_home
        self.tell(lead, route)
        return lead

    def tell(self, lead: Lead, route: Route) -> int:
        """Tell a stream on a route what there is to know; the source whose turn it is by that."""
        lead.least, lead.crowd = self._least_chance(route), self._crowd(route)
        took_s = self.worker.guess_pace.token_s
        lead.pace_s = None if took_s is None else took_s * self.slowdown
        turn, settings = lead.choose(self.leads()), self.planner.settings
        # A chunk is as long as it is, however far full depth.
        twice = lead.is_far and not settings.guess_chunks
        lead.guesses = settings.guesses * (2 if twice else 1)
        return turn

    def guesses_now(self) -> bool:
        """Whether this server guesses ahead for those who ask it now."""
        route = self.planner.in_force.route_of(self.server)
        crowd = self._crowd(route) if self.drafts_along else None
        along = crowd is not None and crowd.turn(FIRST_HEAD_CHANCE, math.inf)[0]
        return along or math.isfinite(self._least_chance(route))

    def _least_chance(self, route: Route) -> float:
        """That guesses of sequences on a route have to have of being right to be followed now;
        infinite where none is worth its time."""
        return self.worker.least_chance(route, self.here() + sum(self.others()))

    def _crowd(self, route: Route) -> Crowd | None:
        """What tokens on the route of this server's users take beside others now; None of another
        route."""
        rules = self.worker.engine.guess_rules
        if tuple(rules.routes[self.server].tolist()) != route:
            return None
        read_s = round(self.planner.read_s, 4)
        return rules.crowd(self.server, self.here(), self.others(), read_s)

    def _guess_s(self) -> tuple[float, ...]:
        """What a guess takes, by source: the draft model's too as the cost model has it, unless
        that was measured and so was this."""
        cost, spec = self.planner.in_force.engine.cost, self.worker.view.spec
        own_s = float(guess_times_s(cost, spec.top_k)[self.server])
        if self.drafter is None:
            return (own_s,)
        took_s = self.drafter.token_s
        if cost.guess_s is None or took_s is None:
            size = self.drafter.size(spec)
            return own_s, float(draft_times_s(cost, spec.top_k, size)[self.server])
        return own_s, took_s * self.slowdown
