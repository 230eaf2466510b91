"""What an exit costs the tokens that follow: they attend to the keys and values it left behind.

The output head is blind to it: an exited token's own prediction may be right and yet what it leaves
in the layers that it did not run moves what later tokens predict.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from trimmoe.calibrate.exits import Exits, exit_layers, split_windows
from trimmoe.calibrate.head import Referee
from trimmoe.calibrate.record import Advance, Recording
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.sweep import Sweep
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.core.profile import EXIT_STATES, ExitState
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.models.base import MoEView

_EXIT_SHARE = 0.03
"""Share of the tokens that leave while echoes are counted. Two exits flip fewer later tokens than
twice one does, so few must leave for the echo of one not to be flattered."""
_COMMON_RATE = 0.2
"""Exit rate of the laxer of the two thresholds at which echoes are counted."""


def with_echoes(
    view: MoEView,
    recording: Recording,
    exits: Exits,
    settings: CalibrationSettings,
    advance: Advance,
) -> tuple[Exits, FloatArray]:
    """The exits, and a bound of what each flips of later tokens, by `EXIT_STATES` [2]; the
    threshold rises with that of the state which the default policy leaves.

    Counted on the test split, at the strictest threshold of the grid and at a lax one, where tokens
    leave elsewhere; the larger bound stands for all. Without any exit to count, nothing is known
    and the bound is a whole flip.
    """
    splits = split_windows(recording.windows, settings.seed)
    rng = np.random.default_rng([settings.seed, 5])
    lax = min(int(np.searchsorted(-exits.rate, -_COMMON_RATE)), exits.grid.size - 1)
    leaves = np.stack(
        [
            _thinned(exit_layers(exits.score[:, splits.test], float(threshold)), exits, rng)
            for threshold in exits.grid[[lax, -1]]
        ]
    )
    counts = (leaves < recording.layer_count).sum(axis=1)
    flips = _flips_of(view, recording, splits.test, leaves, counts, advance)
    upper = poisson_upper(flips, settings.ucb_confidence)
    echo = np.where(counts > 0, upper / np.maximum(counts, 1), 1.0).max(axis=1)
    return replace(exits, echo=echo)


def echo_steps(recording: Recording, settings: CalibrationSettings) -> int:
    """Of how many steps `with_echoes` tells at most."""
    splits = split_windows(recording.windows, settings.seed)
    return len(EXIT_STATES) * 2 * splits.test.size * recording.layer_count


def _thinned(layer: IntArray, exits: Exits, rng: np.random.Generator) -> IntArray:
    """Exit layers [T] of which only a random few remain, so that exits are rare."""
    layers = exits.score.shape[0]
    rate = float((layer < layers).mean())
    stays = rng.random(layer.size) * rate >= _EXIT_SHARE
    return np.where(stays, layers, layer)


def _flips_of(
    view: MoEView,
    recording: Recording,
    tokens: IntArray,
    leaves: IntArray,
    counts: IntArray,
    advance: Advance,
) -> IntArray:
    """How many later tokens the exits `leaves` [2, T] of the tokens [T] flip, by `EXIT_STATES`,
    [2, 2]; all in one sweep, so that every expert is met once."""
    states, some = len(EXIT_STATES), np.flatnonzero(counts)
    flips = np.zeros((states, len(leaves)), dtype=np.int64)
    if not some.size:
        return flips
    times = states * some.size
    windows = np.tile(np.unique(tokens // recording.windows.length), times)
    flipped = flipped_by_exits(
        view,
        recording.windows.take(windows),
        np.tile(leaves[some].ravel(), states),
        np.tile(recording.predictions[tokens], times),
        advance,
        frozen=np.repeat([state is ExitState.FROZEN for state in EXIT_STATES], leaves[some].size),
        folder=recording.folder,
    )
    flips[:, some] = flipped.reshape(states, some.size, -1).sum(axis=2)
    return flips


def poisson_upper(events: IntArray, confidence: float) -> FloatArray:
    """Exact one-sided upper confidence bounds of Poisson means, of any shape."""
    return chi2.ppf(confidence, 2 * (events + 1)) / 2


@torch.inference_mode()
def flipped_by_exits(
    view: MoEView,
    windows: Windows,
    exit_layer: IntArray,
    expected: IntArray,
    advance: Advance,
    *,
    frozen: BoolArray,
    folder: Path | None = None,
) -> BoolArray:
    """Which tokens that run to the end predict something else because of those that do not, [T].

    Tokens leave after layer `exit_layer` [T] of 1..N; from then on the state of those that are
    `frozen` [T] stands still, and the later layers' keys and values are made from it, and that of
    others goes on without routed experts. `expected` [T] are the full-depth predictions. A token
    that leaves is never counted. `folder` takes the states of the sweep.
    """
    referee = Referee(view)
    flipped = np.zeros(windows.tokens, dtype=bool)
    sweep = Sweep(view, windows, folder=folder)
    for visit in sweep.visits():
        layer, span = visit.layer, visit.span
        routing = view.route(layer, visit.attended, groups=visit.groups)
        after = run_layer(view, layer, visit.attended, routing, routing.experts)
        left, still = exit_layer[span] <= layer, frozen[span]
        after[_where(left & still)] = visit.before[_where(left & still)]
        behind = visit.attended[_where(left & ~still)]
        passed = view.finish(layer, behind, view.shared(layer, behind), None)
        after[_where(left & ~still)] = passed
        sweep.leave(visit, after)
        if visit.is_last:
            stays = np.flatnonzero(exit_layer[span] == view.spec.layer_count)
            states = sweep.tail(visit, after)[torch.from_numpy(stays)]
            flipped[span.start + stays] = ~referee.agrees(states, expected[span][stays])
        advance(len(after))
    return flipped


def _where(chosen: BoolArray) -> Tensor:
    return torch.from_numpy(np.flatnonzero(chosen))
