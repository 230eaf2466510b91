"""The generator's parameters of a real trace and profile."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from trimmoe.core.loss_curves import LossCurves
from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.core.trace import Trace
from trimmoe.simulator.echo_law import factor_line, own_flips
from trimmoe.simulator.generate import Parameters

_TINY = 1e-9


def fit_parameters(trace: Trace, profile: Profile, *, exit_confidence: float = 0.9) -> Parameters:
    """Estimate the parameters that generate traces like this one.

    Moments and regressions, each over all layers: a summary, not a likelihood. `exit_confidence` is
    the threshold at which tokens of the trace are taken to exit.
    """
    upper, mean, classes = profile.skip.upper, profile.skip.mean, profile.class_count
    known = mean > _TINY
    importance = trace.importance.astype(np.float64)
    dense_echo, frozen_echo = profile.exit_echo
    skip_flip, power, ratio = _flip_law(profile.skip)
    drop_flip, _, _ = _flip_law(profile.drop)
    excess = float(np.median((upper / np.maximum(mean, _TINY))[known])) if known.any() else 1.0
    return Parameters(
        skew=_skew(trace.experts[:, :, 0], profile.expert_count),
        affinity=_affinity(trace.experts[:, :, 0], profile.expert_count),
        importance=_line(importance.mean(axis=0)),
        importance_concentration=_concentration(importance),
        slot_evenness=_evenness(trace.masses.astype(np.float64)),
        classes=classes,
        class_persistence=_persistence(trace.steadiness, profile.class_share),
        exit_hazard=_hazard_line(trace, exit_confidence),
        exit_confidence=exit_confidence,
        exit_foresight=_foresight(trace, exit_confidence),
        exit_error=_exit_error(profile),
        skip_flip=skip_flip,
        drop_flip=drop_flip,
        flip_power=power,
        class_ratio=ratio,
        substitution_flip=_substitution_flip(profile, excess),
        feasible_similarity=_feasible_similarity(profile),
        bound_excess=excess,
        change_echo=_change_echo(profile, excess),
        dense_exit_echo=float(dense_echo),
        frozen_exit_echo=float(frozen_echo),
        home_agreement=_home_agreement(trace),
    )


def _skew(first: IntArray, experts: int) -> float:
    """Zipf exponent by least squares of log share over log rank, weighted by the shares."""
    counts = [-np.sort(-np.bincount(column, minlength=experts)) for column in first.T]
    share = np.mean(counts, axis=0) / first.shape[0]
    seen = share > 0
    rank, weight = np.log(np.arange(1, experts + 1)[seen]), np.sqrt(share[seen])
    if rank.size < 2:
        return 0.0
    return max(-float(np.polyfit(rank, np.log(share[seen]), 1, w=weight)[0]), 0.0)


def _affinity(first: IntArray, experts: int) -> float:
    """How many more tokens follow the best one-to-one map of experts than would by chance."""
    found = []
    for here, there in zip(first.T[:-1], first.T[1:], strict=True):
        joint = np.bincount(here * experts + there, minlength=experts**2) / here.size
        joint = joint.reshape(experts, experts)
        chance = np.outer(joint.sum(axis=1), joint.sum(axis=0))
        pairs = linear_sum_assignment(joint - chance, maximize=True)
        expected = chance[pairs].sum()
        found.append((joint[pairs].sum() - expected) / max(1.0 - expected, _TINY))
    return float(np.clip(np.mean(found), 0.0, 0.999)) if found else 0.0


def _line(values: FloatArray, weight: FloatArray | None = None) -> tuple[float, float]:
    """The values at both ends of the least squares line through [N]."""
    if values.size < 2:
        return float(values[0]), float(values[0])
    slope, start = np.polyfit(np.arange(values.size), values, 1, w=weight)
    return float(start), float(start + slope * (values.size - 1))


def _concentration(importance: FloatArray) -> float:
    mean, spread = importance.mean(axis=0), importance.var(axis=0)
    each = mean * (1.0 - mean) / np.maximum(spread, _TINY) - 1.0
    return float(np.clip(np.median(each), 0.1, 1e6))


def _evenness(masses: FloatArray) -> float:
    """Concentration of a symmetric Dirichlet, from the mean square of its parts: (a + 1)/(k a + 1)
    over k."""
    slots = masses.shape[2]
    if slots == 1:
        return Parameters().slot_evenness
    parts = masses / np.maximum(masses.sum(axis=2, keepdims=True), _TINY)
    square = float((parts**2).sum(axis=2).mean())
    return float(np.clip((1.0 - square) / max(slots * square - 1.0, _TINY), 0.05, 1e4))


def _persistence(steadiness: IntArray, share: FloatArray) -> float:
    same = (steadiness[:, 1:] == steadiness[:, :-1]).mean() if steadiness.shape[1] > 1 else 0.0
    chance = float((share**2).sum(axis=1).mean())
    return float(np.clip((same - chance) / max(1.0 - chance, _TINY), 0.0, 1.0))


def _exit_layers(trace: Trace, needed: float) -> IntArray:
    """The first layer at which each token is confident enough, N if none, 1..N."""
    sure = trace.confidence >= needed
    sure[:, -1] = True
    return sure.argmax(axis=1) + 1


def _hazard_line(trace: Trace, needed: float) -> tuple[float, float]:
    layers, exit_layer = trace.layer_count, _exit_layers(trace, needed)
    leaving = np.bincount(exit_layer, minlength=layers + 1)[1:layers]
    alive = exit_layer.size - np.concatenate([[0], np.cumsum(leaving)[:-1]])
    if layers < 3:
        return 0.0, 0.0
    hazard = leaving / np.maximum(alive, 1)
    slope, start = np.polyfit(np.arange(layers - 1), hazard, 1, w=np.sqrt(np.maximum(alive, 1)))
    ends = np.clip([start, start + slope * (layers - 1)], 0.0, 1.0)
    return float(ends[0]), float(ends[1])


def _foresight(trace: Trace, needed: float) -> float:
    exit_layer = _exit_layers(trace, needed)
    right = (trace.exit_at == exit_layer[:, None]).mean()
    share = np.bincount(exit_layer) / exit_layer.size
    chance = float((share**2).sum())
    return float(np.clip((right - chance) / max(1.0 - chance, _TINY), 0.0, 1.0))


def _exit_error(profile: Profile) -> float:
    """Slope of the bound of exits' own flips over the doubt that remains, 1 - p."""
    doubt = 1.0 - profile.exit_grid
    return float((profile.exit_error_upper * doubt).sum() / max((doubt**2).sum(), _TINY))


