"""compressed-tensors: integers in words or apart, FP8 and FP4; a tensor's parts tell which."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimmoe.core.errors import UserError
from trimmoe.models.checkpoint import PLAIN_DTYPES, SafetensorsCheckpoint
from trimmoe.models.formats.bits import WORD, fp4_values, unpacked
from trimmoe.models.formats.coded import Coded, Parts, misfit
from trimmoe.models.formats.scaled import blocks_of, scale_values, scaled

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
_BITS = (2, 4, 8)
_STORED_NUMBERS = ("I8", "F8_E4M3")


def read_compressed_tensors(
    stored: SafetensorsCheckpoint, settings: Mapping[str, Any]
) -> dict[str, Coded]:
    """See `Scheme`. `weight_packed` or `weight`, with `weight_scale`, are `weight`."""
    groups = [group for group in (settings.get("config_groups") or {}).values() if group]
    _require_known(stored, settings, groups)
    weights = [group.get("weights") or {} for group in groups]
    declared = next((w["block_structure"] for w in weights if w.get("block_structure")), None)
    widths = {int(w["num_bits"]) for w in weights if w.get("type", "int") == "int" and w}
    packed = _Packed(stored, widths)
    coded: dict[str, Coded] = {}
    for name, entry in stored.entries.items():
        if name.endswith(".weight_packed"):
            weight = name.removesuffix("_packed")
            coded[weight] = packed.coded(name) if entry.dtype == "I32" else _fp4(stored, name)
        elif name.endswith(".weight") and name + "_scale" in stored.entries:
            if entry.dtype not in _STORED_NUMBERS:
                kind = "not compressed" if entry.dtype in PLAIN_DTYPES else f"of {entry.dtype}"
                raise misfit(stored.folder, name, f"it is {kind} but has scales")
            zero = name + "_zero_point"
            coded[name] = scaled(
                stored,
                name,
                scale=name + "_scale",
                zero=zero if zero in stored.entries else None,
                declared=declared,
            )
    return coded


def _require_known(
    stored: SafetensorsCheckpoint, settings: Mapping[str, Any], groups: list[Any]
) -> None:
    """Raise UserError for what the weights alone do not tell."""
    named = [settings.get("format"), *(group.get("format") for group in groups)]
    named.append((settings.get("sparsity_config") or {}).get("format"))
    unknown = [form for form in named if form is not None and form not in _FORMATS]
    if (settings.get("transform_config") or {}).get("config_groups"):
        unknown.append("transformed")
    if unknown:
        raise UserError(
            f"{stored.folder} holds compressed-tensors weights in the format {unknown[0]}, which "
            f"TrimMoE cannot read; use one in pack-quantized, int-quantized or float-quantized."
        )


class _Packed:
    """Integers of a few bits in words of 32, stored with half their range added."""

    def __init__(self, stored: SafetensorsCheckpoint, widths: set[int]) -> None:
        self._stored, self._widths = stored, widths
        self._columns: dict[tuple[str, tuple[int, ...]], int | None] = {}

    def coded(self, packed: str) -> Coded:
        """`weight_packed` [J, K / n] with scales and, if there are, zeros, order and shape."""
        stored, weight = self._stored, packed.removesuffix("_packed")
        rows, words = stored.entry(packed).shape
        bits, columns = self._width(packed, words)
        scales = stored.entry(weight + "_scale").shape
        blocks = blocks_of((rows, columns), scales)
        if blocks is None:
            raise misfit(
                stored.folder, packed, f"scales {list(scales)} do not fit [{rows}, {columns}]"
            )

        def decode(parts: Parts) -> Tensor:
            half = 1 << (bits - 1)
            if "shape" in parts and parts["shape"].tolist() != [rows, columns]:
                raise misfit(stored.folder, packed, "its weight_shape is another's")
            values = (unpacked(parts["weight"], bits, dim=1)[:, :columns] - half).float()
            scale = scale_values(parts["scale"])
            zero = parts.get("zero")
            if zero is not None and zero.dtype == torch.int32:
                zero = unpacked(zero, bits, dim=0)[:rows] - half
            if "order" in parts and bool((parts["order"] >= 0).all()):
                which = parts["order"].long()
                shift = 0.0 if zero is None else zero.float()[:, which]
                return (values - shift) * scale[:, which]
            if zero is not None:
                values -= blocks.spread(zero.float(), values.shape)
            return values * blocks.spread(scale, values.shape)

        ends = {"scale": "_scale", "zero": "_zero_point", "order": "_g_idx", "shape": "_shape"}
        parts = {role: weight + end for role, end in ends.items() if weight + end in stored.entries}
        return Coded(shape=(rows, columns), parts={"weight": packed} | parts, decode=decode)

    def _width(self, packed: str, words: int) -> tuple[int, int]:
        """Bits and columns of a weight of so many words in a row."""
        columns = self._told_columns(packed)
        for bits in sorted(self._widths & set(_BITS)):
            each = WORD // bits
            if columns is None or -(-columns // each) == words:
                return bits, words * each if columns is None else columns
        told = ", ".join(map(str, sorted(self._widths))) or "no"
        raise UserError(
            f"{self._stored.folder} holds compressed-tensors weights packed in {told} bits "
            f"({packed}), which TrimMoE cannot read; use a checkpoint of 4 or 8 bits."
        )

    def _told_columns(self, packed: str) -> int | None:
        """Columns by `weight_shape`, which is read once for all tensors of a kind."""
        entry = self._stored.entry(packed)
        kind = (re.sub(r"\d+", "#", packed), entry.shape)
        shape = packed.removesuffix("_packed") + "_shape"
        if kind not in self._columns:
            known = shape in self._stored.entries
            self._columns[kind] = int(self._stored.glance(shape)[1]) if known else None
        return self._columns[kind]


def _fp4(stored: SafetensorsCheckpoint, packed: str) -> Coded:
    """E2M1 in bytes [J, K / 2]: MXFP4, or NVFP4 if a global scale divides the scales [J, G]."""
    weight = packed.removesuffix("_packed")
    rows, half = stored.entry(packed).shape
    scales = stored.entry(weight + "_scale").shape
    blocks = blocks_of((rows, 2 * half), scales)
    if stored.entry(packed).dtype != "U8" or blocks is None:
        raise misfit(stored.folder, packed, f"scales {list(scales)} do not fit its FP4 numbers")

    def decode(parts: Parts) -> Tensor:
        scale = scale_values(parts["scale"])
        if "global" in parts:
            scale = scale / parts["global"].to(torch.float32).reshape(1, 1)
        values = fp4_values(parts["weight"])
        return values * blocks.spread(scale, values.shape)

    parts = {"weight": packed, "scale": weight + "_scale"}
    if weight + "_global_scale" in stored.entries:
        parts["global"] = weight + "_global_scale"
    return Coded(shape=(rows, 2 * half), parts=parts, decode=decode)
