"""What software costs a message and a token, from a client's clock on exact answers and from what
work was measured to take.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from trimmoe.core.errors import UserError
from trimmoe.core.machines import Machines
from trimmoe.core.plan import Plan
from trimmoe.core.specs import FloatArray
from trimmoe.cost.expected import expected_layer_delay_s
from trimmoe.cost.model import cost_model
from trimmoe.placement.routes import route_delay_s
from trimmoe.runtime.launch.artifacts import Artifacts

_MS = 1e3
_ALIKE = 40.0
"""How much it weighs that a message and a token cost the same, against one user's clock. They
nearly do, and with less weight what a slow server's software takes is put on every token of the
others."""
_LEAST = 0.5
"""What a message and a token cost at least over `software_s`. Of forty measurements with layers of
a millisecond or less it was 0.6 to 1.9."""


def with_overheads(machines: Machines, artifacts: Artifacts, clock_s: FloatArray) -> Machines:
    """The same with what software costs a message and a token: what makes the cost model's exact
    answers take what the clock says, [M], by least squares over those servers' users.

    Both grow with the time that the interpreter takes on a server, and are no less than a share of
    it: where weights take tens of milliseconds, the clock cannot tell what software takes beside
    them, and a plan must not take messages to be free. Where all users have as many messages on
    their way, nothing tells the two apart, and a message is taken to cost what a token does.
    """
    heard = np.isfinite(clock_s)
    if not heard.any():
        raise UserError("No server answered; look into their logs and try again.")
    slower = machines.software_s / machines.software_s.min()
    least_s = _LEAST * machines.software_s
    machines = _no_colder(replace(machines, hop_s=least_s, token_s=least_s), artifacts, clock_s)
    bare_s, unit_s = exact_s(machines, artifacts), 1e-3
    # What the time of a token gains where each of the two costs this much more.
    more_s = least_s + unit_s * slower
    costs = ({"hop_s": more_s}, {"token_s": more_s})
    gained = [exact_s(replace(machines, **cost), artifacts) - bare_s for cost in costs]
    terms = np.stack(gained, axis=1)[heard] / unit_s
    beyond_s = np.maximum(clock_s - bare_s, 0.0)[heard]
    alike = np.array([[_ALIKE, -_ALIKE]])
    (hop_s, token_s), _ = nnls(np.concatenate([terms, alike]), np.append(beyond_s, 0.0))
    settings = machines.header.settings | {"clock_ms": (clock_s * _MS).tolist()}
    return replace(
        machines,
        header=replace(machines.header, settings=settings),
        hop_s=least_s + hop_s * slower,
        token_s=least_s + token_s * slower,
    )


def _no_colder(machines: Machines, artifacts: Artifacts, clock_s: FloatArray) -> Machines:
    """The same, with rows among other servers taking no longer than the clock leaves them beside
    what software costs at least.

    Servers that are timed together share the memory's bandwidth. In decoding one works after the
    other, and what is too large for a cache by itself takes what it takes one alone.
    """
    if machines.cold is None:
        return machines
    alone = replace(machines, cold=np.ones(machines.cold.shape))
    at_most_s, at_least_s = (
        np.nanmean(exact_s(each, artifacts) - clock_s) for each in (machines, alone)
    )
    if at_most_s <= 0.0 or at_most_s <= at_least_s:
        return machines
    share = max(-at_least_s, 0.0) / (at_most_s - at_least_s)
    return replace(machines, cold=1.0 + share * (machines.cold - 1.0))


def exact_s(machines: Machines, artifacts: Artifacts) -> FloatArray:
    """What the cost model says of exact answers to each server's users, [M] seconds a token, while
    they are measured: slots run where servers have them run by the figures that the plan has."""
    plan, model = artifacts.plan, artifacts.model
    cost = cost_model(model, machines.applied(plan.cluster, model, machines.precision))
    known = cost_model(model, plan.cluster)
    tables = expected_layer_delay_s(cost, plan.hosts, artifacts.profile, by=known)
    return route_delay_s(cost, tables, plan.routes)


def expected_exact_s(plan: Plan, artifacts: Artifacts) -> FloatArray:
    """The expected time of a token of each server's users on a plan, [M] seconds."""
    cost = cost_model(artifacts.model, plan.cluster)
    tables = expected_layer_delay_s(cost, plan.hosts, artifacts.profile)
    return route_delay_s(cost, tables, plan.routes)
