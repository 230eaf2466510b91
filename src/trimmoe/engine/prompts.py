"""Tokens of prompts, where a policy trims them as it does generated ones.

Each of them may spend what a generated token is credited (33), and what it leaves is lost, so that
no account knows of them. None exits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimmoe.core.changed import changed
from trimmoe.core.events import Attend, Command, Event, Routed, SequenceOpened, TokensArrived
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.engine.feedback import Feedback
from trimmoe.engine.state import EngineState
from trimmoe.engine.step import Engine
from trimmoe.policy.base import Decision, Observation

NO_EXIT = 2.0
"""A confidence that nothing meets."""


def entered(
    engine: Engine,
    feedback: Feedback,
    opened: Sequence[SequenceOpened],
    owners: IntArray,
    trimmed: np.ndarray,
    *,
    wave: int,
) -> tuple[EngineState, Attend]:
    """Tokens [n] of the prompts of sequences about to be `opened` enter the first layer of a state
    that is theirs alone. `owners` [n] are indices of `opened`, `trimmed` bool [n] which tokens may
    spend the budget; the others run exactly."""
    state = EngineState(feedback=feedback)
    for index, one in enumerate(opened):
        for exact in (False, True):
            budget = 0.0 if exact else one.budget
            event = changed(
                one, sequence=2 * index + exact, budget=budget, confidence=NO_EXIT, balance=0.0
            )
            state, _ = engine.step(state, event)
    sequences = tuple((2 * owners + ~trimmed).tolist())
    arrived: Event = TokensArrived(wave=wave, sequences=sequences, draws=np.ones(owners.size))
    commands: tuple[Command, ...]
    state, commands = engine.step(state, arrived)
    (attend,) = commands
    assert isinstance(attend, Attend)
    return state, attend


def decided(
    engine: Engine,
    state: EngineState,
    *,
    layer: int,
    route: int,
    access: int,
    server: int,
    routed: Routed,
    allowance: FloatArray,
) -> Decision:
    """What n tokens of one prompt do in a layer on `server`, each with `allowance` [n] left; for
    drivers that keep the books of prompts themselves. The delay of those that nobody can serve is
    infinite."""
    rows = np.full(allowance.size, route)
    decision = engine.policy.decide(
        Observation(
            layer=layer,
            route=rows,
            server=np.full(allowance.size, server),
            experts=routed.experts,
            masses=routed.masses,
            importance=routed.importance,
            steadiness=routed.steadiness,
            allowance=allowance,
            exit_at=np.full(allowance.size, engine.cost.layer_count),
            loss_weight=engine.weights(state, rows, np.full(allowance.size, access)),
            probabilities=routed.probabilities,
        )
    )
    assert (decision.loss <= allowance).all(), "a policy overspent the quality budget"
    return decision
