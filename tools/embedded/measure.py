"""What the model card reports, measured on a checkpoint of either recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional

from trimmoe.models.embedded.deltas import Geometry

from .network import Layer, Rotary, attention, blocks_ffn, gated_ffn, norm, routing

Gating = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(gates if all were selected, selection mask, layer) -> gates, each (..., experts)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A checkpoint's weights in the form that `network` computes with."""

    layers: list[Layer]
    routers: list[torch.Tensor]
    embed: torch.Tensor
    final_norm: torch.Tensor
    geometry: Geometry
    renormalised: bool
    """Whether the selected experts' gates are made to sum to one, as Mixtral's are."""


def load_weights(checkpoint: Path) -> Weights:
    """A checkpoint that one of the recipes made: Qwen2-MoE's or Mixtral's form."""
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    geometry, renormalised = _geometry(config), config["model_type"] == "mixtral"
    read = _mixtral_layer if renormalised else _carved_layer
    moe = "block_sparse_moe" if renormalised else "mlp"
    layers, routers = [], []
    for index in range(geometry.layers):
        prefix = f"model.layers.{index}"
        layers.append(read(tensors, prefix, f"{prefix}.{moe}", geometry.experts))
        routers.append(tensors[f"{prefix}.{moe}.gate.weight"])
    return Weights(
        layers=layers, routers=routers, embed=tensors["model.embed_tokens.weight"],
        final_norm=tensors["model.norm.weight"], geometry=geometry, renormalised=renormalised,
    )  # fmt: skip


def _geometry(config: dict) -> Geometry:
    mixtral = config["model_type"] == "mixtral"
    return Geometry(
        layers=config["num_hidden_layers"], hidden=config["hidden_size"],
        heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"],
        vocabulary=config["vocab_size"], top_k=config["num_experts_per_tok"],
        experts=config["num_local_experts" if mixtral else "num_experts"],
        expert_neurons=config["intermediate_size" if mixtral else "moe_intermediate_size"],
        shared_neurons=0 if mixtral else config["shared_expert_intermediate_size"],
        rope_theta=config["rope_theta"], norm_eps=config["rms_norm_eps"],
        context=config["max_position_embeddings"],
    )  # fmt: skip


def _carved_layer(tensors: dict[str, torch.Tensor], prefix: str, moe: str, experts: int) -> Layer:
    names = [f"{moe}.shared_expert", *(f"{moe}.experts.{e}" for e in range(experts))]
    parts = [[tensors.pop(f"{n}.{m}_proj.weight") for m in ("gate", "up", "down")] for n in names]
    parts[0][2] = parts[0][2] * 0.5  # the shared expert's gate, sigmoid(0)
    return _layer(tensors, prefix, parts)


def _mixtral_layer(tensors: dict[str, torch.Tensor], prefix: str, moe: str, experts: int) -> Layer:
    names = [f"{moe}.experts.{e}" for e in range(experts)]
    parts = [[tensors.pop(f"{n}.{m}.weight") for m in ("w1", "w3", "w2")] for n in names]
    return _layer(tensors, prefix, parts)


def _layer(tensors: dict[str, torch.Tensor], prefix: str, parts: list[list[torch.Tensor]]) -> Layer:
    """All experts' neurons side by side; `parts` holds gate, up and down of each."""
    gate, up, down = zip(*parts, strict=True)
    return Layer(
        gate=torch.cat(gate), up=torch.cat(up), down=torch.cat(down, dim=1),
        input_norm=tensors[f"{prefix}.input_layernorm.weight"],
        post_norm=tensors[f"{prefix}.post_attention_layernorm.weight"],
        **{n: tensors[f"{prefix}.self_attn.{n}_proj.weight"] for n in "qkvo"},
    )  # fmt: skip


