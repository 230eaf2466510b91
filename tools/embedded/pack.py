"""Student layers -> the deltas file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from trimmoe.models.embedded.deltas import FORMAT, Geometry, content_sha256

from .network import StudentLayer


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


def layer_tensors(layer: StudentLayer) -> dict[str, torch.Tensor]:
    """One layer's entries, by name within the layer."""
    out = {
        "order": layer.order.to(torch.int16),
        "router": layer.router.to(torch.bfloat16),
        "down_scale": layer.down_scale.float(),
    }
    for name in layer.a:
        a, b = spread(layer.a[name], layer.b[name])
        if not b.any():
            continue
        out[f"{name}.a"], out[f"{name}.a_scale"] = quantise(a, 0)
        out[f"{name}.b"], out[f"{name}.b_scale"] = quantise(b, 1)
        if name == "down":  # the student scales the updated columns, the file only the source's
            out["down.a_scale"] = out["down.a_scale"] * out["down_scale"]
    return out


@torch.no_grad()
def write_deltas(
    path: Path, layers: list[StudentLayer], geometry: Geometry, recipe: dict[str, object]
) -> None:
    """Write the whole file, or leave the old one."""
    tensors = {
        f"layers.{index}.{name}": tensor.detach().contiguous()
        for index, layer in enumerate(layers)
        for name, tensor in layer_tensors(layer).items()
    }
    metadata = {
        "format": FORMAT,
        "geometry": json.dumps(asdict(geometry)),
        "recipe": json.dumps(recipe),
        "content_sha256": content_sha256(tensors),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata=metadata)
    partial.chmod(0o644)
    os.replace(partial, path)
