"""First stage: layer after layer, bring the carved layer's output to the dense model's.

The student's own hidden states are its input, and the target is what takes it back to the
dense model's state after the layer, so errors of earlier layers are corrected, not carried on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from trimmoe.models.embedded.deltas import Geometry

from . import carve
from .network import (
    BF16,
    Layer,
    Rotary,
    StudentLayer,
    attention,
    balance_loss,
    dense_ffn,
    dense_layer,
    norm,
    router_drift,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerwiseSettings:
    """How the first stage trains."""

    length: int = 512
    rank: int = 64
    attention_rank: int = 0
    epochs: int = 1
    batch: int = 1024
    lr: float = 2e-3
    anchor_weight: float = 0.05
    balance_weight: float = 0.02
    spread: float = 0.35
    carve_tokens: int = 8192


def learning_rate(step: int, steps: int, peak: float, *, warmup: int) -> float:
    """Linear warm-up, then a cosine to 2 % of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def optimiser(parameters: dict[str, torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Adam; the scales, which are near one, move at a lower rate than the small factors."""
    slow = [p for name, p in parameters.items() if name.endswith("down_scale")]
    fast = [p for name, p in parameters.items() if not name.endswith("down_scale")]
    groups = [{"params": fast, "factor": 1.0}, {"params": slow, "factor": 0.5}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)


def set_rate(opt: torch.optim.Optimizer, rate: float) -> None:
    for group in opt.param_groups:
        group["lr"] = rate * group["factor"]


@torch.no_grad()
def _advance(
    hidden: torch.Tensor, step: Callable[[torch.Tensor], torch.Tensor], *, windows: int = 16
) -> torch.Tensor:
    """Apply a residual step to (windows, length, hidden) a few windows at a time."""
    return torch.cat([part + step(part) for part in hidden.split(windows)])


def start_layer(
    x: torch.Tensor, dense: dict[str, torch.Tensor], index: int, geometry: Geometry,
    settings: LayerwiseSettings, *, seed: int,
) -> StudentLayer:  # fmt: skip
    """Carve one layer on its inputs (tokens, hidden)."""
    some = x[torch.randperm(len(x))[: settings.carve_tokens]]
    profile = carve.contributions(some, dense_layer(dense, index))
    order = carve.choose_order(profile, geometry, seed=seed + index)
    student = StudentLayer(
        dense, index, geometry, order, rank=settings.rank, attention_rank=settings.attention_rank
    )
    with torch.no_grad():
        norms = carve.expert_norms(x, student.merged(), geometry)
        student.router.copy_(carve.first_router(x, norms, spread=settings.spread))
        probabilities = functional.linear(x, student.router.to(BF16)).float().softmax(-1)
        typical = probabilities.topk(geometry.top_k, dim=-1).values.mean()
        student.down_scale[geometry.shared_neurons :] /= typical
    return student


def train_layer(
    student: StudentLayer, x: torch.Tensor, y: torch.Tensor, settings: LayerwiseSettings
) -> dict[str, float]:
    """Fit the layer to y (tokens, hidden); the mean squared error first and last."""
    size = y.float().square().mean(-1)
    # A handful of tokens (the first of a window) have states a hundred times the usual size.
    keep = (size < 50 * size.median()).nonzero()[:, 0]
    scale = 1.0 / size[keep].mean()
    anchor = student.router.detach().to(BF16).clone()
    trained = {n: p for n, p in student.named_parameters() if n.split(".")[-1] not in "qkvo"}
    opt = optimiser(trained, settings.lr)
    per_epoch = len(keep) // settings.batch
    steps = max(1, settings.epochs * per_epoch)
    errors: list[float] = []
    for step in range(steps):
        if step % per_epoch == 0:
            keep = keep[torch.randperm(len(keep))]
        start = step % per_epoch * settings.batch
        rows = keep[start : start + settings.batch]
        set_rate(opt, learning_rate(step, steps, settings.lr, warmup=5))
        output, probabilities, mask = student(x[rows])
        error = (output.float() - y[rows].float()).square().mean() * scale
        loss = error + settings.anchor_weight * router_drift(x[rows], anchor, probabilities)
        loss = loss + settings.balance_weight * balance_loss(probabilities, mask)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        errors.append(error.item())
    tail = max(1, steps // 10)
    return {"first": errors[0], "last": sum(errors[-tail:]) / tail}


def run_layer(
    index: int, hidden: torch.Tensor, teacher: torch.Tensor, dense: dict[str, torch.Tensor],
    geometry: Geometry, settings: LayerwiseSettings, *, seed: int,
) -> tuple[StudentLayer, torch.Tensor, torch.Tensor, dict[str, float]]:  # fmt: skip
    """Carve and fit one layer; student's and teacher's states (windows, length, hidden) go on."""
    source = dense_layer(dense, index)
    rotary = Rotary(geometry, hidden.shape[1])
    eps = geometry.norm_eps

    def attend(part: torch.Tensor) -> torch.Tensor:
        return attention(norm(part, source.input_norm, eps), source, rotary, geometry)

    teacher = _advance(teacher, attend)
    teacher = _advance(teacher, lambda p: dense_ffn(norm(p, source.post_norm, eps), source))
    hidden = _advance(hidden, attend)
    x = norm(hidden, source.post_norm, eps).flatten(0, 1)
    y = (teacher - hidden).flatten(0, 1)
    student = start_layer(x, dense, index, geometry, settings, seed=seed)
    report = train_layer(student, x, y, settings)
    with torch.no_grad():
        merged: Layer = student.merged()
        pieces = [student(part, merged) for part in x.split(8192)]
        hidden = hidden + torch.cat([piece[0] for piece in pieces]).view_as(hidden)
        mask = torch.cat([piece[2] for piece in pieces])
        mass = torch.cat([(piece[1] * piece[2]).sum(-1) for piece in pieces])
        share = mask.mean(0) / mask.sum(-1).mean() * geometry.experts
    report |= {"load_min": share.min().item(), "load_max": share.max().item()}
    report |= {"mass": mass.mean().item(), "mass_sd": mass.std().item()}
    return student, hidden, teacher, report