def sizes(model: Weights, checkpoint: Path, deltas: Path) -> dict[str, int]:
    """Parameters in all and for one token, bytes kept, and arithmetic of one token's FFN."""
    geometry = model.geometry
    active = geometry.shared_neurons + geometry.top_k * geometry.expert_neurons
    per_neuron = 3 * geometry.hidden * geometry.layers
    tensors = [tensor for layer in model.layers for tensor in astuple(layer)]
    whole = sum(t.numel() for t in [*tensors, *model.routers, model.embed, model.final_norm])
    return {
        "parameters": whole,
        "active_parameters": whole - per_neuron * (geometry.neurons - active),
        "checkpoint_bytes": (checkpoint / "model.safetensors").stat().st_size,
        "deltas_bytes": deltas.stat().st_size,
        "ffn_flops_per_token": 2 * per_neuron * active,
    }


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


def any_experts(probabilities: torch.Tensor, mask: torch.Tensor, layer: int) -> torch.Tensor:
    """As many experts as were selected, drawn at random, with the selected ones' gates."""
    chosen = torch.multinomial(torch.ones_like(mask).flatten(0, -2), int(mask.sum(-1).max()))
    gates = (probabilities * mask).topk(chosen.shape[-1], dim=-1).values
    return torch.zeros_like(mask).scatter(-1, chosen.view_as(gates), gates)


def drop_routed(probabilities: torch.Tensor, mask: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.zeros_like(mask)


def walk(
    model: Weights, tokens: torch.Tensor, gating: Gating = exact
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per layer: states after it (windows, length, hidden), probabilities, selection mask."""
    eps = model.geometry.norm_eps
    rotary = Rotary(model.geometry, tokens.shape[1])
    run = gated_ffn if model.geometry.shared_neurons else blocks_ffn
    hidden = functional.embedding(tokens, model.embed)
    for index, (layer, router) in enumerate(zip(model.layers, model.routers, strict=True)):
        hidden = hidden + attention(
            norm(hidden, layer.input_norm, eps), layer, rotary, model.geometry
        )
        x = norm(hidden, layer.post_norm, eps)
        probabilities, mask = routing(x, router, model.geometry.top_k)
        scale = (probabilities * mask).sum(-1, keepdim=True) if model.renormalised else 1.0
        gates = gating(probabilities / scale, mask, index)
        hidden = hidden + run(x, layer, gates, model.geometry)
        yield hidden, probabilities, mask


def logits_of(model: Weights, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(norm(hidden, model.final_norm, model.geometry.norm_eps), model.embed)


def token_losses(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(length - 1,) cross-entropy of one window's next tokens."""
    return functional.cross_entropy(logits[:-1].float(), tokens[1:], reduction="none")


@torch.inference_mode()
def perplexity(model: Weights, windows: torch.Tensor, gating: Gating = exact) -> float:
    total = count = 0.0
    for window in windows:
        *_, (hidden, _, _) = walk(model, window[None], gating)
        losses = token_losses(logits_of(model, hidden[0]), window)
        total, count = total + losses.sum().item(), count + len(losses)
    return math.exp(total / count)


@torch.inference_mode()
def routing_report(model: Weights, windows: torch.Tensor) -> list[dict[str, object]]:
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


def routing_summary(table: list[dict[str, Any]]) -> dict[str, float]:
    """One line of `routing_report`: the worst loads of any layer, the means of the rest."""
    loads = [load for row in table for load in row["load"]]
    means = ("entropy_bits", "mass_mean", "mass_sd")
    return {"load_min": min(loads), "load_max": max(loads)} | {
        name: round(sum(row[name] for row in table) / len(table), 4) for name in means
    }


@torch.inference_mode()
def skip_harm(
    model: Weights, windows: torch.Tensor, layers: list[int]
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


def _masses_and_argmax(model: Weights, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    steps = list(walk(model, window[None]))
    masses = [(probabilities * mask).sum(-1)[0] for _, probabilities, mask in steps]
    return torch.stack(masses), logits_of(model, steps[-1][0][0]).argmax(-1)
