"""A dense source of a few thousand weights, and students carved from it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tools.embedded.carve import choose_order
from tools.embedded.network import StudentLayer
from tools.embedded.pack import carved_tensors, write_deltas
from tools.embedded.stages import Bench
from tools.embedded.upcycle import upcycled_geometry

from trimmoe.models.embedded.deltas import Geometry, load_deltas, merge
from trimmoe.models.embedded.materialise import model_config

CARVED = Geometry(
    layers=4, hidden=24, heads=3, kv_heads=1, vocabulary=96, experts=4, expert_neurons=8,
    shared_neurons=16, top_k=2, rope_theta=10000.0, norm_eps=1e-5, context=128,
)  # fmt: skip
UPCYCLED = upcycled_geometry(CARVED)


def tiny_dense() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    hidden, size = CARVED.hidden, CARVED.hidden // CARVED.heads
    kv = CARVED.kv_heads * size
    out = {"embed": 0.3 * weight(CARVED.vocabulary, hidden) * hidden**0.5}
    out["norm"] = torch.ones(hidden)
    for index in range(CARVED.layers):
        shapes = {
            "q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden),
            "gate": (CARVED.neurons, hidden), "up": (CARVED.neurons, hidden),
            "down": (hidden, CARVED.neurons),
        }  # fmt: skip
        out |= {f"layers.{index}.{name}": weight(*shape) for name, shape in shapes.items()}
        for name in ("input_norm", "post_norm"):
            out[f"layers.{index}.{name}"] = torch.ones(hidden)
    return out


class Letters:
    """A tokenizer of bytes."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [1 + byte % (CARVED.vocabulary - 1) for byte in text.encode()]}


def tiny_bench(work: Path, geometry: Geometry) -> Bench:
    return Bench(work=work, dense=tiny_dense(), tokenizer=Letters(), geometry=geometry)


def some_tokens(windows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(1, CARVED.vocabulary, (windows, length), generator=generator)


def checkpoint_of(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]
) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def carved_layers(bench: Bench) -> list[StudentLayer]:
    layers = []
    for index in range(CARVED.layers):
        profile = torch.rand(200, CARVED.neurons)
        order = choose_order(profile, CARVED, seed=index)
        layer = StudentLayer(bench.dense, index, CARVED, order, rank=2, attention_rank=0)
        torch.nn.init.normal_(layer.router)
        torch.nn.init.uniform_(layer.down_scale, 0.5, 1.5)
        for factor in layer.b.values():
            torch.nn.init.normal_(factor, std=0.2)
        layers.append(layer)
    return layers


def carved_checkpoint(bench: Bench, layers: list[StudentLayer]) -> Path:
    path = bench.work / "carved.safetensors"
    write_deltas(path, carved_tensors(layers), CARVED, {})
    tensors = merge(bench.dense, load_deltas(path), CARVED)
    return checkpoint_of(bench.work / "carved", tensors, model_config(CARVED))
