"""Families of transformers that route to experts, and what is to be known of them beforehand.

Nothing here is needed to serve a family: how its layers work is found in its modules. The tables
say which families have been shown to answer as transformers does, token for token (`tests/zoo.py`
has a tiny model of each), and why others cannot be served. One that is in neither is tried.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from trimmoe.core.errors import UserError

FAST = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Those whose decode step is compiled, with adapters of their own."""
ENCODER_DECODERS = ("switch_transformers",)

SERVED = (
    "afmoe",
    "aria_text",
    "axk1",
    "axk2",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "dots3_note_text",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v3",
    "jamba",
    "kimi_linear",
    "kolibri1",
    "laguna",
    "lara_mini",
    "lfm2_moe",
    "llama4_text",
    "mellum",
    "mimo_v2_flash",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mistral4",
    "nemotron_h",
    "phimoe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "sarvam_mla",
    "sarvam_moe",
    "solar_open",
)
"""By the general adapter; `FORMS` has those of them whose decode step is compiled."""
TEXT_PARTS = (
    "aria",
    "deepseek_ocr2",
    "gemma4",
    "glm4v_moe",
    "kimi_k25",
    "llama4",
    "minimax_m3_vl",
    "mistral_large4",
    "qwen3_5_moe",
    "qwen3_omni_moe_thinker",
    "qwen3_vl_moe",
    "step3p7",
)
"""Of models that see or hear too: what reads and writes text is served, the rest is not loaded."""

COMPILED_TEXT_PARTS = ("gemma4", "kimi_k25", "qwen3_5_moe")
"""Those whose text part is of a compiled family."""

ALIASES = {"kimi_k2": "deepseek_v3"}
"""What configurations call families that transformers has under another name."""

_STREAMS = "keeps several streams of states side by side (hyper-connections)"
_CONVOLUTION = "keeps states of convolutions behind its experts, where no server stays"
UNSERVED = {
    "beam": "adds attention to its states by a rule of its own",
    "cohere2_moe": "runs attention and experts side by side",
    "dbrx": "joins norms and attention in one module, and all experts in one matrix",
    "deepseek_v4": _STREAMS,
    "diffusion_gemma": "writes by diffusion, not token by token",
    "doge": "looks its experts up by keys, instead of routing to them",
    "ernie4_5_vl_moe": "stores experts for text and for images in one row",
    "glm5_next": _STREAMS,
    "granite_docling": "has no routed experts in what reads text",
    "hy_v4": _STREAMS,
    "hy_v4_vl": _STREAMS,
    "inkling_text": _CONVOLUTION,
    "inkling_mm_model": _CONVOLUTION,
    "inkling2_text": _CONVOLUTION,
    "inkling2": _CONVOLUTION,
    "inkling2_loop_text": _CONVOLUTION,
    "inkling2_loop": _CONVOLUTION,
    "jetmoe": "routes attention to experts too",
    "longcat_flash": "has two attentions in a layer and its experts beside both",
    "minimax": "keeps the normed state, not the state, behind attention",
    "muse_spark": "gates what attention and experts add to its states",
    "nllb-moe": "has an encoder of its own kind",
    "openai_privacy_filter": "marks text and writes none",
    "qwen4_exp": _STREAMS,
    "qwen4_exp_text": _STREAMS,
    "unlimited_ocr": "keeps windows of keys of a kind of its own",
    "zaya": "hands what a router knows on to the router of the next layer",
}
"""Why others are not served."""

_PER_TOKEN = "has embeddings of its tokens in every layer, of which only the first server knows"
_CARRIED = "has layers that attend to what earlier ones, perhaps of another server, have chosen"


def objection(text: Any) -> str | None:
    """Why the model that a text configuration describes is not served although others of its family
    are; None if nothing speaks against it."""
    if getattr(text, "hidden_size_per_layer_input", 0):
        return _PER_TOKEN
    if getattr(text, "num_kv_shared_layers", 0):
        return _CARRIED
    if "shared" in (getattr(text, "indexer_types", None) or ()):
        return _CARRIED
    return None


def keeps_states(model_type: str) -> bool:
    """Whether a family has layers that keep a recurrent state, by its source."""
    import inspect
    import sys

    source = inspect.getsource(sys.modules[any_class_of(model_type).__module__])
    return any(mark in source for mark in STATE_MARKS)


STATE_MARKS = ("get_recurrent_state(", "get_conv_state(")
"""How modules ask their cache for states that cannot be cut back."""


def refusal(model_type: str, reason: str) -> UserError:
    """The error for a model that cannot be served."""
    return UserError(
        f"TrimMoE cannot serve this {model_type} model: it {reason}. `trimmoe models` lists what "
        f"it serves."
    )


@cache
def class_names() -> dict[str, str]:
    """Model class with a head of every model type, that of all its parts where there are two."""
    from transformers.models.auto import modeling_auto as auto

    tables = (
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        # Last, since it is the class whose names a checkpoint of both parts has.
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    return {kind: name for table in tables for kind, name in table.items()}


def class_of(model_type: str) -> Any:
    """The class of a model type. Raises UserError if there is none with a head, or it is known
    that it cannot be served."""
    if model_type in UNSERVED:
        raise refusal(model_type, UNSERVED[model_type])
    return any_class_of(model_type)


def any_class_of(model_type: str) -> Any:
    """The class of a model type, whether it can be served or not. Raises UserError if there is none
    with a head."""
    import transformers

    name = class_names().get(model_type)
    if name is None:
        raise UserError(
            f"The installed transformers has no language model of type {model_type!r}; a newer "
            f"one may have it. `trimmoe models` lists what TrimMoE serves."
        )
    return getattr(transformers, name)
