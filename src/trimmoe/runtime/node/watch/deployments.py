"""What a server decides with, rebuilt when servers come and go or links and load have changed.

Building takes value tables, so it happens in a thread of its own; the engine is exchanged between
two batches. Routes only ever get more: a row keeps its meaning from engine to engine.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray, ModelSpec
from trimmoe.cost.actions import ActionSpace
from trimmoe.cost.model import Accounting, CostModel, cost_model
from trimmoe.engine.feedback import Feedback
from trimmoe.engine.step import Engine
from trimmoe.placement.live import covered, live_hosts, live_routes
from trimmoe.policy.build import (
    Deployment,
    PolicyMaker,
    action_space,
    deploy,
    inflated,
    make_policy,
    starting_weights,
)
from trimmoe.policy.settings import PolicySettings
from trimmoe.policy.trim import WEIGHT_GRID, TrimPolicy, rounded_weight
from trimmoe.runtime.node.records.exact_hosts import ExactHosts, exact_hosts_of

Route = tuple[int, ...]
CUT_DELAY_S = 60.0
"""What a link that is down is taken to cost: nobody uses it who has a choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What is known of the cluster beyond the plan."""

    lost: frozenset[int]
    """Servers that cannot be reached from here."""
    cut: frozenset[tuple[int, int]]
    """Pairs of other servers that do not reach each other."""
    delay_s: FloatArray
    """Measured, [M, M]; NaN where the plan's figure stands."""
    bandwidth_bytes_per_s: FloatArray
    """Likewise, [M, M]."""
    waiting_s: FloatArray
    """[M]."""
    busy: FloatArray
    """[M]."""

    @staticmethod
    def planned(server_count: int) -> Conditions:
        """As the plan has it."""
        shape = (server_count, server_count)
        return Conditions(
            lost=frozenset(),
            cut=frozenset(),
            delay_s=np.full(shape, np.nan),
            bandwidth_bytes_per_s=np.full(shape, np.nan),
            waiting_s=np.zeros(server_count),
            busy=np.zeros(server_count),
        )


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What does not change while a server lives."""

    plan: Plan
    profile: Profile
    model: ModelSpec
    settings: PolicySettings
    """With the plan's inflation of losses."""
    planned: Deployment
    space: ActionSpace
    """What may be done where every server is there."""
    route_weights: tuple[float, ...]
    """omega_D to begin with of the plan's routes; empty if all routes share one."""
    maker: PolicyMaker | None = None
    """Makes another policy than that of `settings`."""
    machine: tuple[int, ...] = ()
    """As in `NodeSettings`, and so is `at_once`: for plans that were not measured."""
    at_once: float = 1.0

    @staticmethod
    def of(
        plan: Plan,
        profile: Profile,
        model: ModelSpec,
        settings: PolicySettings,
        maker: PolicyMaker | None = None,
        *,
        machine: tuple[int, ...] = (),
        at_once: float = 1.0,
    ) -> Basis:
        """Raises `UserError` for a policy that no real system can run."""
        if settings.accounting is Accounting.MIGRATE:
            raise UserError(
                f"The policy `{settings.name}` lets tokens migrate without their cache, which no "
                f"real server can do; choose another one."
            )
        planned = deploy(plan, profile, model, settings.accounting)
        settings = inflated(plan, settings)
        space = action_space(planned, profile, settings)
        return Basis(
            plan=plan,
            profile=profile,
            model=model,
            settings=settings,
            planned=planned,
            space=space,
            route_weights=starting_weights(space, planned, profile, settings),
            maker=maker,
            machine=machine,
            at_once=at_once,
        )


@dataclass(frozen=True, kw_only=True)
class Built:
    """An engine with what else follows from the same conditions."""

    engine: Engine
    exact_hosts: ExactHosts
    conditions: Conditions
    detours: dict[int, Route]
    """By access server: the route instead of its own, which crosses lost servers."""
    known: frozenset[Route]
    added: tuple[Route, ...]
    """The rows of the engine's routes beyond the plan's."""

    def route_of(self, access: int) -> Route:
        """The route that new sequences of an access server take."""
        if access in self.detours:
            return self.detours[access]
        return tuple(self.engine.routes[access].tolist())


def build(basis: Basis, conditions: Conditions, extra: tuple[Route, ...]) -> Built:
    """The engine for these conditions; `extra` are the routes to know beyond the plan's.

    Rows come in the order of `extra`, new detours last: pass what the engine before had `added`
    first, for accounts keep the row of their route.

    d_ref stays the plan's, so that the price of quality means the same throughout.
    """
    cost = measured_cost(basis, conditions)
    hosts = live_hosts(basis.plan.hosts, conditions.lost)
    maker, settings = basis.maker, basis.settings.for_hosts(hosts)
    found = detours(basis, conditions)
    planned = basis.planned.routes
    rows = [tuple(route) for route in planned.tolist()]
    rows += [route for route in dict.fromkeys(chain(extra, found.values())) if route not in rows]
    deployment = Deployment(
        cost=cost,
        routes=np.array(rows),
        reference_s=basis.planned.reference_s,
        plan=replace(basis.plan, hosts=hosts),
    )
    standard = make_policy(deployment, basis.profile, settings)
    space = standard.lookahead.space
    _ = space.menu  # Made here rather than at the first decision.
    if standard.tables is not None:
        # What lies ahead is not infinitely dear because some expert has no host just now.
        standard.tables.space = replace(space, hosts=covered(hosts, conditions.lost))
    own = None if maker is None else maker(space, deployment, basis.profile, settings)
    return Built(
        engine=Engine(
            hosts=basis.plan.hosts,
            policy=standard if own is None else own,
            settings=settings,
            profile=basis.profile,
            cost=cost,
            routes=deployment.routes,
            reference_s=deployment.reference_s,
            route_weights=_weights(basis, rows[planned.shape[0] :]),
        ),
        exact_hosts=exact_hosts_of(space),
        conditions=conditions,
        detours=found,
        known=frozenset(rows),
        added=tuple(rows[planned.shape[0] :]),
    )


