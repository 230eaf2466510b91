"""What it costs that copies in few bits stand in for experts, rung by rung.

One slot that runs its expert's copy flips so little that forcing it on single tokens would take
hundreds of thousands of them to bound it anywhere near what it is. So it is done to many slots at
once, in one band of layers after another: some tokens run copies in the slots of much mass, some in
those of little, some in none. What flips of the former, by steadiness class, is what such slots
cost a token itself, and a bit more, since others around it run copies too; what flips of the latter
is what they cost others. Both are divided by the slots that ran copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.curves import clopper_pearson_lower, clopper_pearson_upper, falling
from trimmoe.calibrate.echoes import poisson_upper
from trimmoe.calibrate.head import Referee
from trimmoe.calibrate.record import Advance, Recording
from trimmoe.calibrate.sampling import KEEP, Classes, forced
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.sweep import Sweep, Visit
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.core.profile import LossCurves, Rung
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.stand_ins import RUNGS, numbered
from trimmoe.models.base import MoEView

_BANDS = 4
"""Of layers."""
_LOW, _HIGH, _NONE = range(3)
"""Which slots of a token run copies: those of no more mass than half of the layer's have, the
others, or none."""
_SHARES = (0.25, 0.25, 0.5)
"""Of the tokens."""


def measures_rungs(view: MoEView, settings: CalibrationSettings) -> bool:
    """Whether there is anything to measure."""
    return view.runs_copies and settings.rung_tokens > 0


def rung_steps(recording: Recording, settings: CalibrationSettings) -> int:
    """Of how many steps `measure_rungs` tells."""
    layers, tokens = recording.layer_count, _windows(recording, settings).tokens
    return len(RUNGS) * len(_bands(layers)) * tokens * layers


def measure_rungs(
    view: MoEView,
    recording: Recording,
    classes: Classes,
    settings: CalibrationSettings,
    advance: Advance,
) -> tuple[Rung, ...]:
    """The losses of every rung. Copies of all experts are made, and stay."""
    shape = recording.layer_count, view.spec.expert_count
    edges = np.ones((recording.layer_count, 2))
    edges[:, _LOW] = np.median(recording.masses, axis=(1, 2))
    found = []
    for bits in RUNGS:
        view.have_copies(np.full(shape, bits))
        number, parts = numbered(np.full(shape, bits)), []
        for band in _bands(recording.layer_count):
            trial = _Trial.of(recording, classes, band, edges, number, settings)
            parts.append(_counted(view, recording, trial, advance))
        found.append(_rung(bits, edges, parts, settings.ucb_confidence))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """Copies that run in a band of layers."""

    windows: Windows
    band: IntArray
    run: IntArray
    """Which slots of each token run copies, [T]."""
    class_of: IntArray
    """Its class in the first layer of the band, or less than 0, [T]."""
    class_count: int
    edge: FloatArray
    """Of low mass, by layer, [N]."""
    number: IntArray
    """Of every expert's copy, [N, E]."""

    @staticmethod
    def of(
        recording: Recording,
        classes: Classes,
        band: IntArray,
        edges: FloatArray,
        number: IntArray,
        settings: CalibrationSettings,
    ) -> _Trial:
        windows = _windows(recording, settings)
        rng = np.random.default_rng([settings.seed, 7, int(number.max()), int(band[0])])
        return _Trial(
            windows=windows,
            band=band,
            run=rng.choice(3, size=windows.tokens, p=_SHARES),
            class_of=classes.class_of[band[0], : windows.tokens],
            class_count=classes.count,
            edge=edges[:, _LOW],
            number=number,
        )

    def slots(self, layer: int, span: slice, experts: IntArray, masses: FloatArray) -> IntArray:
        """What the slots of some tokens [n, k] run, as in `sampling.Changes`."""
        if layer not in self.band:
            return np.full(experts.shape, KEEP)
        is_low = masses <= self.edge[layer]
        run = self.run[span, None]
        copied = np.where(run == _LOW, is_low, ~is_low) & (run != _NONE)
        return np.where(copied, self.number[layer][experts], KEEP)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counts:
    """What a trial came to."""

    band: IntArray
    flipped: IntArray
    """Tokens that ran copies, by class and mass of the slots, [B, 2]."""
    slots: IntArray
    """Copies that they ran, the same."""
    behind: int
    """Tokens flipped that ran none."""
    all_slots: int
    """Copies that ran, of tokens of no known class too."""
    share: float
    """Of the tokens that ran none."""


