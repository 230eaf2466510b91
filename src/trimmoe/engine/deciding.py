"""What is decided upon the rows of a wave that are at one layer."""

from __future__ import annotations

import numpy as np

from trimmoe.core.events import Command, Execute, Routed, SegmentRan, Strand
from trimmoe.core.specs import BoolArray
from trimmoe.core.wave import NOT_PROBED, Wave
from trimmoe.cost.model import CostModel
from trimmoe.cost.nearest import Nearest
from trimmoe.engine.books import entered, passed
from trimmoe.policy.base import Observation, Policy


def decided(
    policy: Policy, cost: CostModel, wave: Wave, event: Routed
) -> tuple[Wave, tuple[Command, ...]]:
    """What the rows alive of a wave are charged for a layer, and how it is executed."""
    rows = wave.alive
    audited = wave.probed[rows] != NOT_PROBED
    # What checks an exit must itself be the full-depth model.
    allowance = np.where(audited, 0.0, wave.allowance[rows])
    decision = policy.decide(
        Observation(
            layer=wave.layer,
            route=wave.route[rows],
            server=wave.server[rows],
            experts=event.experts,
            masses=event.masses,
            importance=event.importance,
            steadiness=event.steadiness,
            allowance=allowance,
            exit_at=wave.exit_at[rows],
            loss_weight=wave.loss_weight[rows],
            probabilities=event.probabilities,
        )
    )
    assert (decision.loss <= allowance).all(), "a policy overspent the quality budget"
    stranded = ~np.isfinite(decision.delay_s)
    if stranded.any():
        return _stranded(policy, cost, wave, event, stranded)
    wave = entered(cost, wave, event.experts, decision)
    execute = Execute(
        wave=event.wave,
        layer=wave.layer,
        rows=rows,
        slot_expert=decision.slot_expert,
        slot_server=decision.slot_server,
        destination=decision.destination,
    )
    return wave, (execute,)


def _stranded(
    policy: Policy, cost: CostModel, wave: Wave, event: Routed, stranded: BoolArray
) -> tuple[Wave, tuple[Command, ...]]:
    """Give up the rows that nobody can serve and decide again for the others."""
    lost, kept = wave.alive[stranded], ~stranded
    wave = wave.without(lost)
    commands: tuple[Command, ...] = (Strand(wave=event.wave, rows=lost),)
    if not wave.alive.size:
        return wave, commands
    others = Routed(
        wave=event.wave,
        experts=event.experts[kept],
        masses=event.masses[kept],
        importance=event.importance[kept],
        steadiness=event.steadiness[kept],
        probabilities=None if event.probabilities is None else event.probabilities[kept],
    )
    wave, more = decided(policy, cost, wave, others)
    return wave, commands + more


def ran_nearest(nearest: Nearest, event: SegmentRan) -> tuple[Wave, tuple[Command, ...]]:
    """What the layers of a segment and the one it ended at cost, which runs at the nearest
    hosts."""
    experts, rows = event.experts, np.arange(len(event.tokens.sequences))
    wave, server, destination = passed(nearest, event.tokens, experts, event.settled)
    commands: tuple[Command, ...] = ()
    if (destination < 0).any():
        lost, rows = np.flatnonzero(destination < 0), np.flatnonzero(destination >= 0)
        wave, commands = wave.without(lost), (Strand(wave=event.wave, rows=lost),)
        if not rows.size:
            return wave, commands
    execute = Execute(
        wave=event.wave,
        layer=wave.layer,
        rows=rows,
        slot_expert=experts[rows, -1],
        slot_server=server[rows],
        destination=destination[rows],
    )
    return wave, (*commands, execute)
