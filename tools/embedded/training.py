"""The loop that the joint stages share: steps, their log, and a state to go on from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from .layerwise import learning_rate, optimiser, set_rate

SAVED_EVERY = 20

Step = Callable[[torch.Tensor, int], dict[str, float]]
"""(rows of the training windows, number of the step) -> what the log says; leaves gradients."""


class Pace(Protocol):
    """What the loop reads of a stage's settings."""

    @property
    def steps(self) -> int: ...
    @property
    def windows(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def warmup(self) -> int: ...
    @property
    def clip(self) -> float: ...


class Trained(Protocol):
    """What the loop keeps of a student."""

    layers: nn.ModuleList
    anchors: list[torch.Tensor]
    probes: nn.Module
    """What helps to train and is no part of the model."""


def train(
    student: Trained, step: Step, pace: Pace, *, windows: int, checkpoint: Path, advance
) -> None:
    """Train in place on `windows` windows, in turn; every 20 steps the state is written, and a
    later call goes on from it."""
    named = dict(nn.ModuleList([student.layers, student.probes]).named_parameters())
    opt = optimiser(named, pace.lr)
    start = _restore(checkpoint, student, opt)
    advance(start)
    for index in range(start, pace.steps):
        began = time.monotonic()
        rows = torch.arange(index * pace.windows, (index + 1) * pace.windows) % windows
        entry = {"step": index} | step(rows, index)
        entry["gradient"] = round(nn.utils.clip_grad_norm_(named.values(), pace.clip).item(), 3)
        set_rate(opt, learning_rate(index, pace.steps, pace.lr, warmup=pace.warmup))
        opt.step()
        opt.zero_grad(set_to_none=True)
        entry["seconds"] = round(time.monotonic() - began, 2)
        with checkpoint.with_suffix(".log").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        if (index + 1) % SAVED_EVERY == 0 or index + 1 == pace.steps:
            _save(checkpoint, student, opt, index + 1)
        advance(1)


def _save(path: Path, student: Trained, opt: torch.optim.Optimizer, step: int) -> None:
    partial = path.with_suffix(".partial")
    content = {
        "states": [layer.state_dict() for layer in student.layers],
        "optimiser": opt.state_dict(),
        "step": step,
        "anchors": student.anchors,
        "probes": student.probes.state_dict(),
    }
    torch.save(content, partial)
    partial.replace(path)


def _restore(path: Path, student: Trained, opt: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    saved = torch.load(path)
    for layer, state in zip(student.layers, saved["states"], strict=True):
        layer.load_state_dict(state)
    opt.load_state_dict(saved["optimiser"])
    student.anchors = saved["anchors"]
    student.probes.load_state_dict(saved.get("probes", {}))
    return saved["step"]
