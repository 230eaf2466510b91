"""What the paper's letter sees of a token and of the calibration where several experts are active.

The paper writes of one target expert per layer: it alone is run (10, 11), what follows it is told
by P_l (38), and its gate is the layer's importance (Algorithm 2, line 8). Everything else of the
policy stays as it is; these are other profiles and observations for it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimmoe.core.changed import changed
from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.cost.actions import DROPPED
from trimmoe.cost.lookahead import first_expert_first
from trimmoe.policy.base import Decision, Observation
from trimmoe.policy.readings import Readings


def as_read(profile: Profile, readings: Readings) -> Profile:
    """The profile that the look-ahead goes by."""
    if readings.one_expert:
        profile = of_targets(profile)
    elif readings.target_transitions:
        profile = moved_by_target(profile)
    if readings.target_importance:
        profile = weighed_by_target(profile)
    return profile


def targets(profile: Profile) -> IntArray:
    """The target r_l of every pattern: its expert of largest mass, [N, P]."""
    layers = zip(profile.patterns, profile.pattern_mass, strict=True)
    return np.stack([first_expert_first(*layer)[0][:, 0] for layer in layers])


def moved_by_target(profile: Profile) -> Profile:
    """The same where what a layer activates follows from the target of the layer before, by P_l
    (38), and from nothing else it activated. Of a target's patterns each comes as often as it does
    in calibration; a target without any in the codebook is left out."""
    first, share = targets(profile), profile.pattern_share
    moved = np.empty_like(profile.pattern_transitions)
    for layer, transition in enumerate(profile.expert_transitions):
        there = first[layer + 1]
        of_target = np.bincount(there, share[layer + 1], profile.expert_count)[there]
        alike = np.bincount(there, minlength=profile.expert_count)[there]
        given = np.divide(share[layer + 1], of_target, out=1.0 / alike, where=of_target > 0)
        rows = transition[first[layer]][:, there] * given
        total = rows.sum(1, keepdims=True)
        moved[layer] = np.where(total > 0, rows / np.where(total > 0, total, 1.0), share[layer + 1])
    return replace(profile, pattern_transitions=moved)


def of_targets(profile: Profile) -> Profile:
    """The same where every expert is a pattern of its own, the target, and P_l (38) leads from one
    to the next; masses and importance are the means of the patterns that it is the target of."""
    layers, experts = profile.layer_count, profile.expert_count
    first, largest = targets(profile), profile.pattern_mass.max(2)
    share = np.zeros((layers, experts))
    mass, importance = np.zeros((layers, experts, 1)), np.zeros((layers, experts, 11))
    for layer in range(layers):
        weight = profile.pattern_share[layer]
        share[layer] = np.bincount(first[layer], weight, experts)
        found = np.column_stack([largest[layer], profile.pattern_importance[layer]])
        means = _means(first[layer], weight, found, experts)
        mass[layer], importance[layer] = means[:, :1], means[:, 1:]
    return replace(
        profile,
        patterns=np.tile(np.arange(experts)[:, None], (layers, 1, 1)),
        pattern_share=share,
        pattern_transitions=profile.expert_transitions,
        pattern_mass=mass,
        pattern_importance=importance,
    )


def _means(first: IntArray, weight: FloatArray, values: FloatArray, experts: int) -> FloatArray:
    """Weighted means of `values` [P, V] by target, [E, V]; of all for those that never are one."""
    found = np.tile(weight @ values / weight.sum(), (experts, 1))
    for expert in range(experts):
        mine = weight * (first == expert)
        if mine.sum() > 0:
            found[expert] = mine @ values / mine.sum()
    return found


def weighed_by_target(profile: Profile) -> Profile:
    """The same where a layer not yet reached is as important as its target's gate is on average."""
    gate = profile.pattern_mass.max(2)
    spread = profile.pattern_importance.shape[2]
    return replace(profile, pattern_importance=np.repeat(gate[:, :, None], spread, axis=2))


def by_gate(observation: Observation) -> Observation:
    """Tokens whose importance is their target's gate (Algorithm 2, line 8)."""
    return changed(observation, importance=observation.masses[:, 0])


def target_only(observation: Observation) -> Observation:
    """Tokens that activate nothing but their target."""
    return changed(
        observation, experts=observation.experts[:, :1], masses=observation.masses[:, :1]
    )


def with_slots(decision: Decision, slots: int, server: IntArray) -> Decision:
    """A decision about targets [n, 1] for activated sets [n, `slots`]: the others do not run."""
    others = (server.size, slots - 1)
    return changed(
        decision,
        slot_expert=np.column_stack([decision.slot_expert, np.full(others, DROPPED)]),
        slot_server=np.column_stack(
            [decision.slot_server, np.broadcast_to(server[:, None], others)]
        ),
    )
