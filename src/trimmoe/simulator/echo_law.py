"""How many later predictions a change flips, beside how often it flips its own.

Both are one perturbation at work: on the token's own prediction through the state that goes on, on
later ones through the keys and values that it leaves. A model that is easily moved is so in both,
which is why the generator keeps their ratio and not a count. It falls with depth, since a change
moves the keys and values of the layers behind it only. That a token is steady spares its own
prediction and not those of later tokens, so the flip rate compared with is that of all classes.

An exit is another matter: it is taken by tokens whose own prediction is nearly certain, so its own
flip rate says nothing of what it leaves. Its echo is a count.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.loss_curves import LossCurves
from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray

_DROPPED = 0.5
"""Of the importance: what a typical drop takes away, where a skip takes all."""


def own_flips(profile: Profile, bound_excess: float) -> FloatArray:
    """Mean flip rate of a typical skip, drop and substitute itself, by layer and `CHANGES`, [N, 3].

    Typical is the median importance of the layer and the mean feasible substitute. Substitutes are
    known by their bounds only, which are `bound_excess` times the mean.
    """
    quantiles = profile.importance_quantiles
    middle = quantiles[:, quantiles.shape[1] // 2]
    return np.stack(
        [
            _pooled_at(profile, profile.skip, middle),
            _pooled_at(profile, profile.drop, _DROPPED * middle),
            _substitutes(profile) / bound_excess,
        ],
        axis=1,
    )


def by_factor(ends: tuple[float, float], layers: int) -> FloatArray:
    """What changes by the same factor from layer to layer, or nothing at all, [N]."""
    return np.zeros(layers) if ends == (0.0, 0.0) else np.geomspace(*ends, layers)


def factor_line(values: FloatArray) -> tuple[float, float]:
    """The ends of the `by_factor` nearest to [N, K], least squares of the logarithms; entries that
    are zero or not finite are not looked at."""
    known = np.isfinite(values) & (values > 0)
    if not known.any():
        return 0.0, 0.0
    depth = np.broadcast_to(np.arange(values.shape[0])[:, None], values.shape)[known]
    logs = np.log(values[known])
    if np.ptp(depth) == 0:
        mean = float(np.exp(logs.mean()))
        return mean, mean
    slope, start = np.polyfit(depth, logs, 1)
    return float(np.exp(start)), float(np.exp(start + slope * (values.shape[0] - 1)))


def _pooled_at(profile: Profile, curves: LossCurves, mass: FloatArray) -> FloatArray:
    """Mean flip rate of all classes at a mass per layer, [N]."""
    pooled = curves.pooled(profile.class_share)
    edges, mean = pooled.edges[:, 0], pooled.mean[:, 0]
    at = np.minimum((edges < mass[:, None]).sum(axis=1), edges.shape[1] - 1)
    return mean[np.arange(at.size), at]


def _substitutes(profile: Profile) -> FloatArray:
    """Bound of the loss of feasible substitutes in any slot, all classes, [N]; 0 without any."""
    alike = profile.slots_alike(profile.substitution_loss)[:, :, 0]
    pooled = (profile.class_share[:, :, None, None] * alike).sum(axis=1)
    other = profile.feasible & ~np.eye(profile.expert_count, dtype=bool)
    return (pooled * other).sum(axis=(1, 2)) / np.maximum(other.sum(axis=(1, 2)), 1)
