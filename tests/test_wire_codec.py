"""Messages and tensors survive the wire; nothing else gets through it."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import factories  # noqa: F401  (the hypothesis profile)
from trimmoe.runtime.wire.base import Frame
from trimmoe.runtime.wire.codec import (
    DTYPES,
    Limits,
    MalformedFrame,
    TensorDescriptor,
    decode,
    encode,
    frame_of,
    tensor_of,
)


class Hidden(msgspec.Struct, tag="hidden", frozen=True, forbid_unknown_fields=True):
    wave: int
    rows: tuple[int, ...] = ()
    note: str = ""


class Stop(msgspec.Struct, tag="stop", frozen=True, forbid_unknown_fields=True):
    reason: str


TYPES = (Hidden, Stop)


def messages() -> st.SearchStrategy[msgspec.Struct]:
    numbers = st.integers(-(2**63), 2**63 - 1)
    return st.one_of(
        st.builds(Hidden, wave=numbers, rows=st.lists(numbers).map(tuple), note=st.text()),
        st.builds(Stop, reason=st.text()),
    )


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits of any dtype: NaNs and infinities too; sometimes not contiguous."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    tensor = bits.ne(0).squeeze(-1) if dtype is torch.bool else bits.view(dtype).squeeze(-1)
    return tensor.transpose(0, -1) if tensor.ndim > 1 and draw(st.booleans()) else tensor


def same_bits(left: Tensor, right: Tensor) -> bool:
    same = left.dtype == right.dtype and left.shape == right.shape
    return same and bytes(frame_of(left)) == bytes(frame_of(right))


@given(messages(), st.lists(tensors(), max_size=4), st.booleans())
def test_what_is_encoded_is_decoded(
    message: msgspec.Struct, sent: list[Tensor], writable: bool
) -> None:
    copy = bytearray if writable else bytes
    frames = [copy(frame) for frame in encode(message, sent)]
    received, arrived = decode(frames, TYPES)
    assert received == message
    assert len(arrived) == len(sent)
    assert all(same_bits(left, right) for left, right in zip(arrived, sent, strict=True))


def test_tensors_are_views_of_writable_frames_and_frames_views_of_tensors() -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    frame = bytearray(frame_of(tensor))
    received = tensor_of(frame, TensorDescriptor("float32", (2, 3)))
    frame[:4] = frame[4:8]
    assert received[0, 0] == received[0, 1] == 1.0
    view = frame_of(tensor)
    tensor[0] = tensor[1]
    assert bytes(view) == bytes(frame)


def test_misaligned_frames_are_copied_to_where_they_may_be_computed_on() -> None:
    frame = memoryview(bytearray(b"\0" + bytes(frame_of(torch.arange(3.0)))))[1:]
    received = tensor_of(frame, TensorDescriptor("float32", (3,)))
    assert received.tolist() == [0.0, 1.0, 2.0]
    assert received.data_ptr() % 4 == 0


def test_bytes_that_are_no_booleans_become_booleans() -> None:
    received = tensor_of(bytearray(b"\0\1\7"), TensorDescriptor("bool", (3,)))
    assert received.view(torch.uint8).tolist() == [0, 1, 1]


def descriptor_frames(*descriptors: object, frames: tuple[Frame, ...] = ()) -> list[Frame]:
    """A valid message with any tensor descriptors."""
    body = {"type": "stop", "reason": ""}
    return [msgspec.msgpack.encode([body, descriptors]), *frames]


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([], id="nothing"),
        pytest.param([b""], id="an empty header"),
        pytest.param([b"\x91" * 100_000], id="deeply nested"),
        pytest.param([b"\xdd\xff\xff\xff\xff"], id="an endless array"),
        pytest.param([msgspec.msgpack.encode([{"type": "evil"}, []])], id="an unknown type"),
        pytest.param([*encode(Stop("x")), b"more"], id="a frame too many"),
        pytest.param(encode(Stop("x"), [torch.ones(1)])[:1], id="a frame too few"),
        pytest.param(descriptor_frames(["float32", [2]], frames=(b"1234",)), id="too short"),
        pytest.param(descriptor_frames(["float32", [1]], frames=(b"12345678",)), id="too long"),
        pytest.param(descriptor_frames(["float32", [-1, -1]], frames=(b"1234",)), id="negative"),
        pytest.param(descriptor_frames(["complex64", [1]], frames=(b"12345678",)), id="a dtype"),
        pytest.param(descriptor_frames(["uint8", [1] * 9], frames=(b"1",)), id="dimensions"),
        pytest.param(descriptor_frames(["uint8", [2**62] * 8], frames=(b"1",)), id="overflow"),
        pytest.param(descriptor_frames(["uint8", [2**63, 0]], frames=(b"",)), id="huge and empty"),
        pytest.param(descriptor_frames(["uint8", [2**62, 8, 0]], frames=(b"",)), id="huge, empty"),
        pytest.param(
            [msgspec.msgpack.encode([{"type": "stop", "reason": "", "more": 1}, []])],
            id="an unknown field",
        ),
    ],
)
def test_anything_else_is_malformed(frames: list[Frame]) -> None:
    with pytest.raises(MalformedFrame):
        decode(frames, TYPES)


def test_limits_hold_on_both_sides() -> None:
    limits = Limits(header_bytes=100, tensors=1, dimensions=2, tensor_bytes=8)
    beyond = [
        (Stop("x" * 100), []),
        (Stop(""), [torch.ones(1), torch.ones(1)]),
        (Stop(""), [torch.ones(1, 1, 1)]),
        (Stop(""), [torch.ones(3)]),
    ]
    for message, sent in beyond:
        with pytest.raises(ValueError, match="limit"):
            encode(message, sent, limits)
        with pytest.raises(MalformedFrame):
            decode(encode(message, sent), TYPES, limits)
    with pytest.raises(ValueError, match="complex64"):
        encode(Stop(""), [torch.ones(1, dtype=torch.complex64)])


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_random_frames_raise_nothing_else(frames: list[bytes]) -> None:
    decoded_or_malformed(frames)


@given(
    messages(),
    st.lists(tensors(), max_size=3),
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 2**16), st.integers(0, 255))),
    st.integers(-2, 2),
)
def test_mutated_frames_raise_nothing_else(
    message: msgspec.Struct, sent: list[Tensor], flips: list[tuple[int, int, int]], cut: int
) -> None:
    frames = [bytearray(frame) for frame in encode(message, sent)]
    for which, where, value in flips:
        frame = frames[which % len(frames)]
        if frame:
            frame[where % len(frame)] = value
    if cut < 0:
        del frames[cut:]
    decoded_or_malformed([*frames, *[bytearray(b"x")] * cut])


def decoded_or_malformed(frames: list) -> None:
    """Decode within a few times the memory that came in."""
    tracemalloc.start()
    try:
        message, _ = decode(frames, TYPES)
        assert isinstance(message, TYPES)
    except MalformedFrame:
        pass
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 200_000 + 50 * sum(len(frame) for frame in frames)
