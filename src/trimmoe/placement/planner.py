"""What planning looks at, and its steps: evaluate hosts and routes, grow replicas along routes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, ClusterSpec, FloatArray, IntArray, ModelSpec
from trimmoe.core.stand_ins import ASCENDING
from trimmoe.cost.expected import layer_table_s
from trimmoe.cost.model import Accounting, CostModel, cost_model
from trimmoe.placement.blocks import add_blocks
from trimmoe.placement.capacity import used_bytes
from trimmoe.placement.redundancy import (
    add_marginal_replicas,
    add_paper_replicas,
    migrating_residence,
)
from trimmoe.placement.routes import best_routes, expected_delay_s, home_routes
from trimmoe.placement.seed_names import SeedName
from trimmoe.placement.stand_ins import copied_bits, passed_by


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """How a plan is made; `make.default()` and `make.paper()` are the presets."""

    seed_plan: SeedName | Literal["best"] = "best"
    """The first deployment; `best` tries `make.SEED_NAMES` and keeps the best result."""
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
    with, as a share of what all experts take as they are served."""
    rounds: int = 3
    """Alternations of replicas and routes from each starting route."""
    seed: int = 0


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
    """Bytes kept for copies of experts in few bits, [M]."""
    tables: dict[tuple[int, bytes], FloatArray] = field(default_factory=dict)
    """Layer tables already computed, by layer and its hosts: candidates share most of them."""

    def within(self, capacity: IntArray) -> Planner:
        """With so much memory for experts, [M]; where servers' memory is not scaled, what that
        takes or leaves is the copies'."""
        if self.cluster.memory_ratio is not None:
            return replace(self, capacity=capacity)
        return replace(self, capacity=capacity, copies=self.copies + self.capacity - capacity)

    @property
    def unreserved(self) -> Planner:
        """With nothing kept for copies, which get what experts leave."""
        if self.cluster.memory_ratio is not None:
            return self
        return self.within(self.capacity + self.copies)

    def placement(self, hosts: BoolArray, routes: IntArray | None) -> Placement:
        """`hosts` with `routes`, or with the best ones, evaluated."""
        delays = np.stack([self._table(hosts, layer) for layer in range(hosts.shape[1])])
        if routes is None:
            routes = best_routes(self.cost, delays, hosts)
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
        return copied_bits(self.model, hosts, frequency, self._room(hosts), passing, self.rungs)

    @property
    def rungs(self) -> tuple[int, ...]:
        """Bits that copies may have: where some of them are known to stand in, only these."""
        return tuple(rung.bits for rung in self.profile.rungs) or ASCENDING

    def _room(self, hosts: BoolArray) -> IntArray:
        """Bytes that copies may take, [M]: what is kept for them, and what experts leave."""
        return np.maximum(self.copies + self.capacity - used_bytes(hosts, self.model), 0)

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
