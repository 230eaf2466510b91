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

from trimmoe.calibrate.exits import Exits, exit_layers, split_windows
from trimmoe.calibrate.head import Referee
from trimmoe.calibrate.losses import Experiments
from trimmoe.calibrate.record import Advance, Recording
from trimmoe.calibrate.sampling import KEEP, Changes, forced
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.sweep import Sweep, Visit
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.core.profile import CHANGES, EXIT_STATES, ExitState
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.models.base import MoEView

_TOKENS = 4096
"""Of the test split, that echoes are counted on."""
_EXIT_SHARE = 0.03
"""Share of the tokens that leave, or are changed, while echoes are counted. Two exits flip fewer
later tokens than twice one does, so they must be few for the echo of one not to be flattered."""
_COMMON_RATE = 0.2
"""Exit rate of the laxer of the two thresholds at which echoes are counted."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Echoes:
    """Upper bounds of the predictions of later tokens that one of each flips."""

    exits: FloatArray
    """By `EXIT_STATES`, [2]."""
    changes: FloatArray
    """By `CHANGES`, [3]."""


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
    elsewhere; the larger bound stands for all. Of what there is nothing to count nothing is known,
    and its bound is a whole flip.
    """
    tokens = _tokens(recording, settings)
    trials = dict(_trials(recording, exits, experiments, settings, tokens))
    layers, length = recording.layer_count, recording.windows.length
    counts = {key: int(trial.touched(layers).sum()) for key, trial in trials.items()}
    some = [key for key, count in counts.items() if count]
    bound = dict.fromkeys(trials, 1.0)
    if some:
        flipped = flipped_behind(
            view,
            recording.windows.take(np.tile(np.unique(tokens // length), len(some))),
            Trimmed.joined([trials[key] for key in some]),
            np.tile(recording.predictions[tokens], len(some)),
            advance,
            folder=recording.folder,
        )
        flips = flipped.reshape(len(some), -1).sum(axis=1)
        upper = poisson_upper(flips, settings.ucb_confidence)
        bound |= {key: float(most) / counts[key] for key, most in zip(some, upper, strict=True)}

    def worst(name: str) -> float:
        return max(value for (what, _), value in bound.items() if what == name)

    changes = [worst(change) if (change, 0) in bound else worst("skip") for change in CHANGES]
    return Echoes(
        exits=np.array([worst(state) for state in EXIT_STATES]), changes=np.array(changes)
    )


def echo_steps(recording: Recording, settings: CalibrationSettings) -> int:
    """Of how many steps `measure_echoes` tells at most."""
    trials = 3 + len(CHANGES)
    return trials * _tokens(recording, settings).size * recording.layer_count


def _tokens(recording: Recording, settings: CalibrationSettings) -> IntArray:
    """Whole windows of the test split."""
    length = recording.windows.length
    test = split_windows(recording.windows, settings.seed).test
    return test[: max(_TOKENS // length, 1) * length]


def _trials(
    recording: Recording,
    exits: Exits,
    experiments: Experiments,
    settings: CalibrationSettings,
    tokens: IntArray,
) -> Iterator[tuple[tuple[str, int], Trimmed]]:
    """What is tried, each under its name and a number: of the first, the worst counts."""
    layers, _, top_k = recording.activated.shape
    rng = np.random.default_rng([settings.seed, 5])
    nothing = Trimmed.nothing(tokens.size, layers=layers, top_k=top_k)
    lax = min(int(np.searchsorted(-exits.rate, -_COMMON_RATE)), exits.grid.size - 1)
    asked = [(ExitState.DENSE, lax), (ExitState.DENSE, -1), (ExitState.FROZEN, lax)]
    for number, (state, at) in enumerate(asked):
        layer = exit_layers(exits.score[:, tokens], float(exits.grid[at]))
        frozen = np.full(tokens.size, state is ExitState.FROZEN)
        yield (
            (state, number),
            replace(nothing, exit_layer=_thinned(layer, layers, rng), frozen=frozen),
        )
    for change, made in zip(CHANGES, experiments.parts, strict=False):
        if made.count:
            few = _few(made, tokens, rng)
            at = np.searchsorted(tokens, few.token)
            layer, slots = nothing.layer.copy(), nothing.slots.copy()
            layer[at], slots[at] = few.layer, few.slots
            yield (change, 0), replace(nothing, layer=layer, slots=slots)


def _thinned(layer: IntArray, layers: int, rng: np.random.Generator) -> IntArray:
    """Exit layers [T] of which only a random few remain, so that exits are rare."""
    rate = float((layer < layers).mean())
    stays = rng.random(layer.size) * rate >= _EXIT_SHARE
    return np.where(stays, layers, layer)


def _few(changes: Changes, tokens: IntArray, rng: np.random.Generator) -> Changes:
    """One change each of a few of these tokens."""
    order = rng.permutation(np.flatnonzero(np.isin(changes.token, tokens)))
    _, first = np.unique(changes.token[order], return_index=True)
    return changes.take(rng.permutation(order[first])[: round(_EXIT_SHARE * tokens.size)])


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
) -> BoolArray:
    """Which tokens that nothing is done to predict something else because of those `trimmed`, [T].

    `expected` [T] are the full-depth predictions. `folder` takes the states of the sweep.
    """
    referee, layers = Referee(view), view.spec.layer_count
    flipped = np.zeros(windows.tokens, dtype=bool)
    touched = trimmed.touched(layers)
    sweep = Sweep(view, windows, folder=folder)
    for visit in sweep.visits():
        after = _passed(view, visit, trimmed)
        sweep.leave(visit, after)
        if visit.is_last:
            span = visit.span
            others = np.flatnonzero(~touched[span])
            states = sweep.tail(visit, after)[torch.from_numpy(others)]
            flipped[span.start + others] = ~referee.agrees(states, expected[span][others])
        advance(len(after))
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
    behind = visit.attended[_where(left & ~still)]
    after[_where(left & ~still)] = view.finish(layer, behind, view.shared(layer, behind), None)
    return after


def _where(chosen: BoolArray) -> Tensor:
    return torch.from_numpy(np.flatnonzero(chosen))