def _weights(basis: Basis, added: list[Route]) -> tuple[float, ...]:
    """omega_D to begin with of all routes; the added ones are priced on the plan as it was."""
    if not basis.route_weights or not added:
        return basis.route_weights
    deployment = replace(basis.planned, routes=np.array(added))
    more = starting_weights(basis.space, deployment, basis.profile, basis.settings)
    return basis.route_weights + more


def prepared(engine: Engine, feedback: Feedback, others: Collection[float] = frozenset()) -> Engine:
    """An engine with the value tables of the loss weights in force, of their neighbours, and of
    those that `others` tell their users' tokens set out with; the same one if it has them. Weights
    wander: tables of those farther than two steps are forgotten.

    Engines never make tables while they decide, so that a decision depends on nothing but the
    engine and what it is told.
    """
    policy = engine.policy
    if not isinstance(policy, TrimPolicy) or policy.tables is None:
        return engine
    in_force = {feedback.loss_weight, *feedback.route_weights, *engine.route_weights}
    wanted = _around(in_force, 1) | _around(others, 0)
    near = _around({*in_force, *others}, 2)
    if not policy.tables.on_demand and all(map(policy.tables.has, wanted)):
        return engine
    return replace(engine, policy=replace(policy, tables=policy.tables.fixed(sorted(wanted), near)))


def _around(weights: Collection[float], steps: int) -> set[float]:
    """The weights that tables are made for, up to so many steps from these."""
    each = range(-steps, steps + 1)
    return {rounded_weight(weight + step * WEIGHT_GRID) for weight in weights for step in each}


def measured_cost(basis: Basis, conditions: Conditions) -> CostModel:
    """The cost model with measured links and waiting in place of the plan's."""
    cluster = basis.plan.cluster

    def measured(values: FloatArray, planned: FloatArray) -> FloatArray:
        sensible = np.isfinite(values) & (values >= 0)
        merged = np.where(sensible, values, planned)
        np.fill_diagonal(merged, planned.diagonal())
        return merged

    # Peers' figures are not trusted to make sense: nothing is free of time and no working link or
    # queue is worse than a cut.
    delay_s = np.minimum(measured(conditions.delay_s, cluster.delay_s), CUT_DELAY_S)
    for a, b in conditions.cut:
        delay_s[a, b] = delay_s[b, a] = CUT_DELAY_S
    slowest = basis.model.hidden_bytes / CUT_DELAY_S
    bandwidth = measured(conditions.bandwidth_bytes_per_s, cluster.bandwidth_bytes_per_s)
    bandwidth = np.maximum(bandwidth, slowest)
    cluster = replace(cluster, delay_s=delay_s, bandwidth_bytes_per_s=bandwidth)
    cost = cost_model(basis.model, cluster, basis.settings.accounting)
    if cost.machine is None and basis.machine:
        at_once = np.full(cost.server_count, basis.at_once)
        cost = replace(cost, machine=np.array(basis.machine), at_once=at_once)
    waiting_s = np.nan_to_num(conditions.waiting_s, nan=0.0, posinf=CUT_DELAY_S)
    busy = np.clip(np.nan_to_num(conditions.busy, nan=0.0), 0.0, 1.0)
    return replace(cost.with_waiting(np.clip(waiting_s, 0.0, CUT_DELAY_S)), busy=busy)


def detours(basis: Basis, conditions: Conditions) -> dict[int, Route]:
    """The best live route of every access server whose own crosses a lost server or a cut link.

    Priced by the plan, not by measurements, so that all servers come to the same routes.
    """
    lost, routes = conditions.lost, basis.planned.routes
    broken = [
        access
        for access, route in enumerate(routes.tolist())
        if access not in lost and _is_broken(access, route, conditions)
    ]
    if not broken:
        return {}
    unmeasured = Conditions.planned(routes.shape[0])
    cost = measured_cost(basis, replace(unmeasured, cut=conditions.cut))
    best = live_routes(cost, basis.plan.hosts, basis.profile, lost)
    return {access: tuple(best[access].tolist()) for access in broken}


def _is_broken(access: int, route: list[int], conditions: Conditions) -> bool:
    way = [access, *route, access]
    hops = {frozenset(hop) for hop in pairwise(way)}
    cut = {frozenset(pair) for pair in conditions.cut}
    return bool(conditions.lost.intersection(route)) or bool(hops & cut)


def changed_much(now: Conditions, then: Conditions, basis: Basis, share: float) -> bool:
    """Whether a link's or a server's expected time differs by more than `share` of what decisions
    are made with, and by more than a thousandth of a token's; or a server is that much more or less
    busy."""
    floor_s = basis.planned.reference_s * basis.model.layer_count / 1000
    old, new = measured_cost(basis, then), measured_cost(basis, now)
    for before, after in ((old.transfer_s, new.transfer_s), (old.waiting_s, new.waiting_s)):
        difference = np.abs(after - before)
        if ((difference > share * before) & (difference > floor_s)).any():
            return True
    return bool((np.abs(now.busy - then.busy) > share).any())
