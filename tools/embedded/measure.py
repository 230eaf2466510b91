"""What the model card reports, measured on a materialised checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional

from trimmoe.models.embedded.deltas import Geometry

from .network import Layer, Rotary, attention, gated_ffn, norm, routing

Gating = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(probabilities, selection mask, layer) -> gates, each (..., experts)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Carved:
    """A checkpoint's weights in the form that `network` computes with."""

    layers: list[Layer]
    routers: list[torch.Tensor]
    embed: torch.Tensor
    final_norm: torch.Tensor
    geometry: Geometry


def load_carved(checkpoint: Path, geometry: Geometry) -> Carved:
    tensors = load_file(checkpoint / "model.safetensors")
    layers = [_layer(tensors, f"model.layers.{i}", geometry) for i in range(geometry.layers)]
    routers = [tensors[f"model.layers.{i}.mlp.gate.weight"] for i in range(geometry.layers)]
    return Carved(
        layers=layers, routers=routers, embed=tensors["model.embed_tokens.weight"],
        final_norm=tensors["model.norm.weight"], geometry=geometry,
    )  # fmt: skip


def _layer(tensors: dict[str, torch.Tensor], prefix: str, geometry: Geometry) -> Layer:
    experts = [f"{prefix}.mlp.experts.{e}" for e in range(geometry.experts)]
    parts = [f"{prefix}.mlp.shared_expert", *experts]
    columns = [tensors[f"{part}.down_proj.weight"] for part in parts]
    columns[0] = columns[0] * 0.5  # the shared expert's gate, sigmoid(0)
    attention_parts = {n: tensors[f"{prefix}.self_attn.{n}_proj.weight"] for n in "qkvo"}
    return Layer(
        gate=torch.cat([tensors[f"{part}.gate_proj.weight"] for part in parts]),
        up=torch.cat([tensors[f"{part}.up_proj.weight"] for part in parts]),
        down=torch.cat(columns, dim=1),
        input_norm=tensors[f"{prefix}.input_layernorm.weight"],
        post_norm=tensors[f"{prefix}.post_attention_layernorm.weight"],
        **attention_parts,
    )


def exact(probabilities: torch.Tensor, mask: torch.Tensor, layer: int) -> torch.Tensor:
    return probabilities * mask


def drop_one(probabilities: torch.Tensor, mask: torch.Tensor, layer: int) -> torch.Tensor:
    """One of the selected experts, at random, adds nothing."""
    victim = torch.multinomial(mask.flatten(0, -2), 1).view(*mask.shape[:-1], 1)
    return (probabilities * mask).scatter(-1, victim, 0.0)


def substitute_one(probabilities: torch.Tensor, mask: torch.Tensor, layer: int) -> torch.Tensor:
    """A random unselected expert runs in a random selected one's place, with its gate."""
    victim = torch.multinomial(mask.flatten(0, -2), 1).view(*mask.shape[:-1], 1)
    stand_in = torch.multinomial((1 - mask).flatten(0, -2), 1).view(*mask.shape[:-1], 1)
    gates = probabilities * mask
    return gates.scatter(-1, stand_in, gates.gather(-1, victim)).scatter(-1, victim, 0.0)


