"""Assemble a policy from a profile, a plan and settings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray, IntArray, ModelSpec
from trimmoe.cost.actions import ActionSpace
from trimmoe.cost.expected import expected_layer_delay_s, reference_layer_delay_s
from trimmoe.cost.lookahead import LookAhead, Weights
from trimmoe.cost.model import Accounting, CostModel, cost_model
from trimmoe.cost.thresholds import theta_at, thresholds
from trimmoe.policy.patterns import PatternIndex
from trimmoe.policy.settings import PolicySettings
from trimmoe.policy.trim import TrimPolicy


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What a policy decides on: the plan with its costs under one accounting."""

    cost: CostModel
    routes: IntArray
    """kappa per access server, [M, N]."""
    reference_s: float
    """d_ref: mean delay of one exact nearest-replica layer on this deployment, without load."""
    plan: Plan


def deploy(plan: Plan, profile: Profile, model: ModelSpec, accounting: Accounting) -> Deployment:
    """The deployment of `plan` under `accounting`."""
    cost = cost_model(model, plan.cluster, accounting)
    servers = np.arange(plan.cluster.server_count)
    home = np.repeat(servers[:, None], model.layer_count, axis=1)
    routes = plan.routes if accounting is Accounting.PINNED else home
    return Deployment(
        cost=cost,
        routes=routes,
        reference_s=reference_layer_delay_s(
            expected_layer_delay_s(cost, plan.hosts, profile), routes, plan.cluster.access_share
        ),
        plan=plan,
    )


def make_policy(deployment: Deployment, profile: Profile, settings: PolicySettings) -> TrimPolicy:
    """The policy of `settings` on a deployment."""
    theta, theta_drop = _thresholds(profile, settings)
    space = ActionSpace(
        cost=deployment.cost,
        hosts=deployment.plan.hosts,
        substitution_loss=profile.substitution_loss,
        feasible=profile.feasible,
        skip=profile.skip,
        drop=profile.drop,
        theta=theta,
        theta_drop=theta_drop,
        levers=settings.levers,
    )
    lookahead = LookAhead(
        space=space,
        profile=profile,
        weights=Weights(
            loss_weight=settings.loss_weight,
            reference_s=deployment.reference_s,
            budget=settings.budget,
        ),
        allowance_step=settings.budget / settings.allowance_levels if settings.budget else 1.0,
    )
    return TrimPolicy(
        lookahead=lookahead,
        horizon=settings.horizon,
        routes=deployment.routes,
        patterns=PatternIndex.of(profile.patterns, profile.expert_count),
    )


def _thresholds(profile: Profile, settings: PolicySettings) -> tuple[FloatArray, FloatArray]:
    """theta_l of (24) for skips and for single drops, [N] each; 1 admits everything."""
    if not settings.importance_gate:
        return np.ones(profile.layer_count), np.ones(profile.layer_count)
    theta, epsilon = thresholds(profile.skip, profile.importance_quantiles, settings.budget)
    return theta, theta_at(profile.drop, epsilon)
