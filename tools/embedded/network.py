"""The dense source and the carved student as plain functions, in the form that trains fast.

The student's FFN keeps the source's shape: one matrix product over all 1536 neurons, then each
expert's block of neurons is multiplied by its gate (zero where it is not selected). On a
processor this costs no more than the dense FFN, and gradients reach every part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from trimmoe.models.embedded.deltas import ATTENTION, FFN, Geometry

BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """bfloat16 weights of one layer, (out, in); the FFN's are in the source's or the new order."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor


def dense_layer(dense: dict[str, torch.Tensor], index: int) -> Layer:
    names = (*ATTENTION, *FFN, "input_norm", "post_norm")
    return Layer(**{name: dense[f"layers.{index}.{name}"].to(BF16) for name in names})


class Rotary:
    """cos and sin, each (length, head size), as transformers lays them out."""

    def __init__(self, geometry: Geometry, length: int) -> None:
        size = geometry.hidden // geometry.heads
        inverse = geometry.rope_theta ** -(torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length).float(), inverse)
        angles = torch.cat([angles, angles], dim=-1)
        self.cos, self.sin = angles.cos().to(BF16), angles.sin().to(BF16)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, heads, length, size) turned by position."""
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        length = x.shape[-2]
        return x * self.cos[:length] + turned * self.sin[:length]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def attention(x: torch.Tensor, layer: Layer, rotary: Rotary, geometry: Geometry) -> torch.Tensor:
    """Normed input (batch, length, hidden) -> attention's output, causal within a window."""
    batch, length, hidden = x.shape
    size = hidden // geometry.heads
    split = (batch, length, -1, size)
    q = rotary(functional.linear(x, layer.q).view(split).transpose(1, 2))
    k = rotary(functional.linear(x, layer.k).view(split).transpose(1, 2))
    v = functional.linear(x, layer.v).view(split).transpose(1, 2)
    groups = geometry.heads // geometry.kv_heads
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return functional.linear(mixed.transpose(1, 2).reshape(batch, length, hidden), layer.o)


