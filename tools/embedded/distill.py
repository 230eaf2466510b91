"""All layers together, towards the dense model's next-token distribution or towards the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trimmoe.models.embedded.deltas import Geometry

from .network import (
    BF16,
    Layer,
    Rotary,
    StudentLayer,
    Trim,
    UpcycledLayer,
    attention,
    balance_loss,
    dense_ffn,
    norm,
    router_drift,
)
from .training import train


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillSettings:
    """How all layers train together."""

    steps: int = 100
    windows: int = 4
    length: int = 256
    positions: int = 256
    lr: float = 1e-3
    warmup: int = 8
    balance_weight: float = 0.01
    anchor_weight: float = 0.02
    clip: float = 1.0
    skip_share: float = 0.03
    """Token-layers whose routed experts are left out in half of the windows, more often where
    the router's mass is low: the model learns to do without, and which layers it can."""
    drop_share: float = 0.06
    """Token-layers of the same windows that lose one activated expert."""
    exit_weight: float = 0.5
    """Most that the divergence of the output head on one late layer's state, drawn anew in every
    step, may count against the final one."""
    exit_from: float = 0.7
    """Depth from which layers are late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What a batch leaves behind on its way through the student."""

    states: torch.Tensor
    """Normed final states, (windows, length, hidden)."""
    after: dict[int, torch.Tensor]
    """States after some layers, not normed, each (windows, length, hidden)."""
    balance: torch.Tensor
    """Per layer the balance loss."""
    drift: torch.Tensor
    """Per layer the distance from the first stage's router."""


class Student:
    """All layers of the student, with the parts it shares with the dense model."""

    def __init__(
        self,
        dense: dict[str, torch.Tensor],
        layers: Sequence[StudentLayer | UpcycledLayer],
        geometry: Geometry,
    ) -> None:
        self.layers, self.geometry = nn.ModuleList(layers), geometry
        self.embed, self.final_norm = dense["embed"].to(BF16), dense["norm"].to(BF16)
        self.anchors = [layer.router.detach().to(BF16).clone() for layer in layers]
        self.probes = nn.Module()

    def run(self, tokens: torch.Tensor, trim: Trim, *, kept: Sequence[int]) -> Pass:
        """What tokens (windows, length) leave behind; the states after the layers `kept` too."""
        geometry, eps = self.geometry, self.geometry.norm_eps
        rotary = Rotary(geometry, tokens.shape[1])
        hidden = functional.embedding(tokens, self.embed)
        balance, drift, after = [], [], {}
        blocks: Any = self.layers  # A module list's items are not typed.
        for index, (layer, anchor) in enumerate(zip(blocks, self.anchors, strict=True)):
            merged: Layer = layer.merged()
            x = norm(hidden, merged.input_norm, eps)
            hidden = hidden + attention(x, merged, rotary, geometry)
            x = norm(hidden, merged.post_norm, eps)
            output, probabilities, mask = layer(x, merged, trim)
            hidden = hidden + output
            if index in kept:
                after[index] = hidden
            balance.append(balance_loss(probabilities, mask))
            drift.append(router_drift(x, anchor, probabilities))
        return Pass(
            states=self.normed(hidden), after=after,
            balance=torch.stack(balance), drift=torch.stack(drift),
        )  # fmt: skip

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the output head reads of states (..., hidden)."""
        return norm(hidden, self.final_norm, self.geometry.norm_eps)


def dense_walk(
    tokens: torch.Tensor, layers: list[Layer], embed: torch.Tensor, geometry: Geometry
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Per dense layer: the FFN's input and the state after the layer, (windows, length, hidden)."""
    rotary, eps = Rotary(geometry, tokens.shape[1]), geometry.norm_eps
    hidden = functional.embedding(tokens, embed)
    for layer in layers:
        hidden = hidden + attention(norm(hidden, layer.input_norm, eps), layer, rotary, geometry)
        x = norm(hidden, layer.post_norm, eps)
        hidden = hidden + dense_ffn(x, layer)
        yield x, hidden


