"""`trimmoe simulate`: methods under load on a virtual clock, one table, one JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

import trimmoe
from trimmoe.core.ledger import Kind
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.core.trace import Trace
from trimmoe.cost.model import Accounting
from trimmoe.experiments.method_engines import make_engine, plan_for
from trimmoe.experiments.methods import PolicyMaker, configured, find_method
from trimmoe.policy.base import Policy
from trimmoe.policy.build import Deployment, action_space, deploy
from trimmoe.policy.settings import PolicySettings
from trimmoe.progress import Bars
from trimmoe.simulator.arrivals import Requests
from trimmoe.simulator.feed import require_guesses
from trimmoe.simulator.geometries import GEOMETRIES
from trimmoe.simulator.measure import Estimate, Sample, estimate, figures
from trimmoe.simulator.run import simulate
from trimmoe.simulator.settings import Prefill, SimulationSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """One method's runs."""

    name: str
    title: str
    policy: PolicySettings
    settings: SimulationSettings
    samples: list[Sample]


def model_of(name: str) -> ModelSpec:
    """The model called `name`: one of the geometries without weights, or a checkpoint's."""
    if name in GEOMETRIES:
        return GEOMETRIES[name]()
    from trimmoe.experiments.opening import resolved
    from trimmoe.models.load import model_spec

    return model_spec(resolved(name), hashed=True)


def simulate_methods(
    plan: Plan,
    profile: Profile,
    model: ModelSpec,
    trace: Trace,
    methods: Sequence[str],
    settings: SimulationSettings,
    *,
    accounting: Accounting | None = None,
    requests: Requests | None = None,
    advance: Callable[[float], None] = lambda _: None,
) -> list[Simulated]:
    """Run every method under the same load, or play it the same `requests`; `accounting` overrides
    the methods' own.

    Under `migrate` prompts are left out, as that accounting has none. Raises `UserError` if the
    trace was not recorded with the profile, or does not hold what a method looks at, before any
    runs.
    """
    trace.require_profile(profile)
    found, possible = [], []
    for name in methods:
        method = find_method(name)
        if method.reroutes:
            trace.require_probabilities()
        policy = configured(method, budget=settings.budget, confidence=settings.confidence)
        if accounting is not None:
            policy = policy.under(accounting)
        require_guesses(policy, plan.cluster.server_count, trace)
        possible.append((name, method, policy, plan_for(method, plan, profile, model)))
    for name, method, policy, chosen in possible:
        asked = replace(settings, budget=policy.budget, confidence=policy.confidence)
        if policy.accounting is Accounting.MIGRATE:
            asked = replace(asked, load=replace(asked.load, prefill=Prefill.EXCLUDED))
        engine = make_engine(chosen, profile, model, policy, method.policy)
        deployment = deploy(chosen, profile, model, policy.accounting)
        remake = method.policy and partial(_remade, method.policy, profile, engine.settings)
        title = method.title
        if policy.accounting is not Accounting.PINNED and str(policy.accounting) not in title:
            title += f" ({policy.accounting})"
        found.append(
            Simulated(
                name=name,
                title=title,
                policy=engine.settings,
                settings=asked,
                samples=simulate(
                    engine,
                    deployment,
                    trace,
                    asked,
                    policy_of=remake,
                    requests=requests,
                    advance=advance,
                ),
            )
        )
    return found


def simulate_with_bar(
    plan: Plan,
    profile: Profile,
    model: ModelSpec,
    trace: Trace,
    methods: Sequence[str],
    settings: SimulationSettings,
    *,
    accounting: Accounting | None = None,
) -> list[Simulated]:
    """`simulate_methods`, and how far it is."""
    with Bars() as progress:
        total = len(methods) * len(settings.seeds) * settings.end_s
        bar = progress.add_task("Simulating", total=total)
        return simulate_methods(
            plan,
            profile,
            model,
            trace,
            methods,
            settings,
            accounting=accounting,
            advance=lambda seconds: progress.advance(bar, seconds),
        )


