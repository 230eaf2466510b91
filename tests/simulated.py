"""Small clusters with generated models for the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from factories import random_cluster, random_model_spec
from synthetic import hostile, random_plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.core.trace import Trace
from trimmoe.engine.step import Engine
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.build import Deployment, deploy
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.readings import ExitRule, WeightRule
from trimmoe.simulator.generate import Parameters
from trimmoe.simulator.generated_profile import generate_profile_and_trace
from trimmoe.simulator.measure import Sample
from trimmoe.simulator.run import simulate
from trimmoe.simulator.settings import Load, SimulationSettings

SEQUENCES, LENGTH = 12, 10


@dataclass(frozen=True, kw_only=True)
class World:
    """A small cluster with a generated model on it."""

    model: ModelSpec
    profile: Profile
    trace: Trace
    deployment: Deployment
    engine: Engine

    def run(self, load: Load, **changes: Any) -> Sample:
        policy = self.engine.settings
        wanted: dict[str, Any] = {
            "budget": policy.budget,
            "confidence": policy.confidence,
            "warm_up_s": 0.0,
            "duration_s": 1000.0,
            "seeds": (0,),
        }
        asked = SimulationSettings(load=load, **(wanted | changes))
        return simulate(self.engine, self.deployment, self.trace, asked)[0]


def world(
    preset: str = "trimmoe",
    *,
    seed: int = 0,
    layers: int = 4,
    experts: int = 6,
    top_k: int = 2,
    servers: int = 4,
    lying: bool = False,
    **policy,
) -> World:
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng, layers=layers, experts=experts, top_k=top_k)
    parameters = Parameters(exit_hazard=(0.0, 0.3), skip_flip=0.05, drop_flip=0.03)
    profile, trace = generate_profile_and_trace(
        model, parameters, sequences=SEQUENCES, length=LENGTH, seed=seed, profile_tokens=512
    )
    if lying:
        profile = hostile(rng, profile)
    plan = random_plan(rng, model, random_cluster(rng, servers=servers))
    chosen = PRESETS[preset]().but(**({"draft_confidence": None} | policy))
    engine = make_engine(plan, profile, model, chosen)
    deployment = deploy(plan, profile, model, chosen.accounting)
    return World(model=model, profile=profile, trace=trace, deployment=deployment, engine=engine)


def unchanging() -> dict:
    """Policy changes under which decisions depend on nothing but the token and its account."""
    return {
        "weight_rule": WeightRule.FIXED,
        "exit_rule": ExitRule.FIXED,
        "audit_share": 0.0,
        "confidence": 0.9,
    }


def slowed(engine: Engine, factor: float) -> Engine:
    """The same engine on servers so much slower that they become the bottleneck."""
    cost = engine.cost
    return replace(
        engine,
        cost=replace(cost, dense_s=cost.dense_s * factor, expert_s=cost.expert_s * factor),
    )


def drained(one: World, **changes: Any) -> Sample:
    """A run that has served all its requests before it ends."""
    load = Load(
        rate_per_s=20.0, requests=40, burstiness=4.0, output_tokens=6, prompt_tokens=9,
        prefill_chunk=4,
    )  # fmt: skip
    sample = one.run(load, **({"duration_s": 300.0} | changes))
    assert sample.after.in_flight == sample.after.running == 0
    return sample
