"""Geometries of models whose weights are not at hand, from their published configurations.

Sizes are for 16-bit weights and activations; a matrix element costs two operations per token.
"""

from __future__ import annotations

import hashlib

import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.specs import ModelSpec

_BYTES = 2


def switch_base_8e() -> ModelSpec:
    """The decoder of Switch-Base-8: every second of 12 blocks is a MoE layer, top-1 of 8.

    The decoder is what generated tokens pass; the dense blocks before each MoE layer and the
    cross attention's queries count to that layer, the encoder's dense part to the bytes that every
    server holds.
    """
    width, inner, vocabulary = 768, 3072, 32128
    attention, feed_forward = 4 * width**2, 2 * width * inner
    dense = vocabulary * width + 12 * attention + 6 * feed_forward + 6 * 8 * width
    dense += 12 * 2 * attention + 6 * feed_forward + 6 * 8 * width
    return _spec(
        "Switch-Base-8E",
        "switch_transformers",
        layers=6,
        experts=8,
        top_k=1,
        hidden=width,
        vocabulary=vocabulary,
        context=512,
        expert=feed_forward,
        # Two blocks: self attention, queries and output of cross attention; one dense FFN.
        dense_layer=2 * (attention + 2 * width**2) + feed_forward + 8 * width,
        dense_total=dense,
        renormalised=False,
    )


def qwen15_moe_a27b() -> ModelSpec:
    """Qwen1.5-MoE-A2.7B: 24 layers, top-4 of 60 experts beside a shared one."""
    width, vocabulary = 2048, 151936
    layer = 4 * width**2 + 3 * width * 5632 + width + 60 * width
    return _spec(
        "Qwen1.5-MoE-A2.7B",
        "qwen2_moe",
        layers=24,
        experts=60,
        top_k=4,
        hidden=width,
        vocabulary=vocabulary,
        context=8192,
        expert=3 * width * 1408,
        dense_layer=layer,
        dense_total=24 * layer + 2 * vocabulary * width,
        renormalised=False,
    )


def mixtral_8x7b() -> ModelSpec:
    """Mixtral-8x7B: 32 layers, top-2 of 8 experts, gates renormalised."""
    width, vocabulary = 4096, 32000
    layer = 2 * width**2 + 2 * width * 1024 + 8 * width
    return _spec(
        "Mixtral-8x7B",
        "mixtral",
        layers=32,
        experts=8,
        top_k=2,
        hidden=width,
        vocabulary=vocabulary,
        context=32768,
        expert=3 * width * 14336,
        dense_layer=layer,
        dense_total=32 * layer + 2 * vocabulary * width,
        renormalised=True,
    )


GEOMETRIES = {
    "switch-base-8e": switch_base_8e,
    "qwen1.5-moe-a2.7b": qwen15_moe_a27b,
    "mixtral-8x7b": mixtral_8x7b,
}


def find_geometry(name: str) -> ModelSpec:
    """The geometry called `name`; raises `UserError` naming those there are."""
    if name not in GEOMETRIES:
        raise UserError(f"There is no geometry `{name}`; choose from {', '.join(GEOMETRIES)}.")
    return GEOMETRIES[name]()


def _spec(
    name: str,
    family: str,
    *,
    layers: int,
    experts: int,
    top_k: int,
    hidden: int,
    vocabulary: int,
    context: int,
    expert: int,
    dense_layer: int,
    dense_total: int,
    renormalised: bool,
) -> ModelSpec:
    """`expert`, `dense_layer`, `dense_total`: numbers of parameters."""
    shape = (layers, experts)
    return ModelSpec(
        name=name,
        family=family,
        # No weights, so no hash of them: the name stands for the geometry.
        model_hash=hashlib.sha256(f"geometry {name}".encode()).hexdigest(),
        layer_count=layers,
        expert_count=experts,
        top_k=top_k,
        hidden_size=hidden,
        vocab_size=vocabulary,
        context_length=context,
        activation_bytes=_BYTES,
        gates_renormalised=renormalised,
        expert_bytes=np.full(shape, expert * _BYTES, dtype=np.int64),
        expert_flops=np.full(shape, 2.0 * expert),
        layer_dense_flops=np.full(layers, 2.0 * dense_layer),
        head_flops=2.0 * vocabulary * hidden,
        dense_bytes=dense_total * _BYTES,
    )
