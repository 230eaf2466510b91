"""A plan for people: who holds what, where each access server's tokens run and why, what that
saves, and what more memory would.

Delays are expected delays per token of exact nearest-replica execution without load, the same
figures the planner minimises (`placement.routes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray, ModelSpec
from trimmoe.cost.expected import expected_layer_delay_s, reference_layer_delay_s
from trimmoe.cost.model import cost_model
from trimmoe.experiments.reasons import (
    Reasons,
    because_lines,
    loss_table,
    milliseconds,
    plan_reasons,
    reason_table,
    survival_text,
)
from trimmoe.placement.capacity import human_bytes, used_bytes
from trimmoe.placement.guessed import GuessedObjective
from trimmoe.placement.pipeline import pipeline_stages, stage_hosts, staircase_routes
from trimmoe.placement.routes import execution_share, home_routes, route_delay_s
from trimmoe.placement.stand_ins import copies_bytes

_SHADES = "·░▒▓█"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFigures:
    """The numbers behind `explain_plan`; delays in seconds per token, all of shape [M]."""

    used: IntArray
    """Bytes of experts held."""
    copies: IntArray
    """Bytes of copies in few bits of others."""
    executions: FloatArray
    """Share of slot executions."""
    visitors: IntArray
    """Access servers with users whose route runs some layer on this server."""
    route_s: FloatArray
    home_s: FloatArray
    """The same hosts with every layer at the access server."""
    pipeline_s: FloatArray | None
    """A memory-proportional pipeline over all servers; None if whole layers do not fit."""
    guessed_s: FloatArray
    """From token to token where servers guess, see `placement.guessed`."""
    right: FloatArray
    """Share of their guesses that is right, as far as what they hold tells."""
    reference_layer_s: float
    """d_ref: the mean per-layer delay on the plan's routes."""


def plan_figures(plan: Plan, profile: Profile, model: ModelSpec) -> PlanFigures:
    """Evaluate a plan; raises `UserError` if it was made for another model or profile geometry."""
    if plan.header.input_hashes["model"] != model.model_hash:
        raise UserError(f"The plan was made for another model than {model.name}; plan again.")
    profile.require_model(model)
    cluster = plan.cluster
    cost = cost_model(model, cluster)
    delays = expected_layer_delay_s(cost, plan.hosts, profile)
    pipeline_s = None
    stages = pipeline_stages(model, plan.expert_capacity_bytes)
    if stages is not None:
        hosts = stage_hosts(model, cluster.server_count, stages)
        staircase = staircase_routes(cluster.server_count, stages)
        pipeline_s = route_delay_s(cost, expected_layer_delay_s(cost, hosts, profile), staircase)
    bits = (
        np.zeros(plan.hosts.shape, dtype=np.int64)
        if plan.stand_in_bits is None
        else plan.stand_in_bits
    )
    route_s = route_delay_s(cost, delays, plan.routes)
    guesses = GuessedObjective(
        cost=cost,
        profile=profile,
        access_share=np.full(cluster.server_count, 1.0 / cluster.server_count),
        copies=lambda hosts, routes: plan.stand_in_bits,
    )
    passes = (plan.routes[:, :, None] == np.arange(cluster.server_count)).any(axis=1)
    return PlanFigures(
        used=used_bytes(plan.hosts, model),
        copies=copies_bytes(model, bits),
        executions=execution_share(cost, plan.hosts, profile, plan.routes, cluster.access_share),
        visitors=passes[cluster.access_share > 0].sum(axis=0),
        route_s=route_s,
        home_s=route_delay_s(cost, delays, home_routes(*plan.routes.shape)),
        pipeline_s=pipeline_s,
        guessed_s=guesses.worth_s(route_s, plan.hosts, plan.routes),
        right=guesses.chances(plan.hosts, plan.routes),
        reference_layer_s=reference_layer_delay_s(delays, plan.routes, cluster.access_share),
    )


def explain_plan(
    plan: Plan,
    profile: Profile,
    model: ModelSpec,
    console: Console,
    keep_going: Callable[[], bool] = lambda: True,
) -> None:
    """Print servers, heat map, layers and routes of a plan, and what more memory would save.

    The last is left out for servers that `keep_going` gives no time for. Raises `UserError` like
    `plan_figures`.
    """
    figures = plan_figures(plan, profile, model)
    reasons = plan_reasons(plan, profile, model, keep_going)
    console.print(_headline(plan, model, figures))
    console.print(_server_table(plan, figures, reasons))
    console.print(_heat_map(plan))
    console.print(_layer_table(plan))
    console.print(_route_table(plan, figures))
    console.print(reason_table(plan, reasons))
    console.print(because_lines(plan, figures.route_s, reasons))
    console.print(loss_table(plan, profile, model, figures.route_s))


