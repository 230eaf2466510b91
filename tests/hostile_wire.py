"""Frames of real answers, and ports that are sent changed ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from hostile import Mutator, attempted
from nodes import answers, request, running, staircase_routes, world
from serving import Tiny
from trimmoe.policy.presets import PRESETS
from trimmoe.runtime.node.records.checks import Geometry, check
from trimmoe.runtime.node.records.messages import (
    MESSAGE_TYPES,
    InHand,
    Message,
    Onward,
    Reserve,
    SamplingSpec,
    Start,
)
from trimmoe.runtime.node.records.packing import MalformedMessage, unpack_wave
from trimmoe.runtime.wire.base import Frame, TransportClosed
from trimmoe.runtime.wire.codec import MalformedFrame, decode
from trimmoe.runtime.wire.keys import keyring_from_token
from trimmoe.runtime.wire.memory import MemoryNetwork
from trimmoe.runtime.wire.protocol import open_beat, open_envelope, pack
from trimmoe.runtime.wire.transport import LinkTransport
from trimmoe.runtime.wire.zmq_transport import ZmqCarrier
from wires import BRISK, NAMES, TOKEN, soon

SERVERS = 3
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\0" + bytes(31)
UNIMPRESSED = InHand(2**40)
Frames = list[bytes]


class Recorder(MemoryNetwork):
    """Keeps what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, Frames]] = []

    def deliver(self, source: str, destination: str, frames: list[Frame]) -> None:
        self.sent.append((destination, [bytes(frame) for frame in frames]))
        super().deliver(source, destination, frames)


async def recorded(tiny: Tiny) -> list[tuple[str, Frames]]:
    """What servers tell each other during answers under three policies, and to whom."""
    found = []
    profile, plan = world(tiny, servers=SERVERS, routes=staircase_routes(SERVERS))
    for policy in ("exact", "speculative", "trimmoe"):
        network = Recorder()
        async with running(
            tiny, profile=profile, plan=plan, policy=PRESETS[policy](), network=network
        ) as cluster:
            await answers(cluster, [(at, request([3, 4, 5], 6)) for at in range(SERVERS)])
        found += network.sent
    return found


def geometry_of(tiny: Tiny) -> Geometry:
    spec = tiny.view.spec
    return Geometry(
        layer_count=spec.layer_count,
        server=0,
        server_count=SERVERS,
        hidden_size=spec.hidden_size,
        top_k=spec.top_k,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
        widths=tiny.view.widths,
        loaded=tiny.view.loaded,
    )


def take_apart(frames: Sequence[bytes], receiver: str, geometry: Geometry) -> str:
    """All that is done with frames before they mean anything; how far they came."""
    try:
        envelope = open_envelope(frames, receiver, None)
    except MalformedFrame:
        return "no envelope"
    if envelope.is_beat:
        return "beat" if attempted(lambda: open_beat(frames[1]), (MalformedFrame,)) else "no beat"
    try:
        message, tensors = decode([bytearray(each) for each in frames[1:]], MESSAGE_TYPES)
    except MalformedFrame:
        return "no message"
    assert isinstance(message, Message)
    try:
        check(geometry, 1, message, tensors)
        if isinstance(message, Start | Onward) and message.wave:
            unpack_wave(
                message.wave,
                layer=0,
                sequences=message.rows.sequences,
                layer_count=geometry.layer_count,
                server_count=geometry.server_count,
            )
    except MalformedMessage:
        return "nonsense"
    return "message"


def changed(frames: Frames, mutator: Mutator) -> Frames:
    """As they were but for bytes, or for a value of their message."""
    if mutator.upto(2) or len(frames) < 2:
        return mutator.frames(frames)
    made = list(frames)
    with contextlib.suppress(msgspec.DecodeError, IndexError, TypeError, ValueError):
        made[1] = mutator.message(made[1])
    return made


def decoders(
    sent: Sequence[tuple[str, Frames]], geometry: Geometry, count: int, seed: int
) -> Counter[str]:
    """So many changed messages through everything that reads them."""
    mutator, found = Mutator(seed), Counter[str]()
    for _ in range(count):
        receiver, frames = mutator.one_of(sent)
        found[take_apart(changed(frames, mutator), receiver, geometry)] += 1
    return found


