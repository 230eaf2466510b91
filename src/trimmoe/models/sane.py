"""Checkpoints whose settings no model has, or whose weights are not what their settings say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trimmoe.core.errors import UserError
from trimmoe.models.family import Geometry

_LARGEST = 1 << 31
"""Of any whole number; contexts are the largest."""
_MOST = 1 << 14
"""Layers, experts, heads."""


def require_sizes(raw: dict[str, Any]) -> None:
    """Raise `ValueError` for settings that no model has, of which lists would be made or modules
    built before the weights are looked at."""
    for key, value in raw.items():
        if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
            raise ValueError(f"{key} is out of all bounds")
        if re.search("layers|experts|heads", key) and isinstance(value, int) and value > _MOST:
            raise ValueError(f"{key} is {value}")


def require_sane(geometry: Geometry) -> None:
    """Raise `ValueError` for a shape that no model has."""
    sizes = {
        "block_count": geometry.block_count,
        "expert_count": geometry.expert_count,
        "top_k": geometry.top_k,
        "hidden_size": geometry.hidden_size,
        "vocab_size": geometry.vocab_size,
        "context_length": geometry.context_length,
    }
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name} is {size!r}")
    if geometry.top_k > geometry.expert_count or not geometry.moe_blocks:
        raise ValueError("there are too few experts")


def built(make: Callable[[], Any], folder: Path) -> Any:
    """What transformers makes of a configuration, on the meta device; its classes do not say what
    they cannot be made from. Raises UserError."""
    try:
        with torch.device("meta"):
            return make()
    except Exception as error:
        why = str(error).splitlines() or [type(error).__name__]
        raise UserError(
            f"config.json in {folder} describes a model that cannot be made ({why[0][:300]}); "
            "fetch the checkpoint again."
        ) from error
