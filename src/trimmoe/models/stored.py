"""What a checkpoint takes on disk in the quantisation that its config.json names."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

_MXFP4_BITS = 4 + 8 / 32
"""Four bits, and an exponent of eight for 32 of them."""
_SCALE_BYTES = 4
"""Of a block of FP8."""


def stored_bytes(model: nn.Module, settings: dict[str, Any] | None, dtype_bytes: int) -> int:
    """All parameters once; what is not quantised is in so many bytes each."""
    return round(
        sum(
            parameter.numel() * _bytes_each(name, parameter, model, settings, dtype_bytes)
            for name, parameter in model.named_parameters()
        )
    )


def is_known(settings: dict[str, Any] | None) -> bool:
    """Whether `stored_bytes` knows such a quantisation; if not it counts as none."""
    return settings is None or _method(settings) is not None


def quantisation_name(settings: dict[str, Any] | None) -> str | None:
    return None if settings is None else str(settings.get("quant_method") or "unknown")


def _method(settings: dict[str, Any]) -> str | None:
    name = settings.get("quant_method")
    if name == "mxfp4":
        return name
    return "fp8" if name == "fp8" and settings.get("weight_block_size") else None


def _bytes_each(
    name: str, parameter: Any, model: nn.Module, settings: dict[str, Any] | None, plain: int
) -> float:
    method = None if settings is None else _method(settings)
    if settings is None or method is None or parameter.dim() < 2 or _is_kept(name, model, settings):
        return plain
    expert = ".experts." in name
    if method == "mxfp4":
        return _MXFP4_BITS / 8 if expert and parameter.dim() == 3 else plain
    rows, columns = settings["weight_block_size"]
    return 1 + _SCALE_BYTES / (rows * columns)


def _is_kept(name: str, model: nn.Module, settings: dict[str, Any]) -> bool:
    """Whether a parameter stays as it is: embeddings, heads, routers and what is named."""
    owner = name.rpartition(".")[0]
    if isinstance(model.get_submodule(owner), (nn.Embedding, nn.Conv1d)):
        return True
    last = owner.rpartition(".")[2]
    if last in ("lm_head", "gate", "router"):
        return True
    named = settings.get("modules_to_not_convert") or ()
    return any(re.search(each.replace(".", r"\.").replace("*", ".*"), owner) for each in named)
