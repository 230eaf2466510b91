"""What the figures are measured on: a model, its profile and tokens, a cluster, two plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, IntArray, ModelSpec
from trimmoe.core.trace import Trace
from trimmoe.placement.make import make_plan, paper
from trimmoe.placement.optimise import SearchSettings, optimise_plan
from trimmoe.simulator.generate import Parameters
from trimmoe.simulator.generated_profile import generate_profile_and_trace
from trimmoe.simulator.geometries import find_geometry

Announce = Callable[[str], None]
"""Told what is being done, for a progress bar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is run; the sizes trade minutes for narrower intervals."""

    seeds: tuple[int, ...] = (0, 1)
    """Of the simulations under load; the sweep over loads takes the first only."""
    sequences: int = 64
    """Of generated traces."""
    length: int = 24
    load_tokens: int = 600
    """Decoded tokens measured in every simulation."""
    output_tokens: int = 40
    """Length of the simulated answers; the paper does not say."""
    rates: tuple[float, ...] = (10.0, 20.0, 40.0, 80.0)
    """Requests per second of Fig. 11."""
    horizons: tuple[int, ...] = (1, 2, 3, 4, 5)
    moving_horizons: tuple[int, ...] = (1, 2, 3)
    """The same where tokens move: every destination is a branch of its own."""
    horizon_tokens: int = 48
    budgets: tuple[float, ...] = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03)
    sensitivity_sequences: int = 10
    """Of the tokens generated with one parameter changed."""
    sensitivity_length: int = 16
    sensitivity_parameters: tuple[str, ...] | None = None
    """Those that are changed; None for all."""
    search_iterations: int = 300
    """Of the planner."""
    profile_tokens: int = 8192
    """Of generated profiles."""


def quick() -> Effort:
    """Seconds instead of minutes, to see that everything works; the figures are noise."""
    return Effort(
        seeds=(0,),
        sequences=6,
        length=6,
        load_tokens=40,
        output_tokens=3,
        rates=(10.0, 80.0),
        horizons=(1, 2),
        moving_horizons=(1, 2),
        horizon_tokens=6,
        budgets=(0.005, 0.02, 0.03),
        sensitivity_sequences=3,
        sensitivity_length=3,
        sensitivity_parameters=("substitution_flip", "change_echo"),
        search_iterations=5,
        profile_tokens=512,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One model on one cluster."""

    name: str
    source: str
    """`recorded` from a real model, or `generated` from named parameters."""
    model: ModelSpec
    profile: Profile
    trace: Trace
    plan: Plan
    """Ours."""
    paper_plan: Plan
    """The paper's: dispersed groups, replicas by (28), tokens at home."""

    @property
    def inputs(self) -> dict[str, str]:
        """Hashes of everything that figures are made from."""
        return {
            "model": self.model.model_hash,
            "profile": self.profile.hash,
            "trace": self.trace.hash,
            "plan": self.plan.hash,
            "paper_plan": self.paper_plan.hash,
        }

    def described(self) -> dict[str, Any]:
        """The world in a JSON."""
        trace, cluster = self.trace, self.plan.cluster
        return {
            "name": self.name,
            "source": self.source,
            "model": self.model.name,
            "layers": self.model.layer_count,
            "experts": self.model.expert_count,
            "top_k": self.model.top_k,
            "cluster": cluster.name,
            "servers": list(cluster.server_names),
            "sequences": trace.sequence_count,
            "tokens": trace.token_count,
            "generator": trace.header.settings.get("generator"),
            "inputs": self.inputs,
        }

    def access(self, count: int, seed: int) -> IntArray:
        """Access servers of `count` sequences, [count]: the users' shares as nearly as whole
        sequences allow, in an order drawn from the seed."""
        exact = self.plan.cluster.access_share * count
        whole = np.floor(exact).astype(int)
        most = np.argsort(whole - exact, kind="stable")[: count - whole.sum()]
        servers = np.concatenate([np.repeat(np.arange(whole.size), whole), most])
        return np.random.default_rng([seed, 7]).permutation(servers)


def generated_world(
    geometry: str,
    cluster: ClusterSpec,
    effort: Effort,
    *,
    seed: int,
    parameters: Parameters | None = None,
    announce: Announce = lambda _: None,
) -> World:
    """A world of a published geometry with generated tokens; nothing in it was measured."""
    announce(f"{geometry}: tokens")
    model, drawn = find_geometry(geometry), parameters or Parameters()
    profile, trace = generate_profile_and_trace(
        model,
        drawn,
        sequences=effort.sequences,
        length=effort.length,
        seed=seed,
        profile_tokens=effort.profile_tokens,
    )
    return made_world(
        geometry, "generated", model, profile, trace, cluster, effort, seed=seed, announce=announce
    )


def made_world(
    name: str,
    source: str,
    model: ModelSpec,
    profile: Profile,
    trace: Trace,
    cluster: ClusterSpec,
    effort: Effort,
    *,
    seed: int,
    plan: Plan | None = None,
    announce: Announce = lambda _: None,
) -> World:
    """Plan what is not planned yet; the search ends by iterations, so every machine finds the same.

    Raises `UserError` if the trace is of another profile or the model does not fit.
    """
    trace.require_profile(profile)
    announce(f"{name}: plans")
    if plan is None:
        search = SearchSettings(iterations=effort.search_iterations, seed=seed)
        plan = optimise_plan(profile, model, cluster, search, cluster_hash=cluster.name)
    return World(
        name=name,
        source=source,
        model=model,
        profile=profile,
        trace=trace,
        plan=plan,
        paper_plan=make_plan(profile, model, cluster, paper(), cluster_hash=cluster.name),
    )


def first_tokens(trace: Trace, tokens: int) -> Trace:
    """About the first `tokens` tokens: as many sequences as there are, cut short, or fewer."""
    sequences = min(trace.sequence_count, tokens)
    length = max(1, min(trace.length, tokens // sequences))
    kept = np.arange(sequences)[:, None] * trace.length + np.arange(length)
    arrays = {item: getattr(trace, item)[kept.reshape(-1)] for item in trace.columns}
    return replace(trace, length=length, **arrays)


def effort_json(effort: Effort) -> dict[str, Any]:
    """The effort in a JSON."""
    return asdict(effort)
