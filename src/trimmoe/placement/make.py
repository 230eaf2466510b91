"""From a profile, a model and a cluster to a plan: seed, routes, replicas, and again.

Replicas are worth what they save on the routes, and routes follow the replicas, so the two
alternate a few times from several starting routes; the placement of least expected exact delay
per token, weighted by where users enter, is kept. Each seed itself is among the candidates, so
the plan is never worse than any of them. Nothing here draws random numbers: the seed is only
recorded, and the same inputs give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan, plan_header
from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, ClusterSpec, FloatArray, IntArray, ModelSpec
from trimmoe.cost.expected import layer_table_s
from trimmoe.cost.model import Accounting, CostModel, cost_model
from trimmoe.placement.blocks import add_blocks
from trimmoe.placement.capacity import expert_capacity_bytes
from trimmoe.placement.redundancy import (
    add_marginal_replicas,
    add_paper_replicas,
    migrating_residence,
)
from trimmoe.placement.routes import best_routes, expected_delay_s, home_routes
from trimmoe.placement.seeds import seed_plan
from trimmoe.placement.stand_ins import (
    allowance_bytes,
    copied_bits,
    passed_by,
    reserved_bytes,
)

SeedName = Literal[
    "dispersed",
    "pipeline",
    "compact_pipeline",
    "edgeshard_latency",
    "edgeshard_throughput",
    "activation_aware",
    "load_balanced",
    "slim_caching",
    "single_server",
]
SEED_NAMES: tuple[SeedName, ...] = ("dispersed", "pipeline", "compact_pipeline")
"""What `best` tries; `optimise` starts from all seeds there are."""
_AT_HOME: tuple[SeedName, ...] = (
    "dispersed", "activation_aware", "load_balanced", "slim_caching",
)  # fmt: skip
"""Seeds without stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """How a plan is made; `default()` and `paper()` are the presets."""

    seed_plan: SeedName | Literal["best"] = "best"
    """The first deployment; `best` tries `SEED_NAMES` and keeps the best result."""
    benefit: Literal["marginal", "paper"] = "marginal"
    """What a replica is worth, see `redundancy`."""
    routes: Literal["best", "home", "staircase", "own"] = "best"
    """Shortest paths, all layers at the access server, the pipeline's own stages, or whatever the
    seed plan's are."""
    redundancy: bool = True
    """Whether free memory is used at all."""
    blocks: bool = True
    """Whether replicas of runs of whole layers are tried too (marginal benefit, best routes)."""
    groups: int | None = None
    """Groups of similar experts per layer of the dispersed seed; None: the root of their number."""
    kv_reserve_bytes: int = 0
    """Memory kept for KV caches on every server, where the cluster has no `memory_ratio`."""
    stand_in_share: float = 0.12
    """Memory on every server for copies in few bits of experts that it does not hold, to guess
    with, as a share of what all experts take in single precision."""
    rounds: int = 3
    """Alternations of replicas and routes from each starting route."""
    seed: int = 0


def default() -> PlanSettings:
    """Every seed plan, marginal benefit, best routes."""
    return PlanSettings()


def paper() -> PlanSettings:
    """The paper to the letter: dispersed groups, replicas by (28), tokens at home."""
    return PlanSettings(seed_plan="dispersed", benefit="paper", routes="home", stand_in_share=0.0)


