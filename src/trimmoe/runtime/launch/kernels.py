"""What decisions are compiled to, made once before several processes would each make it at once."""

from __future__ import annotations

import numpy as np

from trimmoe.core.events import Event, Routed, SequenceOpened, TokensArrived
from trimmoe.core.specs import ModelSpec
from trimmoe.policy.settings import PolicySettings
from trimmoe.progress import track
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.node.deployments import Basis, Conditions, build, prepared


def compile_decisions(artifacts: Artifacts, settings: PolicySettings) -> None:
    """Take one decision here, so that all compiled loops are on disk afterwards.

    Takes a second where they are already, and some fifteen after installing or updating. Raises
    `UserError` for a policy that no real system can run.
    """
    model, plan = artifacts.model, artifacts.plan
    steps = track(("tables", "decision"), "Compiling decisions")
    next(steps)
    basis = Basis.of(plan, artifacts.profile, model, settings)
    engine = build(basis, Conditions.planned(plan.cluster.server_count), ()).engine
    engine = prepared(engine, engine.start().feedback)
    next(steps)
    state = engine.start()
    for event in _one_token(model, settings):
        state, _ = engine.step(state, event)
    steps.close()


def _one_token(model: ModelSpec, settings: PolicySettings) -> tuple[Event, ...]:
    """A token up to the decision of its first layer; arrays of the types that servers give."""
    slots, experts = model.top_k, model.expert_count
    return (
        SequenceOpened(
            sequence=0, access=0, budget=settings.budget, confidence=settings.confidence
        ),
        TokensArrived(wave=0, sequences=(0,), draws=np.zeros(1)),
        Routed(
            wave=0,
            experts=np.arange(slots)[None],
            masses=np.full((1, slots), 1.0 / experts),
            importance=np.full(1, slots / experts),
            steadiness=np.zeros(1, dtype=np.int64),
            probabilities=np.full((1, experts), 1.0 / experts),
        ),
    )