def neurons(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Activations of all FFN neurons, (..., neurons)."""
    return functional.silu(functional.linear(x, layer.gate)) * functional.linear(x, layer.up)


def dense_ffn(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    return functional.linear(neurons(x, layer), layer.down)


def routing(x: torch.Tensor, router: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 probabilities (..., experts) and the mask of the selected ones."""
    probabilities = functional.linear(x, router).float().softmax(dim=-1)
    top = probabilities.topk(top_k, dim=-1).indices
    return probabilities, torch.zeros_like(probabilities).scatter_(-1, top, 1.0)


def gated_ffn(
    x: torch.Tensor, layer: Layer, gates: torch.Tensor, geometry: Geometry
) -> torch.Tensor:
    """FFN in the new order with each expert's block times its gate, gates (..., experts)."""
    active = neurons(x, layer)
    shared, routed = active.split(
        [geometry.shared_neurons, geometry.neurons - geometry.shared_neurons], -1
    )
    blocks = routed.unflatten(-1, (geometry.experts, geometry.expert_neurons))
    routed = (blocks * gates.to(blocks.dtype)[..., None]).flatten(-2)
    return functional.linear(torch.cat([shared, routed], dim=-1), layer.down)


def dispatched(
    x: torch.Tensor, gates: torch.Tensor, expert: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """Sum of gate times expert, for x (..., hidden) and gates (..., experts); `expert` gets the
    tokens (tokens, hidden) whose gate for it is not zero, and its number."""
    flat, weights = x.flatten(0, -2), gates.flatten(0, -2).to(x.dtype)
    output = torch.zeros_like(flat)
    for index in range(weights.shape[-1]):
        rows = weights[:, index].nonzero()[:, 0]
        part = expert(flat[rows], index) * weights[rows, index, None]
        output = output.index_add(0, rows, part)
    return output.view_as(x)


def blocks_ffn(
    x: torch.Tensor, layer: Layer, gates: torch.Tensor, geometry: Geometry
) -> torch.Tensor:
    """`gated_ffn` without shared neurons, each expert on its own tokens: for large experts."""
    width = geometry.expert_neurons

    def expert(tokens: torch.Tensor, index: int) -> torch.Tensor:
        rows = slice(index * width, (index + 1) * width)
        active = functional.silu(tokens @ layer.gate[rows].T) * (tokens @ layer.up[rows].T)
        return active @ layer.down[:, rows].T

    return dispatched(x, gates, expert)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trim:
    """Random trimming while training, in every second window."""

    skip_share: float
    drop_share: float
    generator: torch.Generator

    def kept(self, gates: torch.Tensor) -> torch.Tensor:
        """1 where an expert still runs, for gates (windows, length, experts)."""
        windows, length, experts = gates.shape
        mass = gates.sum(-1)
        # Lowest mass: twice the share; highest: never.
        rank = mass.flatten().argsort().argsort().view(windows, length) / mass.numel()
        draws = torch.rand((3, windows, length), generator=self.generator)
        skipped = draws[0] < 2 * self.skip_share * (1 - rank)
        dropped = (draws[1] < self.drop_share)[..., None] & _nth_active(gates, draws[2])
        trimmed = skipped[..., None] | dropped
        trimmed[::2] = False
        return (~trimmed).expand(windows, length, experts).to(gates.dtype)


def _nth_active(gates: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """A one-hot mask of one selected expert per token, drawn by numbers in [0, 1)."""
    active = (gates > 0).float().cumsum(-1)
    wanted = (draw * active[..., -1]).floor() + 1
    return (active == wanted[..., None]) & (gates > 0)


class StudentLayer(nn.Module):
    """One carved layer: frozen base in the new order, trained router, scales and LoRA factors."""

    order: torch.Tensor

    def __init__(
        self, dense: dict[str, torch.Tensor], index: int, geometry: Geometry, order: torch.Tensor,
        *, rank: int, attention_rank: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.geometry = geometry
        self.base = {name: dense[f"layers.{index}.{name}"] for name in (*ATTENTION, *FFN)}
        self.norms = {n: dense[f"layers.{index}.{n}"].to(BF16) for n in ("input_norm", "post_norm")}
        self.register_buffer("order", order)
        self.base["gate"] = self.base["gate"][order].contiguous()
        self.base["up"] = self.base["up"][order].contiguous()
        self.base["down"] = self.base["down"][:, order].contiguous()
        self.base = {name: weight.to(BF16) for name, weight in self.base.items()}
        self.router = nn.Parameter(torch.zeros(geometry.experts, geometry.hidden))
        self.down_scale = nn.Parameter(torch.ones(geometry.neurons))
        ranks = dict.fromkeys(FFN, rank) | dict.fromkeys(ATTENTION, attention_rank)
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for name, size in ranks.items():
            if size:
                rows, columns = self.base[name].shape
                self.a[name] = nn.Parameter(torch.randn(size, columns) / columns**0.5)
                self.b[name] = nn.Parameter(torch.zeros(rows, size))

    def matrix(self, name: str) -> torch.Tensor:
        """Base plus update, bfloat16; gradients reach the factors."""
        weight = self.base[name]
        if name in self.a:  # one fused product: summed in float32, rounded once
            weight = torch.addmm(weight, self.b[name].to(BF16), self.a[name].to(BF16))
        return weight * self.down_scale.to(BF16) if name == "down" else weight

    def merged(self) -> Layer:
        """The layer's weights as they now stand."""
        return Layer(**{n: self.matrix(n) for n in self.base}, **self.norms)

    def forward(
        self, x: torch.Tensor, layer: Layer | None = None, trim: Trim | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normed input -> output, router probabilities, selection mask before any trimming."""
        layer = layer or self.merged()
        probabilities, mask = routing(x, self.router.to(BF16), self.geometry.top_k)
        gates = probabilities * mask
        if trim is not None:
            gates = gates * trim.kept(gates.detach())
        output = gated_ffn(x, layer, gates, self.geometry)
        return output, probabilities, mask


class UpcycledLayer(nn.Module):
    """A dense layer whose FFN stands in every expert, each with its own low-rank update.

    The gates of the selected experts sum to one, so that the layer is the dense one as long as
    the updates are zero. With one expert it is a branch: the dense layer with one update.
    """

    def __init__(
        self, dense: dict[str, torch.Tensor], index: int, geometry: Geometry, *, rank: int
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.base = dense_layer(dense, index)
        self.router = nn.Parameter(torch.zeros(geometry.experts, geometry.hidden))
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for name in FFN:
            rows, columns = getattr(self.base, name).shape
            factors = torch.randn(geometry.experts, rank, columns) / columns**0.5
            self.a[name] = nn.Parameter(factors)
            self.b[name] = nn.Parameter(torch.zeros(geometry.experts, rows, rank))

    def merged(self) -> Layer:
        """What the experts share: attention, norms and the dense FFN."""
        return self.base

    def expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """One expert's output for (tokens, hidden); the update stays beside the frozen product,
        whose weights then need no gradient."""

        def project(values: torch.Tensor, name: str) -> torch.Tensor:
            a, b = (factors[name][expert].to(BF16) for factors in (self.a, self.b))
            return torch.addmm(values @ getattr(self.base, name).T, values @ a.T, b.T)

        active = functional.silu(project(x, "gate")) * project(x, "up")
        return project(active, "down")

    def forward(
        self, x: torch.Tensor, layer: Layer | None = None, trim: Trim | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `StudentLayer.forward`; each expert sees only the tokens that selected it."""
        probabilities, mask = routing(x, self.router.to(BF16), self.geometry.top_k)
        gates = probabilities * mask
        kept = 1.0 if trim is None else trim.kept(gates.detach())
        output = dispatched(x, kept * gates / gates.sum(-1, keepdim=True), self.expert)
        return output, probabilities, mask


def balance_loss(probabilities: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Switch Transformers' auxiliary loss: 1 when balanced."""
    experts = mask.shape[-1]
    share = mask.flatten(0, -2).mean(0) / mask.sum(-1).mean()
    return experts * (share * probabilities.flatten(0, -2).mean(0)).sum()


def router_drift(
    x: torch.Tensor, anchor: torch.Tensor, probabilities: torch.Tensor
) -> torch.Tensor:
    """Mean KL from an earlier router (experts, hidden) to the present probabilities on x.

    A light pull against the easy way out: a router whose probabilities are all alike loses the
    least when it is wrong, and tells nobody which tokens need their experts.
    """
    wanted = functional.linear(x.detach(), anchor).float().softmax(-1)
    logs = probabilities.clamp_min(1e-9).log()
    return functional.kl_div(logs, wanted, reduction="none").sum(-1).mean()
