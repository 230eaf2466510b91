"""The methods a comparison runs: each is a plan and a policy in the same engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.engine.step import Engine
from trimmoe.placement.make import PlanSettings, make_plan
from trimmoe.policy.build import deploy, make_policy, priced
from trimmoe.policy.settings import PolicySettings, exact, paper, substitute_only, trimmoe


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One row of a comparison."""

    title: str
    settings: Callable[[], PolicySettings]
    pipeline: bool = False
    """Run on a contiguous pipeline over the same machines instead of the given plan."""


METHODS = {
    "pipeline": Method(title="pipeline", settings=exact, pipeline=True),
    "exact": Method(title="exact nearest", settings=exact),
    "substitute-only": Method(title="substitute only", settings=substitute_only),
    "trimmoe": Method(title="TrimMoE", settings=trimmoe),
    "paper": Method(title="paper (migrate: not physical)", settings=paper),
}
DEFAULT_METHODS = ("pipeline", "exact", "substitute-only", "trimmoe")


def find_method(name: str) -> Method:
    """The method called `name`; raises `UserError` naming those there are."""
    if name not in METHODS:
        raise UserError(f"There is no method `{name}`; choose from {', '.join(METHODS)}.")
    return METHODS[name]


def configured(method: Method, *, budget: float, confidence: float) -> PolicySettings:
    """The method's policy with the user's budget and confidence, where it spends any.

    Exits are not charged to the budget but held to half of it: so many of all tokens may they
    flip, by their error measured in calibration, where a policy looks at it.
    """
    settings = method.settings()
    if settings.levers.lossless:
        return settings
    exit_risk = None if settings.exit_risk is None else budget / 2
    return replace(settings, budget=budget, confidence=confidence, exit_risk=exit_risk)


def possible_methods(plan: Plan, profile: Profile, model: ModelSpec) -> tuple[str, ...]:
    """The methods compared by default: a pipeline only where whole layers fit one after another."""
    try:
        plan_for(METHODS["pipeline"], plan, profile, model)
    except UserError:
        return tuple(name for name in DEFAULT_METHODS if name != "pipeline")
    return DEFAULT_METHODS


def plan_for(method: Method, plan: Plan, profile: Profile, model: ModelSpec) -> Plan:
    """The plan that the method runs on: the given one or a pipeline on the same cluster."""
    if not method.pipeline:
        return plan
    settings = PlanSettings(seed_plan="pipeline", routes="staircase", redundancy=False)
    cluster_hash = plan.header.input_hashes["cluster"]
    return make_plan(profile, model, plan.cluster, settings, cluster_hash=cluster_hash)


def make_engine(plan: Plan, profile: Profile, model: ModelSpec, settings: PolicySettings) -> Engine:
    """The engine of a policy on a plan."""
    deployment = deploy(plan, profile, model, settings.accounting)
    settings = priced(deployment, profile, inflated(plan, settings))
    return Engine(
        policy=make_policy(deployment, profile, settings),
        settings=settings,
        profile=profile,
        cost=deployment.cost,
        routes=deployment.routes,
        reference_s=deployment.reference_s,
    )


def inflated(plan: Plan, settings: PolicySettings) -> PolicySettings:
    """`settings` with the joint inflation measured for the plan, unless they name their own."""
    if settings.inflation > 1.0 or not settings.inflate:
        return settings
    return replace(settings, inflation=plan.inflation(settings.budget))


def require_fitting(profile: Profile, plan: Plan, model: ModelSpec) -> None:
    """Raise `UserError` unless profile and plan belong to the model and to each other."""
    profile.require_model(model.model_hash, model.name)
    if plan.header.input_hashes["profile"] != profile.hash:
        raise UserError(
            "The plan was made from another profile; run `trimmoe plan` with this profile."
        )
