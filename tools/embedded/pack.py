"""Trained layers -> the deltas file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from trimmoe.models.embedded.deltas import FORMAT, Geometry, content_sha256

from .network import StudentLayer, UpcycledLayer


def quantise(weight: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values and the float32 scale of each slice across `dim`."""
    scale = weight.abs().amax(dim=dim).clamp_min(1e-12) / 127
    return (weight / scale.unsqueeze(dim)).round().clamp(-127, 127).to(torch.int8), scale


def spread(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same product with its energy spread evenly over the rank, which 8 bits keep best."""
    left, left_r = torch.linalg.qr(b)
    right, right_r = torch.linalg.qr(a.T)
    u, s, vh = torch.linalg.svd(left_r @ right_r.T)
    generator = torch.Generator().manual_seed(0)
    turn, _ = torch.linalg.qr(torch.randn(len(s), len(s), generator=generator))
    root = s.sqrt()
    return turn.T @ (root[:, None] * vh) @ right.T, left @ (u * root) @ turn


def factor_tensors(prefix: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """An update's factors in 8 bits; nothing where the update is zero."""
    a, b = spread(a, b)
    if not b.any():
        return {}
    values_a, scale_a = quantise(a, 0)
    values_b, scale_b = quantise(b, 1)
    named = {"a": values_a, "a_scale": scale_a, "b": values_b, "b_scale": scale_b}
    return {f"{prefix}.{name}": tensor for name, tensor in named.items()}


@torch.no_grad()
def carved_tensors(layers: list[StudentLayer]) -> dict[str, torch.Tensor]:
    """The deltas file's entries for a carved model."""
    out = {}
    for index, layer in enumerate(layers):
        prefix = f"layers.{index}"
        out[f"{prefix}.order"] = layer.order.to(torch.int16)
        out[f"{prefix}.router"] = layer.router.to(torch.bfloat16)
        out[f"{prefix}.down_scale"] = layer.down_scale.float()
        for name in layer.a:
            out |= factor_tensors(f"{prefix}.{name}", layer.a[name], layer.b[name])
        if (scale := f"{prefix}.down.a_scale") in out:
            # The student scales the updated columns, the file only the source's.
            out[scale] = out[scale] * layer.down_scale
    return out


@torch.no_grad()
def upcycled_tensors(layers: list[UpcycledLayer]) -> dict[str, torch.Tensor]:
    """The deltas file's entries for an upcycled model: routers, and every expert's updates."""
    out = {}
    for index, layer in enumerate(layers):
        prefix = f"layers.{index}"
        out[f"{prefix}.router"] = layer.router.to(torch.bfloat16)
        for name in layer.a:
            for expert, (a, b) in enumerate(zip(layer.a[name], layer.b[name], strict=True)):
                out |= factor_tensors(f"{prefix}.experts.{expert}.{name}", a, b)
    return out


def write_deltas(
    path: Path,
    tensors: dict[str, torch.Tensor],
    geometry: Geometry,
    recipe: dict[str, object],
    *,
    form: str = FORMAT,
) -> None:
    """Write the whole file, or leave the old one."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    metadata = {
        "format": form,
        "geometry": json.dumps(asdict(geometry)),
        "recipe": json.dumps(recipe),
        "content_sha256": content_sha256(tensors),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata=metadata)
    partial.chmod(0o644)
    os.replace(partial, path)
