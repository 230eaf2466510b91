"""The plan that a method runs on, and the engine made of both."""

from __future__ import annotations

from dataclasses import replace

from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan, plan_header
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.cost.model import cost_model
from trimmoe.engine.step import Engine
from trimmoe.experiments.methods import DEFAULT_METHODS, METHODS, Method
from trimmoe.placement.make import PlanSettings, make_planner
from trimmoe.placement.redundancy import add_load_replicas, primary_copies
from trimmoe.placement.routes import home_routes
from trimmoe.placement.seeds import seed_plan
from trimmoe.policy.base import Policy
from trimmoe.policy.build import (
    PolicyMaker,
    deploy,
    inflated,
    make_policy,
    starting_weights,
    user_references,
)
from trimmoe.policy.settings import PolicySettings


def possible_methods(
    plan: Plan,
    profile: Profile,
    model: ModelSpec,
    among: tuple[str, ...] = DEFAULT_METHODS,
) -> tuple[str, ...]:
    """The methods compared by default, those whose placement can serve the model."""
    return tuple(
        name
        for name in among
        if METHODS[name].seed is None or seeded_plan(METHODS[name], plan, profile, model)
    )


def plan_for(method: Method, plan: Plan, profile: Profile, model: ModelSpec) -> Plan:
    """The plan that the method runs on: the given one or its own on the same machines.

    Raises `UserError` if its own placement cannot serve the model there.
    """
    found = plan if method.seed is None else seeded_plan(method, plan, profile, model)
    if found is None:
        raise UserError(
            f"The method {method.title} cannot place {model.name} on cluster {plan.cluster.name}; "
            "leave it out or add memory."
        )
    if method.load_replicas:
        found = load_replicated(found, profile, model)
    if not method.home:
        return found
    return replace(found, routes=home_routes(plan.cluster.server_count, model.layer_count))


def seeded_plan(method: Method, plan: Plan, profile: Profile, model: ModelSpec) -> Plan | None:
    """The seed plan of a method with its own routes; None where it cannot serve the model."""
    assert method.seed is not None
    planner = make_planner(profile, model, plan.cluster, PlanSettings(), guesses=False)
    seed = seed_plan(method.seed, planner)
    if seed is None:
        return None
    header = plan_header(
        plan.cluster,
        settings={"seed_plan": method.seed},
        input_hashes=plan.header.input_hashes,
        seed=plan.header.seed,
    )
    return Plan(
        header=header,
        cluster=plan.cluster,
        hosts=seed.hosts,
        routes=seed.routes,
        expert_capacity_bytes=planner.capacity,
        stand_in_bits=planner.stand_in_bits(seed.hosts, seed.routes) if method.copies else None,
    )


def load_replicated(plan: Plan, profile: Profile, model: ModelSpec) -> Plan:
    """The plan without communication-aware replicas: its routes and one copy of each expert stay,
    and what memory is left goes to replicas by load alone."""
    cost, capacity = cost_model(model, plan.cluster), plan.expert_capacity_bytes
    bare = primary_copies(cost, plan.hosts, plan.routes, plan.cluster.access_share)
    header = plan_header(
        plan.cluster,
        settings=plan.header.settings | {"replicas": "load"},
        input_hashes=plan.header.input_hashes,
        seed=plan.header.seed,
    )
    return replace(plan, header=header, hosts=add_load_replicas(model, profile, bare, capacity))


def make_engine(
    plan: Plan,
    profile: Profile,
    model: ModelSpec,
    settings: PolicySettings,
    maker: PolicyMaker | None = None,
) -> Engine:
    """The engine of a policy on a plan; `maker` makes another policy than that of `settings`."""
    deployment = deploy(plan, profile, model, settings.accounting)
    settings = inflated(plan, settings)
    standard = make_policy(deployment, profile, settings)
    space = standard.lookahead.space
    policy: Policy = standard if maker is None else maker(space, deployment, profile, settings)
    return Engine(
        policy=policy,
        settings=settings,
        profile=profile,
        cost=deployment.cost,
        routes=deployment.routes,
        reference_s=deployment.reference_s,
        route_weights=starting_weights(space, deployment, profile, settings),
        user_reference_s=(
            user_references(deployment, profile) if settings.readings.user_references else None
        ),
        hosts=plan.hosts,
        stand_in_bits=plan.stand_in_bits,
    )


def method_engine(
    method: Method, plan: Plan, profile: Profile, model: ModelSpec, settings: PolicySettings
) -> Engine:
    """The engine of a method, with `settings` as `configured` made them, beside a given plan."""
    own = plan_for(method, plan, profile, model)
    return make_engine(own, profile, model, settings, method.policy)


def require_fitting(profile: Profile, plan: Plan, model: ModelSpec) -> None:
    """Raise `UserError` unless profile and plan belong to the model and to each other."""
    profile.require_model(model)
    if not plan.is_of(profile):
        raise UserError(
            "The plan was made from another profile; run `trimmoe plan` with this profile."
        )
