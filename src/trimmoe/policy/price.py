"""The price of quality at which a policy's expected loss just meets its budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.cost.actions import ActionSpace
from trimmoe.cost.expected import destinations
from trimmoe.cost.lookahead import IMPORTANCE_DECILES, Weights, typical_tokens

WEIGHTS = tuple(1.0 / (1.0 + np.exp(-odds)) for odds in np.arange(-2.9, 2.91, 0.2))
"""Loss weights that are tried, evenly spaced in the logarithm of the price."""


def meeting_weights(
    space: ActionSpace,
    profile: Profile,
    weights: Weights,
    routes: IntArray,
    *,
    exits: bool,
    target: float,
) -> tuple[float, ...]:
    """For every route the least of `WEIGHTS` at which typical tokens lose at most `target` of the
    budget; the greatest if none will do.

    On a route a layer's action does not move the token, so with quality at a price every layer
    takes its own best action; `exits`: whether later layers count by the share of tokens that
    reach them. `routes` [R, N].
    """
    alive = profile.active if exits else np.ones(profile.layer_count)
    following = destinations(routes)
    done: dict[tuple[int, int, int], FloatArray] = {}
    found = []
    for route, after in zip(routes.tolist(), following.tolist(), strict=True):
        lost = np.zeros(len(WEIGHTS))
        for key in zip(range(profile.layer_count), route, after, strict=True):
            if key not in done:
                done[key] = _layer_losses(space, profile, weights, *key)
            lost += alive[key[0]] * done[key]
        enough = np.flatnonzero(lost <= target * weights.budget)
        found.append(float(WEIGHTS[enough[0] if enough.size else -1]))
    return tuple(found)


def own_weight(loss_weight: FloatArray, reference_s: FloatArray, shared_s: float) -> FloatArray:
    """omega_D with which a user whose exact layers take `reference_s`, [n], decides under (31) over
    the `shared_s` of all what it would with `loss_weight` [n] over its own.

    Both terms count alike if omega_D / omega_T is `reference_s / shared_s` times what it was.
    """
    lost = loss_weight * reference_s
    return lost / (lost + (1.0 - loss_weight) * shared_s)


def _layer_losses(
    space: ActionSpace, profile: Profile, weights: Weights, layer: int, source: int, to: int
) -> FloatArray:
    """Expected loss of a layer's best action under each of `WEIGHTS`, [len(WEIGHTS)]."""
    losses = np.zeros(len(WEIGHTS))
    share = profile.pattern_share[layer] / len(IMPORTANCE_DECILES)
    row_share = np.tile(share, len(IMPORTANCE_DECILES))
    for steady in range(space.class_count):
        tokens = typical_tokens(profile, layer, steady)
        actions = space.candidates(layer, source, to, **tokens)
        # A token has its budget here, whatever it saved before.
        pointless = actions.pointless(np.full(row_share.size, weights.budget))
        delay_s = np.where(pointless, np.inf, actions.delay_s)
        weight = row_share * (profile.class_share[layer, steady] if space.class_count > 1 else 1.0)
        for index, loss_weight in enumerate(WEIGHTS):
            priced = replace(weights, loss_weight=float(loss_weight))
            best = priced.step_cost(delay_s, actions.loss).argmin(1)
            losses[index] += weight @ actions.loss[np.arange(best.size), best]
    return losses
