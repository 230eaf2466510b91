"""The rules of a transport, the same on sockets and in memory, and what breaks links."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import factories  # noqa: F401  (the hypothesis profile)
from trimmoe.runtime.wire.alarm import Alarm
from trimmoe.runtime.wire.base import PeerChange, PeerDown, PeerUnreachable, PeerUp, TransportClosed
from trimmoe.runtime.wire.codec import Limits, encode
from trimmoe.runtime.wire.emulation import EmulatedCarrier, EmulatedLink
from trimmoe.runtime.wire.link import Link
from trimmoe.runtime.wire.memory import MemoryNetwork
from trimmoe.runtime.wire.protocol import pack
from trimmoe.runtime.wire.transport import LinkTransport
from wires import BRISK, NAMES, Cluster, Note, soon, texts, until


@pytest.fixture(params=["memory", "socket", "plain", "curve"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    made = Cluster(request.param)
    async with made.stack:
        yield made


@pytest.fixture
async def memory() -> AsyncIterator[Cluster]:
    made = Cluster("memory")
    async with made.stack:
        yield made


@pytest.fixture(params=["memory", "socket", "plain"])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    made = Cluster(request.param)
    async with made.stack:
        yield made


async def test_messages_and_tensors_arrive_in_order_and_are_counted(cluster: Cluster) -> None:
    a, b = await cluster.add("a"), await cluster.add("b")
    await cluster.up()
    hidden = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    await a.send("b", Note("first"), [hidden, torch.tensor([True, False])])
    hidden.zero_()  # it was copied
    for index in range(5):
        await a.send("b", Note(str(index)))
    received = await soon(b.receive())
    assert (received.peer, received.message) == ("a", Note("first"))
    assert torch.equal(received.tensors[0], torch.arange(12).reshape(3, 4).to(torch.bfloat16))
    assert received.tensors[1].tolist() == [True, False]
    assert await texts(b, 5) == list("01234")
    assert a.counters.sent["b"] == b.counters.received["a"]
    assert a.counters.sent["b"].messages == 6
    assert b.counters.sent["a"].messages == 0
    assert a.counters.sent["b"].size_bytes > hidden.nbytes


async def test_nobody_is_up_before_it_has_answered(cluster: Cluster) -> None:
    a = await cluster.add("a")
    assert a.peers_up() == frozenset()
    with pytest.raises(KeyError):
        await a.send("b", Note("who?"))
    b = await cluster.add("b")
    with pytest.raises(PeerUnreachable):
        await a.send("b", Note("too early"))
    await cluster.up()
    assert a.peers_up() == {"b"}
    assert b.peers_up() == {"a"}
    assert cluster.changes["a"] == [PeerUp(peer="b")]


async def test_a_peer_that_does_not_consume_fills_a_bounded_queue(cluster: Cluster) -> None:
    a, b = await cluster.add("a"), await cluster.add("b")
    await cluster.up()
    window = BRISK.window_messages
    for index in range(window):
        await a.send("b", Note(str(index)))
    with pytest.raises(PeerUnreachable, match="full"):
        await a.send("b", Note("too much"))
    assert a.counters.dropped["not sent: its queue is full"] == 1
    assert await texts(b, window) == [str(index) for index in range(window)]
    await until(lambda: has_room(a, "b"))
    await a.send("b", Note("again"))
    assert await texts(b, 1) == ["again"]


def has_room(server: LinkTransport, peer: str) -> bool:
    try:
        server._peers[peer].link.check_room(1)
    except PeerUnreachable:
        return False
    return True


async def test_many_windows_pass_when_they_are_consumed(cluster: Cluster) -> None:
    a, b = await cluster.add("a"), await cluster.add("b")
    await cluster.up()
    total = 20 * BRISK.window_messages

    async def produce() -> None:
        for index in range(total):
            while not has_room(a, "b"):
                await asyncio.sleep(0)
            await a.send("b", Note(str(index)))

    producing = asyncio.create_task(produce())
    assert await texts(b, total) == [str(index) for index in range(total)]
    await producing


async def test_a_dead_peer_is_reported_with_what_it_lost_and_found_when_it_restarts(
    cluster: Cluster,
) -> None:
    a, b = await cluster.add("a"), await cluster.add("b")
    await cluster.up()
    await a.send("b", Note("lost"))
    await a.send("b", Note("lost too"))
    address = b.address
    await b.close()
    await until(lambda: len(cluster.changes["a"]) > 1)
    down = cluster.changes["a"][1]
    assert isinstance(down, PeerDown)
    assert (down.peer, down.lost_messages) == ("b", 2)
    with pytest.raises(PeerUnreachable):
        await a.send("b", Note("nobody there"))

    carrier = cluster.carrier("b", address)
    restarted = LinkTransport(carrier, (Note,), settings=BRISK)
    await cluster.stack.enter_async_context(restarted)
    restarted.connect("a", a.address)
    await soon(a.wait_up("b"))
    await soon(restarted.wait_up("a"))
    await a.send("b", Note("welcome"))
    assert await texts(restarted, 1) == ["welcome"]


async def test_a_dead_peer_leaves_the_others_alone(cluster: Cluster) -> None:
    a, b, c = [await cluster.add(name) for name in NAMES]
    await cluster.up(NAMES)
    await b.close()
    await until(lambda: a.peers_up() == {"c"} and c.peers_up() == {"a"})
    await a.send("c", Note("still here"))
    assert await texts(c, 1) == ["still here"]
    assert PeerDown not in [type(change) for change in cluster.changes["c"] if change.peer == "a"]


async def test_after_close_nothing_waits_for_ever(cluster: Cluster) -> None:
    a, _ = await cluster.add("a"), await cluster.add("b")
    await cluster.up()
    waiting = [asyncio.ensure_future(a.receive()), asyncio.ensure_future(a.wait_up("b", "c"))]
    await asyncio.sleep(0)
    await a.close()
    for result in await soon(asyncio.gather(*waiting, return_exceptions=True)):
        assert isinstance(result, TransportClosed)
    with pytest.raises(TransportClosed):
        await a.send("b", Note("too late"))


@given(
    st.lists(st.binary(max_size=64), max_size=4),
    st.sampled_from([None, "b", "nobody"]),
    st.fixed_dictionaries(
        {},
        optional={
            "session": st.integers(-1, 2**64 - 1),
            "sequence": st.integers(-(2**63), 2**64 - 1),
            "heard": st.integers(-(2**63), 2**64 - 1) | st.none(),
            "received": st.integers(-(2**63), 2**64 - 1),
            "sent_s": st.floats(),
            "is_beat": st.booleans(),
        },
    ),
)
def test_whatever_a_carrier_delivers_raises_nothing(
    frames: list[bytes], origin: str | None, changes: dict[str, Any]
) -> None:
    """Behind a valid envelope, too, and one that names our present session (None)."""
    server = LinkTransport(MemoryNetwork().carrier("a"), (Note,), settings=BRISK)
    server.connect("b")
    session = server._peers["b"].link.session
    peer = Link(name="b", peer="a", settings=BRISK, new_session=lambda previous: 7)
    changes = {key: session if value is None else value for key, value in changes.items()}
    envelope = pack(msgspec.structs.replace(peer.message(0.0), **changes))
    server._arrived(origin, frames)
    server._arrived(origin, [envelope, *frames])
    server._arrived(origin, [envelope, *encode(Note("x"))])
    assert len(server._inbox) <= 1
    assert server.counters.dropped or server._inbox


async def test_what_the_limits_forbid_is_refused_before_it_is_sent(memory: Cluster) -> None:
    a, _ = await memory.add("a"), await memory.add("b")
    await memory.up()
    with pytest.raises(ValueError, match="limit"):
        await a.send("b", Note("x" * Limits().header_bytes))
    assert a.counters.sent["b"].messages == 0


async def test_a_short_stall_delivers_everything_in_order(memory: Cluster) -> None:
    a, b = await memory.add("a"), await memory.add("b")
    await memory.up()
    memory.network.stall("a", "b")
    for index in range(4):
        await a.send("b", Note(str(index)))
    memory.network.resume("a", "b")
    assert await texts(b, 4) == list("0123")
    assert memory.changes["a"] == [PeerUp(peer="b")]


async def test_a_long_stall_is_a_clean_cut_on_both_sides(memory: Cluster) -> None:
    a, b = await memory.add("a"), await memory.add("b")
    await memory.up()
    memory.network.stall("a", "b")
    await a.send("b", Note("never delivered"), [torch.ones(1)])
    await until(lambda: not a.peers_up() and not b.peers_up())
    held = memory.network._stalled["a", "b"]
    assert all(len(frames) == 2 for frames in held), "beats only: the tensor was given up"
    memory.network.resume("a", "b")
    await memory.up()
    await a.send("b", Note("anew"))
    assert await texts(b, 1) == ["anew"]
    lost = [change.lost_messages for change in memory.changes["a"] if isinstance(change, PeerDown)]
    assert sum(lost) == 1


async def test_a_callback_that_fails_ends_nothing_but_itself(memory: Cluster) -> None:
    a = await memory.add("a")
    failed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))

    def fail(change: PeerChange) -> None:
        raise RuntimeError("the layer above")

    a.on_peer_change(fail)
    b = await memory.add("b")
    await memory.up()
    memory.network.kill("b")
    await until(lambda: not a.peers_up())
    await b.close()
    await memory.add("b")
    await memory.up()
    assert [type(change) for change in memory.changes["a"]][:3] == [PeerUp, PeerDown, PeerUp]
    assert len(failed) == len(memory.changes["a"])


async def test_what_was_not_consumed_before_a_cut_is_void(memory: Cluster) -> None:
    a, b = await memory.add("a"), await memory.add("b")
    await memory.up()
    await a.send("b", Note("unread"))
    await until(lambda: b.counters.received["a"].messages == 1)
    memory.network.kill("a")
    await until(lambda: not b.peers_up())
    assert b.counters.dropped["void after a cut"] == 1


async def test_a_blocked_event_loop_is_not_a_silent_peer(memory: Cluster) -> None:
    await memory.add("a")
    await memory.add("b")
    await memory.up()
    time.sleep(2 * BRISK.silence_s)
    await asyncio.sleep(3 * BRISK.beat_s)
    assert memory.changes["a"] == [PeerUp(peer="b")]


async def test_many_cuts_keep_nothing(memory: Cluster) -> None:
    a, b = await memory.add("a"), await memory.add("b")
    memory.network.stall("b", "a")
    for _ in range(3):
        memory.network.resume("b", "a")
        await memory.up()
        memory.network.stall("b", "a")
        for index in range(BRISK.window_messages):
            await a.send("b", Note(str(index)))
        await until(lambda: not a.peers_up() and not b.peers_up())
    assert len(b._inbox) == 0
    assert len(a._peers["b"].link._unconsumed) == 0


def emulated(
    cluster: Cluster, name: str, *peers: str, bandwidth: float = math.inf
) -> EmulatedCarrier:
    """At the end of links from these peers."""
    link = EmulatedLink(delay_s=0.01, bandwidth_bytes_per_s=bandwidth)
    return EmulatedCarrier(cluster.carrier(name), dict.fromkeys(peers, link))


async def test_an_emulated_link_is_measured_as_it_is(either: Cluster) -> None:
    a = await either.add("a", emulated(either, "a", "b"))
    b = await either.add("b", emulated(either, "b", "a", bandwidth=5e6))
    await either.up()
    await until(lambda: a.link_estimates()["b"].samples > 3)
    # A busy machine blurs single samples; the running average comes right.
    await until(lambda: 1e6 < (a.link_estimates()["b"].bandwidth_bytes_per_s or 0.0) < 2e7)
    estimate = a.link_estimates()["b"]
    assert estimate.round_trip_s is not None
    assert estimate.round_trip_s >= 0.02
    assert estimate.delay_s is not None
    assert 0.01 <= estimate.delay_s <= estimate.round_trip_s
    assert a.reading_wait_s() >= 0.0
    await a.send("b", Note("slowly"))
    sent_s = time.monotonic()
    assert await texts(b, 1) == ["slowly"]
    assert time.monotonic() - sent_s >= 0.005


async def test_a_stalled_emulated_link_holds_up_no_other(either: Cluster) -> None:
    carrier = emulated(either, "b", "a")
    a, b = await either.add("a", emulated(either, "a")), await either.add("b", carrier)
    c = await either.add("c", emulated(either, "c"))
    await either.up(NAMES)
    carrier.stall("a", 0.15)
    for index in range(4):
        await a.send("b", Note(str(index)))
    await a.send("c", Note("meanwhile"))
    assert await texts(c, 1) == ["meanwhile"]
    assert b.counters.received["a"].messages == 0
    assert await texts(b, 4) == list("0123")


async def test_a_stall_longer_than_the_silence_is_reported_and_mended(either: Cluster) -> None:
    carrier = emulated(either, "b", "a")
    a, b = await either.add("a", emulated(either, "a")), await either.add("b", carrier)
    await either.up()
    carrier.stall("a", 2 * BRISK.silence_s)
    await a.send("b", Note("never delivered"))
    await until(lambda: not a.peers_up() and not b.peers_up())
    await either.up()
    await a.send("b", Note("anew"))
    assert await texts(b, 1) == ["anew"]


async def test_a_dropped_connection_loses_loudly_and_mends_itself(either: Cluster) -> None:
    carrier = emulated(either, "b", "a")
    a, b = await either.add("a", emulated(either, "a")), await either.add("b", carrier)
    await either.up()
    carrier.stall("a", BRISK.silence_s / 2)
    await a.send("b", Note("lost with the connection"))
    held = carrier._queues["a"]._under_way
    await until(lambda: any(b"lost with" in bytes(frames[1]) for _, frames in held))
    carrier.lose("a")
    await until(lambda: any(isinstance(change, PeerDown) for change in either.changes["a"]))
    await either.up()
    await a.send("b", Note("anew"))
    assert await texts(b, 1) == ["anew"]
    lost = [change.lost_messages for change in either.changes["a"] if isinstance(change, PeerDown)]
    assert sum(lost) == 1


@pytest.mark.parametrize("precise", [True, False])
async def test_an_alarm_rings_once_never_early_and_can_be_moved(
    precise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not precise:
        monkeypatch.setattr("trimmoe.runtime.wire.alarm._libc", None)
    rung: list[float] = []
    alarm = Alarm(lambda: rung.append(time.monotonic()))
    due_s = time.monotonic() + 0.03
    alarm.set(due_s + 100)
    alarm.set(due_s)
    await until(lambda: rung)
    alarm.set(time.monotonic() + 0.01)
    alarm.set(math.inf)
    await asyncio.sleep(0.03)
    alarm.close()
    assert len(rung) == 1
    assert rung[0] >= due_s


def test_a_late_process_is_late_for_all_its_peers_a_slow_link_for_one() -> None:
    here = LinkTransport(MemoryNetwork().carrier("a"), (Note,))
    for peer in ("b", "c", "d"):
        here.connect(peer)
    assert here.reading_wait_s() == 0.0
    for index in range(20):
        for peer, late_s in (("b", 0.01), ("c", 0.01), ("d", 3.0)):
            now_s = 0.25 * index + late_s * (index % 2)
            here._peers[peer].lateness.read(sent_s=0.25 * index, now_s=now_s)
    assert 0.0 < here.reading_wait_s() < 0.01
