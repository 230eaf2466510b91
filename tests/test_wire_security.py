"""Who may speak, what garbage does to a server, and what must not happen in plain text."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import zmq

from trimmoe.core.errors import UserError
from trimmoe.runtime.wire.codec import DEFAULT_LIMITS
from trimmoe.runtime.wire.keys import (
    Keyring,
    derive_keys,
    generate_token,
    keyring_from_token,
)
from trimmoe.runtime.wire.link import LinkSettings
from trimmoe.runtime.wire.protocol import WIRE_VERSION, Envelope
from trimmoe.runtime.wire.transport import LinkTransport
from trimmoe.runtime.wire.zmq_transport import SocketSettings, ZmqCarrier
from wires import BRISK, NAMES, PATIENCE_S, TOKEN, Note, soon, texts, until


class Pair:
    """Servers a and b with any keyrings, connected."""

    def __init__(self) -> None:
        self.stack = AsyncExitStack()

    async def start(
        self,
        keyring_a: Keyring | None = None,
        keyring_b: Keyring | None = None,
        *,
        settings: LinkSettings = BRISK,
    ) -> tuple[LinkTransport, LinkTransport]:
        a = LinkTransport(ZmqCarrier("a", keyring=keyring_a), (Note,), settings=settings)
        b = LinkTransport(ZmqCarrier("b", keyring=keyring_b), (Note,), settings=settings)
        for server in (a, b):
            await self.stack.enter_async_context(server)
        a.connect("b", b.address)
        b.connect("a", a.address)
        return a, b


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    async with made.stack:
        yield made


async def test_a_server_with_another_token_gets_nowhere(pair: Pair) -> None:
    ours = keyring_from_token(TOKEN, "a", NAMES)
    theirs = keyring_from_token(generate_token(), "b", NAMES)
    a, b = await pair.start(ours, theirs)
    await until(lambda: a.counters.dropped.get("connection not of this protocol"))
    assert a.peers_up() == b.peers_up() == frozenset()


async def test_a_stranger_who_knows_our_public_keys_is_not_admitted(pair: Pair) -> None:
    ours = keyring_from_token(TOKEN, "a", NAMES)
    stranger = replace(ours, name="b", own=derive_keys(generate_token(), "b"))
    a, b = await pair.start(ours, stranger)
    await until(lambda: a.counters.dropped.get("connection not admitted"))
    assert a.peers_up() == b.peers_up() == frozenset()


async def test_a_member_cannot_speak_in_anothers_name(pair: Pair) -> None:
    """c is admitted with c's key, and claims to be b."""
    c = derive_keys(TOKEN, "c")
    ours = keyring_from_token(TOKEN, "a", NAMES)
    a, b = await pair.start(ours, replace(keyring_from_token(TOKEN, "b", NAMES), own=c))
    await until(lambda: a.counters.dropped.get("sender is not who it claims to be"))
    assert a.peers_up() == b.peers_up() == frozenset()


async def test_plain_and_encrypted_servers_do_not_mix(pair: Pair) -> None:
    a, b = await pair.start(keyring_from_token(TOKEN, "a", NAMES), None)
    await until(lambda: a.counters.dropped.get("connection not of this protocol"))
    assert a.peers_up() == b.peers_up() == frozenset()


@pytest.mark.parametrize("encrypted", [False, True])
async def test_raw_bytes_on_the_port_are_dropped_and_counted(pair: Pair, encrypted: bool) -> None:
    rings = [keyring_from_token(TOKEN, name, NAMES) if encrypted else None for name in "ab"]
    a, b = await pair.start(*rings)
    await soon(a.wait_up("b"))
    await soon(b.wait_up("a"))
    rng = np.random.default_rng(0)
    host, port = a.address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)
    oversized = greeting + b"\x02" + (2**62).to_bytes(8, "big") + b"x"
    for junk in (b"GET / HTTP/1.1\r\n\r\n", rng.bytes(5000), oversized):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(junk)
        await writer.drain()
        writer.close()
    await until(lambda: a.counters.dropped.get("connection not of this protocol"))
    await a.send("b", Note("unimpressed"))
    await b.send("a", Note("same here"))
    assert await texts(b, 1) == ["unimpressed"]
    assert await texts(a, 1) == ["same here"]


async def test_a_frame_beyond_the_limit_never_arrives() -> None:
    arrived: list[int] = []
    carrier = ZmqCarrier("a", settings=SocketSettings(largest_frame_bytes=1000))
    context = zmq.Context()
    await carrier.start(lambda origin, frames: arrived.append(len(frames[0])), lambda reason: None)
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.reconnect_ivl = 10
        dealer.connect(carrier.address)
        dealer.send(b"x" * 1001)

        def small_arrived() -> bool:
            dealer.send(b"x" * 1000)
            return bool(arrived)

        await until(small_arrived)
    finally:
        context.destroy(linger=0)
        await carrier.close()
    assert set(arrived) == {1000}