def as_published(seed: SeedName) -> PlanSettings:
    """Another system's placement with its own routes, without routes and replicas of ours."""
    return PlanSettings(seed_plan=seed, routes="own", redundancy=False, stand_in_share=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Who holds what and the routes on it, with its expected exact delay per token."""

    hosts: BoolArray
    """[M, N, E]."""
    routes: IntArray
    """[M, N]."""
    expected_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """What every step of planning looks at."""

    profile: Profile
    model: ModelSpec
    cluster: ClusterSpec
    settings: PlanSettings
    cost: CostModel
    capacity: IntArray
    copies: IntArray
    """Bytes for copies of experts in few bits, [M]."""
    tables: dict[tuple[int, bytes], FloatArray] = field(default_factory=dict)
    """Layer tables already computed, by layer and its hosts: candidates share most of them."""

    def seed(self, name: SeedName) -> Placement | None:
        """A seed plan with routes of its own, see `seeds`; None if it cannot serve the model.

        Raises `UserError` if the experts themselves do not fit.
        """
        found = seed_plan(name, self)
        return None if found is None else self.placement(found.hosts, found.routes)

    def placement(self, hosts: BoolArray, routes: IntArray | None) -> Placement:
        """`hosts` with `routes`, or with the best ones, evaluated."""
        delays = np.stack([self._table(hosts, layer) for layer in range(hosts.shape[1])])
        if routes is None:
            routes = best_routes(self.cost, delays)
        share = self.cluster.access_share
        return Placement(
            hosts=hosts,
            routes=routes,
            expected_s=expected_delay_s(self.cost, delays, routes, share),
        )

    def _table(self, hosts: BoolArray, layer: int) -> FloatArray:
        held = hosts[:, layer]
        key = (layer, held.tobytes())
        if key not in self.tables:
            self.tables[key] = layer_table_s(self.cost, held, self.profile, layer)
        return self.tables[key]

    def finished(self, seed: Placement, starts: list[IntArray]) -> Placement:
        """The seed with routes and replicas as the settings say.

        `starts`: routes to start the alternation from, besides the best ones on the seed.
        """
        routed = self.placement(seed.hosts, self._fixed_routes(seed))
        if not self.settings.redundancy:
            return routed
        if self.settings.benefit == "paper":
            return self.placement(self._paper_hosts(seed.hosts), self._fixed_routes(seed))
        if self.settings.routes != "best":
            return _best([routed, *self._alternations(seed, routed.routes)])
        grown = [routed]
        if self.settings.blocks:
            grown.append(self.placement(self._block_hosts(seed.hosts), None))
        found = list(grown)
        for base in grown:
            for routes in [base.routes, *starts]:
                found.extend(self._alternations(base, routes))
        return _best(found)

    def stand_in_bits(self, hosts: BoolArray, routes: IntArray) -> IntArray | None:
        """Bits of servers' copies of experts that they do not hold, [M, N, E]; None for none."""
        if not self.settings.stand_in_share:
            return None
        frequency = self.profile.expected_executions
        passing = passed_by(routes, len(hosts)) if self.profile.rungs else None
        return copied_bits(self.model, hosts, frequency, self.copies, passing)

    def regrown(self, hosts: BoolArray, found: Placement) -> Iterator[Placement]:
        """Other hosts in place of those of a placement that was `finished`, with routes, and with
        replicas where the settings have any."""
        base = self.placement(hosts, self._fixed_routes(found))
        yield base
        if self.settings.redundancy and self.settings.benefit == "marginal":
            yield from self._alternations(base, base.routes)

    def _block_hosts(self, hosts: BoolArray) -> BoolArray:
        return add_blocks(
            self.cost, self.model, self.profile, hosts, self.capacity, self.cluster.access_share
        )

    def _fixed_routes(self, seed: Placement) -> IntArray | None:
        match self.settings.routes:
            case "best":
                return None
            case "home":
                return home_routes(self.cluster.server_count, self.model.layer_count)
            case "staircase" | "own":
                return seed.routes

    def _paper_hosts(self, hosts: BoolArray) -> BoolArray:
        migrating = cost_model(self.model, self.cluster, Accounting.MIGRATE)
        share = self.cluster.access_share
        residence = migrating_residence(migrating, hosts, self.profile, share)
        return add_paper_replicas(
            self.cluster, self.model, self.profile, hosts, self.capacity, residence
        )

    def _alternations(self, base: Placement, routes: IntArray) -> Iterator[Placement]:
        """Replicas for the routes, routes for the replicas, and again from the base's hosts."""
        for _ in range(self.settings.rounds):
            hosts = add_marginal_replicas(
                self.cost,
                self.model,
                self.profile,
                base.hosts,
                self.capacity,
                routes,
                self.cluster.access_share,
            )
            found = self.placement(hosts, self._fixed_routes(base))
            yield found
            if np.array_equal(found.routes, routes):
                return
            routes = found.routes


def _best(found: list[Placement]) -> Placement:
    return min(found, key=lambda candidate: candidate.expected_s)


def make_plan(
    profile: Profile,
    model: ModelSpec,
    cluster: ClusterSpec,
    settings: PlanSettings | None = None,
    *,
    cluster_hash: str,
) -> Plan:
    """Plan the deployment and the routes (Algorithm 1, lines 9-14, and the routes of the design).

    The header's settings say which seed won (`seed_won`) and, per seed, the expected exact delay
    per token in seconds of the seed itself and of what became of it (`seeds`).

    Raises `UserError` if the profile is of another model, the cluster cannot hold the experts or
    the settings contradict each other.
    """
    settings = settings or default()
    profile.require_model(model)
    # What is as others place it keeps no room for what only we put there.
    planner = make_planner(profile, model, cluster, settings, guesses=settings.routes != "own")
    names = SEED_NAMES if settings.seed_plan == "best" else (settings.seed_plan,)
    seeds = {name: planner.seed(name) for name in names if _allowed(name, settings)}
    there = {name: seed for name, seed in seeds.items() if seed is not None}
    if not there:
        raise _cannot_serve(model, cluster, settings)
    starts = distinct_routes([seed.routes for seed in there.values()])
    finished = {name: planner.finished(seed, starts) for name, seed in there.items()}
    won = min(finished, key=lambda name: finished[name].expected_s)
    record = {name: _record(seed, finished.get(name)) for name, seed in seeds.items()}
    return as_plan(planner, finished[won], cluster_hash, {"seed_won": won, "seeds": record})


def make_planner(
    profile: Profile,
    model: ModelSpec,
    cluster: ClusterSpec,
    settings: PlanSettings,
    *,
    guesses: bool = True,
) -> Planner:
    """A planner without load under pinned accounting; raises `UserError` like `make_plan`.

    If servers are to have what stands in for experts in `guesses`, that has its place beside the
    dense part."""
    least_of = {"groups": 1, "kv_reserve_bytes": 0, "rounds": 1, "stand_in_share": 0}
    for name, least in least_of.items():
        value = getattr(settings, name)
        if value is not None and value < least:
            raise UserError(f"The plan setting {name} is {value}; give at least {least}.")
    if settings.seed_plan in _AT_HOME and settings.routes == "staircase":
        raise UserError(
            f"The {settings.seed_plan} seed has no stages to route along; choose routes `best` or "
            "`home`, or a pipeline seed."
        )
    kept = settings.kv_reserve_bytes + (profile.stand_in_bytes if guesses else 0)
    capacity = expert_capacity_bytes(cluster, model, kv_reserve_bytes=kept)
    copies = np.full(len(capacity), allowance_bytes(model, settings.stand_in_share))
    if cluster.memory_ratio is None:
        copies = reserved_bytes(capacity, model, int(copies[0]))
        capacity = capacity - copies
    return Planner(
        profile=profile,
        model=model,
        cluster=cluster,
        settings=settings,
        cost=cost_model(model, cluster),
        capacity=capacity,
        copies=copies,
    )


def _cannot_serve(model: ModelSpec, cluster: ClusterSpec, settings: PlanSettings) -> UserError:
    remedy = "plan with the `dispersed` seed or add memory."
    if settings.seed_plan == "single_server":
        return UserError(f"No server of cluster {cluster.name} holds all of {model.name}; {remedy}")
    return UserError(
        f"Whole layers of {model.name} do not fit on cluster {cluster.name} one after another; "
        f"{remedy}"
    )


def _allowed(name: SeedName, settings: PlanSettings) -> bool:
    return name not in _AT_HOME or settings.routes != "staircase"


def distinct_routes(routes: list[IntArray]) -> list[IntArray]:
    """`routes` [M, N] each, without repetitions, in order."""
    return [
        route
        for index, route in enumerate(routes)
        if not any(np.array_equal(route, earlier) for earlier in routes[:index])
    ]


def _record(seed: Placement | None, finished: Placement | None) -> dict[str, float] | None:
    if seed is None or finished is None:
        return None
    return {"seed_s": seed.expected_s, "plan_s": finished.expected_s}


def as_plan(
    planner: Planner, placement: Placement, cluster_hash: str, found: dict[str, Any]
) -> Plan:
    header = plan_header(
        planner.cluster,
        settings=asdict(planner.settings) | found | {"expected_s": placement.expected_s},
        input_hashes={
            "model": planner.model.model_hash,
            "profile": planner.profile.hash,
            "cluster": cluster_hash,
        },
        seed=planner.settings.seed,
    )
    return Plan(
        header=header,
        cluster=planner.cluster,
        hosts=placement.hosts,
        routes=placement.routes,
        expert_capacity_bytes=planner.capacity,
        stand_in_bits=planner.stand_in_bits(placement.hosts, placement.routes),
    )
