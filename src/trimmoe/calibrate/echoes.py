"""What trimming a token costs the tokens that follow: they attend to the keys and values it left.

Its own prediction is blind to it: a token that exited, or ran other experts in one layer, may be
right and yet move what later tokens predict. Here it is really done, to few tokens at a time, and
what flips behind them is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from trimmoe.calibrate.exits import Exits, split_windows
from trimmoe.calibrate.hazard import exit_layers
from trimmoe.calibrate.head import Referee
from trimmoe.calibrate.losses import Experiments
from trimmoe.calibrate.record import Advance, Recording
from trimmoe.calibrate.sampling import KEEP, Changes, forced
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.sweep import Known, Sweep, Visit
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.core.exit_states import ECHOING_STATES, ExitState
from trimmoe.core.profile import CHANGES
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.models.base import MoEView

_TOKENS = 4096
"""Of the test split, that echoes of exits are counted on."""
_CHANGE_TOKENS = 1536
"""The same for each kind of change in each band of layers."""
_EXIT_SHARE = 0.03
"""Share of the tokens that leave while echoes are counted. Two exits flip fewer later tokens than
twice one does, so they must be few for the echo of one not to be flattered."""
_CHANGE_SHARE = 0.1
"""The same for changes, of which a budget of a percent or two buys more than of exits: what many
flip together levels off, and counted singly they would be charged several times what they do."""
_BANDS = 4
"""Of layers, in which changes are counted apart."""
_COMMON_RATE = 0.2
"""Exit rate of the laxer of the two thresholds at which echoes are counted."""
_EXITS = ((ExitState.DENSE, True), (ExitState.DENSE, False), (ExitState.FROZEN, True))
"""States that exits leave, and whether at the laxer threshold."""
_UNTOUCHED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Trimmed:
    """What is done to T tokens, those of whole windows: nothing to most of them."""

    exit_layer: IntArray
    """Layer (1..N) after which they leave, [T]."""
    frozen: BoolArray
    """Whether their state stands still from then on; otherwise it goes on without routed experts,
    [T]."""
    layer: IntArray
    """Layer in which they run other experts, or -1, [T]."""
    slots: IntArray
    """What they run there, as in `Changes`, [T, k]."""

    @staticmethod
    def nothing(tokens: int, *, layers: int, top_k: int) -> Trimmed:
        """All of them run to the end, unchanged."""
        return Trimmed(
            exit_layer=np.full(tokens, layers),
            frozen=np.zeros(tokens, dtype=bool),
            layer=np.full(tokens, _UNTOUCHED),
            slots=np.full((tokens, top_k), KEEP),
        )

    @staticmethod
    def joined(parts: list[Trimmed]) -> Trimmed:
        """One after the other."""
        names = Trimmed.__slots__
        return Trimmed(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})

    def touched(self, layers: int) -> BoolArray:
        """Tokens that anything is done to, [T]."""
        return (self.exit_layer < layers) | (self.layer != _UNTOUCHED)

    def start(self, layers: int) -> IntArray:
        """The first layer in which anything is done to each token, `layers` for none, [T]."""
        changed = np.where(self.layer == _UNTOUCHED, layers, self.layer)
        return np.minimum(self.exit_layer, changed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Echoes:
    """Upper bounds of the predictions of later tokens that one of each flips."""

    exits: FloatArray
    """By `ECHOING_STATES`, [2]."""
    changes: FloatArray
    """By layer and `CHANGES`, [N, 3]; never more in a later layer than in an earlier one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """What is done to some tokens, those of whole windows."""

    name: str
    tokens: IntArray
    """[T]."""
    trimmed: Trimmed
    layers: IntArray
    """It stands for changes in these layers; empty for exits."""


