"""AWQ and GPTQ: integers in words of 32 bits, transposed, with a scale and a zero per group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimmoe.core.errors import UserError
from trimmoe.models.checkpoint import SafetensorsCheckpoint
from trimmoe.models.formats.bits import WORD, unpacked
from trimmoe.models.formats.coded import Coded, Parts, misfit

_AWQ_BITS = 4
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ puts each of eight columns: it packs 0, 2, 4, 6, 1, 3, 5, 7."""

_GPTQ_BITS = (2, 4, 8)
_GPTQ_FORMATS = ("gptq", "gptq_v2")


def read_awq(stored: SafetensorsCheckpoint, settings: Mapping[str, Any]) -> dict[str, Coded]:
    """See `Scheme`. `qweight` [K, J / 8], `qzeros` [G, J / 8] and `scales` [G, J] are `weight`."""
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    bits = settings.get("bits", settings.get("w_bit", _AWQ_BITS))
    if version != "gemm" or bits != _AWQ_BITS:
        raise UserError(
            f"{stored.folder} holds {bits}-bit AWQ weights of version {version}, which TrimMoE "
            f"cannot read; use a 4-bit one of version gemm."
        )
    coded: dict[str, Coded] = {}
    for base in _bases(stored):
        rows, words = stored.entry(base + "qweight").shape
        group = _group_size(stored, base, settings, rows)
        shape = (words * WORD // _AWQ_BITS, rows)
        _require_shapes(stored, base, shape, bits=_AWQ_BITS, zeros_along=words)

        def decode(parts: Parts, group: int = group) -> Tensor:
            weight, zeros = (_awq_unpacked(parts[role]) for role in ("weight", "zeros"))
            return _scaled(weight, zeros, parts["scales"], group)

        coded[base + "weight"] = Coded(
            shape=shape, parts=_parts(stored, base, with_order=False), decode=decode
        )
    return coded


def read_gptq(stored: SafetensorsCheckpoint, settings: Mapping[str, Any]) -> dict[str, Coded]:
    """See `Scheme`. `qweight` [K b / 32, J], `qzeros` [G, J b / 32] and `scales` [G, J].

    `g_idx` [K] names the group of each input; without it they lie in a row. Bits are told tensor by
    tensor, since settings may make exceptions.
    """
    form = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
    if form not in _GPTQ_FORMATS:
        raise UserError(
            f"{stored.folder} holds GPTQ weights in the format {form}, which TrimMoE cannot read; "
            f"use one in gptq or gptq_v2."
        )
    coded: dict[str, Coded] = {}
    for base in _bases(stored):
        words, columns = stored.entry(base + "qweight").shape
        bits = _gptq_bits(stored, base, columns)
        shape = (columns, words * WORD // bits)
        group = _group_size(stored, base, settings, shape[1])
        _require_shapes(stored, base, shape, bits=bits, zeros_along=columns * bits // WORD)
        # A one for each number in a word: zeros of the older format are stored less one.
        ones = sum(1 << at for at in range(0, WORD, bits)) if form == "gptq" else 0

        def decode(parts: Parts, bits: int = bits, group: int = group, ones: int = ones) -> Tensor:
            weight = unpacked(parts["weight"], bits, dim=0)
            # Sums of int32 wrap around, as they did when one was taken away.
            zeros = unpacked(parts["zeros"] + ones, bits, dim=1)
            return _scaled(weight, zeros, parts["scales"], group, parts.get("order"))

        coded[base + "weight"] = Coded(
            shape=shape, parts=_parts(stored, base, with_order=True), decode=decode
        )
    return coded


def _bases(stored: SafetensorsCheckpoint) -> list[str]:
    """Names of the quantised modules, each with a dot at its end."""
    return [name.removesuffix("qweight") for name in stored.entries if name.endswith(".qweight")]


def _parts(stored: SafetensorsCheckpoint, base: str, *, with_order: bool) -> dict[str, str]:
    parts = {"weight": base + "qweight", "zeros": base + "qzeros", "scales": base + "scales"}
    if with_order and base + "g_idx" in stored.entries:
        parts["order"] = base + "g_idx"
    return parts


def _group_size(
    stored: SafetensorsCheckpoint, base: str, settings: Mapping[str, Any], inputs: int
) -> int:
    """Inputs that share a scale. Raises UserError if there are not as many scales as that makes."""
    groups = stored.entry(base + "scales").shape[0]
    declared = settings.get("group_size", settings.get("q_group_size", -1))
    sizes = [declared if declared and declared > 0 else inputs]
    if inputs % groups == 0:
        sizes.append(inputs // groups)
    fitting = [size for size in sizes if -(-inputs // size) == groups]
    if not fitting:
        raise misfit(stored.folder, base + "scales", f"{groups} groups do not fit {inputs} inputs")
    return fitting[0]


def _gptq_bits(stored: SafetensorsCheckpoint, base: str, outputs: int) -> int:
    zeros = stored.entry(base + "qzeros").shape[-1]
    bits = next((bits for bits in _GPTQ_BITS if zeros * WORD == outputs * bits), None)
    if bits is None:
        told = f"{zeros * WORD / outputs:g}"
        raise UserError(
            f"{stored.folder} holds {told}-bit GPTQ weights ({base}qweight), which TrimMoE cannot "
            f"read; use a checkpoint of 4 or 8 bits."
        )
    return bits


def _require_shapes(
    stored: SafetensorsCheckpoint, base: str, shape: tuple[int, int], *, bits: int, zeros_along: int
) -> None:
    """Raise UserError if zeros, scales or order are not those of a weight of `shape`."""
    groups = stored.entry(base + "scales").shape[0]
    wanted = {"qzeros": (groups, zeros_along), "scales": (groups, shape[0]), "g_idx": (shape[1],)}
    for end, expected in wanted.items():
        if end == "g_idx" and base + end not in stored.entries:
            continue
        found = stored.entry(base + end).shape
        if found != expected:
            raise misfit(
                stored.folder,
                base + end,
                f"its shape {list(found)} does not fit {bits}-bit weights {list(shape)}",
            )


def _awq_unpacked(words: Tensor) -> Tensor:
    """Numbers [R, 8 C] of words [R, C], back in the order of columns."""
    numbers = unpacked(words, _AWQ_BITS, dim=1)
    places = torch.tensor(_AWQ_PLACES)
    return numbers.unflatten(1, (-1, len(_AWQ_PLACES)))[:, :, places].flatten(1)


def _scaled(
    weight: Tensor, zeros: Tensor, scales: Tensor, group: int, order: Tensor | None = None
) -> Tensor:
    """(weight - zero) * scale of weights [K, J], transposed to [J, K].

    `order` [K] names the group of each input; without it, groups of `group` lie in a row.
    """
    scales = scales.to(torch.float32)
    if order is None and weight.shape[0] % group == 0:
        groups = weight.unflatten(0, (-1, group))
        values = (groups - zeros[:, None]).to(torch.float32).mul_(scales[:, None]).flatten(0, 1)
    else:
        which = torch.arange(weight.shape[0]) // group if order is None else order.long()
        values = (weight - zeros[which]).to(torch.float32).mul_(scales[which])
    return values.T.contiguous()
