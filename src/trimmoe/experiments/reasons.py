"""Why a plan's routes are what they are, what more memory would save, and what is left of it when a
server goes.

Delays are expected delays per token of exact nearest-replica execution without load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich.markup import escape
from rich.table import Table

from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray, ModelSpec
from trimmoe.cost.expected import expected_layer_delay_s
from trimmoe.cost.model import cost_model
from trimmoe.placement.alternatives import MemoryGains, RouteParts, other_routes, route_parts
from trimmoe.placement.live import delay_after_s, live_hosts
from trimmoe.progress import track


@dataclass(frozen=True, kw_only=True, slots=True)
class Reasons:
    """Why the routes are what they are; delays in seconds per token, of shape [M]."""

    parts: RouteParts
    others_s: dict[str, FloatArray]
    """Other routes on the same hosts, by name."""
    extra_bytes: int
    """Memory added to one server at a time."""
    gain_s: FloatArray
    """What that saves over all users; NaN where there was no time to find out."""


_LARGEST_EXTRA_BYTES = 10**9
_EXTRA_SHARE = 0.1
"""Of all experts, where these are so small that a gigabyte would hold most of them."""


def plan_reasons(
    plan: Plan, profile: Profile, model: ModelSpec, keep_going: Callable[[], bool] = lambda: True
) -> Reasons:
    """Compare the routes with others and add memory to each server while `keep_going`."""
    cost = cost_model(model, plan.cluster)
    tables = expected_layer_delay_s(cost, plan.hosts, profile)
    gains = MemoryGains(
        cost=cost,
        model=model,
        profile=profile,
        hosts=plan.hosts,
        capacity=plan.expert_capacity_bytes,
        access_share=plan.cluster.access_share,
    )
    extra_bytes = min(_LARGEST_EXTRA_BYTES, int(_EXTRA_SHARE * model.total_expert_bytes))
    servers = track(range(plan.cluster.server_count), "More memory")
    return Reasons(
        parts=route_parts(cost, tables, plan.routes),
        others_s=other_routes(cost, tables),
        extra_bytes=extra_bytes,
        gain_s=gains.of_each(extra_bytes, servers=servers, keep_going=keep_going),
    )


def reason_table(plan: Plan, reasons: Reasons) -> Table:
    """What the route's delay is made of, and what other routes on the same hosts would take."""
    table = Table(title="Why these routes: their parts, and others (expected ms per token)")
    table.add_column("access")
    for name in ("moves", "dense", "experts", *reasons.others_s):
        table.add_column(name, justify="right")
    parts = reasons.parts
    shown = (parts.moves_s, parts.dense_s, parts.experts_s, *reasons.others_s.values())
    for m, name in enumerate(plan.cluster.server_names):
        table.add_row(escape(name), *(milliseconds(delay[m]) for delay in shown))
    return table


def because_lines(plan: Plan, route_s: FloatArray, reasons: Reasons) -> str:
    """One sentence per access server with users; `route_s` [M]: delays of the plan's routes."""
    lines = []
    for m in np.flatnonzero(plan.cluster.access_share > 0):
        others = {name: float(delay[m]) for name, delay in reasons.others_s.items()}
        why = _because(float(route_s[m]), others)
        lines.append(f"{escape(plan.cluster.server_names[m])}: {why}")
    return "\n".join(lines)


def _because(route_s: float, others_s: dict[str, float]) -> str:
    """The plan's route against the simple ones, in words."""
    simple = {name: delay for name, delay in others_s.items() if name != "best"}
    name, delay_s = min(simple.items(), key=lambda item: item[1])
    if route_s > others_s["best"] * (1 + 1e-9):
        over_s = route_s - others_s["best"]
        return f"{milliseconds(over_s)} ms over the least exact delay on these hosts"
    if delay_s <= route_s * (1 + 1e-9):
        return f"no route beats {name}"
    return f"saves {milliseconds(delay_s - route_s)} ms over the best simple route, {name}"


def milliseconds(seconds: float | FloatArray) -> str:
    """Seconds for people, without the unit: `12.34`."""
    return f"{float(seconds) * 1e3:.2f}"


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
