"""The price of quality at which a policy's expected loss just meets its budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.cost.actions import ActionSpace, as_batch
from trimmoe.cost.expected import destinations
from trimmoe.cost.lookahead import IMPORTANCE_DECILES, Weights, typical_tokens

WEIGHTS = tuple(np.round(np.arange(0.05, 0.951, 0.05), 2))
"""Loss weights that are tried."""


def meeting_weight(
    space: ActionSpace,
    profile: Profile,
    weights: Weights,
    routes: IntArray,
    access_share: FloatArray,
    *,
    exits: bool,
    target: float,
) -> float:
    """The least of `WEIGHTS` at which typical tokens lose at most `target` of the budget.

    On a route a layer's action does not move the token, so with quality at a price every layer
    takes its own best action; `exits`: whether later layers count by the share of tokens that
    reach them. `routes` [M, N], `access_share` [M]. The greatest weight if none will do.
    """
    alive = profile.active if exits else np.ones(profile.layer_count)
    lost = np.zeros(len(WEIGHTS))
    done: dict[tuple[int, int, int], FloatArray] = {}
    for access in np.flatnonzero(access_share > 0):
        following = destinations(routes)[access]
        for layer in range(profile.layer_count):
            key = (layer, int(routes[access, layer]), int(following[layer]))
            if key not in done:
                done[key] = _layer_losses(space, profile, weights, *key)
            lost += access_share[access] * alive[layer] * done[key]
    enough = np.flatnonzero(lost <= target * weights.budget)
    return float(WEIGHTS[enough[0]] if enough.size else WEIGHTS[-1])


def _layer_losses(
    space: ActionSpace, profile: Profile, weights: Weights, layer: int, source: int, to: int
) -> FloatArray:
    """Expected loss of a layer's best action under each of `WEIGHTS`, [len(WEIGHTS)]."""
    losses = np.zeros(len(WEIGHTS))
    share = profile.pattern_share[layer] / len(IMPORTANCE_DECILES)
    row_share = np.tile(share, len(IMPORTANCE_DECILES))
    for steady in range(space.class_count):
        tokens = typical_tokens(profile, layer, steady)
        ends = np.full(row_share.size, source), np.full(row_share.size, to)
        actions = space.enumerate(layer, as_batch(**tokens, source=ends[0], destination=ends[1]))
        weight = row_share * (profile.class_share[layer, steady] if space.class_count > 1 else 1.0)
        for index, loss_weight in enumerate(WEIGHTS):
            priced = replace(weights, loss_weight=float(loss_weight))
            best = priced.step_cost(actions.delay_s, actions.loss).argmin(1)
            losses[index] += weight @ actions.loss[np.arange(best.size), best]
    return losses
