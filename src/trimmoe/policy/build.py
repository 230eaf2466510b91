"""Assemble a policy from a profile, a plan and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from trimmoe.core.loss_curves import LossCurves
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray, IntArray, ModelSpec
from trimmoe.cost.actions import ActionSpace, StandIns
from trimmoe.cost.exits import ExitForecast, calibrated, certain, never
from trimmoe.cost.expected import expected_layer_delay_s, reference_layer_delay_s
from trimmoe.cost.lookahead import LookAhead, Weights
from trimmoe.cost.migrating import migrating_reference_s
from trimmoe.cost.model import Accounting, CostModel, cost_model
from trimmoe.cost.thresholds import theta_at, thresholds
from trimmoe.cost.values import allowance_levels
from trimmoe.policy.base import Policy
from trimmoe.policy.letter import as_read
from trimmoe.policy.nearest import nothing_to_choose
from trimmoe.policy.patterns import PatternIndex
from trimmoe.policy.price import meeting_weights
from trimmoe.policy.readings import BUDGET_USE_TARGET
from trimmoe.policy.settings import PolicySettings
from trimmoe.policy.tables import TableBank
from trimmoe.policy.trim import TrimPolicy

ALLOWANCE_LEVELS = 8
"""Budget levels per D-bar in the look-ahead."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What a policy decides on: the plan with its costs under one accounting."""

    cost: CostModel
    routes: IntArray
    """kappa per access server, [M, N]."""
    reference_s: float
    """d_ref: mean delay of one exact nearest-replica layer on this deployment, without load; under
    `migrate` tokens move to what they activate, as they do under its policies."""
    plan: Plan


PolicyMaker = Callable[[ActionSpace, Deployment, Profile, PolicySettings], Policy]
"""Makes a policy of its own from the actions, the deployment, the profile and the settings; an
importable name, so that it can be sent to servers."""


def deploy(plan: Plan, profile: Profile, model: ModelSpec, accounting: Accounting) -> Deployment:
    """The deployment of `plan` under `accounting`."""
    cost = cost_model(model, plan.cluster, accounting)
    servers = np.arange(plan.cluster.server_count)
    home = np.repeat(servers[:, None], model.layer_count, axis=1)
    routes = plan.routes if accounting is Accounting.PINNED else home
    share = plan.cluster.access_share
    if accounting is Accounting.MIGRATE:
        reference_s = migrating_reference_s(cost, plan.hosts, profile, share)
    else:
        delay_s = expected_layer_delay_s(cost, plan.hosts, profile)
        reference_s = reference_layer_delay_s(delay_s, routes, share)
    return Deployment(cost=cost, routes=routes, reference_s=reference_s, plan=plan)


def user_references(deployment: Deployment, profile: Profile) -> FloatArray:
    """d_ref of every user: as `Deployment.reference_s`, of the tokens that enter at each server
    alone, [M] seconds."""
    cost, plan = deployment.cost, deployment.plan
    everybody = np.eye(plan.cluster.server_count)
    if cost.accounting is Accounting.MIGRATE:
        found = [migrating_reference_s(cost, plan.hosts, profile, user) for user in everybody]
    else:
        delay_s = expected_layer_delay_s(cost, plan.hosts, profile)
        routes = deployment.routes[: plan.cluster.server_count]
        found = [reference_layer_delay_s(delay_s, routes, user) for user in everybody]
    return np.array(found)


def make_policy(deployment: Deployment, profile: Profile, settings: PolicySettings) -> TrimPolicy:
    """The policy of `settings` on a deployment."""
    space = action_space(deployment, profile, settings)
    readings = settings.readings
    profile = as_read(profile, readings)
    weights = Weights(
        loss_weight=settings.loss_weight,
        reference_s=deployment.reference_s,
        budget=settings.budget,
    )
    exits = exit_forecast(profile, settings)
    tables = None
    settled = nothing_to_choose(settings.levers, settings.accounting)
    if not settled and not settings.literal_lookahead:
        tables = TableBank(
            space=space,
            profile=profile,
            weights=weights,
            exits=exits,
            routes=deployment.routes,
            levels=allowance_levels(settings.budget, ALLOWANCE_LEVELS),
            horizon=settings.horizon,
        )
    return TrimPolicy(
        lookahead=LookAhead(
            space=space,
            profile=profile,
            weights=weights,
            exits=exits,
            allowance_step=settings.budget / ALLOWANCE_LEVELS if settings.budget else 1.0,
        ),
        horizon=settings.horizon,
        routes=deployment.routes,
        patterns=PatternIndex.of(profile.patterns, profile.expert_count),
        tables=tables,
        one_expert=readings.one_expert,
        target_importance=readings.target_importance,
    )


