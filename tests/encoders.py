"""Quantised formats written from their specifications, number by number, to be read back.

Every encoder takes a matrix [J, K] and gives what the files hold, by the end of the tensor's name,
and what that stands for. Nothing here is shared with what reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A matrix as it is stored, and what it stands for."""

    parts: dict[str, Tensor]
    values: Floats


Encoder = Callable[[Floats], Encoded]


def e4m3(byte: int) -> float:
    """What a byte means in float8_e4m3fn: four bits of exponent, three of mantissa, no infinity."""
    sign, exponent, mantissa = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def _e4m3_values(weight: Tensor) -> Floats:
    table = np.array([e4m3(byte) for byte in range(256)], dtype=np.float32)
    return table[weight.view(torch.uint8).numpy()]


def fp8(block: tuple[int, int] | None, *, end: str = "weight_scale_inv") -> Encoder:
    """E4M3 with a scale per block; None: one for all."""

    def encode(weight: Floats) -> Encoded:
        rows, columns = weight.shape
        height, width = block or weight.shape
        grid = np.empty((-(-rows // height), -(-columns // width)), np.float32)
        scaled, spread = np.empty_like(weight), np.empty_like(weight)
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                part = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
                grid[i, j] = np.abs(weight[part]).max() / np.float32(448)
                scaled[part], spread[part] = weight[part] / grid[i, j], grid[i, j]
        numbers = torch.from_numpy(scaled).to(torch.float8_e4m3fn)
        scales = torch.from_numpy(grid if block else grid.reshape(()))
        return Encoded(
            parts={"weight": numbers, end: scales}, values=_e4m3_values(numbers) * spread
        )

    return encode


def _affine(weight: Floats, group: int, bits: int) -> tuple[Numbers, Numbers, NDArray[np.float16]]:
    """Numbers [J, K], zeros [J, G] and scales [J, G] of groups of inputs; the last may be short."""
    inputs = weight.shape[1]
    groups = [weight[:, start : start + group] for start in range(0, inputs, group)]
    low = np.stack([np.minimum(part.min(1), 0) for part in groups], axis=1)
    high = np.stack([np.maximum(part.max(1), 0) for part in groups], axis=1)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales), 0, 2**bits - 1).astype(np.int64)
    spread, shift = (np.repeat(each, group, axis=1)[:, :inputs] for each in (scales, zeros))
    numbers = np.clip(np.rint(weight / spread) + shift, 0, 2**bits - 1).astype(np.int64)
    return numbers, zeros, scales


def _stands_for(numbers: Numbers, zeros: Numbers, scales: Any, which: Any) -> Floats:
    """(number - zero) * scale, one by one; `which` is the group of each input."""
    values = np.empty(numbers.shape, np.float32)
    for k, group in enumerate(which):
        shifted = (numbers[:, k] - zeros[:, group]).astype(np.float32)
        values[:, k] = shifted * scales[:, group].astype(np.float32)
    return values


def _words(numbers: Numbers, bits: int, places: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Rows of numbers in rows of words; `places` names the number in each place of a word."""
    each = 32 // bits
    words = np.zeros((numbers.shape[0], -(-numbers.shape[1] // each)), np.uint32)
    for row in range(words.shape[0]):
        for word in range(words.shape[1]):
            for at in range(each):
                column = word * each + (at if places is None else places[at])
                number = int(numbers[row, column]) if column < numbers.shape[1] else 0
                words[row, word] |= np.uint32(number << bits * at)
    return words.view(np.int32)


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def awq(group: int) -> Encoder:
    """AutoAWQ's GEMM version, four bits."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def encode(weight: Floats) -> Encoded:
        numbers, zeros, scales = _affine(weight, group, 4)
        which = [k // group for k in range(weight.shape[1])]
        return Encoded(
            parts={
                "qweight": _tensor(_words(numbers.T, 4, order)),
                "qzeros": _tensor(_words(zeros.T, 4, order)),
                "scales": _tensor(scales.T),
            },
            values=_stands_for(numbers, zeros, scales, which),
        )

    return encode


def gptq(bits: int, group: int, *, form: str = "gptq", shuffled: bool = False) -> Encoder:
    """AutoGPTQ's layout; `shuffled` as `desc_act` leaves it."""

    def encode(weight: Floats) -> Encoded:
        inputs = weight.shape[1]
        which = np.arange(inputs) // group
        if shuffled:
            which = np.random.default_rng(inputs).permutation(which)
        by_group = np.argsort(which, kind="stable")
        sorted_numbers, zeros, scales = _affine(weight[:, by_group], group, bits)
        numbers = np.empty_like(sorted_numbers)
        numbers[:, by_group] = sorted_numbers
        packed = _words(zeros.T, bits).view(np.uint32).astype(np.uint64)
        if form == "gptq":
            ones = sum(1 << at for at in range(0, 32, bits))
            packed = (packed - np.uint64(ones)) & np.uint64(0xFFFFFFFF)
        parts = {
            "qweight": _tensor(_words(numbers, bits).T),
            "qzeros": _tensor(packed.astype(np.uint32).view(np.int32)),
            "scales": _tensor(scales.T),
        }
        if shuffled:
            parts["g_idx"] = _tensor(which.astype(np.int32))
        return Encoded(parts=parts, values=_stands_for(numbers, zeros, scales, which))

    return encode


def packed(bits: int, group: int, *, symmetric: bool, shuffled: bool = False) -> Encoder:
    """compressed-tensors' pack-quantized: signed numbers, stored with half their range added."""

    def encode(weight: Floats) -> Encoded:
        rows, inputs = weight.shape
        which = np.arange(inputs) // group
        if shuffled:
            which = np.random.default_rng(inputs).permutation(which)
        by_group = np.argsort(which, kind="stable")
        sorted_numbers, zeros, scales = _affine(weight[:, by_group], group, bits)
        if symmetric:
            zeros = np.full_like(zeros, 2 ** (bits - 1))
        numbers = np.empty_like(sorted_numbers)
        numbers[:, by_group] = sorted_numbers
        parts = {
            "weight_packed": _tensor(_words(numbers, bits)),
            "weight_scale": _tensor(scales),
            "weight_shape": torch.tensor([rows, inputs]),
        }
        if not symmetric:
            parts["weight_zero_point"] = _tensor(_words(zeros.T, bits).T)
        if shuffled:
            parts["weight_g_idx"] = _tensor(which.astype(np.int32))
        return Encoded(parts=parts, values=_stands_for(numbers, zeros, scales, which))

    return encode


def int8(*, symmetric: bool) -> Encoder:
    """compressed-tensors' int-quantized: a byte for each weight, a scale for each output."""

    def encode(weight: Floats) -> Encoded:
        numbers, zeros, scales = _affine(weight, weight.shape[1], 8)
        if symmetric:
            zeros = np.full_like(zeros, 128)
        parts = {
            "weight": _tensor((numbers - 128).astype(np.int8)),
            "weight_scale": _tensor(scales),
        }
        if not symmetric:
            parts["weight_zero_point"] = _tensor((zeros - 128).astype(np.int8))
        which = np.zeros(weight.shape[1], int)
        return Encoded(parts=parts, values=_stands_for(numbers, zeros, scales, which))

    return encode


def _nearest_e2m1(value: float) -> int:
    code = min(range(8), key=lambda c: abs(E2M1[c] - abs(value)))
    return code | (8 if value < 0 else 0)


def _e2m1(weight: Floats, spread: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Bytes [J, K / 2] and values of weights over scales."""
    codes = np.array([[_nearest_e2m1(v) for v in row] for row in weight / spread], np.uint8)
    signed = np.array([*E2M1, *(-value for value in E2M1)], np.float32)
    halves = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return halves, (signed[codes] * spread).astype(np.float32)


def _exponents(weight: Floats) -> NDArray[np.uint8]:
    """A power of two for each 32 inputs, as E8M0."""
    largest = np.abs(weight.reshape(weight.shape[0], -1, 32)).max(2)
    return (np.floor(np.log2(largest / 6)) + 128).astype(np.uint8)


def mxfp4(weight: Floats) -> Encoded:
    """gpt-oss's MXFP4."""
    exponents = _exponents(weight)
    spread = np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, axis=1)
    data, values = _e2m1(weight, spread)
    blocks = data.reshape(*exponents.shape, 16)
    return Encoded(parts={"_blocks": _tensor(blocks), "_scales": _tensor(exponents)}, values=values)


def packed_mxfp4(weight: Floats) -> Encoded:
    """compressed-tensors' mxfp4-pack-quantized."""
    exponents = _exponents(weight)
    spread = np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, axis=1)
    data, values = _e2m1(weight, spread)
    parts = {"weight_packed": _tensor(data), "weight_scale": _tensor(exponents)}
    return Encoded(parts=parts, values=values)


def packed_nvfp4(weight: Floats) -> Encoded:
    """compressed-tensors' nvfp4-pack-quantized: FP8 scales of 16 inputs, over one global scale."""
    largest = np.abs(weight.reshape(weight.shape[0], -1, 16)).max(2)
    over_all = np.float32(448 * 6 / largest.max())
    scales = _tensor(largest / 6 * over_all).to(torch.float8_e4m3fn)
    spread = np.repeat((_e4m3_values(scales) / over_all).astype(np.float32), 16, axis=1)
    data, values = _e2m1(weight, spread)
    parts = {
        "weight_packed": _tensor(data),
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([float(over_all)]),
    }
    return Encoded(parts=parts, values=values)
