"""What software adds to one hop of a hidden vector between two servers on this machine.

    python benchmarks/bench_hop.py [--messages N] [--output FILE]

Two processes; loopback TCP, plain and encrypted (CURVE), or a socket in a folder. A hop lasts from
the call of `send` to the return of `receive` with the tensor; both processes read the same
monotonic clock. On an emulated link the figure is the excess over the link's delay and the transfer
of the message's bytes. Above them stand the bare sockets read in three ways, with nothing of ours
on top.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
import zmq.asyncio

import trimmoe
from trimmoe.core.artifact import written_whole
from trimmoe.runtime.wire.base import Carrier
from trimmoe.runtime.wire.codec import encode
from trimmoe.runtime.wire.emulation import EmulatedCarrier, EmulatedLink
from trimmoe.runtime.wire.keys import keyring_from_token
from trimmoe.runtime.wire.sockets import SocketCarrier
from trimmoe.runtime.wire.transport import LinkTransport
from trimmoe.runtime.wire.zmq_transport import ZmqCarrier

NAMES = ("left", "right")
TOKEN = "benchmark-token-not-a-secret-0123456789"
LINK = EmulatedLink(delay_s=0.002, bandwidth_bytes_per_s=1e9 / 8)
VECTORS = {
    "576 float32": torch.zeros(576, dtype=torch.float32),
    "4096 bfloat16": torch.zeros(4096, dtype=torch.bfloat16),
}
PAUSE_S = 0.003
"""Between messages: decoding sends one at a time."""
WARM_UP = 50
LINKS = ("tcp", "socket", "curve")
"""On loopback; a socket in a private folder is what servers of one machine have."""
READERS = ("descriptor", "zmq.asyncio", "thread")


class Hop(msgspec.Struct, tag="hop", frozen=True, forbid_unknown_fields=True):
    """One hidden vector on its way."""

    sent_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    content = {
        "benchmark": "hop",
        "trimmoe_version": trimmoe.__version__,
        "machine": platform.platform(),
        "processors": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "messages": arguments.messages,
        "emulated_delay_ms": LINK.delay_s * 1e3,
        "rows": [*_bare_rows(arguments.messages), *_rows(arguments.messages)],
    }
    if arguments.output:
        with written_whole(arguments.output) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")


def _bare_rows(messages: int) -> Iterable[dict[str, Any]]:
    for reader in READERS:
        hops_s = _measure(_bare_sender, _bare_receiver, messages, reader)
        yield _row({"what": "bare socket", "reader": reader, "vector": "4096 bfloat16"}, hops_s)


def _rows(messages: int) -> Iterable[dict[str, Any]]:
    for vector in VECTORS:
        for link in LINKS:
            for emulated in (False, True):
                hops_s = _measure(_sender, _receiver, messages, vector, link, emulated)
                if emulated:
                    hops_s = hops_s - _emulated_s(vector)
                named = {"vector": vector, "link": link, "emulated": emulated}
                yield _row({"what": "transport", **named}, hops_s)


def _emulated_s(vector: str) -> float:
    """What the emulated link itself takes for the tensor's bytes."""
    frames = encode(Hop(0.0), [VECTORS[vector]])
    size_bytes = sum(len(frame) for frame in frames)
    return LINK.delay_s + size_bytes / LINK.bandwidth_bytes_per_s


def _row(named: dict[str, Any], hops_s: np.ndarray) -> dict[str, Any]:
    row = {
        **named,
        "p50_ms": float(np.quantile(hops_s, 0.5) * 1e3),
        "p99_ms": float(np.quantile(hops_s, 0.99) * 1e3),
    }
    about = ", ".join(f"{key} {value}" for key, value in named.items())
    print(f"{about}: p50 {row['p50_ms']:.3f} ms, p99 {row['p99_ms']:.3f} ms", flush=True)
    return row


