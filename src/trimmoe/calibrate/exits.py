"""Exit heads (eq. 22, 23), their calibration, and Learn-then-Test over a grid of thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.curves import clopper_pearson_upper
from trimmoe.calibrate.hazard import exit_layers
from trimmoe.calibrate.products import gram
from trimmoe.calibrate.record import Advance, Recording
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.windows import Windows
from trimmoe.core.exit_states import exit_threshold
from trimmoe.core.profile import DRAFT_CONFIDENCE
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.models.exit_head import HeadInput, confidence, head_input

_RIDGES = (3000.0, 300.0, 30.0)
"""Penalties tried, strongest first; the calibration split chooses."""
_NEWTON_STEPS = 6
_STRICTEST, _LEAST_STRICT = 0.9995, 0.55
"""Range of the grid's last threshold."""


@dataclass(frozen=True, kw_only=True)
class Exits:
    """The exit fields of a Profile, and where the recorded tokens exit."""

    settings: CalibrationSettings
    weight: np.ndarray
    """float32 [N, d]."""
    bias: np.ndarray
    """float32 [N]."""
    grid: FloatArray
    error_upper: FloatArray
    rate: FloatArray
    score: np.ndarray
    """xi of every recorded token after every layer, float32 [N, T]."""

    @cached_property
    def threshold(self) -> float:
        """The confidence at which tokens are taken to exit: the one asked for, raised to where what
        exits flip is tolerated, as the default policy does; infinite if nothing will do."""
        tolerated = exit_threshold(self.grid, self.error_upper * self.rate, self.settings.exit_risk)
        return max(self.settings.confidence, tolerated)

    @cached_property
    def layer(self) -> IntArray:
        """L_q of every recorded token at that confidence, 1..N, [T]."""
        return exit_layers(self.score, self.threshold)

    @cached_property
    def draft_layer(self) -> IntArray:
        """Where a draft of every recorded token sets out, 1..N, [T]; nothing that drafts would flip
        holds them back."""
        return exit_layers(self.score, DRAFT_CONFIDENCE)


@torch.inference_mode()
def calibrate_exits(recording: Recording, settings: CalibrationSettings, advance: Advance) -> Exits:
    """Fit the heads, score every token, walk the grid on the test split (22, 23)."""
    splits = split_windows(recording.windows, settings.seed)
    heads, scores = [], []
    for layer, hidden in enumerate(recording.hidden):
        weight, bias = torch.zeros(hidden.shape[1]), _constant(recording, layer)
        if recording.may_exit[layer] and layer < recording.layer_count - 1:
            agrees = torch.from_numpy(recording.agrees[layer])
            weight, bias = fit_exit_head(hidden, agrees, splits, settings.exit_heads)
        heads.append((weight.numpy(), bias))
        scores.append(confidences(hidden, weight, bias, settings.exit_heads))
        recording.release()
        advance(1)
    score = np.stack(scores)
    held = splits.calibration
    level = settings.ucb_confidence
    grid = exit_grid(score[:, held], recording.agrees[:, held], level)
    error_upper, rate = learn_then_test(
        score[:, splits.test], recording.agrees[:, splits.test], grid, level
    )
    return Exits(
        settings=settings,
        weight=np.stack([weight for weight, _ in heads]),
        bias=np.array([bias for _, bias in heads], dtype=np.float32),
        grid=grid,
        error_upper=error_upper,
        rate=rate,
        score=score,
    )