def _headline(plan: Plan, model: ModelSpec, figures: PlanFigures) -> str:
    share = plan.cluster.access_share
    text = f"{escape(model.name)} on {escape(plan.cluster.name)}: "
    text += f"{milliseconds(share @ figures.route_s)} ms expected per token, exact and without load"
    text += f" (home routes {milliseconds(share @ figures.home_s)} ms"
    if figures.pipeline_s is not None:
        text += f", pipeline {milliseconds(share @ figures.pipeline_s)} ms"
    text += f"); {milliseconds(figures.reference_layer_s)} ms per layer"
    won = plan.header.settings.get("seed_won")
    text += f"; grown from: {escape(str(won))}" if won else ""
    text += _search_text(plan.header.settings)
    text += survival_text(plan, float(share @ figures.route_s))
    return text


def _search_text(settings: dict[str, Any]) -> str:
    """What an optimised plan was searched for and how near the optimum it is proved to be."""
    if "search" not in settings:
        return ""
    text = f"; {settings['objective']} value {milliseconds(settings['value_s'])} ms after "
    text += f"{settings['iterations'] + settings['trimmed_iterations']} iterations"
    bound = settings["bound"]
    if bound is None:
        return text
    known = "the optimum is" if bound["optimal"] else "the optimum is at least"
    return f"{text}; {known} {milliseconds(bound['lower_s'])} ms, gap {bound['gap']:.2%}"


def _server_table(plan: Plan, figures: PlanFigures, reasons: Reasons) -> Table:
    table = Table(title="Servers")
    table.add_column("server")
    for name in ("used", "copies", "experts", "layers", "users", "routes through", "executions"):
        table.add_column(name, justify="right")
    table.add_column(f"{human_bytes(reasons.extra_bytes)} more saves", justify="right")
    held = plan.hosts.sum(axis=2)
    for m, name in enumerate(plan.cluster.server_names):
        table.add_row(
            escape(name),
            human_bytes(int(figures.used[m])),
            human_bytes(int(figures.copies[m])),
            str(int(held[m].sum())),
            str(int((held[m] > 0).sum())),
            f"{plan.cluster.access_share[m]:.0%}",
            str(int(figures.visitors[m])),
            f"{figures.executions[m]:.1%}",
            "?" if np.isnan(reasons.gain_s[m]) else f"{milliseconds(reasons.gain_s[m])} ms",
        )
    return table


def _heat_map(plan: Plan) -> Table:
    """One character per layer: the fuller, the more of the layer's experts the server holds."""
    experts = plan.hosts.shape[2]
    held = plan.hosts.sum(axis=2)
    shade = np.ceil(held / experts * (len(_SHADES) - 1)).astype(int)
    table = Table(title=f"Experts held, layers 0-{held.shape[1] - 1} ({_SHADES[0]} none, █ all)")
    table.add_column("server")
    table.add_column("layers", no_wrap=True)
    for name, row in zip(plan.cluster.server_names, shade, strict=True):
        table.add_row(escape(name), "".join(_SHADES[level] for level in row))
    return table


def _layer_table(plan: Plan) -> Table:
    """Who holds what of every layer; consecutive layers with the same hosts share a row."""
    table = Table(title="Hosts by layer")
    table.add_column("layers", justify="right")
    table.add_column("servers, and which experts where not all")
    layers = range(plan.hosts.shape[1])
    for _, run in groupby(layers, key=lambda layer: plan.hosts[:, layer].tobytes()):
        same = list(run)
        label = f"{same[0]}-{same[-1]}" if len(same) > 1 else str(same[0])
        table.add_row(label, escape(hosts_text(plan.hosts[:, same[0]], plan.cluster.server_names)))
    return table


def hosts_text(held: BoolArray, names: tuple[str, ...]) -> str:
    """The hosts [M, E] of one layer: `s1; s4: 0 3-7`."""
    parts = [
        name if row.all() else f"{name}: {_numbers_text(np.flatnonzero(row).tolist())}"
        for name, row in zip(names, held, strict=True)
        if row.any()
    ]
    return "; ".join(parts)


def _numbers_text(numbers: list[int]) -> str:
    """Rising numbers, three and more that follow one another by the first and the last."""
    said = []
    for _, run in groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        own = [number for _, number in run]
        said += [f"{own[0]}-{own[-1]}"] if len(own) > 2 else [str(each) for each in own]
    return " ".join(said)


def _route_table(plan: Plan, figures: PlanFigures) -> Table:
    table = Table(title="Routes (expected ms per token)")
    table.add_column("access")
    for name in ("users", "exact", "guessing", "right", "home", "pipeline"):
        table.add_column(name, justify="right")
    table.add_column("route: servers with their layers")
    for m, name in enumerate(plan.cluster.server_names):
        table.add_row(
            escape(name),
            f"{plan.cluster.access_share[m]:.0%}",
            milliseconds(figures.route_s[m]),
            milliseconds(figures.guessed_s[m]),
            f"{figures.right[m]:.0%}",
            milliseconds(figures.home_s[m]),
            "-" if figures.pipeline_s is None else milliseconds(figures.pipeline_s[m]),
            escape(route_text(plan.routes[m], plan.cluster.server_names)),
        )
    return table


def route_text(route: IntArray, names: tuple[str, ...]) -> str:
    """A route in runs: `s1 x12 > s4 x18`."""
    runs = [(int(server), len(list(run))) for server, run in groupby(route)]
    return " > ".join(f"{names[server]} x{count}" for server, count in runs)
