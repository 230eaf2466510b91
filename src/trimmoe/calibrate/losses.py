"""What skips, drops and substitutions cost, measured by what-ifs (eq. 3, 5)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from trimmoe.calibrate import sampling, substitution
from trimmoe.calibrate.curves import Measured, loss_curves, monotony, quantile_edges
from trimmoe.calibrate.record import Advance, Recording
from trimmoe.calibrate.sampling import Changes, Classes
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.whatif import flips
from trimmoe.core.loss_curves import LossCurves
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.models.base import MoEView

_CONTROL_SAMPLES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiments:
    """Every what-if of a calibration, by kind, before it is run."""

    skips: Changes
    skip_mass: FloatArray
    skip_edges: FloatArray
    drops: Changes
    drop_mass: FloatArray
    drop_edges: FloatArray
    substitutions: Changes
    controls: Changes
    classes: Classes
    similarity: FloatArray
    feasible: BoolArray
    pair_bin: IntArray

    @property
    def parts(self) -> tuple[Changes, ...]:
        return self.skips, self.drops, self.substitutions, self.controls

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """The loss fields of a Profile, same names, shapes and meaning."""

    skip: LossCurves
    drop: LossCurves
    similarity: FloatArray
    substitution_loss: FloatArray
    substitution_mean: FloatArray
    substitution_samples: IntArray
    feasible: BoolArray
    report: dict[str, Any]
    """What the header says about the measurements."""


def plan_experiments(
    recording: Recording, classes: Classes, settings: CalibrationSettings
) -> Experiments:
    """Draw the what-ifs of all kinds."""
    top_k, bins, seed = recording.activated.shape[2], settings.bins, settings.seed
    skip_edges = np.stack([quantile_edges(row, bins) for row in recording.importance])
    skips, skip_mass = sampling.skip_changes(
        recording.importance,
        skip_edges,
        classes,
        top_k=top_k,
        samples=settings.skip_samples,
        seed=seed,
    )
    drops, drop_mass, drop_edges = _plan_drops(recording, classes, settings)
    similarity = substitution.similarities(recording.logit_gram)
    feasible = substitution.feasible_sets(
        similarity, settings.substitution_quantile, settings.substitutes
    )
    pair_bin = substitution.pair_bins(similarity, feasible, bins)
    return Experiments(
        skips=skips,
        skip_mass=skip_mass,
        skip_edges=skip_edges,
        drops=drops,
        drop_mass=drop_mass,
        drop_edges=drop_edges,
        substitutions=sampling.substitution_changes(
            recording.activated,
            feasible,
            pair_bin,
            bins,
            classes,
            samples=settings.substitution_samples,
            seed=seed,
        ),
        controls=sampling.control_changes(classes, top_k, _CONTROL_SAMPLES, seed),
        classes=classes,
        similarity=similarity,
        feasible=feasible,
        pair_bin=pair_bin,
    )


def _plan_drops(
    recording: Recording, classes: Classes, settings: CalibrationSettings
) -> tuple[Changes, FloatArray, FloatArray]:
    """Random proper subsets of every token's slots, a stratified sample of them; none with one
    slot, where all or nothing is dropped."""
    layers, tokens, top_k = recording.activated.shape
    if top_k == 1:
        nothing = np.zeros(0, dtype=np.int64)
        none = Changes(token=nothing, layer=nothing, slots=np.zeros((0, 1), dtype=np.int64))
        return none, np.zeros(0), np.ones((layers, settings.bins))
    subsets, masses, edges = [], [], []
    for layer in range(layers):
        rng = np.random.default_rng([settings.seed, 2, layer])
        subsets.append(sampling.random_subsets(tokens, top_k, rng))
        masses.append((recording.masses[layer] * subsets[-1]).sum(axis=1).astype(np.float64))
        edges.append(quantile_edges(masses[-1], settings.bins))
    stacked = np.stack(edges)
    changes, mass = sampling.drop_changes(
        subsets, masses, stacked, classes, samples=settings.drop_samples, seed=settings.seed
    )
    return changes, mass, stacked


def measure_losses(
    view: MoEView,
    recording: Recording,
    experiments: Experiments,
    settings: CalibrationSettings,
    advance: Advance,
) -> Losses:
    """Run the what-ifs and fit curves and bounds to what flipped; `advance` is told of a step for
    each what-if and layer."""
    changes = sampling.join(experiments.parts)
    expected = recording.predictions[changes.token]
    flipped, measured = flips(
        view,
        recording.windows,
        changes,
        expected,
        advance=advance,
        folder=recording.folder,
        clean=recording.hidden,
    )
    bounds = np.cumsum([part.count for part in experiments.parts])[:-1]
    results = zip(np.split(flipped, bounds), np.split(measured, bounds), strict=True)
    (skip_flip, skip_ok), (drop_flip, drop_ok), (sub_flip, sub_ok), (noise, noise_ok) = results
    classes, level = experiments.classes, settings.ucb_confidence
    skips = _measured(experiments.skips, classes, experiments.skip_mass, skip_flip, skip_ok)
    drops = _measured(experiments.drops, classes, experiments.drop_mass, drop_flip, drop_ok)
    fit = partial(
        loss_curves,
        classes=classes.count,
        neighbours=settings.neighbour_layers,
        confidence=level,
    )
    skip = fit(experiments.skip_edges, skips)
    whole = recording.activated.shape[2] == 1
    counts = substitution.pair_counts(
        recording.activated,
        experiments.substitutions.take(sub_ok),
        sub_flip[sub_ok],
        view.spec.expert_count,
        classes,
    )
    losses = partial(
        substitution.substitution_losses,
        experiments.pair_bin,
        settings.bins,
        pair_samples=settings.pair_samples,
        neighbours=settings.neighbour_layers,
        confidence=level,
    )
    upper = substitution.by_rank(losses, counts)
    return Losses(
        skip=skip,
        drop=skip if whole else fit(experiments.drop_edges, drops),
        similarity=experiments.similarity,
        substitution_loss=upper,
        substitution_mean=substitution.mean_by_rank(
            experiments.pair_bin,
            settings.bins,
            counts,
            upper,
            pair_samples=settings.pair_samples,
        ),
        substitution_samples=counts[1],
        feasible=experiments.feasible,
        report={
            "samples": {
                "skip": int(skip_ok.sum()),
                "drop": int(drop_ok.sum()),
                "substitution": int(sub_ok.sum()),
            },
            # How often a what-if that changes nothing flips: rounding differs between batches.
            "control_flip_rate": float(noise[noise_ok].mean()) if noise_ok.any() else 0.0,
            "monotonicity": {
                "skip": monotony(experiments.skip_edges, skips),
                "drop": monotony(experiments.drop_edges, drops),
            },
        },
    )


def _measured(
    changes: Changes,
    classes: Classes,
    mass: FloatArray,
    flipped: BoolArray,
    measured: BoolArray,
) -> Measured:
    return Measured(
        layer=changes.layer[measured],
        steadiness=classes.of(changes)[measured],
        mass=mass[measured],
        flipped=flipped[measured],
    )