def measure_echoes(
    view: MoEView,
    recording: Recording,
    exits: Exits,
    experiments: Experiments,
    settings: CalibrationSettings,
    advance: Advance,
) -> Echoes:
    """Trim a few tokens of the test split in each way, all ways in one sweep.

    Tokens leave at the strictest threshold of the grid and at a lax one, where they leave
    elsewhere; the larger bound stands for all. A change moves less of what follows the later its
    layer is, so changes are made in one band of layers after another. Of what there is nothing to
    count nothing is known, and its bound is a whole flip.
    """
    leaving = _tokens(recording, settings, _TOKENS)
    changed = _tokens(recording, settings, _CHANGE_TOKENS)
    trials = [
        *_exits(recording, exits, settings, leaving),
        *_changes(recording, experiments, settings, changed),
    ]
    bounds = _bounds(view, recording, trials, settings, advance)
    found = list(zip(trials, bounds, strict=True))
    changes = np.ones((recording.layer_count, len(CHANGES)))
    for trial, bound in found:
        if trial.name in CHANGES:
            changes[trial.layers, CHANGES.index(trial.name)] = bound
    if recording.activated.shape[2] == 1:
        changes[:, CHANGES.index("drop")] = changes[:, CHANGES.index("skip")]
    by_state = [max(b for trial, b in found if trial.name == state) for state in ECHOING_STATES]
    falling = np.maximum.accumulate(changes[::-1])[::-1]
    return Echoes(exits=np.array(by_state), changes=falling)


def echo_steps(recording: Recording, settings: CalibrationSettings) -> int:
    """Of how many steps `measure_echoes` tells at most."""
    leaving = _tokens(recording, settings, _TOKENS).size
    changed = _tokens(recording, settings, _CHANGE_TOKENS).size
    ways = len(CHANGES) * len(_bands(recording.layer_count))
    return (len(_EXITS) * leaving + ways * changed) * recording.layer_count


def _bounds(
    view: MoEView,
    recording: Recording,
    trials: list[_Trial],
    settings: CalibrationSettings,
    advance: Advance,
) -> list[float]:
    """What one of each trial flips, at most."""
    layers, length = recording.layer_count, recording.windows.length
    counts = [int(trial.trimmed.touched(layers).sum()) for trial in trials]
    some = [trial for trial, count in zip(trials, counts, strict=True) if count]
    bounds = [1.0] * len(trials)
    if not some:
        return bounds
    windows = np.concatenate([trial.tokens[::length] for trial in some]) // length
    trimmed = Trimmed.joined([trial.trimmed for trial in some])
    start = trimmed.start(layers).reshape(-1, length).min(axis=1)
    flipped = flipped_behind(
        view,
        recording.windows.take(windows),
        trimmed,
        np.concatenate([recording.predictions[trial.tokens] for trial in some]),
        advance,
        folder=recording.folder,
        known=Known(hidden=recording.hidden, windows=windows, first=start, last=start),
    )
    ends = np.cumsum([trial.tokens.size for trial in some])[:-1]
    flips = iter(part.sum() for part in np.split(flipped, ends))
    for at, count in enumerate(counts):
        if count:
            upper = poisson_upper(np.array(next(flips)), settings.ucb_confidence)
            bounds[at] = float(upper) / count
    return bounds