async def test_the_largest_tensor_passes_encrypted(pair: Pair) -> None:
    rings = [keyring_from_token(TOKEN, name, NAMES) for name in "ab"]
    # Nothing else is heard while it passes: encrypting alone takes longer than brisk links wait.
    patient = LinkSettings(silence_s=PATIENCE_S)
    a, b = await pair.start(*rings, settings=patient)
    await soon(a.wait_up("b"))
    largest = torch.zeros(DEFAULT_LIMITS.tensor_bytes, dtype=torch.uint8)
    await a.send("b", Note("large"), [largest])
    received = await soon(b.receive())
    assert received.tensors[0].shape == largest.shape


def envelope(**changes: object) -> bytes:
    """A valid beat's envelope from b to a, but for the changes."""
    fields: dict = {
        "version": WIRE_VERSION.major,
        "sender": "b",
        "receiver": "a",
        "session": 1,
        "sequence": 0,
        "heard": 0,
        "received": 0,
        "sent_s": 0.0,
        "is_beat": True,
    }
    return msgspec.msgpack.encode(Envelope(**{**fields, **changes}))


async def test_a_client_that_sends_junk_messages_is_dropped_and_counted(pair: Pair) -> None:
    a, b = await pair.start()
    await soon(a.wait_up("b"))
    rng = np.random.default_rng(1)
    future = 2**62
    junk: list[list[bytes]] = [
        [b""],
        [rng.bytes(100), rng.bytes(100)],
        [envelope()],
        [b"x" * 1000, b""],
        [envelope(version=99), b""],
        [envelope(receiver="c"), b""],
        [envelope(sender="nobody"), b""],
        [envelope(session=-1), b""],
        [envelope(session=1, sequence=5, is_beat=False), b"", b"", b""],
        [envelope(session=future), b"no beat"],
    ]
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(a.address)
        for frames in junk:
            dealer.send_multipart(frames)
        await until(lambda: a.counters.dropped.get("malformed message"))
    finally:
        context.destroy(linger=0)
    dropped = a.counters.dropped
    assert dropped["no envelope"] == 5
    assert dropped["another version of the protocol"] == 1
    assert dropped["meant for another server"] == 1
    assert dropped["unknown sender"] == 1
    assert dropped["stale or after a loss"] >= 1
    # The last one posed as b's next life: without keys anybody may, and it only costs a cut.
    await soon(a.wait_up("b"))
    await soon(b.wait_up("a"))


async def test_a_message_of_an_unknown_type_cuts_the_link_and_the_link_mends(pair: Pair) -> None:
    class Other(msgspec.Struct, tag="other"):
        pass

    a, b = await pair.start()
    await soon(a.wait_up("b"))
    await a.send("b", Other())
    await until(lambda: b.counters.dropped.get("malformed message"))
    await soon(b.wait_up("a"))
    await until(lambda: a._peers["b"].link.up)
    assert a.counters.sent["b"].messages == 1


def test_keys_are_derived_from_token_and_name_alone() -> None:
    keys = derive_keys(TOKEN, "a")
    assert keys == derive_keys(TOKEN, "a")
    assert keys.public != derive_keys(TOKEN, "b").public
    assert keys.public != derive_keys(TOKEN + "!", "a").public
    assert zmq.curve_public(keys.secret) == keys.public
    assert keys.secret.decode() not in repr(keys)


def test_tokens_are_generated_long_and_short_ones_refused() -> None:
    derive_keys(generate_token(), "a")
    assert generate_token() != generate_token()
    with pytest.raises(UserError, match="generate"):
        derive_keys("password", "a")


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://10.0.0.1:5000", "tcp://host:1"])
async def test_plain_text_beyond_this_machine_needs_a_word(address: str) -> None:
    carrier = ZmqCarrier("a", address)
    with pytest.raises(UserError, match="encrypted"):
        await carrier.start(lambda origin, frames: None, lambda reason: None)


@pytest.mark.parametrize("keyring", [None, keyring_from_token(TOKEN, "a", NAMES)])
async def test_with_keys_or_a_word_any_address_will_do(keyring: Keyring | None) -> None:
    carrier = ZmqCarrier("a", "tcp://0.0.0.0:0", keyring=keyring, allow_plain=keyring is None)
    await carrier.start(lambda origin, frames: None, lambda reason: None)
    try:
        carrier.connect("b", "tcp://127.0.0.1:9")
    finally:
        await carrier.close()


async def test_a_taken_port_and_a_nonsense_address_are_the_users_to_mend() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        carrier = ZmqCarrier("a", f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(UserError, match="free the port"):
            await carrier.start(lambda origin, frames: None, lambda reason: None)
    for nonsense in ("localhost:5000", "tcp://localhost", "ipc://x"):
        with pytest.raises(UserError, match="tcp://host:port"):
            await ZmqCarrier("a", nonsense).start(lambda o, f: None, lambda r: None)
