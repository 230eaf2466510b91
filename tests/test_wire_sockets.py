"""Servers of one machine on Unix sockets: what `test_wire_transport.py` does not ask of all."""

from __future__ import annotations

import asyncio
import socket
import struct
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimmoe.core.errors import UserError
from trimmoe.runtime.wire.base import Frame
from trimmoe.runtime.wire.sockets import (
    ALIGNMENT,
    MOST_FRAMES,
    NOT_OURS,
    NotOurs,
    SocketCarrier,
    StreamSettings,
    Unpacker,
    packed,
)
from wires import until

LARGEST = 1000


@given(
    messages=st.lists(st.lists(st.binary(max_size=80), min_size=1, max_size=5), max_size=5),
    cuts=st.lists(st.integers(1, 60), max_size=60),
)
def test_messages_come_out_as_they_went_in_wherever_the_stream_is_cut(
    messages: list[list[bytes]], cuts: list[int]
) -> None:
    stream = b"".join(part for message in messages for part in packed(message))
    unpacker, came = Unpacker(LARGEST), []
    for size in [*cuts, len(stream)]:
        came += unpacker.take(stream[:size])
        stream = stream[size:]
    assert [[bytes(frame) for frame in message] for message in came] == messages
    assert not any(frame.readonly for message in came for frame in message)


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_every_frame_begins_where_a_tensor_may_lie(sizes: list[int]) -> None:
    parts, at = packed([bytes(size) for size in sizes]), 0
    for number, part in enumerate(parts):
        if number and len(part) and at % ALIGNMENT:
            # Only padding lies elsewhere.
            assert (at + len(part)) % ALIGNMENT == 0
        at += len(part)
    assert at % ALIGNMENT == 0


@pytest.mark.parametrize(
    "hostile",
    [
        struct.pack("<Q", 0),
        struct.pack("<Q", MOST_FRAMES + 1),
        struct.pack("<QQ", 1, LARGEST + 1),
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_what_is_none_of_our_messages_is_refused_before_anything_is_kept(hostile: bytes) -> None:
    with pytest.raises(NotOurs):
        Unpacker(LARGEST).take(hostile)


class Ends:
    """Two carriers, what came to the second one and what it dropped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.came: list[list[bytes]] = []
        self.dropped: Counter[str] = Counter()
        self.a, self.b = (self.carrier(name) for name in "ab")

    def carrier(self, name: str) -> SocketCarrier:
        settings = StreamSettings(queue_bytes=1 << 20, largest_frame_bytes=1 << 16)
        return SocketCarrier(name, f"unix://{self.folder}/{name}", settings=settings)

    def arrived(self, origin: str | None, frames: Sequence[Frame]) -> None:
        assert origin is None
        self.came.append([bytes(frame) for frame in frames])

    def drop(self, reason: str) -> None:
        self.dropped[reason] += 1


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async with AsyncExitStack() as stack:
        made = Ends(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        for carrier in (made.a, made.b):
            stack.push_async_callback(carrier.close)
        await made.a.start(made.arrived, made.drop)
        yield made


async def test_what_is_posted_before_a_peer_listens_arrives_once_it_does(ends: Ends) -> None:
    ends.a.connect("b", ends.b.address)
    for number in range(3):
        assert ends.a.post("b", [b"%d" % number])
    await ends.b.start(ends.arrived, ends.drop)
    await until(lambda: len(ends.came) == 3)
    assert ends.came == [[b"0"], [b"1"], [b"2"]]


async def test_a_broken_connection_is_noticed_at_once_and_made_again(ends: Ends) -> None:
    await ends.b.start(ends.arrived, ends.drop)
    ends.a.connect("b", ends.b.address)
    assert ends.a.post("b", [b"first"])
    await until(lambda: ends.came)
    await ends.b.close()
    await until(lambda: not ends.a.post("b", [b"lost"]))
    ends.came.clear()
    ends.b = ends.carrier("b")
    await ends.b.start(ends.arrived, ends.drop)
    await until(lambda: ends.a.post("b", [b"again"]))
    await until(lambda: ends.came)
    assert ends.came == [[b"again"]]
    await ends.b.close()


async def test_a_peer_that_does_not_read_fills_a_bounded_queue(ends: Ends) -> None:
    """And what it was sent arrives whole and in order when it does."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(ends.folder / "b"))
        listening.listen()
        ends.a.connect("b", ends.b.address)
        taken = 0
        while ends.a.post("b", [taken.to_bytes(4, "little") + bytes(50_000)]):
            taken += 1
            assert taken < 1000, "it takes for ever"
        assert taken * 50_000 >= 1 << 20
        connection, _ = listening.accept()
        with connection:
            connection.setblocking(False)
            unpacker, came, loop = Unpacker(1 << 16), [], asyncio.get_running_loop()
            while len(came) < taken:
                data = await asyncio.wait_for(loop.sock_recv(connection, 1 << 16), 30)
                came += [int.from_bytes(frames[0][:4], "little") for frames in unpacker.take(data)]
    assert came == list(range(taken))


async def test_a_stranger_on_the_socket_is_shown_out_and_harms_nobody(ends: Ends) -> None:
    await ends.b.start(ends.arrived, ends.drop)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(ends.folder / "b"))
        stranger.sendall(b"\xff" * 64)
        await until(lambda: ends.dropped[NOT_OURS])
        stranger.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(stranger, 10) == b""
    ends.a.connect("b", ends.b.address)
    assert ends.a.post("b", [b"hello"])
    await until(lambda: ends.came)


async def test_a_killed_servers_socket_is_taken_over(ends: Ends) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(ends.folder / "b"))
    await ends.b.start(ends.arrived, ends.drop)
    ends.a.connect("b", ends.b.address)
    ends.a.post("b", [b"hello"])
    await until(lambda: ends.came)
    await ends.b.close()
    assert not (ends.folder / "b").exists()


async def test_nonsense_for_an_address_is_the_users_to_mend(tmp_path: Path) -> None:
    for nonsense in ("tcp://127.0.0.1:5", "unix://relative", "/a/path"):
        with pytest.raises(UserError, match="unix:///path"):
            await SocketCarrier("a", nonsense).start(lambda o, f: None, lambda r: None)
    tmp_path.chmod(0o700)
    long = f"unix://{tmp_path}/{'x' * 120}"
    with pytest.raises(UserError, match="choose another folder"):
        await SocketCarrier("a", long).start(lambda o, f: None, lambda r: None)