def drop_routed(probabilities: torch.Tensor, mask: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.zeros_like(mask)


def walk(
    model: Carved, tokens: torch.Tensor, gating: Gating = exact
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per layer: states after it (windows, length, hidden), probabilities, selection mask."""
    eps = model.geometry.norm_eps
    rotary = Rotary(model.geometry, tokens.shape[1])
    hidden = functional.embedding(tokens, model.embed)
    for index, (layer, router) in enumerate(zip(model.layers, model.routers, strict=True)):
        hidden = hidden + attention(
            norm(hidden, layer.input_norm, eps), layer, rotary, model.geometry
        )
        x = norm(hidden, layer.post_norm, eps)
        probabilities, mask = routing(x, router, model.geometry.top_k)
        gates = gating(probabilities, mask, index)
        hidden = hidden + gated_ffn(x, layer, gates, model.geometry)
        yield hidden, probabilities, mask


def logits_of(model: Carved, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(norm(hidden, model.final_norm, model.geometry.norm_eps), model.embed)


def token_losses(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(length - 1,) cross-entropy of one window's next tokens."""
    return functional.cross_entropy(logits[:-1].float(), tokens[1:], reduction="none")


@torch.inference_mode()
def perplexity(model: Carved, windows: torch.Tensor, gating: Gating = exact) -> float:
    total = count = 0.0
    for window in windows:
        *_, (hidden, _, _) = walk(model, window[None], gating)
        losses = token_losses(logits_of(model, hidden[0]), window)
        total, count = total + losses.sum().item(), count + len(losses)
    return math.exp(total / count)


@torch.inference_mode()
def routing_report(model: Carved, windows: torch.Tensor) -> list[dict[str, object]]:
    """Per layer: every expert's load (1 = uniform), entropy of the router, importance mass."""
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in model.layers]
    for window in windows:
        for index, (_, probabilities, mask) in enumerate(walk(model, window[None])):
            found[index].append((probabilities[0], mask[0]))
    return [_layer_report(index, pairs, model.geometry) for index, pairs in enumerate(found)]


def _layer_report(
    index: int, pairs: list[tuple[torch.Tensor, torch.Tensor]], geometry: Geometry
) -> dict[str, object]:
    probabilities = torch.cat([pair[0] for pair in pairs])
    mask = torch.cat([pair[1] for pair in pairs])
    load = mask.mean(0) * geometry.experts / geometry.top_k
    mass = (probabilities * mask).sum(-1)
    entropy = -(probabilities * probabilities.clamp_min(1e-9).log()).sum(-1) / math.log(2)
    quantiles = mass.quantile(torch.tensor([0.05, 0.5, 0.95]))
    return {
        "layer": index,
        "load": [round(v, 4) for v in load.tolist()],
        "entropy_bits": round(entropy.mean().item(), 4),
        "mass_mean": round(mass.mean().item(), 4),
        "mass_sd": round(mass.std().item(), 4),
        "mass_p05_p50_p95": [round(v, 4) for v in quantiles.tolist()],
    }


@torch.inference_mode()
def lens_agreement(model: Carved, windows: torch.Tensor, first: int) -> dict[int, float]:
    """Share of positions where a layer's state, read by the output head, names the final token."""
    same: dict[int, float] = {}
    for window in windows:
        states = [hidden[0] for hidden, _, _ in walk(model, window[None])]
        final = logits_of(model, states[-1]).argmax(-1)
        for layer in range(first, len(states)):
            hits = (logits_of(model, states[layer]).argmax(-1) == final).float().mean().item()
            same[layer] = same.get(layer, 0.0) + hits / len(windows)
    return {layer: round(value, 4) for layer, value in same.items()}


@torch.inference_mode()
def skip_harm(
    model: Carved, windows: torch.Tensor, layers: list[int]
) -> dict[int, dict[str, float]]:
    """What leaving out a layer's routed experts does, for tokens of low and of high mass.

    Per layer: share of changed argmax tokens among the quarter of tokens with the least and
    with the most importance mass, when that layer's routed experts are left out for all tokens.
    """
    harm: dict[int, dict[str, float]] = {}
    exact_runs = [_masses_and_argmax(model, window) for window in windows]
    for chosen in layers:

        def gating(
            p: torch.Tensor, mask: torch.Tensor, layer: int, chosen: int = chosen
        ) -> torch.Tensor:
            return torch.zeros_like(p) if layer == chosen else p * mask

        flips, masses = [], []
        for window, (mass, argmax) in zip(windows, exact_runs, strict=True):
            *_, (hidden, _, _) = walk(model, window[None], gating)
            flips.append((logits_of(model, hidden[0]).argmax(-1) != argmax).float())
            masses.append(mass[chosen])
        flipped, mass = torch.cat(flips), torch.cat(masses)
        low, high = mass <= mass.quantile(0.25), mass >= mass.quantile(0.75)
        harm[chosen] = {
            "low_mass": round(flipped[low].mean().item(), 4),
            "high_mass": round(flipped[high].mean().item(), 4),
            "all": round(flipped.mean().item(), 4),
        }
    return harm


def _masses_and_argmax(model: Carved, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    steps = list(walk(model, window[None]))
    masses = [(probabilities * mask).sum(-1)[0] for _, probabilities, mask in steps]
    return torch.stack(masses), logits_of(model, steps[-1][0][0]).argmax(-1)
