"""FP8: weights in E4M3, multiplied by a scale of each block, or of the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimmoe.models.checkpoint import SafetensorsCheckpoint
from trimmoe.models.formats.coded import Coded, misfit
from trimmoe.models.formats.scaled import scaled

_SCALES = ("_scale_inv", "_scale")
"""Both multiply: the first is called after what the quantiser did."""


def read_fp8(stored: SafetensorsCheckpoint, settings: Mapping[str, Any]) -> dict[str, Coded]:
    """See `Scheme`. Every tensor of E4M3 is one of the model's, under its own name."""
    coded: dict[str, Coded] = {}
    for name, entry in stored.entries.items():
        if entry.dtype != "F8_E4M3":
            continue
        scales = [name + end for end in _SCALES if name + end in stored.entries]
        if not scales:
            raise misfit(stored.folder, name, "it has no scales beside it")
        coded[name] = scaled(
            stored, name, scale=scales[0], declared=settings.get("weight_block_size")
        )
    return coded
