"""Which neurons are shared, which form which expert, and a first router.

Per layer, from the student's own activations: the neurons with the largest mean squared
contribution stay shared; the others are grouped so that neurons active on the same tokens are
in the same expert; the router predicts how much each expert would contribute.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch.nn import functional

from trimmoe.models.embedded.deltas import Geometry

from .network import Layer, neurons


def contributions(x: torch.Tensor, layer: Layer, *, chunk: int = 4096) -> torch.Tensor:
    """(tokens, neurons) bfloat16: |activation| times the norm of the neuron's output vector."""
    size = layer.down.float().norm(dim=0).to(torch.bfloat16)
    return torch.cat([neurons(part, layer).abs_().mul_(size) for part in x.split(chunk)])


def choose_order(profile: torch.Tensor, geometry: Geometry, *, seed: int) -> torch.Tensor:
    """int64 (neurons,): shared neurons first, then each expert's."""
    energy = profile.float().square().mean(0)
    ranked = energy.argsort(descending=True)
    shared, routed = ranked.split(
        [geometry.shared_neurons, geometry.neurons - geometry.shared_neurons]
    )
    labels = balanced_clusters(profile[:, routed].float().T, geometry.experts, seed=seed)
    groups = [routed[labels == expert].sort().values for expert in range(geometry.experts)]
    return torch.cat([shared.sort().values, *groups])


def balanced_clusters(
    features: torch.Tensor, clusters: int, *, seed: int, rounds: int = 12
) -> torch.Tensor:
    """Label (rows,): k-means on directions, every cluster with the same number of rows."""
    # Fourth root of the energy, centred: a few loud tokens would otherwise decide everything.
    points = features.sqrt()
    points = functional.normalize(points - points.mean(1, keepdim=True), dim=1)
    points = functional.normalize(points - points.mean(0), dim=1)
    rows, capacity = len(points), len(points) // clusters
    generator = torch.Generator().manual_seed(seed)
    centres = points[torch.randperm(rows, generator=generator)[:clusters]]
    labels = np.zeros(rows, dtype=np.int64)
    for _ in range(rounds):
        affinity = (points @ centres.T).numpy()
        # Each cluster appears once per seat; the assignment fills all seats at the best total.
        _, seats = linear_sum_assignment(-affinity.repeat(capacity, axis=1))
        fresh = seats // capacity
        if (fresh == labels).all():
            break
        labels = fresh
        sums = torch.stack([points[torch.from_numpy(labels == c)].sum(0) for c in range(clusters)])
        centres = functional.normalize(sums, dim=1)
    return torch.from_numpy(labels)


def expert_norms(
    x: torch.Tensor, layer: Layer, geometry: Geometry, *, chunk: int = 4096
) -> torch.Tensor:
    """float32 (tokens, experts): norm of what each expert adds with gate 1 (layer in new order)."""
    width = geometry.expert_neurons
    down = layer.down[:, geometry.shared_neurons :].unflatten(1, (geometry.experts, width))
    parts = []
    for part in x.split(chunk):
        active = neurons(part, layer)[:, geometry.shared_neurons :].unflatten(
            1, (geometry.experts, width)
        )
        out = torch.einsum("tew,hew->teh", active, down)
        parts.append(out.float().norm(dim=-1))
    return torch.cat(parts)


def first_router(x: torch.Tensor, norms: torch.Tensor, *, spread: float) -> torch.Tensor:
    """float32 (experts, hidden) router from inputs (tokens, hidden) and `expert_norms`.

    Experts are ranked by the log of what they would add. Differences between them are widened on
    tokens where the routed experts together add much and narrowed where they add little, so that
    the softmax mass of the selected experts rises with how much they matter, not only with how
    unequal they are. `spread` is the standard deviation of the logits.
    """
    logs = norms.clamp_min(1e-6).log()
    total = norms.square().sum(-1, keepdim=True).clamp_min(1e-12).log()
    total = (total - total.mean()) / total.std().clamp_min(1e-6)
    strength = total.clamp(-1.5, 1.5).exp()
    router = ridge(x, strength * (logs - logs.mean(-1, keepdim=True)))
    logits = functional.linear(x.float(), router)
    return router * (spread / (logits - logits.mean(-1, keepdim=True)).std())


def ridge(x: torch.Tensor, y: torch.Tensor, *, penalty: float = 1e-2) -> torch.Tensor:
    """(outputs, inputs) float32 least-squares map without a constant."""
    x = x.float()
    gram = x.T @ x
    gram.diagonal().add_(penalty * gram.diagonal().mean())
    return torch.linalg.solve(gram, x.T @ y).T.contiguous()