@torch.no_grad()
def dense_states(
    tokens: torch.Tensor,
    layers: list[Layer],
    embed: torch.Tensor,
    final_norm: torch.Tensor,
    geometry: Geometry,
) -> torch.Tensor:
    """The dense model's normed final states, (windows, length, hidden)."""
    *_, (_, hidden) = dense_walk(tokens, layers, embed, geometry)
    return norm(hidden, final_norm, geometry.norm_eps)


@torch.no_grad()
def divergence(
    student: torch.Tensor, goal: torch.Tensor, embed: torch.Tensor, *, chunk: int = 512
) -> tuple[float, torch.Tensor]:
    """Mean KL(goal || student) over states (positions, hidden), and its gradient.

    The goal is the dense model's states, or the tokens (positions,) that do follow: the
    cross-entropy. The output head is not trained, so the gradient for the states is written out
    here, a few positions at a time, instead of keeping logits over the whole vocabulary for
    autograd.
    """
    total, gradients = 0.0, []
    for mine, aim in zip(student.split(chunk), goal.split(chunk), strict=True):
        own = functional.linear(mine, embed).float().log_softmax(-1)
        if aim.is_floating_point():
            wanted = functional.linear(aim, embed).float().log_softmax(-1)
            weight = wanted.exp()
            total += (weight * (wanted - own)).sum().item()
            slope = own.exp_().sub_(weight)
        else:
            total += functional.nll_loss(own, aim, reduction="sum").item()
            slope = own.exp_()
            slope[torch.arange(len(aim)), aim] -= 1
        gradients.append(slope.to(BF16) @ embed)
    return total / len(student), torch.cat(gradients) / len(student)


def distill(
    student: Student, tokens: torch.Tensor, teacher: list[Layer] | None,
    settings: DistillSettings, *, checkpoint: Path, seed: int, advance,
) -> None:  # fmt: skip
    """Train in place, on the text itself where there is no teacher; see `train`."""

    def step(rows: torch.Tensor, index: int) -> dict[str, float]:
        loss, extra = _step(student, tokens[rows].long(), teacher, settings, seed=seed + index)
        return {"kl" if teacher else "nll": round(loss, 4)} | extra

    train(
        student, step, settings,
        windows=len(tokens), checkpoint=checkpoint, advance=advance,
    )  # fmt: skip


def _step(
    student: Student,
    batch: torch.Tensor,
    teacher: list[Layer] | None,
    settings: DistillSettings,
    *,
    seed: int,
) -> tuple[float, dict[str, float]]:
    """Gradients of one batch; the divergence on a random part of the positions."""
    generator = torch.Generator().manual_seed(seed)
    trim = Trim(skip_share=settings.skip_share, drop_share=settings.drop_share, generator=generator)
    layers = student.geometry.layers
    early = int(
        torch.randint(int(layers * settings.exit_from), layers - 1, (), generator=generator)
    )
    if teacher:
        goal = dense_states(batch, teacher, student.embed, student.final_norm, student.geometry)
    else:
        batch, goal = batch[:, :-1], batch[:, 1:]
    found = student.run(batch, trim, kept=(early,))
    count = settings.positions * len(batch)
    chosen = torch.randperm(batch.numel(), generator=generator)[:count]
    flat, goal = found.states.flatten(0, 1)[chosen], goal.flatten(0, 1)[chosen]
    loss, gradient = divergence(flat.detach(), goal, student.embed)
    side = settings.balance_weight * found.balance.sum()
    side = side + settings.anchor_weight * found.drift.sum()
    roots, gradients = [flat, side], [gradient, torch.ones_like(side)]
    entry: dict[str, float] = {}
    if settings.exit_weight:
        some = count // 4
        early_flat = student.normed(found.after[early]).flatten(0, 1)[chosen[:some]]
        early_loss, early_gradient = divergence(early_flat.detach(), goal[:some], student.embed)
        roots.append(early_flat)
        gradients.append(settings.exit_weight * min(1.0, loss / early_loss) * early_gradient)
        entry |= {"early_layer": early, "early_loss": round(early_loss, 4)}
    torch.autograd.backward(roots, gradients)
    return loss, entry | {
        "balance": round(found.balance.mean().item(), 4),
        "balance_max": round(found.balance.max().item(), 4),
        "drift": round(found.drift.mean().item(), 4),
    }