@torch.inference_mode()
def _counted(view: MoEView, recording: Recording, trial: _Trial, advance: Advance) -> _Counts:
    """Take whole windows through the layers."""
    ran = np.zeros(trial.windows.tokens, dtype=np.int64)
    flipped = np.zeros(trial.windows.tokens, dtype=bool)
    referee, expected = Referee(view), recording.predictions
    sweep = Sweep(view, trial.windows, folder=recording.folder)
    for visit in sweep.visits():
        after, copies = _passed(view, visit, trial)
        ran[visit.span] += copies
        sweep.leave(visit, after)
        if visit.is_last:
            states = sweep.tail(visit, after)
            flipped[visit.span] = ~referee.agrees(states, expected[visit.span])
        advance(len(after))
    shape = trial.class_count, 2
    counts, slots = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for steady, which in product(range(shape[0]), (_LOW, _HIGH)):
        those = (trial.class_of == steady) & (trial.run == which)
        counts[steady, which], slots[steady, which] = flipped[those].sum(), ran[those].sum()
    others = trial.run == _NONE
    return _Counts(
        band=trial.band,
        flipped=counts,
        slots=slots,
        behind=int(flipped[others].sum()),
        all_slots=int(ran.sum()),
        share=float(others.mean()),
    )


def _passed(view: MoEView, visit: Visit, trial: _Trial) -> tuple[Tensor, IntArray]:
    """States after the layer, [n, d], and how many copies ran of each token, [n]."""
    layer = visit.layer
    routing = view.route(layer, visit.attended, groups=visit.groups)
    masses = routing.probabilities.gather(1, routing.experts).numpy()
    slots = trial.slots(layer, visit.span, routing.experts.numpy(), masses)
    experts = forced(routing.experts, torch.from_numpy(slots))
    after = run_layer(view, layer, visit.attended, routing, experts)
    return after, (slots != KEEP).sum(1)


def _rung(bits: int, edges: FloatArray, parts: list[_Counts], confidence: float) -> Rung:
    """Rates of flips by slot, the same in all layers of a band."""
    layers, shape = edges.shape[0], (edges.shape[0], *parts[0].slots.shape)
    mean, upper, echo = np.ones(shape), np.ones(shape), np.ones(layers)
    samples = np.zeros(shape, dtype=np.int64)
    for part in parts:
        bound = bounded(part.flipped, part.slots, confidence)
        rate = part.flipped / np.maximum(part.slots, 1)
        rate = np.where(part.slots > 0, rate, bound)
        mean[part.band] = np.minimum(np.maximum.accumulate(rate, axis=1), bound)
        upper[part.band], samples[part.band] = bound, part.slots
        if part.all_slots and part.share:
            later = float(poisson_upper(np.array(part.behind), confidence))
            echo[part.band] = later / part.all_slots / part.share
    curves = LossCurves(
        edges=np.repeat(edges[:, None], shape[1], axis=1), mean=mean, upper=upper, samples=samples
    )
    # What a layer leaves is read by fewer layers the later it is.
    falling_echo = np.maximum.accumulate(echo[::-1])[::-1]
    return Rung(bits=bits, curves=curves, echo=np.minimum(falling_echo, 1.0))


def bounded(flips: IntArray, slots: IntArray, confidence: float) -> FloatArray:
    """Upper bounds of rates that fall with the class and rise with the bin, [B, G], of counts of
    that shape.

    A cell's rate is then at most the mean rate of all cells of its class or less steady ones and of
    its bin or later ones, and of part of them. The least bound of a few such parts is taken, each
    at a confidence that makes the least hold at `confidence`. Where a cell's own lower bound
    exceeds it, the data refute the order and its own upper bound stands.
    """
    parts = list(product((False, True), repeat=2))
    level = 1.0 - (1.0 - confidence) / len(parts)
    flips = np.minimum(flips, slots)
    bounds = [
        clopper_pearson_upper(_pooled(flips, *part), _pooled(slots, *part), level) for part in parts
    ]
    upper = np.min(bounds, axis=0)
    own_lower = clopper_pearson_lower(flips, slots, confidence)
    own_upper = clopper_pearson_upper(flips, slots, confidence)
    upper = np.maximum.accumulate(np.where(own_lower > upper, own_upper, upper), axis=1)
    seen: BoolArray = slots.sum(axis=1).cumsum() > 0
    return falling(upper[None], seen[None])[0]


def _pooled(counts: IntArray, classes: bool, bins: bool) -> IntArray:
    """Sums over the class and less steady ones, and over the bin and later ones, [B, G]."""
    if classes:
        counts = counts.cumsum(axis=0)
    return counts[:, ::-1].cumsum(axis=1)[:, ::-1] if bins else counts


def _bands(layers: int) -> list[IntArray]:
    return np.array_split(np.arange(layers), min(_BANDS, layers))


def _windows(recording: Recording, settings: CalibrationSettings) -> Windows:
    windows = recording.windows
    return windows.part(0, max(settings.rung_tokens // windows.length, 1))