def action_space(deployment: Deployment, profile: Profile, settings: PolicySettings) -> ActionSpace:
    """The actions that `settings` admit on a deployment."""
    readings = settings.readings
    profile = profile.averaged() if readings.mean_losses else profile
    profile = profile.echoing() if readings.echoes_charged else profile
    share = profile.class_share
    pooled = profile.skip.pooled(share), profile.drop.pooled(share)
    theta, theta_drop = _thresholds(*pooled, profile, settings)
    skip, drop, substitution = profile.skip, profile.drop, profile.substitution_loss
    if not readings.steadiness:
        skip, drop = pooled
        substitution = (share[:, :, None, None, None] * substitution).sum(1, keepdims=True)
    if not readings.slot_ranks:
        substitution = profile.slots_alike(substitution)
    skip, drop = skip.inflated(settings.inflation), drop.inflated(settings.inflation)
    substitution = np.minimum(substitution * settings.inflation, 1.0)
    stand_ins = None
    if settings.levers.stand_in:
        stand_ins = _stand_ins(deployment, profile, settings)
    return ActionSpace(
        cost=deployment.cost,
        hosts=deployment.plan.hosts,
        substitution_loss=substitution,
        feasible=profile.feasible,
        skip=skip,
        drop=drop,
        theta=theta,
        theta_drop=theta_drop,
        levers=settings.levers,
        stand_ins=stand_ins,
    )


def _stand_ins(
    deployment: Deployment, profile: Profile, settings: PolicySettings
) -> StandIns | None:
    """The plan's copies of which the profile says what they lose; None if there are none."""
    bits = deployment.plan.stand_in_bits
    if bits is None or deployment.cost.rung_share is None:
        return None
    curves = {
        rung.bits: rung.within(settings.budget, profile.class_share, profile.top_k)
        for rung in profile.rungs
    }
    if not settings.readings.steadiness:
        curves = {few: one.pooled(profile.class_share) for few, one in curves.items()}
    curves = {few: one.inflated(settings.inflation) for few, one in curves.items()}
    return StandIns.of(curves, np.where(deployment.plan.hosts, 0, bits))


def inflated(plan: Plan, settings: PolicySettings) -> PolicySettings:
    """`settings` with the joint inflation measured for the plan, unless they name their own."""
    if settings.inflation > 1.0 or not settings.readings.inflate:
        return settings
    return replace(settings, inflation=plan.inflation(settings.budget))


def starting_weights(
    space: ActionSpace, deployment: Deployment, profile: Profile, settings: PolicySettings
) -> tuple[float, ...]:
    """omega_D to begin with by route; empty if all routes share `settings.loss_weight`.

    `space`: what `action_space` makes of the other arguments, or a policy already has.
    """
    if not settings.readings.price_start or settings.budget <= 0 or settings.levers.lossless:
        return ()
    if deployment.cost.accounting is Accounting.MIGRATE:
        return ()
    return meeting_weights(
        space,
        profile,
        Weights(
            loss_weight=settings.loss_weight,
            reference_s=deployment.reference_s,
            budget=settings.budget,
        ),
        deployment.routes,
        exits=settings.levers.exit,
        target=BUDGET_USE_TARGET,
    )


def exit_forecast(profile: Profile, settings: PolicySettings) -> ExitForecast:
    """When tokens are expected to exit under `settings`."""
    # Drafts flip nothing: they leave at a confidence of their own, whatever risk is tolerated.
    readings = settings.readings
    risk = None if settings.drafts else readings.exit_risk
    tolerated = risk is None or profile.exit_threshold_at_risk(risk, readings.exit_state) <= 1.0
    if not settings.levers.exit or not tolerated:
        return never(profile.layer_count)
    if not readings.hazards:
        return certain(profile.layer_count)
    drafts = settings.drafts and profile.draft_hazard is not None
    hazard = profile.draft_hazard if drafts else profile.exit_hazard
    assert hazard is not None
    return calibrated(hazard)


def _thresholds(
    skip: LossCurves, drop: LossCurves, profile: Profile, settings: PolicySettings
) -> tuple[FloatArray, FloatArray]:
    """theta_l of (24) for skips and for single drops, [N] each; 1 admits everything."""
    if not settings.readings.importance_gate:
        return np.ones(profile.layer_count), np.ones(profile.layer_count)
    theta, epsilon = thresholds(skip, profile.importance_quantiles, settings.budget)
    return theta, theta_at(drop, epsilon)
