"""What blocks of a family do, where neither names nor shapes of their modules tell: a description,
which the compiled blocks read as numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trimmoe.models.compiled.beside import NAMES
from trimmoe.models.compiled.kinds import (
    GATED_CLAMPED,
    GATED_GELU,
    GATED_SILU,
    SCORES_SIGMOID,
    SCORES_SOFTMAX,
)

_SCORE_CORRECTION = "gate.e_score_correction_bias"


def _sums_of_two(config: Any) -> int:
    return 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Of the blocks of one family."""

    router: str = "gate"
    """The child of a block's MLP, or of the block where it is `beside`, that has the router's
    matrix."""
    scores: int = SCORES_SOFTMAX
    """What the router makes of its logits."""
    correction: str | None = None
    """Within the MLP, what is added to scores where experts are chosen."""
    best_of_group: Callable[[Any], int] = lambda config: 0
    """By a configuration, how many best experts a group of experts is judged by; 0 for none."""
    renormalises: bool | None = None
    """Whether gates add up to one; None for what the configuration says."""
    gated: int = GATED_SILU
    """What lies between the projections of routed experts."""
    alternating: bool = False
    """Whether rows of an expert's gate and up projection are stored in turn."""
    gates_heads: bool = False
    """Whether what gives a head's query gives a gate of what it gives, too."""
    about_one: bool = False
    """Whether norms multiply with one more than their weights."""
    beside: bool = False
    """Whether routed experts lie beside a block's MLP, each with norms of its own (`beside`)."""
    caps_logits: bool = False
    """Whether a configuration may ask for logits that are held within limits."""


DEFAULT = Form()
_DELTA = Form(gates_heads=True, about_one=True)
_DEEPSEEK = Form(scores=SCORES_SIGMOID, correction=_SCORE_CORRECTION, best_of_group=_sums_of_two)
FORMS: dict[str, Form] = {
    "deepseek_v2": Form(
        best_of_group=lambda config: int(config.topk_method == "group_limited_greedy"),
        renormalises=False,
    ),
    "deepseek_v3": _DEEPSEEK,
    "dots1": _DEEPSEEK,
    "gemma4_text": Form(
        router="router.proj", renormalises=True, gated=GATED_GELU, beside=True, caps_logits=True
    ),
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "gpt_oss": Form(router="router", renormalises=True, gated=GATED_CLAMPED, alternating=True),
    "minimax_m2": Form(
        scores=SCORES_SIGMOID, correction="e_score_correction_bias", renormalises=True
    ),
    "qwen3_5_moe_text": replace(_DELTA, renormalises=True),
    "qwen3_next": _DELTA,
    "sarvam_mla": _DEEPSEEK,
    "sarvam_moe": _DEEPSEEK,
    "solar_open": _DEEPSEEK,
}
"""Families of the general adapter whose decode step is compiled, by the `model_type` of what reads
text. Attention that compresses keys and values or is linear, norms of queries and keys, biases,
sinks, shared experts and dense blocks are found in the modules."""


def knows(form: Form, layer: Any, experts: str) -> bool:
    """Whether a layer has nothing but what compiled blocks know; `experts` is where its routed ones
    are, within it, or empty."""
    known = {f"self_attn.{name}" for name in _ATTENTION} | set(_NORMS)
    known |= {f"{LINEAR}.{name}" for name in _DELTA_RULE}
    known |= {f"mlp.{name}.weight" for name in _MLP}
    for shared in SHARED:
        known |= {f"mlp.{shared}.{name}.weight" for name in _MLP}
    known |= {"mlp.shared_expert_gate.weight", f"mlp.{form.correction}"}
    known |= {f"mlp.{form.router}.{end}" for end in ("weight", "bias")}
    if form.beside:
        known |= {*NAMES, f"{form.router}.weight"}
    if form.gates_heads:
        known.remove("self_attn.q_proj.bias")
    held = f"{experts}." if experts else None
    return all(
        name in known or (held is not None and name.startswith(held)) for name in layer.state_dict()
    )


LINEAR = "linear_attn"
"""The child of a layer that is linear attention."""
SHARED = ("shared_expert", "shared_experts")
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_MLP = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = (
    *(f"{part}_proj.{end}" for part in "qkvo" for end in ("weight", "bias")),
    "q_norm.weight",
    "k_norm.weight",
    "sinks",
    "q_a_proj.weight",
    "q_a_layernorm.weight",
    "q_b_proj.weight",
    "kv_a_proj_with_mqa.weight",
    "kv_a_layernorm.weight",
    "kv_b_proj.weight",
)
_DELTA_RULE = (
    *(f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a", "qkvz", "ba")),
    "conv1d.weight",
    "dt_bias",
    "A_log",
    "norm.weight",
    "out_proj.weight",
)
