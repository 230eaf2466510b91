"""Messages and tensors as frames: one header, then one raw frame per tensor. No pickle.

The header holds the message (MessagePack, one of the types the reader names, no unknown fields)
and a descriptor of each tensor. Whatever bytes arrive, `decode` returns or raises `MalformedFrame`,
and allocates no more than a small multiple of what arrived.

Bytes are turned into arrays by numpy, not torch: torch gives up the interpreter's lock at every
step, and beside a thread that computes it is a while until that comes back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Union

import msgspec
import numpy as np
import torch
from torch import Tensor

from trimmoe.runtime.wire.base import Frame

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_KNOWN = {
    dtype: np.dtype("int16" if dtype is torch.bfloat16 else name) for name, dtype in DTYPES.items()
}
"""What numpy reads them as."""

MessageTypes = tuple[type[msgspec.Struct], ...]


class MalformedFrame(ValueError):
    """Bytes that are no message of this protocol."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a message may be at most; the same on both sides."""

    header_bytes: int = 1 << 20
    tensors: int = 64
    dimensions: int = 8
    tensor_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        assert min(self.header_bytes, self.tensors, self.dimensions, self.tensor_bytes) > 0


DEFAULT_LIMITS = Limits()


class TensorDescriptor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a raw frame holds."""

    dtype: str
    shape: tuple[int, ...]


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    message: msgspec.Raw
    tensors: tuple[TensorDescriptor, ...]


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(_Header)


def encode(
    message: msgspec.Struct, tensors: Sequence[Tensor] = (), limits: Limits = DEFAULT_LIMITS
) -> list[Frame]:
    """Frames of a message: the header, then one per tensor.

    Frames of contiguous CPU tensors are views of their memory, not copies. Raises `ValueError`
    for what the other side would refuse.
    """
    if len(tensors) > limits.tensors:
        raise ValueError(f"{len(tensors)} tensors in one message; the limit is {limits.tensors}")
    descriptors = tuple(_describe(tensor, limits) for tensor in tensors)
    header = _encoder.encode(_Header(msgspec.Raw(_encoder.encode(message)), descriptors))
    if len(header) > limits.header_bytes:
        raise ValueError(f"a header of {len(header)} bytes; the limit is {limits.header_bytes}")
    return [header, *(frame_of(tensor) for tensor in tensors)]


def decode(
    frames: Sequence[Frame], message_types: MessageTypes, limits: Limits = DEFAULT_LIMITS
) -> tuple[msgspec.Struct, tuple[Tensor, ...]]:
    """The message, one of `message_types`, and its tensors, which share the frames' memory.

    Raises `MalformedFrame` for anything else.
    """
    if not 1 <= len(frames) <= 1 + limits.tensors:
        raise MalformedFrame(f"{len(frames)} frames")
    if len(frames[0]) > limits.header_bytes:
        raise MalformedFrame(f"a header of {len(frames[0])} bytes")
    header = checked_decode(_header_decoder, frames[0])
    if len(header.tensors) != len(frames) - 1:
        raise MalformedFrame(f"{len(header.tensors)} tensors in {len(frames) - 1} frames")
    message = checked_decode(_message_decoder(message_types), header.message)
    pairs = zip(header.tensors, frames[1:], strict=True)
    return message, tuple(tensor_of(frame, descriptor, limits) for descriptor, frame in pairs)


def frame_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row-major; a view of its memory if it is contiguous on the CPU."""
    if not (tensor.is_cpu and tensor.is_contiguous()):
        tensor = tensor.to("cpu").contiguous()
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy().reshape(-1).view(np.uint8).data


def tensor_of(
    frame: Frame, descriptor: TensorDescriptor, limits: Limits = DEFAULT_LIMITS
) -> Tensor:
    """The tensor in a frame; shares the frame's memory if that is writable and aligned.

    Raises `MalformedFrame` if the frame is not what the descriptor says.
    """
    dtype = DTYPES.get(descriptor.dtype)
    if dtype is None:
        raise MalformedFrame(f"dtype {descriptor.dtype[:40]!r}")
    shape = descriptor.shape
    if len(shape) > limits.dimensions or any(size < 0 for size in shape):
        raise MalformedFrame(f"{len(shape)} dimensions, or negative ones")
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes != len(frame) or size_bytes > limits.tensor_bytes:
        raise MalformedFrame(f"{len(frame)} bytes where the shape needs {size_bytes}")
    if size_bytes == 0:
        return _empty(shape, dtype)
    if dtype is torch.bool:
        return torch.from_numpy((np.frombuffer(frame, dtype=np.uint8) != 0).reshape(shape))
    raw = np.frombuffer(frame, dtype=_KNOWN[dtype])
    if not (raw.flags.writeable and raw.flags.aligned):
        raw = raw.copy()
    tensor = torch.from_numpy(raw.reshape(shape))
    return tensor.view(dtype) if dtype is torch.bfloat16 else tensor


def checked_decode(decoder: msgspec.msgpack.Decoder[Any], data: Frame | msgspec.Raw) -> Any:
    """Decode, with `MalformedFrame` for whatever a decoder may raise on hostile bytes."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise MalformedFrame(str(error)[:200]) from None


@cache
def _message_decoder(message_types: MessageTypes) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(Union[message_types])  # noqa: UP007 (a tuple of types)


def _describe(tensor: Tensor, limits: Limits) -> TensorDescriptor:
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise ValueError(f"{tensor.dtype} does not travel; convert to one of {', '.join(DTYPES)}")
    if tensor.ndim > limits.dimensions or tensor.nbytes > limits.tensor_bytes:
        raise ValueError(
            f"a tensor of {tensor.ndim} dimensions and {tensor.nbytes} bytes; the limits are "
            f"{limits.dimensions} and {limits.tensor_bytes}"
        )
    return TensorDescriptor(name, tuple(tensor.shape))


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without elements; huge dimensions beside the zero are refused."""
    try:
        return torch.empty(shape, dtype=dtype)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise MalformedFrame(f"an empty tensor of shape {shape}") from error