def _tokens(recording: Recording, settings: CalibrationSettings, most: int) -> IntArray:
    """Whole windows of the test split."""
    length = recording.windows.length
    return split_windows(recording.windows, settings.seed).test[: max(most // length, 1) * length]


def _bands(layers: int) -> list[IntArray]:
    return np.array_split(np.arange(layers), min(_BANDS, layers))


def _exits(
    recording: Recording, exits: Exits, settings: CalibrationSettings, tokens: IntArray
) -> Iterator[_Trial]:
    layers, _, top_k = recording.activated.shape
    rng = np.random.default_rng([settings.seed, 5])
    nothing = Trimmed.nothing(tokens.size, layers=layers, top_k=top_k)
    lax = min(int(np.searchsorted(-exits.rate, -_COMMON_RATE)), exits.grid.size - 1)
    for state, is_lax in _EXITS:
        threshold = float(exits.grid[lax if is_lax else -1])
        reached = exit_layers(exits.score[:, tokens], threshold)
        leave = _thinned(reached, layers, rng)
        frozen = np.full(tokens.size, state is ExitState.FROZEN)
        trimmed = replace(nothing, exit_layer=leave, frozen=frozen)
        yield _Trial(name=state, tokens=tokens, trimmed=trimmed, layers=np.zeros(0, dtype=np.int64))


def _changes(
    recording: Recording,
    experiments: Experiments,
    settings: CalibrationSettings,
    tokens: IntArray,
) -> Iterator[_Trial]:
    layers, _, top_k = recording.activated.shape
    rng = np.random.default_rng([settings.seed, 6])
    nothing = Trimmed.nothing(tokens.size, layers=layers, top_k=top_k)
    for change, made in zip(CHANGES, _gentle(experiments), strict=True):
        for band in _bands(layers):
            few = _few(made.take(np.isin(made.layer, band)), tokens, rng)
            at = np.searchsorted(tokens, few.token)
            layer, slots = nothing.layer.copy(), nothing.slots.copy()
            layer[at], slots[at] = few.layer, few.slots
            trimmed = replace(nothing, layer=layer, slots=slots)
            yield _Trial(name=change, tokens=tokens, trimmed=trimmed, layers=band)


def _thinned(layer: IntArray, layers: int, rng: np.random.Generator) -> IntArray:
    """Exit layers [T] of which only a random few remain, so that exits are rare."""
    rate = float((layer < layers).mean())
    stays = rng.random(layer.size) * rate >= _EXIT_SHARE
    return np.where(stays, layers, layer)


def _gentle(experiments: Experiments) -> list[Changes]:
    """The what-ifs that a policy would take: of the steadiest tokens, where little mass goes."""
    classes, gentle = experiments.classes, []
    masses = (experiments.skip_mass, experiments.drop_mass, None)
    for changes, mass in zip(experiments.parts, masses, strict=False):
        chosen = classes.of(changes) == classes.count - 1
        if mass is not None and chosen.any():
            chosen &= mass <= np.median(mass[chosen])
        gentle.append(changes.take(chosen))
    return gentle


def _few(changes: Changes, tokens: IntArray, rng: np.random.Generator) -> Changes:
    """One change each of a few of these tokens."""
    order = rng.permutation(np.flatnonzero(np.isin(changes.token, tokens)))
    _, first = np.unique(changes.token[order], return_index=True)
    return changes.take(rng.permutation(order[first])[: round(_CHANGE_SHARE * tokens.size)])


def poisson_upper(events: IntArray, confidence: float) -> FloatArray:
    """Exact one-sided upper confidence bounds of Poisson means, of any shape."""
    return chi2.ppf(confidence, 2 * (events + 1)) / 2


@torch.inference_mode()
def flipped_behind(
    view: MoEView,
    windows: Windows,
    trimmed: Trimmed,
    expected: IntArray,
    advance: Advance,
    *,
    folder: Path | None = None,
    known: Known | None = None,
) -> BoolArray:
    """Which tokens that nothing is done to predict something else because of those `trimmed`, [T].

    `expected` [T] are the full-depth predictions. `folder` takes the states of the sweep; where it
    is `known` what the tokens are before anything is done to them, they go on from there, and
    windows that nothing is done in do not run.
    """
    referee, layers = Referee(view), view.spec.layer_count
    flipped = np.zeros(windows.tokens, dtype=bool)
    untouched = ~trimmed.touched(layers)
    sweep = Sweep(view, windows, folder=folder, known=known)

    def passed(visit: Visit) -> int:
        after, span = _passed(view, visit, trimmed), visit.span
        sweep.leave(visit, after)
        if visit.is_last:
            others = np.flatnonzero(untouched[span])
            states = sweep.tail(visit, after)[torch.from_numpy(others)]
            flipped[span.start + others] = ~referee.agrees(states, expected[span][others])
        return len(after)

    for rows in sweep.results(passed):
        advance(rows)
    return flipped


def _passed(view: MoEView, visit: Visit, trimmed: Trimmed) -> Tensor:
    """States after the layer, [n, d]."""
    layer, span = visit.layer, visit.span
    routing = view.route(layer, visit.attended, groups=visit.groups)
    experts, changed = routing.experts, trimmed.layer[span] == layer
    if changed.any():
        experts = experts.clone()
        slots = torch.from_numpy(trimmed.slots[span][changed]).to(view.device)
        experts[_where(changed)] = forced(experts[_where(changed)], slots)
    after = run_layer(view, layer, visit.attended, routing, experts)
    left, still = trimmed.exit_layer[span] <= layer, trimmed.frozen[span]
    after[_where(left & still)] = visit.before[_where(left & still)]
    behind = _where(left & ~still)
    after[behind] = view.skip(layer, visit.attended[behind])
    return after


def _where(chosen: BoolArray) -> Tensor:
    return torch.from_numpy(np.flatnonzero(chosen))
