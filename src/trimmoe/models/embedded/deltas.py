"""The learned part: its file format, and merging it into the dense source.

One safetensors file. For each layer N:

- `layers.N.order` int16 (neurons,): the source's FFN neurons in their new order, the shared
  expert's first, then each routed expert's;
- `layers.N.router` bfloat16 (experts, hidden);
- `layers.N.down_scale` float32 (neurons,): factor on each column of the down projection;
- for each updated matrix M: `layers.N.M.a` int8 (rank, in), `layers.N.M.b` int8 (out, rank) and
  their float32 scales per input and per output. The update is `b_scale * (b @ a) * a_scale`.

The integer product stays below 2**24, so float32 holds it exactly whatever the order of
summation: the merged weights are the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trimmoe.core.errors import UserError

if TYPE_CHECKING:
    import torch

FORMAT = "trimmoe-embedded-deltas/1"
DELTAS_PATH = Path(__file__).with_name("deltas.safetensors")
ATTENTION = ("q", "k", "v", "o")
FFN = ("gate", "up", "down")


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Sizes of the carved model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    experts: int
    expert_neurons: int
    shared_neurons: int
    top_k: int
    rope_theta: float
    norm_eps: float
    context: int

    @property
    def neurons(self) -> int:
        return self.shared_neurons + self.experts * self.expert_neurons


def read_header(path: Path) -> dict[str, str]:
    """The metadata of a deltas file, without its tensors."""
    try:
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= 1 << 24:
                raise ValueError("no safetensors header")
            metadata = json.loads(handle.read(length)).get("__metadata__", {})
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read the embedded model's deltas in {path}: {error}") from error
    if metadata.get("format") != FORMAT or "content_sha256" not in metadata:
        raise UserError(f"{path} is not a deltas file of the form {FORMAT}.")
    return metadata


def read_geometry(metadata: dict[str, str]) -> Geometry:
    return Geometry(**json.loads(metadata["geometry"]))


def content_sha256(tensors: dict[str, torch.Tensor]) -> str:
    """Hash of every tensor's name, type, shape and bytes, in the order of the names."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_deltas(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a deltas file; refused where they are not what was written."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    metadata = read_header(path)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"The embedded model's deltas in {path} are damaged: {error}") from error
    if content_sha256(tensors) != metadata["content_sha256"]:
        raise UserError(f"The embedded model's deltas in {path} are damaged: wrong checksum.")
    return tensors


def update_of(deltas: dict[str, torch.Tensor], matrix: str) -> torch.Tensor | None:
    """The float32 (out, in) update of `layers.N.M`, or None where it was left alone."""
    if f"{matrix}.a" not in deltas:
        return None
    product = deltas[f"{matrix}.b"].float() @ deltas[f"{matrix}.a"].float()
    return product * deltas[f"{matrix}.b_scale"][:, None] * deltas[f"{matrix}.a_scale"][None, :]


def merge_layer(
    dense: dict[str, torch.Tensor], deltas: dict[str, torch.Tensor], layer: int, geometry: Geometry
) -> dict[str, torch.Tensor]:
    """One layer's bfloat16 tensors under their names in a Qwen2-MoE checkpoint."""
    import torch

    short, full = f"layers.{layer}", f"model.layers.{layer}"
    order = deltas[f"{short}.order"].long()
    base = {name: dense[f"{short}.{name}"] for name in (*ATTENTION, *FFN)}
    base["gate"], base["up"] = base["gate"][order], base["up"][order]
    base["down"] = base["down"][:, order] * deltas[f"{short}.down_scale"][None, :]
    for name in base:
        update = update_of(deltas, f"{short}.{name}")
        base[name] = base[name] if update is None else base[name] + update

    shared = geometry.shared_neurons
    out = {f"{full}.self_attn.{name}_proj.weight": base[name] for name in ATTENTION}
    out[f"{full}.input_layernorm.weight"] = dense[f"{short}.input_norm"]
    out[f"{full}.post_attention_layernorm.weight"] = dense[f"{short}.post_norm"]
    out[f"{full}.mlp.gate.weight"] = deltas[f"{short}.router"]
    # A gate of zeros opens by sigmoid(0) = 1/2 on every token; the down projection makes up for it.
    out[f"{full}.mlp.shared_expert_gate.weight"] = torch.zeros(1, geometry.hidden)
    out |= _expert(f"{full}.mlp.shared_expert", base, slice(0, shared), down_factor=2.0)
    for expert in range(geometry.experts):
        start = shared + expert * geometry.expert_neurons
        rows = slice(start, start + geometry.expert_neurons)
        out |= _expert(f"{full}.mlp.experts.{expert}", base, rows, down_factor=1.0)
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in out.items()}


def _expert(
    prefix: str, base: dict[str, torch.Tensor], rows: slice, *, down_factor: float
) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.gate_proj.weight": base["gate"][rows],
        f"{prefix}.up_proj.weight": base["up"][rows],
        f"{prefix}.down_proj.weight": base["down"][:, rows] * down_factor,
    }


def merge(
    dense: dict[str, torch.Tensor], deltas: dict[str, torch.Tensor], geometry: Geometry
) -> dict[str, torch.Tensor]:
    """The whole checkpoint's tensors (the output head is tied to the embedding)."""
    import torch

    out = {
        "model.embed_tokens.weight": dense["embed"].to(torch.bfloat16).contiguous(),
        "model.norm.weight": dense["norm"].to(torch.bfloat16).contiguous(),
    }
    for layer in range(geometry.layers):
        out |= merge_layer(dense, deltas, layer, geometry)
    return out
