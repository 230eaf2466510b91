"""Layers whose routed experts lie beside an MLP, each between norms of its own (Gemma 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimmoe.models.compiled import columns
from trimmoe.models.compiled.tables import Tables

NORMS = {
    columns.ATTENTION_POST: "post_attention_layernorm",
    columns.EXPERTS_NORM: "pre_feedforward_layernorm_2",
    columns.SHARED_NORM: "pre_feedforward_layernorm",
    columns.SHARED_POST: "post_feedforward_layernorm_1",
    columns.ROUTED_POST: "post_feedforward_layernorm_2",
    columns.BOTH_POST: "post_feedforward_layernorm",
}
"""Children of a layer, by column; what they read is in `columns`."""
NAMES = (
    *(f"{name}.weight" for name in NORMS.values()),
    "layer_scalar",
    "router.scale",
    "router.per_expert_scale",
)
"""Parameters of a layer that `add_beside` takes up."""


def add_beside(tables: Tables, block: int, layer: Any) -> None:
    """Note the norms and scales of a block."""
    for column, name in NORMS.items():
        tables.vector(block, column, getattr(layer, name).weight)
    router = layer.router
    tables.vector(block, columns.ROUTER_NORM, router.scale.float() * router.scalar_root_size)
    tables.vector(block, columns.SCALES, router.per_expert_scale)
    tables.vector(block, columns.OUTPUT_SCALE, layer.layer_scalar)


def value_norm(attention: Any) -> Tensor | None:
    """What the norm of values multiplies with, if there is one: it has no weights."""
    return torch.ones(attention.head_dim) if hasattr(attention, "v_norm") else None
