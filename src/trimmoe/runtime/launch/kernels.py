"""What decisions are compiled to, made once before several processes would each make it at once."""

from __future__ import annotations

import numpy as np

from trimmoe.core.events import Depart, Routed, SegmentRan, SequenceOpened, TokensArrived
from trimmoe.core.specs import ModelSpec
from trimmoe.engine.step import Engine
from trimmoe.policy.build import PolicyMaker
from trimmoe.policy.settings import PolicySettings
from trimmoe.progress import track
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.node.watch.deployments import Basis, Conditions, build, prepared


def compile_decisions(
    artifacts: Artifacts, settings: PolicySettings, maker: PolicyMaker | None = None
) -> None:
    """Take one decision here, so that all compiled loops are on disk afterwards.

    Takes a second where they are already, and some fifteen after installing or updating. Raises
    `UserError` for a policy that no real system can run.
    """
    model, plan = artifacts.model, artifacts.plan
    steps = track(("tables", "decision"), "Compiling decisions")
    next(steps)
    basis = Basis.of(plan, artifacts.profile, model, settings, maker)
    engine = build(basis, Conditions.planned(plan.cluster.server_count), ()).engine
    engine = prepared(engine, engine.start().feedback)
    next(steps)
    # Arrays of one row and of several are of two kinds to the compiler.
    for count in (1, 2):
        _decide(engine, model, settings, count)
    steps.close()


def _decide(engine: Engine, model: ModelSpec, settings: PolicySettings, count: int) -> None:
    """So many tokens up to the decision of their first layer; arrays of the types that servers
    give."""
    slots, experts = model.top_k, model.expert_count
    state, sequences = engine.start(), tuple(range(count))
    for sequence in sequences:
        opened = SequenceOpened(
            sequence=sequence, access=0, budget=settings.budget, confidence=settings.confidence
        )
        state, _ = engine.step(state, opened)
    departing = engine.settled is not None
    arrived = TokensArrived(wave=0, sequences=sequences, draws=np.zeros(count), departing=departing)
    state, (command,) = engine.step(state, arrived)
    chosen = np.tile(np.arange(slots), (count, 1))
    routed = Routed(
        wave=0,
        experts=chosen,
        masses=np.full((count, slots), 1.0 / experts),
        importance=np.full(count, slots / experts),
        steadiness=np.zeros(count, dtype=np.int64),
        probabilities=np.full((count, experts), 1.0 / experts),
    )
    if isinstance(command, Depart):
        known = routed if engine.decides else None
        sets = chosen[:, None]
        ran = SegmentRan(wave=0, tokens=command.tokens, experts=sets, settled=0, routed=known)
        engine.step(state, ran)
    else:
        engine.step(state, routed)
