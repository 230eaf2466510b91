"""`trimmoe experiment regret`: how near each policy comes to a clairvoyant, cluster by cluster.

Recorded tokens are replayed through the engine under every policy on the same plan and routes; the
bound is what the same action set could reach with every token's future known. Replayed, not
executed: the differences are those of decisions alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

import trimmoe
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile, load_profile
from trimmoe.core.specs import IntArray, ModelSpec
from trimmoe.core.trace import Trace, load_trace
from trimmoe.cost.clairvoyant import Exits, clairvoyant_bound
from trimmoe.cost.model import Accounting
from trimmoe.engine.step import Engine
from trimmoe.experiments.method_engines import make_engine
from trimmoe.experiments.opening import resolved
from trimmoe.experiments.random_clusters import paper_cluster
from trimmoe.experiments.variants import base_policy
from trimmoe.models.load import model_spec
from trimmoe.placement.make import PlanSettings, make_plan, paper
from trimmoe.policy.presets import exact
from trimmoe.policy.presets import paper as paper_policy
from trimmoe.policy.readings import WeightRule
from trimmoe.policy.settings import PolicySettings
from trimmoe.policy.trim import TrimPolicy
from trimmoe.simulator.generate import Parameters
from trimmoe.simulator.generated_profile import generate_profile_and_trace
from trimmoe.simulator.geometries import find_geometry
from trimmoe.simulator.replay import replay

_SEQUENCES, _LENGTH = 32, 48
"""Of generated traces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegretSettings:
    """What is compared."""

    clusters: int = 10
    servers: int = 10
    memory_ratio: float = 2.0
    budget: float = 0.02
    confidence: float = 0.9
    placement: str = "default"
    """`default`, or `paper`: the paper's placement with all layers at home."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What is decided on: a model's profile and tokens with a known future."""

    profile: Profile
    model: ModelSpec
    trace: Trace

    @property
    def inputs(self) -> dict[str, str]:
        """Hashes of it."""
        return {
            "profile": self.profile.hash,
            "trace": self.trace.hash,
            "model": self.model.model_hash,
        }


def recorded_tokens(model: str, profile: Path, trace: Path) -> Tokens:
    """A recording of a real model. Raises `UserError` unless all belong together."""
    calibrated, recorded = load_profile(profile), load_trace(trace)
    recorded.require_profile(calibrated)
    spec = model_spec(resolved(model), hashed=True)
    calibrated.require_model(spec)
    return Tokens(profile=calibrated, model=spec, trace=recorded)


def generated_tokens(geometry: str, seed: int) -> Tokens:
    """Tokens of a published geometry from the generator's assumptions. Raises `UserError`."""
    model, parameters = find_geometry(geometry), Parameters()
    profile, trace = generate_profile_and_trace(
        model, parameters, sequences=_SEQUENCES, length=_LENGTH, seed=seed
    )
    return Tokens(profile=profile, model=model, trace=trace)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One cluster: mean delay per token, seconds, of every policy and of the bound."""

    cluster: str
    delay_s: dict[str, float]
    bound_s: float
    spent: dict[str, float]
    """Share of the budget that was charged."""


def policies(settings: RegretSettings) -> dict[str, PolicySettings]:
    """The policies in the order of the table; audits are off, since a replay has no answers."""
    ours = base_policy(budget=settings.budget, confidence=settings.confidence).but(audit_share=0.0)
    letter = replace(
        paper_policy(),
        accounting=Accounting.PINNED,
        budget=settings.budget,
        confidence=settings.confidence,
    )
    return {
        "exact": exact(),
        "paper": letter,
        "ours, H = 1": replace(ours, horizon=1),
        "ours, H = 3": replace(ours, horizon=3),
        "ours, full depth": ours,
        "ours, price fixed": ours.but(weight_rule=WeightRule.FIXED),
    }


def measure_cluster(plan: Plan, tokens: Tokens, settings: RegretSettings, *, seed: int) -> Outcome:
    """Replay the trace under every policy on one plan."""
    profile, model, trace = tokens.profile, tokens.model, tokens.trace
    rng = np.random.default_rng(seed)
    share = plan.cluster.access_share
    access = rng.choice(share.size, size=trace.sequence_count, p=share)
    delay_s, spent = {}, {}
    for name, policy in policies(settings).items():
        engine = make_engine(plan, profile, model, policy)
        ledgers = replay(
            engine, trace, access, budget=policy.budget, confidence=policy.confidence, seed=seed
        )
        delay_s[name] = float(np.mean([ledger.delay_s for ledger in ledgers]))
        loss = float(np.mean([ledger.loss for ledger in ledgers]))
        spent[name] = loss / settings.budget if settings.budget else 0.0
    ours = make_engine(plan, profile, model, policies(settings)["ours, full depth"])
    return Outcome(
        cluster=plan.cluster.name,
        delay_s=delay_s,
        bound_s=_bound(ours, trace, access, settings),
        spent=spent,
    )


def _bound(engine: Engine, trace: Trace, access: IntArray, settings: RegretSettings) -> float:
    """The clairvoyant bound for the default policy's actions, thresholds and charges."""
    assert isinstance(engine.policy, TrimPolicy)
    needed, charge = engine.exit_terms(settings.confidence)
    return clairvoyant_bound(
        engine.policy.lookahead.space,
        trace,
        engine.routes,
        access,
        budget=settings.budget,
        exits=Exits(threshold=needed, loss=charge),
    ).delay_s