def _constant(recording: Recording, layer: int) -> float:
    """Bias of a head without weights: the log odds of agreement at its layer."""
    tokens = recording.token_count
    agreed = recording.agreement[layer] * tokens
    return float(np.log((agreed + 0.5) / (tokens - agreed + 0.5)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """Token indices of three disjoint sets of whole windows."""

    train: IntArray
    calibration: IntArray
    test: IntArray


def split_windows(windows: Windows, seed: int) -> Splits:
    """About 55 % of the windows to train, 15 % to calibrate, 30 % to test; at least one each.

    By windows, not tokens: neighbouring tokens are alike and would leak between the splits.
    """
    count, length = windows.count, windows.length
    assert count >= 3
    order = np.random.default_rng(seed).permutation(count)
    calibration = max(1, round(0.15 * count))
    test = max(1, round(0.3 * count))
    parts = np.split(order, [count - calibration - test, count - test])
    tokens = [
        (np.sort(part)[:, None] * length + np.arange(length)).ravel().astype(np.int64)
        for part in parts
    ]
    return Splits(train=tokens[0], calibration=tokens[1], test=tokens[2])


def fit_exit_head(
    hidden: Tensor, agrees: Tensor, splits: Splits, reads: HeadInput = "direction"
) -> tuple[Tensor, float]:
    """One layer's head: weight float32 [d] and bias, Platt-scaled (22, 23).

    `hidden` [T, d] after the layer, of which the head `reads` the direction or all, `agrees` bool
    [T] (b of 22). The ridge is chosen and the
    scale and shift are fitted on the calibration split, then folded into weight and bias.
    """
    train = torch.from_numpy(splits.train)
    held = torch.from_numpy(splits.calibration)
    features = head_input(hidden[train], reads)
    scale = features.std(dim=0).clamp_min(1e-6)
    centre = features.mean(dim=0)
    features = (features - centre) / scale
    held_features = (head_input(hidden[held], reads) - centre) / scale
    labels, held_labels = agrees[train].float(), agrees[held].float()
    best_loss, best = np.inf, (torch.zeros_like(scale), 0.0)
    start = torch.zeros(scale.numel() + 1)
    for ridge in _RIDGES:
        start = fit_logistic(features, labels, ridge=ridge, start=start)
        scores = held_features @ start[:-1] + start[-1]
        slope, shift = platt(scores, held_labels)
        loss = _log_loss(slope * scores + shift, held_labels)
        if loss < best_loss:
            best_loss, best = loss, (slope * start[:-1], slope * float(start[-1]) + shift)
    weight = best[0] / scale
    return weight, best[1] - float(weight @ centre)


def fit_logistic(features: Tensor, labels: Tensor, *, ridge: float, start: Tensor) -> Tensor:
    """Minimise the cross-entropy (23) plus ridge/2 |w|^2 by damped Newton steps.

    `features` [n, d], `labels` [n] of 0 and 1, `start` [d + 1]; returns [d + 1], the bias last.
    Its pull towards zero is slight: it only keeps a bias finite where all labels agree.
    """
    design = torch.cat([features, torch.ones(features.shape[0], 1)], dim=1)
    penalty = torch.full((design.shape[1],), ridge)
    penalty[-1] = 1.0
    solution = start.clone()
    loss = _penalised(design, labels, penalty, solution)
    for _ in range(_NEWTON_STEPS):
        rate = torch.sigmoid(design @ solution)
        gradient = design.T @ (rate - labels) + penalty * solution
        weight = (rate * (1 - rate)).sqrt()
        curvature = gram(design * weight[:, None]) + torch.diag(penalty)
        step = torch.linalg.solve(curvature.double(), gradient.double()).float()
        size = 1.0
        while size > 1e-3:
            candidate = solution - size * step
            candidate_loss = _penalised(design, labels, penalty, candidate)
            if candidate_loss < loss:
                break
            size /= 2
        else:
            break
        done = loss - candidate_loss < 1e-6 * abs(loss)
        solution, loss = candidate, candidate_loss
        if done:
            break
    return solution


def platt(scores: Tensor, labels: Tensor) -> tuple[float, float]:
    """Slope >= 0 and shift that calibrate scores [n]; the pull towards zero is slight."""
    fitted = fit_logistic(scores[:, None], labels, ridge=1.0, start=torch.tensor([1.0, 0.0]))
    return max(float(fitted[0]), 0.0), float(fitted[1])


def _penalised(design: Tensor, labels: Tensor, penalty: Tensor, solution: Tensor) -> float:
    scores = design @ solution
    ridge = 0.5 * (penalty * solution.square()).sum()
    return float(_log_loss_sum(scores, labels) + ridge)


def _log_loss(scores: Tensor, labels: Tensor) -> float:
    return float(_log_loss_sum(scores, labels) / labels.numel())


def _log_loss_sum(scores: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum")


def confidences(
    hidden: Tensor, weight: Tensor, bias: float, reads: HeadInput = "direction"
) -> np.ndarray:
    """xi of every token after one layer, float32 [T]; `hidden` [T, d] may lie on disk."""
    blocks = [confidence(block, weight, bias, reads) for block in hidden.split(4096)]
    return torch.cat(blocks).numpy()


def exit_grid(
    scores: np.ndarray, agrees: np.ndarray, confidence_level: float, size: int = 32
) -> FloatArray:
    """Candidate thresholds, ascending; confidences and labels [N, T'] are the calibration split's.

    Learn-then-Test walks from the strictest threshold down and stops at the first failure, so
    the walk starts where the bound is likely to be least: a stricter threshold would see too few
    exits to be judged. The test split has no part in this choice.
    """
    candidates = _thresholds(_STRICTEST, 4 * size)
    upper, _ = learn_then_test(scores, agrees, candidates, confidence_level)
    return _thresholds(max(float(candidates[upper.argmin()]), _LEAST_STRICT), size)


def _thresholds(strictest: float, size: int) -> FloatArray:
    """From one half to `strictest`, evenly spaced in log odds."""
    logits = np.linspace(0.0, np.log(strictest / (1.0 - strictest)), size)
    return 1.0 / (1.0 + np.exp(-logits))


def learn_then_test(
    scores: np.ndarray, agrees: np.ndarray, grid: FloatArray, confidence_level: float
) -> tuple[FloatArray, FloatArray]:
    """Bounded exit error and exit rate at each threshold, from the test split.

    `scores` and bool `agrees` are [N, T']. A token that exits nowhere before the last layer is
    no exit. Returns upper bounds of P(prediction differs | exit) and rates, both [len(grid)].
    """
    layers, tokens = scores.shape
    exits, errors = np.zeros((2, grid.size), dtype=np.int64)
    for index, threshold in enumerate(grid):
        layer = exit_layers(scores, threshold)
        early = layer < layers
        exits[index] = early.sum()
        errors[index] = (~agrees[layer - 1, np.arange(tokens)] & early).sum()
    return clopper_pearson_upper(errors, exits, confidence_level), exits / tokens
