"""The planner at full length: seeds, greedy growth, local search, and the trimmed value at last.

Every seed plan is evaluated and grown greedily (`Planner.finished`), the search goes on from
all of these (`search`), and what wins gets the replicas that still save something in the memory
left. With the trimmed objective the best of this and every seed are ranked anew by their trimmed
value, and the search goes on with trimmed tables, at the price the best one pays, among routes over
the servers that good routes use. What is returned is the best of everything evaluated, so it is
never worse under the objective than any seed, nor than the best single server where that holds the
model: it is one of the seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, ClusterSpec, IntArray, ModelSpec
from trimmoe.placement.at_home import copy_losses, home_hosts
from trimmoe.placement.bound import Bound, exact_bound
from trimmoe.placement.guessed import GuessedObjective
from trimmoe.placement.landscape import ExactObjective, Landscape, Objective
from trimmoe.placement.make import as_plan, default, distinct_routes, make_planner
from trimmoe.placement.mutate import Mutator
from trimmoe.placement.planner import Placement, Planner, PlanSettings
from trimmoe.placement.redundancy import add_marginal_replicas
from trimmoe.placement.routes import home_routes
from trimmoe.placement.search import Search
from trimmoe.placement.seeds import SEEDS, seed_placement
from trimmoe.placement.stand_ins import standing_in
from trimmoe.placement.trimmed import EachUserObjective, TrimmedObjective

KeepGoing = Callable[[float], bool]
"""Whether less than this share of the time has passed; asked before every step."""

_GREEDY_SHARE = 0.3
"""Of the time, after which no further seed is grown; the better ones go first."""
_EXACT_SHARE = 0.5
"""Of the time, where the trimmed objective comes after the exact one."""
_FINALISTS = 4
_TRIMMED_SERVERS = 6
"""Servers that routes of the trimmed search may use: its tables are dear."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """How long and for what `optimise_plan` searches."""

    objective: Literal["exact", "guessed", "trimmed"] = "exact"
    budget: float = 0.02
    """D-bar of the trimmed objective."""
    iterations: int = 20_000
    """Neighbours and random starts tried at most."""
    trimmed_iterations: int = 200
    """Neighbours tried at most with trimmed tables."""
    bound_seconds: float = 0.0
    """How long the integer program may look for the optimum where it is small enough and the
    objective exact (`bound`); 0: not at all. Its time is the solver's own, so with it the result
    may differ from machine to machine, for the better only."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A placement that may win, by where it came from."""

    name: str
    hosts: BoolArray
    routes: IntArray
    value_s: float


def optimise_plan(
    profile: Profile,
    model: ModelSpec,
    cluster: ClusterSpec,
    search: SearchSettings | None = None,
    settings: PlanSettings | None = None,
    *,
    cluster_hash: str,
    keep_going: KeepGoing = lambda share: True,
) -> Plan:
    """The plan of least value that was found until the iterations or the time ran out.

    The header's settings say what was searched for (`search`), each seed's value and what became
    of it greedily (`seeds`), what won and how many iterations were done.

    Raises `UserError` if the profile is of another model or the experts do not fit.
    """
    search = search or SearchSettings()
    settings = replace(settings or default(), seed=search.seed)
    profile.require_model(model)
    if not 0.0 <= search.budget <= 1.0:
        raise UserError(f"The budget is {search.budget}; give a flip rate from 0 to 1.")
    planner = make_planner(profile, model, cluster, settings)
    if search.objective != "trimmed":
        # What copies are worth is counted, or nothing.
        planner = planner.unreserved
    found = Optimiser(planner=planner, settings=search, keep_going=keep_going).run()
    return as_plan(planner, found.placement, cluster_hash, found.record)


