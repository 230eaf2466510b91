"""What it costs that copies in few bits stand in for experts, rung by rung.

A copy is off by a little noise, and what noise flips are predictions that were next to a tie: the
more slots of a text run copies, the less one more of them flips. Singly forced slots, added up, are
many times what they flip together. So copies are counted as policies have them run: in half of all
slots of whole texts, of some tokens in those of much mass, of the others in those of little. What
flips, of a token itself and of those behind it, is divided by the slots that ran copies. The same
in one band of layers after another says how layers share it. Where a policy runs fewer of them than
that, `trimmoe tune` finds by how much more they flip than they are charged.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.curves import clopper_pearson_lower, clopper_pearson_upper, falling
from trimmoe.calibrate.head import Referee
from trimmoe.calibrate.record import Advance, Recording
from trimmoe.calibrate.sampling import KEEP, Classes, forced
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.sweep import Known, Sweep, Visit
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.core.loss_curves import LossCurves, Rung
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.stand_ins import ASCENDING, numbered
from trimmoe.models.base import MoEView

_BANDS = 3
"""Of layers."""
_LOW, _HIGH = range(2)
"""Which slots of a token run copies: those of no more mass than half of the layer's have, or the
others; half of the tokens each."""


def measures_rungs(view: MoEView, settings: CalibrationSettings) -> bool:
    """Whether there is anything to measure."""
    nothing = np.zeros((view.spec.layer_count, view.spec.expert_count), dtype=np.int64)
    return settings.rung_tokens > 0 and view.have_copies(nothing)


def rung_steps(recording: Recording, settings: CalibrationSettings) -> int:
    """Of how many steps `measure_rungs` tells."""
    layers, tokens = recording.layer_count, _windows(recording, settings).tokens
    return len(ASCENDING) * (1 + len(_bands(layers))) * tokens * layers


def measure_rungs(
    view: MoEView,
    recording: Recording,
    classes: Classes,
    settings: CalibrationSettings,
    advance: Advance,
) -> tuple[Rung, ...]:
    """The losses of every rung. Meanwhile there are copies of all experts in it."""
    layers = recording.layer_count
    shape = layers, view.spec.expert_count
    edges = np.ones((layers, 2))
    edges[:, _LOW] = np.median(recording.masses, axis=(1, 2))
    found = []
    for bits in ASCENDING:
        view.have_copies(np.full(shape, bits))
        number = numbered(np.full(shape, bits))
        whole, *bands = [
            _counted(view, recording, _Trial.of(recording, band, edges, number, settings), advance)
            for band in (np.arange(layers), *_bands(layers))
        ]
        view.drop_copies()
        share = _by_layer(bands, layers)
        found.append(_rung(bits, edges, share, *whole.by(classes), settings.ucb_confidence))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """Copies that run in a band of layers."""

    windows: Windows
    band: IntArray
    run: IntArray
    """Which slots of each token run copies, [T]."""
    edge: FloatArray
    """Of low mass, by layer, [N]."""
    number: IntArray
    """Of every expert's copy, [N, E]."""

    @staticmethod
    def of(
        recording: Recording,
        band: IntArray,
        edges: FloatArray,
        number: IntArray,
        settings: CalibrationSettings,
    ) -> _Trial:
        windows = _windows(recording, settings)
        rng = np.random.default_rng([settings.seed, 7])
        run = rng.integers(2, size=windows.tokens)
        return _Trial(windows=windows, band=band, run=run, edge=edges[:, _LOW], number=number)

    def slots(self, layer: int, span: slice, experts: IntArray, masses: FloatArray) -> IntArray:
        """What the slots of some tokens [n, k] run, as in `sampling.Changes`."""
        if layer not in self.band:
            return np.full(experts.shape, KEEP)
        is_low = masses <= self.edge[layer]
        copied = is_low == (self.run[span, None] == _LOW)
        return np.where(copied, self.number[layer][experts], KEEP)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counts:
    """What became of the tokens of a trial."""

    trial: _Trial
    flipped: BoolArray
    """[T]."""
    ran: IntArray
    """Copies that ran, [T]."""

    def by(self, classes: Classes) -> tuple[IntArray, IntArray]:
        """Tokens flipped, and copies that ran, by class in the middle of the layers and by mass of
        the slots, [B, 2] each."""
        band = self.trial.band
        class_of = classes.class_of[band[band.size // 2], : self.ran.size]
        flipped, ran = np.zeros((2, classes.count, 2), dtype=np.int64)
        for steady, which in product(range(classes.count), (_LOW, _HIGH)):
            those = (class_of == steady) & (self.trial.run == which)
            flipped[steady, which] = self.flipped[those].sum()
            ran[steady, which] = self.ran[those].sum()
        return flipped, ran


@torch.inference_mode()
def _counted(view: MoEView, recording: Recording, trial: _Trial, advance: Advance) -> _Counts:
    """Take whole windows through the layers, from the band's first on: before it they are as
    recorded."""
    ran = np.zeros(trial.windows.tokens, dtype=np.int64)
    flipped = np.zeros(trial.windows.tokens, dtype=bool)
    referee, expected = Referee(view), recording.predictions
    sweep = Sweep(view, trial.windows, folder=recording.folder, known=_known(recording, trial))

    def visited(visit: Visit) -> int:
        after, copies = _passed(view, visit, trial)
        ran[visit.span] += copies
        sweep.leave(visit, after)
        if visit.is_last:
            states = sweep.tail(visit, after)
            flipped[visit.span] = ~referee.agrees(states, expected[visit.span])
        return len(after)

    for tokens in sweep.results(visited):
        advance(tokens)
    advance(int(trial.band[0]) * trial.windows.tokens)
    return _Counts(trial=trial, flipped=flipped, ran=ran)


def _known(recording: Recording, trial: _Trial) -> Known:
    own = np.arange(trial.windows.count)
    first = np.full(own.size, trial.band[0])
    return Known(hidden=recording.hidden, windows=own, first=first, last=first)


def _passed(view: MoEView, visit: Visit, trial: _Trial) -> tuple[Tensor, IntArray]:
    """States after the layer, [n, d], and how many copies ran of each token, [n]."""
    layer = visit.layer
    routing = view.route(layer, visit.attended, groups=visit.groups)
    masses = routing.probabilities.gather(1, routing.experts).numpy()
    slots = trial.slots(layer, visit.span, routing.experts.numpy(), masses)
    experts = forced(routing.experts, torch.from_numpy(slots))
    after = run_layer(view, layer, visit.attended, routing, experts)
    return after, (slots != KEEP).sum(1)


def _by_layer(bands: list[_Counts], layers: int) -> FloatArray:
    """What a copy flips in each layer over what one flips on average, [N]."""
    rate = np.zeros(layers)
    for band in bands:
        # One more, so that a band that flips nothing is not free.
        rate[band.trial.band] = (band.flipped.sum() + 1) / max(int(band.ran.sum()), 1)
    return rate / rate.mean()


def _rung(
    bits: int,
    edges: FloatArray,
    share: FloatArray,
    flips: IntArray,
    slots: IntArray,
    confidence: float,
) -> Rung:
    """Rates of flips by slot, of counts [B, 2] of all layers together."""
    bound = bounded(flips, slots, confidence)
    rate = np.where(slots > 0, flips / np.maximum(slots, 1), bound)
    mean = np.minimum(np.maximum.accumulate(rate, axis=1), bound)
    scale = share[:, None, None]
    curves = LossCurves(
        edges=np.repeat(edges[:, None], len(slots), axis=1),
        mean=np.minimum(mean * scale, 1.0),
        upper=np.minimum(bound * scale, 1.0),
        samples=np.repeat(slots[None] // len(edges), len(edges), axis=0),
    )
    return Rung(bits=bits, curves=curves)


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