def _flip_law(curves: LossCurves) -> tuple[float, float, float]:
    """Rate at mass 1 of the least steady class, power of the mass, ratio between classes: least
    squares of the logarithms."""
    classes = np.broadcast_to(np.arange(curves.mean.shape[1])[None, :, None], curves.mean.shape)
    known = (curves.mean > _TINY) & (curves.edges > _TINY) & (curves.mean < 1.0)
    if known.sum() < 3:
        return 0.0, 1.0, 1.0
    columns = [np.ones(int(known.sum())), np.log(curves.edges[known]), classes[known]]
    weight = np.sqrt(curves.samples[known])
    design = np.stack(columns, axis=1) * weight[:, None]
    found, *_ = np.linalg.lstsq(design, np.log(curves.mean[known]) * weight, rcond=None)
    at_one, power, ratio = found
    return float(min(np.exp(at_one), 1.0)), float(max(power, 0.0)), float(min(np.exp(ratio), 1.0))


def _substitution_flip(profile: Profile, excess: float) -> float:
    """Slope of the mean loss of the least steady class over the distance (1 - Sim)/2."""
    loss = profile.slots_alike(profile.substitution_loss)[:, 0, 0]
    distance = (1.0 - profile.similarity) / 2.0
    apart = distance > _TINY
    slope = (loss[apart] * distance[apart]).sum() / max((distance[apart] ** 2).sum(), _TINY)
    return float(np.clip(slope / max(excess, _TINY), 0.0, 1.0))


def _feasible_similarity(profile: Profile) -> float:
    experts = profile.expert_count
    others = profile.feasible & ~np.eye(experts, dtype=bool)
    return float(profile.similarity[others].min()) if others.any() else 1.0


def _change_echo(profile: Profile, excess: float) -> tuple[float, float]:
    """Echoes over the changes' own flips, at both ends of the depth."""
    own = own_flips(profile, max(excess, _TINY))
    with np.errstate(divide="ignore", invalid="ignore"):  # What flips nothing itself has no ratio.
        return factor_line(profile.change_echo / own)


def _home_agreement(trace: Trace) -> float:
    if trace.home_wrong is None:
        return Parameters().home_agreement
    return 1.0 - float(trace.home_wrong.mean())