def plan_value_s(
    plan: Plan, profile: Profile, model: ModelSpec, cluster: ClusterSpec, search: SearchSettings
) -> float:
    """What a plan is worth under what was searched for, on a cluster as it is now, seconds per
    token."""
    planner = make_planner(profile, model, cluster, default())
    objective = Optimiser(planner=planner, settings=search, keep_going=lambda _: True).objective()
    return objective.value_s(plan.hosts, plan.routes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search came to."""

    placement: Placement
    record: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """One search; see the module docstring."""

    planner: Planner
    settings: SearchSettings
    keep_going: KeepGoing

    def run(self) -> Found:
        """Search; the record is JSON-like."""
        wanted = self.settings.objective
        objective = self.objective()
        first = self._exact() if wanted == "trimmed" else objective
        seeds = self._seeds()
        entries = [self._entry(first, f"seed {n}", s.hosts, s.routes) for n, s in seeds.items()]
        entries += self._grown(first, seeds)
        share = _EXACT_SHARE if wanted == "trimmed" else 1.0
        entries, done = self._searched(first, entries, share)
        trimmed_done = 0
        if isinstance(objective, EachUserObjective):
            entries, trimmed_done = self._trimmed(objective, entries)
        bound = self._bound() if wanted == "exact" else None
        if bound is not None and bound.hosts is not None:
            routes = self._landscape(first).routes(bound.hosts)
            entries.append(self._entry(first, "integer program", bound.hosts, routes))
        best = min(entries, key=lambda entry: entry.value_s)
        record = {
            "search": asdict(self.settings),
            "objective": objective.name,
            "value_s": best.value_s,
            "seed_won": best.name,
            "seeds": self._record(seeds, entries),
            "iterations": done,
            "trimmed_iterations": trimmed_done,
            "bound": None if bound is None else bound.record(best.value_s),
        }
        placement = self.planner.placement(best.hosts, best.routes)
        return Found(placement=placement, record=record)

    def _bound(self) -> Bound | None:
        if self.settings.bound_seconds <= 0:
            return None
        return exact_bound(self.planner, time_limit_s=self.settings.bound_seconds)

    def _seeds(self) -> dict[str, Placement]:
        found = {name: seed_placement(name, self.planner) for name in SEEDS}
        return {name: seed for name, seed in found.items() if seed is not None}

    def objective(self) -> ExactObjective | GuessedObjective | EachUserObjective:
        """What plans are compared by."""
        match self.settings.objective:
            case "exact":
                return self._exact()
            case "guessed":
                return GuessedObjective.of(self.planner)
            case "trimmed":
                return EachUserObjective(whole=self._budgeted())

    def _exact(self) -> ExactObjective:
        share = self.planner.cluster.access_share
        return ExactObjective(
            cost=self.planner.cost, profile=self.planner.profile, access_share=share
        )

    def _budgeted(self) -> TrimmedObjective:
        return TrimmedObjective(
            cost=self.planner.cost,
            profile=self.planner.profile.echoing(),
            access_share=self.planner.cluster.access_share,
            budget=self.settings.budget,
            copied_bits=self._copied_bits(),
            copies=self.planner.stand_in_bits,
        )

    def _entry(self, objective: Objective, name: str, hosts: BoolArray, routes: IntArray) -> _Entry:
        value_s = objective.value_s(hosts, routes)
        return _Entry(name=name, hosts=hosts, routes=routes, value_s=value_s)

    def _grown(self, objective: Objective, seeds: dict[str, Placement]) -> list[_Entry]:
        """Every seed with best routes and greedy replicas, as long as there is time."""
        grown = []
        starts = distinct_routes([seed.routes for seed in seeds.values()])
        for name, seed in sorted(seeds.items(), key=lambda item: item[1].expected_s):
            if not self.keep_going(_GREEDY_SHARE):
                break
            after = self.planner.finished(seed, starts)
            grown.append(self._entry(objective, f"greedy {name}", after.hosts, after.routes))
        return grown

    def _searched(
        self, objective: Objective, entries: list[_Entry], share: float
    ) -> tuple[list[_Entry], int]:
        """`entries` and what local search made of them, best first."""
        landscape = self._landscape(objective)
        search = Search(
            landscape=landscape,
            mutator=self._mutator(),
            rng=np.random.default_rng(self.settings.seed),
            iterations=self.settings.iterations,
            keep_going=lambda: self.keep_going(share),
        )
        search.run({entry.name: entry.hosts for entry in entries})
        for climber in search.pool:
            bare = climber.best_hosts
            for hosts in (self._filled(bare, landscape.routes(bare)), bare):
                routes = landscape.routes(hosts)
                entries.append(self._entry(objective, f"search from {climber.name}", hosts, routes))
        return sorted(entries, key=lambda entry: entry.value_s), search.done

    def _filled(self, hosts: BoolArray, routes: IntArray) -> BoolArray:
        """`hosts` with what still saves something in the memory left."""
        planner = self.planner
        return add_marginal_replicas(
            planner.cost,
            planner.model,
            planner.profile,
            hosts,
            planner.capacity,
            routes,
            planner.cluster.access_share,
        )

    def _trimmed(self, users: EachUserObjective, entries: list[_Entry]) -> tuple[list[_Entry], int]:
        """All seeds and the best of the others by trimmed value, searched further."""
        trimmed = users.whole
        others = [entry for entry in entries if not entry.name.startswith("seed ")][:_FINALISTS]
        seeds = [entry for entry in entries if entry.name.startswith("seed ")]
        ranked = [self._entry(users, e.name, e.hosts, e.routes) for e in seeds + others]
        ranked += self._at_home(users)
        ranked.sort(key=lambda entry: entry.value_s)
        ranked += self._rerouted(trimmed, ranked[:_FINALISTS])
        ranked.sort(key=lambda entry: entry.value_s)
        best = ranked[0]
        _, price_s = trimmed.priced(best.hosts, best.routes)
        landscape = self._landscape(trimmed.at(price_s, self._busiest(ranked[:_FINALISTS])))
        search = Search(
            landscape=landscape,
            mutator=self._mutator(),
            rng=np.random.default_rng(self.settings.seed),
            iterations=self.settings.trimmed_iterations,
            keep_going=lambda: self.keep_going(1.0),
            draws=0,
            climb_steps=self.settings.trimmed_iterations,
        )
        climber = search.run({best.name: best.hosts})
        for name, hosts in (
            ("new routes on ", best.hosts),
            ("trimmed search from ", climber.best_hosts),
        ):
            routes = landscape.routes(hosts)
            ranked.append(self._entry(users, f"{name}{best.name}", hosts, routes))
            filled = self._filled(hosts, routes)
            ranked.append(self._entry(users, f"{name}{best.name}, filled", filled, routes))
        return ranked, search.done

    def _at_home(self, objective: Objective) -> list[_Entry]:
        """Tokens that stay with their users, if copies may stand in."""
        planner = self.planner
        worth = copy_losses(planner.profile)
        if worth is None or not planner.copies.any():
            return []
        hosts = home_hosts(planner.model, planner.capacity, worth)
        if hosts is None:
            return []
        routes = home_routes(planner.cluster.server_count, planner.model.layer_count)
        return [self._entry(objective, "at home", hosts, routes)]

    def _rerouted(self, trimmed: TrimmedObjective, entries: list[_Entry]) -> list[_Entry]:
        """The hosts of `entries` with other routes: of those that are best at any price of quality,
        and as copies are taken to be, each server's users get the one that saves most.

        At the price that the old routes pay nobody may want to leave them, however much others save
        for what is left of the budget; and there is not memory for all copies on all routes."""
        servers, found, users = self._busiest(entries), [], EachUserObjective(whole=trimmed)
        for entry in entries:
            seen = [
                self._landscape(trimmed.at(float(price_s), servers)).routes(entry.hosts)
                for price_s in trimmed.prices
            ]
            name, best = f"other routes on {entry.name}", entry
            for access in np.argsort(-self.planner.cluster.access_share, kind="stable").tolist():
                for row in np.unique([routes[access] for routes in seen], axis=0):
                    routes = best.routes.copy()
                    routes[access] = row
                    tried = self._entry(users, name, entry.hosts, routes)
                    best = min(best, tried, key=lambda each: each.value_s)
            found.append(replace(best, name=name))
        return found

    def _copied_bits(self) -> IntArray | None:
        """What copies servers are taken to have while placements are compared."""
        planner = self.planner
        if not planner.settings.stand_in_share:
            return None
        return standing_in(planner.model, planner.copies, planner.rungs)

    def _busiest(self, entries: list[_Entry]) -> IntArray:
        """The servers on which the routes of `entries` run most layers, ascending."""
        share = self.planner.cluster.access_share
        load = np.zeros(share.size)
        for entry in entries:
            np.add.at(load, entry.routes, np.broadcast_to(share[:, None], entry.routes.shape))
        busiest = np.argsort(-load, kind="stable")[:_TRIMMED_SERVERS]
        return np.sort(busiest)

    def _landscape(self, objective: Objective) -> Landscape:
        return Landscape(
            cost=self.planner.cost,
            access_share=self.planner.cluster.access_share,
            objective=objective,
        )

    def _mutator(self) -> Mutator:
        return Mutator(model=self.planner.model, capacity=self.planner.capacity)

    def _record(
        self, seeds: dict[str, Placement], entries: list[_Entry]
    ) -> dict[str, dict[str, float | None] | None]:
        """Value of every seed and of its greedy growth where it was tried; None: impossible."""
        values = {entry.name: entry.value_s for entry in entries}
        return {
            name: None
            if name not in seeds
            else {"seed_s": values[f"seed {name}"], "plan_s": values.get(f"greedy {name}")}
            for name in SEEDS
        }