def _remade(
    maker: PolicyMaker, profile: Profile, settings: PolicySettings, deployment: Deployment
) -> Policy:
    return maker(action_space(deployment, profile, settings), deployment, profile, settings)


def simulation_json(
    plan: Plan,
    profile: Profile,
    trace: Trace,
    settings: SimulationSettings,
    outcomes: Sequence[Simulated],
) -> dict[str, Any]:
    """All figures, with all that is needed to repeat them."""
    return {
        "trimmoe_version": trimmoe.__version__,
        "settings": asdict(settings),
        "seeds": list(settings.seeds),
        "input_hashes": {
            "model": profile.model_hash,
            "profile": profile.hash,
            "plan": plan.hash,
            "trace": trace.hash,
        },
        "cluster": plan.cluster.name,
        "servers": list(plan.cluster.server_names),
        "methods": [_outcome(outcome) for outcome in outcomes],
    }


def _outcome(outcome: Simulated) -> dict[str, Any]:
    samples = outcome.samples
    by_seed = [figures(one, outcome.settings.sla_s) for one in samples]
    kinds = sum(one.ledger.kinds for one in samples)
    total = max(int(np.sum(kinds)), 1)
    return {
        "method": outcome.name,
        "title": outcome.title,
        "accounting": str(outcome.policy.accounting),
        "prefill": str(outcome.settings.load.prefill),
        "policy": outcome.policy.described(),
        "figures": {key: asdict(estimate([one[key] for one in by_seed])) for key in by_seed[0]},
        "by_seed": by_seed,
        "tokens": [one.ledger.tokens for one in samples],
        "events": [one.after.events for one in samples],
        "kinds": {
            kind.name.lower(): float(np.asarray(kinds)[:, kind].sum() / total) for kind in Kind
        },
        "server_use": np.mean([one.server_use for one in samples], axis=0).tolist(),
        "link_use": np.mean([one.link_use for one in samples], axis=0).tolist(),
        "link_bytes": np.mean([one.link_bytes for one in samples], axis=0).tolist(),
        "waiting_s": np.mean([one.waiting_s for one in samples], axis=0).tolist(),
    }


def simulation_table(content: dict[str, Any]) -> Table:
    """The one table that a simulation prints."""
    seeds, load = len(content["seeds"]), content["settings"]["load"]
    offered = (
        f"{load['rate_per_s']:g} requests/s"
        if load["rate_per_s"] is not None
        else f"{load['concurrency']} requests at a time"
    )
    table = Table(
        title=f"{offered} on {content['cluster']}, {content['settings']['duration_s']:g} s",
        caption=(
            f"ms per decoded token, ±: 95 % over {seeds} seeds; ttft: ms to the first token; srv, "
            f"link: use of the busiest; MB/s: all links; rem: remote; bud: budget spent; SLA: "
            f"tokens within {content['settings']['sla_s'] * 1e3:g} ms"
        ),
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("method", no_wrap=True)
    headings = (
        "ms",
        "±",
        "p50",
        "p99",
        "ttft",
        "tok/s",
        "srv",
        "link",
        "MB/s",
        "rem",
        "bud",
        "SLA",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in content["methods"]:
        table.add_row(row["title"], *_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    known = {key: Estimate(**value) for key, value in row["figures"].items()}
    mean = {key: value.mean for key, value in known.items()}
    budget = mean["budget_per_token"]
    half = (known["token_ms"].high_95 - known["token_ms"].low_95) / 2.0
    return [
        f"{mean['token_ms']:.1f}",
        f"{half:.1f}" if np.isfinite(half) else "-",
        f"{mean['token_p50_ms']:.1f}",
        f"{mean['token_p99_ms']:.1f}",
        f"{mean['first_token_ms']:.0f}",
        f"{mean['tokens_per_s']:.0f}",
        f"{mean['server_use_max']:.0%}",
        f"{mean['link_use_max']:.0%}",
        f"{mean['sent_mb_per_s']:.1f}",
        f"{mean['remote_share']:.0%}",
        f"{mean['budget_spent_per_token'] / budget:.0%}" if budget else "-",
        f"{mean['sla_share']:.0%}",
    ]
