"""What a plan is worth to those who are left when one of its servers goes."""

from __future__ import annotations

import numpy as np
from rich.markup import escape
from rich.table import Table

from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray, ModelSpec
from trimmoe.cost.model import cost_model
from trimmoe.experiments.reasons import milliseconds
from trimmoe.placement.live import delay_after_s, live_hosts


def survival_text(plan: Plan, expected_s: float) -> str:
    """What a plan that was made to survive losses costs beside the one that was not; nothing for
    others. `expected_s`: its expected exact delay per token."""
    asked = plan.header.settings.get("survive")
    if asked is None:
        return ""
    losses, over_s = asked["losses"], expected_s - asked["without_s"]
    many = "any server" if losses == 1 else f"any {losses} servers"
    cost = f"{milliseconds(over_s)} ms" if over_s > 0 else "nothing"
    return f"; {many} may go, which costs {cost}"


def loss_table(plan: Plan, profile: Profile, model: ModelSpec, route_s: FloatArray) -> Table:
    """Experts without a host, and the expected delay of users of other servers, once each server
    is gone; `route_s` [M] is what they have before."""
    cost, share = cost_model(model, plan.cluster), plan.cluster.access_share
    table = Table(title="When a server is lost (expected ms per token of the others' users)")
    table.add_column("lost")
    for name in ("experts without a host", "before", "after"):
        table.add_column(name, justify="right")
    for lost, name in enumerate(plan.cluster.server_names):
        orphans = int((~live_hosts(plan.hosts, frozenset([lost])).any(axis=0)).sum())
        others = np.where(np.arange(share.size) == lost, 0.0, share)
        before = after = "-"
        if others.sum() > 0:
            after_s = delay_after_s(cost, plan.hosts, plan.routes, profile, lost)
            before = milliseconds(others @ route_s / others.sum())
            after = milliseconds(others @ np.nan_to_num(after_s) / others.sum())
        # Whoever needs those waits until the server is back.
        table.add_row(escape(name), str(orphans), before, "waits" if orphans else after)
    return table
