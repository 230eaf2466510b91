"""How many tokens may leave after which layer, and how often that is wrong.

Agreement alone says little: what an early exit needs is to be right where it is sure. Sureness is
read in two ways, from the output head's own probability on the state after the layer, and by the
small heads that `trimmoe calibrate` fits to such states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trimmoe.calibrate.exits import (
    confidences,
    exit_grid,
    exit_layers,
    fit_exit_head,
    learn_then_test,
    split_windows,
)
from trimmoe.calibrate.windows import Windows

from .measure import Weights, logits_of, walk

SURE = (0.9, 0.98)
WRONG_AT_MOST = (0.01, 0.02)
LEVEL = 0.9
"""How sure the bound of the exits' error is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitRecord:
    """Every token after every layer that may be left; the layers are `first` and on."""

    first: int
    windows: torch.Tensor
    """int64 (windows, length)."""
    hidden: list[torch.Tensor]
    """bfloat16 (tokens, hidden) for each layer."""
    agrees: np.ndarray
    """bool [layers, tokens]: whether the output head already names the last layer's token."""
    probability: np.ndarray
    """float32 [layers, tokens]: the output head's largest probability."""


@torch.inference_mode()
def record_exits(model: Weights, windows: torch.Tensor, first: int) -> ExitRecord:
    """Run the windows (windows, length) and read every layer from `first` to the last but one."""
    hidden, agrees, probability = [], [], []
    for window in windows:
        states = torch.stack([state[0] for state, _, _ in walk(model, window[None])][first:])
        *early, final = (logits_of(model, state).float().softmax(-1).max(-1) for state in states)
        hidden.append(states[:-1])
        agrees.append(torch.stack([each.indices == final.indices for each in early]))
        probability.append(torch.stack([each.values for each in early]))
    return ExitRecord(
        first=first, windows=windows, hidden=list(torch.cat(hidden, dim=1)),
        agrees=torch.cat(agrees, dim=1).numpy(), probability=torch.cat(probability, dim=1).numpy(),
    )  # fmt: skip


def exit_table(record: ExitRecord) -> list[dict[str, float]]:
    """Per layer: agreement; share of tokens surer than a probability, and the share of those that
    are wrong; the largest share that may leave with no more than some wrong."""
    return [
        {"layer": record.first + index} | _row(agrees, probability)
        for index, (agrees, probability) in enumerate(
            zip(record.agrees, record.probability, strict=True)
        )
    ]


def _row(agrees: np.ndarray, probability: np.ndarray) -> dict[str, float]:
    row = {"agreement": float(agrees.mean())}
    for sure in SURE:
        leaves = probability > sure
        row[f"above {sure}"] = float(leaves.mean())
        row[f"above {sure}, wrong"] = float((~agrees[leaves]).mean()) if leaves.any() else 0.0
    for wrong in WRONG_AT_MOST:
        row[f"at most {wrong} wrong"] = share_within(agrees, probability, wrong)
    return {name: round(value, 4) for name, value in row.items()}


def share_within(agrees: np.ndarray, sureness: np.ndarray, wrong: float) -> float:
    """The largest share of tokens, the surest first, of which at most `wrong` are wrong; [tokens].

    The threshold is chosen in hindsight, so this is a little more than a calibration may promise.
    """
    errors = (~agrees[np.argsort(-sureness, kind="stable")]).cumsum()
    counts = np.arange(1, len(errors) + 1)
    within = np.flatnonzero(errors <= wrong * counts)
    return float(within[-1] + 1) / len(counts) if within.size else 0.0


def calibrated_exits(record: ExitRecord, *, seed: int = 0) -> list[dict[str, float]]:
    """What a calibration would find on these windows: at each threshold the exits' share, the
    bound of their error, and the mean layer that those leave after (the test split's)."""
    windows = Windows(ids=record.windows.numpy())
    splits = split_windows(windows, seed)
    scores = []
    for hidden, agrees in zip(record.hidden, record.agrees, strict=True):
        weight, bias = fit_exit_head(hidden, torch.from_numpy(agrees), splits)
        scores.append(confidences(hidden, weight, bias))
    # The layer that nobody leaves early: where the rest goes.
    score = np.stack([*scores, np.ones_like(scores[0])])
    agrees = np.concatenate([record.agrees, np.ones_like(record.agrees[:1])])
    held, test = splits.calibration, splits.test
    grid = exit_grid(score[:, held], agrees[:, held], LEVEL)
    upper, share = learn_then_test(score[:, test], agrees[:, test], grid, LEVEL)
    rows = []
    for threshold, wrong, leaving in zip(grid, upper, share, strict=True):
        layer = exit_layers(score[:, test], threshold)
        left = layer[layer < len(score)]
        rows.append({
            "threshold": round(float(threshold), 4), "share": round(float(leaving), 4),
            "wrong_at_most": round(float(wrong), 4),
            "mean_layer": round(record.first + float(left.mean()) - 1, 1) if len(left) else 0.0,
        })  # fmt: skip
    return rows