def _measure(
    sender: Callable[..., Coroutine[Any, Any, None]],
    receiver: Callable[..., Coroutine[Any, Any, list[float]]],
    messages: int,
    *arguments: object,
) -> np.ndarray:
    """Seconds of each hop, [messages]; the sender runs in a process of its own."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_run, args=(sender, there, messages, *arguments))
    process.start()
    try:
        hops_s = asyncio.run(receiver(here, messages, *arguments))
    finally:
        process.join()
    return np.array(hops_s[WARM_UP:])


def _run(sender: Callable[..., Any], *arguments: object) -> None:
    torch.set_num_threads(1)
    asyncio.run(sender(*arguments))


def _transport(name: str, link: str, emulated: bool) -> LinkTransport:
    keyring = keyring_from_token(TOKEN, name, NAMES) if link == "curve" else None
    # The folder is gone with the machine's other temporary files.
    carrier: Carrier = ZmqCarrier(name, keyring=keyring)
    if link == "socket":
        carrier = SocketCarrier(name, f"unix://{tempfile.mkdtemp()}/link")
    if emulated:
        carrier = EmulatedCarrier(carrier, dict.fromkeys(set(NAMES) - {name}, LINK))
    return LinkTransport(carrier, (Hop,))


async def _sender(pipe: Connection, messages: int, vector: str, link: str, emulated: bool) -> None:
    async with _transport("left", link, emulated) as left:
        pipe.send(left.address)
        left.connect("right", pipe.recv())
        await left.wait_up("right")
        for _ in range(messages + WARM_UP):
            await left.send("right", Hop(time.monotonic()), [VECTORS[vector]])
            await asyncio.sleep(PAUSE_S)
        await asyncio.to_thread(pipe.recv)


async def _receiver(
    pipe: Connection, messages: int, vector: str, link: str, emulated: bool
) -> list[float]:
    hops_s = []
    async with _transport("right", link, emulated) as right:
        right.connect("left", pipe.recv())
        pipe.send(right.address)
        for _ in range(messages + WARM_UP):
            received = await right.receive()
            assert isinstance(received.message, Hop)
            hops_s.append(time.monotonic() - received.message.sent_s)
        pipe.send("done")
    return hops_s


async def _bare_sender(pipe: Connection, messages: int, reader: str) -> None:
    body = bytes(VECTORS["4096 bfloat16"].nbytes)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(pipe.recv())
        for _ in range(messages + WARM_UP):
            dealer.send_multipart([msgspec.msgpack.encode(time.monotonic()), body])
            await asyncio.sleep(PAUSE_S)
        await asyncio.to_thread(pipe.recv)


async def _bare_receiver(pipe: Connection, messages: int, reader: str) -> list[float]:
    hops_s = []
    kind = zmq.asyncio.Context if reader == "zmq.asyncio" else zmq.Context
    with kind() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        receive = _reading(reader, router, messages + WARM_UP)
        pipe.send(f"tcp://127.0.0.1:{port}")
        for _ in range(messages + WARM_UP):
            frames = await receive()
            hops_s.append(time.monotonic() - msgspec.msgpack.decode(frames[1].buffer, type=float))
        asyncio.get_running_loop().remove_reader(router.fileno())
        pipe.send("done")
    return hops_s


def _reading(reader: str, router: Any, total: int) -> Callable[[], Awaitable[list[zmq.Frame]]]:
    """How to wait for the next message of a bare socket."""
    if reader == "zmq.asyncio":
        return lambda: router.recv_multipart(copy=False)
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[list[zmq.Frame]] = asyncio.Queue()

    def drain() -> None:
        while True:
            try:
                arrived.put_nowait(router.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return

    def read() -> None:
        for _ in range(total):
            frames = router.recv_multipart(copy=False)
            loop.call_soon_threadsafe(arrived.put_nowait, frames)

    if reader == "thread":
        threading.Thread(target=read, daemon=True).start()
    else:
        loop.add_reader(router.fileno(), drain)
        drain()
    return arrived.get


if __name__ == "__main__":
    main()