@asynccontextmanager
async def encrypted(*names: str) -> AsyncIterator[list[LinkTransport]]:
    """Servers of one token, linked with one another on real ports."""
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for name in names:
            carrier = ZmqCarrier(name, keyring=keyring_from_token(TOKEN, name, NAMES))
            server = LinkTransport(carrier, MESSAGE_TYPES, settings=BRISK)
            made.append(await stack.enter_async_context(server))
        for one in made:
            for other in made:
                if one is not other:
                    one.connect(other.name, other.address)
        for one in made:
            await soon(one.wait_up(*(set(names) - {one.name})))
        yield made


async def hear_on(server: LinkTransport) -> None:
    """Take whatever comes."""
    with contextlib.suppress(TransportClosed):
        while True:
            await server.receive()


async def still_talk(a: LinkTransport, b: LinkTransport) -> None:
    """Two servers understand each other."""
    await soon(a.wait_up(b.name))
    await soon(b.wait_up(a.name))
    await b.send(a.name, UNIMPRESSED)
    while (await soon(a.receive())).message != UNIMPRESSED:
        pass


async def member(sent: Sequence[tuple[str, Frames]], count: int, seed: int) -> Counter[str]:
    """So many changed messages to a real port by who has a valid key; what became of them."""
    mutator = Mutator(seed)
    async with encrypted("a", "b", "c") as (a, b, c):
        hearing = asyncio.create_task(hear_on(c))
        link = c._peers["a"].link
        for done in range(count):
            _, frames = mutator.one_of(sent)
            loop_s = asyncio.get_running_loop().time()
            true = pack(link.message(loop_s) if mutator.upto(4) else link.beat(loop_s))
            c.carrier.post("a", changed([true, *frames[1:]], mutator))
            if link.up:
                link.sent(1)
            if done % 16 == 0:
                await asyncio.sleep(0)
            if done % 80 == 0:  # After a cut all is refused unread until both have begun anew.
                await soon(a.wait_up("c"))
                await soon(c.wait_up("a"))
            while a._inbox:
                await a.receive()
        await asyncio.sleep(0.2)
        await still_talk(a, b)
        hearing.cancel()
        return Counter(a.counters.dropped) + Counter(
            {"delivered": a.counters.received["c"].messages}
        )


async def strangers(count: int, seed: int) -> Counter[str]:
    """So many changed frames to a real port by who has no key, twenty to a connection."""
    mutator = Mutator(seed)
    hello = b"\x04\xc8\x05HELLO" + bytes(194)
    frame = b"\0\x20" + bytes(32)
    async with encrypted("a", "b") as (a, b):
        host, port = a.address.removeprefix("tcp://").split(":")
        for _ in range(max(count // 20, 1)):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                parts = [GREETING, hello, *[frame] * 18]
                at = mutator.upto(3)
                parts = [*parts[:at], *(mutator.bytes(part) for part in parts[at:])]
                writer.write(b"".join(parts))
                writer.close()
        await still_talk(a, b)
        return Counter(a.counters.dropped)


async def overheard(secret: bytes) -> bytes:
    """All bytes that pass between two encrypted servers while one tells the other a secret."""
    seen, passing = bytearray(), list[asyncio.Task[None]]()
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for name in "ab":
            carrier = ZmqCarrier(name, keyring=keyring_from_token(TOKEN, name, NAMES))
            server = LinkTransport(carrier, MESSAGE_TYPES, settings=BRISK)
            made.append(await stack.enter_async_context(server))
        a, b = made
        host, port = b.address.removeprefix("tcp://").split(":")

        async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(host, int(port))
            passing.append(asyncio.create_task(_copy(reader, back, seen)))
            passing.append(asyncio.create_task(_copy(there, writer, seen)))

        between = await asyncio.start_server(passed_on, "127.0.0.1", 0)
        a.connect("b", f"tcp://127.0.0.1:{between.sockets[0].getsockname()[1]}")
        b.connect("a", a.address)
        await soon(a.wait_up("b"))
        told = Reserve(
            1, [0], SamplingSpec(0, 1, 0, 0, 0, 0, None, grammar=secret.decode()), 0, True
        )
        await a.send("b", told)
        assert (await soon(b.receive())).message == told
        between.close()
    await asyncio.gather(*passing)
    return bytes(seen)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seen: bytearray) -> None:
    with contextlib.suppress(ConnectionError):
        while content := await source.read(1 << 16):
            seen += content
            sink.write(content)
    sink.close()


def resident_mb() -> float:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6
