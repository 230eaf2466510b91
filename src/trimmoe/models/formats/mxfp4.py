"""MXFP4 as gpt-oss is published: E2M1 in blocks of 32, each multiplied by a power of two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trimmoe.models.checkpoint import SafetensorsCheckpoint
from trimmoe.models.formats.bits import e8m0_values, fp4_values
from trimmoe.models.formats.coded import Coded, Parts, misfit

_BLOCK = 32


def read_mxfp4(stored: SafetensorsCheckpoint, settings: Mapping[str, Any]) -> dict[str, Coded]:
    """See `Scheme`. `X_blocks` [..., J, G, 16] and `X_scales` [..., J, G] are X [..., J, 32 G]."""
    coded: dict[str, Coded] = {}
    for name, entry in stored.entries.items():
        if not name.endswith("_blocks") or entry.dtype != "U8":
            continue
        base = name.removesuffix("_blocks")
        scales = stored.entry(base + "_scales").shape
        if entry.shape != (*scales, _BLOCK // 2) or len(scales) not in (2, 3):
            raise misfit(
                stored.folder,
                name,
                f"blocks {list(entry.shape)} do not fit scales {list(scales)}",
            )
        coded[base] = Coded(
            shape=(*scales[:-1], scales[-1] * _BLOCK),
            parts={"blocks": name, "scales": base + "_scales"},
            decode=_decode,
        )
    return coded


def _decode(parts: Parts) -> Tensor:
    return (fp4_values(parts["blocks"]) * e8m0_values(parts["scales"])[..., None]).flatten(-2)
