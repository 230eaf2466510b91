"""What an exit costs the tokens that follow: they attend to the keys and values it left behind.

The output head is blind to it: an exited token's own prediction may be right and yet its state,
propagated through the layers it did not run, moves what later tokens predict.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from scipy.stats import chi2

from trimmoe.calibrate.exits import Exits, exit_layers, exit_threshold, split_windows
from trimmoe.calibrate.head import Referee
from trimmoe.calibrate.record import Advance, Recording, Windows, open_windows, run_layer
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.models.base import MoEView

_ROWS = 1024
"""Tokens of one step; windows are batched up to this."""
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
) -> tuple[Exits, float]:
    """The exits, charged with what they do to later tokens as well, and that charge by itself; the
    threshold rises with it.

    Counted on the test split, at the strictest threshold of the grid and at a lax one, where tokens
    leave elsewhere; the larger bound stands for all. Without any exit to count, nothing is known
    and the charge is a whole flip.
    """
    splits = split_windows(recording.windows.count, recording.windows.length, settings.seed)
    rng = np.random.default_rng([settings.seed, 5])
    lax = min(int(np.searchsorted(-exits.rate, -_COMMON_RATE)), exits.grid.size - 1)
    bounds = [
        _echo_at(view, recording, exits, float(threshold), splits.test, settings, rng, advance)
        for threshold in exits.grid[[lax, -1]]
    ]
    echo = max(bounds)
    error_upper = exits.error_upper + echo
    threshold = exit_threshold(exits.grid, error_upper, exits.rate, settings)
    layer = exit_layers(exits.score, threshold)
    return replace(exits, error_upper=error_upper, threshold=threshold, layer=layer), echo


def echo_tokens(recording: Recording, settings: CalibrationSettings) -> int:
    """Tokens that `with_echoes` will run."""
    splits = split_windows(recording.windows.count, recording.windows.length, settings.seed)
    return 2 * splits.test.size


def _echo_at(
    view: MoEView,
    recording: Recording,
    exits: Exits,
    threshold: float,
    tokens: IntArray,
    settings: CalibrationSettings,
    rng: np.random.Generator,
    advance: Advance,
) -> float:
    """Upper bound of the later tokens that one exit at `threshold` flips."""
    layer = exit_layers(exits.score[:, tokens], threshold)
    rate = float((layer < recording.layer_count).mean())
    stays = rng.random(tokens.size) * rate >= _EXIT_SHARE
    layer[stays] = recording.layer_count
    count = int((layer < recording.layer_count).sum())
    if count == 0:
        return 1.0
    windows = recording.windows.take(np.unique(tokens // recording.windows.length))
    flips = flipped_by_exits(view, windows, layer, recording.predictions[tokens], advance)
    return poisson_upper(int(flips.sum()), settings.ucb_confidence) / count


def poisson_upper(events: int, confidence: float) -> float:
    """Exact one-sided upper confidence bound of a Poisson mean."""
    return float(chi2.ppf(confidence, 2 * (events + 1)) / 2)


@torch.inference_mode()
def flipped_by_exits(
    view: MoEView, windows: Windows, exit_layer: IntArray, expected: IntArray, advance: Advance
) -> BoolArray:
    """Which tokens that run to the end predict something else because of those that do not, [T].

    Tokens leave after layer `exit_layer` [T] of 1..N; from then on their state stands still, and
    the later layers' keys and values are made from it. `expected` [T] are the full-depth
    predictions. A token that leaves is never counted.
    """
    referee = Referee(view)
    flipped = np.zeros(windows.tokens, dtype=bool)
    at_once = max(1, _ROWS // windows.length)
    for first in range(0, windows.count, at_once):
        part = windows.part(first, first + at_once)
        span = slice(first * windows.length, first * windows.length + part.tokens)
        states = _final_states(view, part, exit_layer[span])
        stays = np.flatnonzero(exit_layer[span] == view.spec.layer_count)
        agrees = referee.agrees(states[torch.from_numpy(stays)], expected[span][stays])
        flipped[span.start + stays] = ~agrees
        advance(part.tokens)
    return flipped


def _final_states(view: MoEView, windows: Windows, exit_layer: IntArray) -> torch.Tensor:
    """States [T, d] after the last layer, those of tokens that left as they left."""
    cache, batch, hidden = open_windows(view, windows)
    groups = batch.groups
    left_after = torch.from_numpy(exit_layer).to(view.device)
    before = batch.pack(hidden)
    for layer in range(view.spec.layer_count):
        flat = batch.pack(view.attend(layer, hidden, batch, cache))
        routing = view.route(layer, flat, groups=groups)
        after = run_layer(view, layer, flat, routing, routing.experts)
        before = torch.where((left_after > layer)[:, None], after, before)
        hidden = batch.unpack(before)
    return batch.pack(view.tail(hidden, batch, cache))
