"""Copies that stand in for experts, as far as a model can run them."""

from __future__ import annotations

from dataclasses import replace

from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.engine.step import Engine
from trimmoe.models.base import MoEView
from trimmoe.policy.settings import PolicySettings


def able(view: MoEView, engine: Engine) -> Engine:
    """The engine for a view that all servers share: the copies that it may have run are made here;
    without them where the view runs none."""
    bits = engine.copied_bits
    if bits is None:
        return engine
    view.fit_copies(engine.profile.input_squares)
    return engine if all(map(view.have_copies, bits)) else engine.without_copies()


def able_policy(
    view: MoEView, profile: Profile, plan: Plan, policy: PolicySettings, server: int
) -> PolicySettings:
    """The same for the view of one server."""
    bits, in_need = plan.stand_in_bits, policy.in_need
    runs = policy.levers.stand_in or (in_need is not None and in_need.stand_in)
    if bits is None or not runs or not profile.rungs:
        return policy
    view.fit_copies(profile.input_squares)
    if view.have_copies(bits[server]):
        return policy
    return replace(
        policy,
        levers=replace(policy.levers, stand_in=False),
        in_need=None if in_need is None else replace(in_need, stand_in=False),
    )
