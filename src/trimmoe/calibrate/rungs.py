"""What it costs that copies in few bits stand in for experts, rung by rung.

A slot that runs its expert's copy is forced on single slots of tokens, as other changes are, and
what flips is told by layer, steadiness class and the slot's mass. What such slots flip of later
tokens is little each, so that many are forced at once and what flips behind them is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.curves import (
    around,
    bin_of,
    clopper_pearson_lower,
    clopper_pearson_upper,
    falling,
    isotonic_rates,
    quantile_edges,
)
from trimmoe.calibrate.echoes import poisson_upper
from trimmoe.calibrate.head import Referee
from trimmoe.calibrate.record import Advance, Recording
from trimmoe.calibrate.sampling import KEEP, Changes, Classes, forced, join
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.sweep import Sweep
from trimmoe.calibrate.whatif import flips
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.core.profile import LossCurves, Rung
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.stand_ins import RUNGS, numbered
from trimmoe.models.base import MoEView

NEIGHBOURS = 3
"""Layers on either side that a layer's losses are estimated with: they are low, and what bounds a
low rate is the number of samples."""
_BINS = 4
"""Of the mass of a slot."""
_BANDS = 4
"""Of layers, in which echoes are counted apart."""
_ECHO_SHARE = 0.25
"""Tokens that run copies while echoes are counted, a slot of theirs in every layer of a band: about
as many slots as a budget buys."""
_ECHO_TOKENS = 6144


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """Single slots of tokens that are forced to run copies."""

    changes: Changes
    mass: FloatArray
    """Of each such slot, [S]."""


def measures_rungs(view: MoEView, settings: CalibrationSettings) -> bool:
    """Whether there is anything to measure."""
    return view.runs_copies and settings.rung_samples > 0


def rung_steps(recording: Recording, settings: CalibrationSettings) -> int:
    """Of how many steps `measure_rungs` tells at most."""
    layers = recording.layer_count
    bands = len(_bands(layers))
    echoes = bands * _echo_windows(recording).count * recording.windows.length
    samples = settings.rung_samples + 2 * _BINS
    return len(RUNGS) * layers * (samples * layers + echoes)


def measure_rungs(
    view: MoEView,
    recording: Recording,
    classes: Classes,
    settings: CalibrationSettings,
    advance: Advance,
) -> tuple[Rung, ...]:
    """The losses of every rung. Copies of all loaded experts are made, and stay."""
    apart = Classes(class_of=classes.class_of, count=classes.count, apart=2 * NEIGHBOURS + 1)
    edges = np.stack([quantile_edges(row.reshape(-1), _BINS) for row in recording.masses])
    found = []
    for bits in RUNGS:
        shape = recording.layer_count, view.spec.expert_count
        view.have_copies(np.full(shape, bits))
        trial = _single_slots(recording, apart, edges, bits, view.spec.expert_count, settings)
        flipped, measured = flips(
            view,
            recording.windows,
            trial.changes,
            recording.predictions[trial.changes.token],
            advance=advance,
            folder=recording.folder,
        )
        kept = trial.changes.take(measured)
        cells = kept.layer, apart.of(kept), trial.mass[measured]
        curves = _curves(edges, cells, flipped[measured], classes.count, settings.ucb_confidence)
        echo = _echoes(view, recording, bits, settings, advance)
        found.append(Rung(bits=bits, curves=curves, echo=echo))
    return tuple(found)


def _numbers(bits: int, layers: int, experts: int) -> IntArray:
    return numbered(np.full((layers, experts), bits))


def _single_slots(
    recording: Recording,
    classes: Classes,
    edges: FloatArray,
    bits: int,
    experts: int,
    settings: CalibrationSettings,
) -> _Trial:
    """A random slot each of tokens of every class, by its mass."""
    layers, tokens, top_k = recording.activated.shape
    number, one = _numbers(bits, layers, experts), np.arange(tokens)
    parts, masses = [], []
    for layer in range(layers):
        rng = np.random.default_rng([settings.seed, 7, bits, layer])
        slot = rng.integers(top_k, size=tokens)
        mass = recording.masses[layer][one, slot].astype(np.float64)
        bins = bin_of(edges[layer], mass)
        token = classes.draw(layer, bins, _BINS, settings.rung_samples, rng)
        slots = np.full((token.size, top_k), KEEP)
        target = recording.activated[layer][token, slot[token]]
        slots[np.arange(token.size), slot[token]] = number[layer][target]
        where = np.full(token.size, layer, dtype=np.int64)
        parts.append(Changes(token=token, layer=where, slots=slots))
        masses.append(mass[token])
    return _Trial(changes=join(parts), mass=np.concatenate(masses))


def _curves(
    edges: FloatArray,
    cells: tuple[IntArray, IntArray, FloatArray],
    flipped: BoolArray,
    classes: int,
    confidence: float,
) -> LossCurves:
    """Curves of what flipped [S], measured of slots in `cells`: layer, class and mass, [S] each."""
    layers, bins = edges.shape
    flips_of, samples = np.zeros((2, layers, classes, bins), dtype=np.int64)
    for layer in range(layers):
        here = cells[0] == layer
        at = cells[1][here], bin_of(edges[layer], cells[2][here])
        np.add.at(samples[layer], at, 1)
        np.add.at(flips_of[layer], at, flipped[here].astype(np.int64))
    flips_of, samples = around(flips_of, NEIGHBOURS), around(samples, NEIGHBOURS)
    mean, upper = np.ones(samples.shape), np.ones(samples.shape)
    for layer in range(layers):
        for index in range(classes):
            mean[layer, index] = isotonic_rates(flips_of[layer, index], samples[layer, index])
        upper[layer] = bounded(flips_of[layer], samples[layer], confidence)
    return LossCurves(
        edges=np.repeat(edges[:, None], classes, axis=1),
        mean=mean,
        upper=np.maximum(upper, mean),
        samples=samples,
    )


def bounded(flips_of: IntArray, samples: IntArray, confidence: float) -> FloatArray:
    """Upper bounds of rates that fall with the class and rise with the bin, [B, G], of counts of
    that shape.

    A cell's rate is then at most the mean rate of all cells of its class or less steady ones and of
    its bin or later ones, and of part of them. The least bound of a few such parts is taken, each
    at a confidence that makes the least hold at `confidence`. Where a cell's own lower bound
    exceeds it, the data refute the order and its own upper bound stands.
    """
    parts = (False, False), (False, True), (True, False), (True, True)
    level = 1.0 - (1.0 - confidence) / len(parts)
    bounds = [
        clopper_pearson_upper(_pooled(flips_of, *part), _pooled(samples, *part), level)
        for part in parts
    ]
    upper = np.min(bounds, axis=0)
    own_lower = clopper_pearson_lower(flips_of, samples, confidence)
    own_upper = clopper_pearson_upper(flips_of, samples, confidence)
    upper = np.maximum.accumulate(np.where(own_lower > upper, own_upper, upper), axis=1)
    seen = samples.sum(axis=1, keepdims=True).cumsum(axis=0) > 0
    return falling(upper[None], seen[None, :, 0])[0]


def _pooled(counts: IntArray, classes: bool, bins: bool) -> IntArray:
    """Sums over the class and less steady ones, and over the bin and later ones, [B, G]."""
    if classes:
        counts = counts.cumsum(axis=0)
    return counts[:, ::-1].cumsum(axis=1)[:, ::-1] if bins else counts


def _bands(layers: int) -> list[IntArray]:
    return np.array_split(np.arange(layers), min(_BANDS, layers))


def _echo_windows(recording: Recording) -> Windows:
    windows = recording.windows
    return windows.part(0, max(_ECHO_TOKENS // windows.length, 1))


def _echoes(
    view: MoEView,
    recording: Recording,
    bits: int,
    settings: CalibrationSettings,
    advance: Advance,
) -> FloatArray:
    """Upper bound of the later predictions that one slot flips, [N]; never more in a later layer
    than in an earlier one."""
    layers = recording.layer_count
    echo = np.ones(layers)
    number = _numbers(bits, layers, view.spec.expert_count)
    for band in _bands(layers):
        rng = np.random.default_rng([settings.seed, 8, bits, int(band[0])])
        events, slots, counted = _behind(view, recording, band, number, rng, advance)
        if slots and counted:
            upper = float(poisson_upper(np.array(events), settings.ucb_confidence))
            # Of tokens that run copies themselves nobody can tell what flipped them.
            echo[band] = upper / slots / counted
    return np.minimum(np.maximum.accumulate(echo[::-1])[::-1], 1.0)


@torch.inference_mode()
def _behind(
    view: MoEView,
    recording: Recording,
    band: IntArray,
    number: IntArray,
    rng: np.random.Generator,
    advance: Advance,
) -> tuple[int, int, float]:
    """Predictions flipped of tokens that run no copies, slots of others that do, and the share of
    the tokens that the former are."""
    windows = _echo_windows(recording)
    touched = rng.random(windows.tokens) < _ECHO_SHARE
    top_k = recording.activated.shape[2]
    referee, events = Referee(view), 0
    expected = recording.predictions[: windows.tokens]
    sweep = Sweep(view, windows, folder=recording.folder)
    for visit in sweep.visits():
        layer, span = visit.layer, visit.span
        routing = view.route(layer, visit.attended, groups=visit.groups)
        experts = routing.experts
        if layer in band:
            rows = np.flatnonzero(touched[span])
            slots = _one_slot(experts[rows], number[layer], rng.integers(top_k, size=rows.size))
            experts = experts.clone()
            experts[rows] = slots
        after = run_layer(view, layer, visit.attended, routing, experts)
        sweep.leave(visit, after)
        if visit.is_last:
            others = np.flatnonzero(~touched[span])
            states = sweep.tail(visit, after)[torch.from_numpy(others)]
            events += int((~referee.agrees(states, expected[span][others])).sum())
        advance(len(after))
    return events, int(touched.sum()) * band.size, float((~touched).mean())


def _one_slot(experts: Tensor, number: IntArray, slot: IntArray) -> Tensor:
    """Activated sets [n, k] with the copy run in a `slot` [n] of each."""
    chosen = np.full(tuple(experts.shape), KEEP)
    one = np.arange(slot.size)
    chosen[one, slot] = number[experts.numpy()[one, slot]]
    return forced(experts, torch.from_numpy(chosen))