def measure_regret(
    tokens: Tokens, settings: RegretSettings, clusters: Iterable[int]
) -> list[Outcome]:
    """One outcome per cluster seed in `clusters`."""
    placed = paper() if settings.placement == "paper" else PlanSettings()
    outcomes = []
    for seed in clusters:
        cluster = paper_cluster(seed, servers=settings.servers, memory_ratio=settings.memory_ratio)
        plan = make_plan(tokens.profile, tokens.model, cluster, placed, cluster_hash=cluster.name)
        outcomes.append(measure_cluster(plan, tokens, settings, seed=seed))
    return outcomes


def regret_json(
    settings: RegretSettings, outcomes: Sequence[Outcome], inputs: dict[str, str]
) -> dict[str, Any]:
    """Delays, regrets over the bound, and the share of what could be saved that was saved."""
    names = list(outcomes[0].delay_s)
    regret = {
        name: [outcome.delay_s[name] / outcome.bound_s - 1.0 for outcome in outcomes]
        for name in names
    }
    return {
        "experiment": "regret",
        "trimmoe_version": trimmoe.__version__,
        "settings": asdict(settings),
        "inputs": inputs,
        "clusters": [asdict(outcome) for outcome in outcomes],
        "regret": regret,
        "mean_regret": {name: float(np.mean(values)) for name, values in regret.items()},
        "mean_captured": {
            name: float(np.mean([_captured(outcome, name) for outcome in outcomes]))
            for name in names
        },
    }


def _captured(outcome: Outcome, name: str) -> float:
    """Share of the gap between exact execution and the bound that a policy closed."""
    gap = outcome.delay_s["exact"] - outcome.bound_s
    saved = outcome.delay_s["exact"] - outcome.delay_s[name]
    return saved / gap if gap > 1e-12 else 1.0


def regret_table(content: dict[str, Any]) -> Table:
    """Milliseconds per token and cluster, the mean regret below."""
    names = list(content["mean_regret"])
    table = Table(box=box.SIMPLE_HEAD, title="ms per token; regret over the clairvoyant bound")
    table.add_column("cluster")
    for name in [*names, "bound"]:
        table.add_column(name, justify="right")
    for outcome in content["clusters"]:
        delays = [f"{outcome['delay_s'][name] * 1e3:.2f}" for name in names]
        table.add_row(outcome["cluster"], *delays, f"{outcome['bound_s'] * 1e3:.2f}")
    table.add_section()
    table.add_row("mean regret", *(f"{content['mean_regret'][n]:.1%}" for n in names), "")
    table.add_row("gap closed", *(f"{content['mean_captured'][n]:.0%}" for n in names), "")
    table.add_row(
        "budget spent",
        *(f"{np.mean([o['spent'][n] for o in content['clusters']]):.0%}" for n in names),
        "",
    )
    return table
