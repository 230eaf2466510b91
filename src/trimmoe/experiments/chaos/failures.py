"""What is done to servers, supervisors and by clients while eight streams are under way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import httpx
import numpy as np

from trimmoe.experiments.chaos.stage import Stage
from trimmoe.experiments.chaos.streams import PROMPTS, Asking, Seen

STOP_S = 10.0
VANISHING = 16
SLOW = 200
"""Connections that send a byte a second."""
_SHARE = 4
"""Answers in a burst are so many times as short as others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Where a failure happens."""

    stage: Stage
    asking: Asking
    rng: np.random.Generator
    capacity: int
    """Answers at a time that servers have places for."""
    expected: Sequence[Seen]
    notes: list[str] = field(default_factory=list)
    """What is worth telling of the failure at hand, and no fault."""

    def some_server(self) -> int:
        return int(self.rng.integers(len(self.stage.names)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Something that goes wrong; what it does says what else was not as it should be."""

    kind: str
    """By which it is asked for."""
    title: str
    happen: Callable[[Scene], Awaitable[list[str]]]
    after: Callable[[Scene], Awaitable[list[str]]] | None = None
    """Once streams are through and all is well."""


def failures(names: Sequence[str]) -> list[Failure]:
    """All there are, for servers by name."""
    each = [
        Failure(kind="kill", title=f"kill -9 {name}", happen=partial(_kill, index))
        for index, name in enumerate(names)
    ]
    return [
        *each,
        Failure(kind="stop", title=f"SIGSTOP of a server for {STOP_S:.0f} s", happen=_stop),
        Failure(
            kind="supervisor",
            title="kill -9 supervisor, then a server",
            happen=_kill_supervisor,
            after=_serve_again,
        ),
        Failure(
            kind="keeper",
            title="kill -9 supervisor, keeper, a server",
            happen=_kill_keeper,
            after=_serve_again,
        ),
        Failure(kind="vanish", title=f"{VANISHING} clients vanish in mid-stream", happen=_vanish),
        Failure(kind="burst", title="burst to ten times capacity", happen=_burst),
        Failure(kind="slow", title=f"{SLOW} idle slow connections", happen=_slow),
    ]


async def _kill(server: int, scene: Scene) -> list[str]:
    scene.stage.kill(server)
    return []


async def _stop(scene: Scene) -> list[str]:
    server = scene.some_server()
    scene.stage.signal(server, signal.SIGSTOP)
    try:
        await asyncio.sleep(STOP_S)
    finally:
        scene.stage.signal(server, signal.SIGCONT)
    return []


async def _kill_supervisor(scene: Scene) -> list[str]:
    scene.stage.kill_supervisor()
    keeper = await scene.stage.keeper()
    scene.stage.kill(scene.some_server())
    return [] if keeper else ["nobody took the supervisor's place"]


async def _kill_keeper(scene: Scene) -> list[str]:
    stage = scene.stage
    stage.kill_supervisor()
    keeper = await stage.keeper()
    if keeper is None:
        return ["nobody took the supervisor's place"]
    os.kill(keeper, signal.SIGKILL)
    again = await stage.keeper(but=keeper)
    stage.kill(scene.some_server())
    return [] if again else ["nobody took the keeper's place"]


async def _serve_again(scene: Scene) -> list[str]:
    before = {scene.stage.pid(index) for index in range(len(scene.stage.names))}
    taken = await scene.stage.serve_again()
    same = before == {scene.stage.pid(index) for index in range(len(scene.stage.names))}
    faults = [] if taken else ["`trimmoe serve` did not take the servers over"]
    return faults if same else [*faults, "servers were started anew to be taken over"]


async def _vanish(scene: Scene) -> list[str]:
    counts = scene.rng.integers(1, max(2, scene.asking.tokens // 2), VANISHING).tolist()
    clients = [scene.asking.read(at, Seen(), most=count) for at, count in enumerate(counts)]
    await asyncio.gather(*clients)
    return []


async def _burst(scene: Scene) -> list[str]:
    """Whoever is let in gets its answer, the others are told when to come back."""
    got = await asyncio.gather(*(_short(scene, at) for at in range(10 * scene.capacity)))
    faults = sorted({each for each in got if each not in ("", "refused")})
    served, refused = got.count(""), got.count("refused")
    scene.notes.append(f"{served} served, {refused} told when to come back")
    if not served:
        faults.append("nobody of the burst was served")
    if not refused:
        faults.append("nobody of the burst was sent away")
    return faults


async def _short(scene: Scene, at: int) -> str:
    """What is wrong with a short answer; `refused` if it was refused as it should be."""
    asking = scene.asking
    tokens = max(1, asking.tokens // _SHARE)
    asked = asking.body(at, max_tokens=tokens)
    try:
        got = await asking.client.post(f"{asking.base}/v1/completions", json=asked)
    except httpx.HTTPError as error:
        return f"a burst's request broke off ({type(error).__name__})"
    if got.status_code == httpx.codes.TOO_MANY_REQUESTS:
        return "refused" if "retry-after" in got.headers else "429 without Retry-After"
    if got.status_code != httpx.codes.OK:
        return f"a burst's request got HTTP {got.status_code}"
    answer = got.json()
    whole = answer["usage"]["completion_tokens"] == tokens
    text = answer["choices"][0]["text"]
    right = scene.expected[at % len(PROMPTS)].text.startswith(text)
    return "" if whole and right else "a burst's answer is another one"


async def _slow(scene: Scene) -> list[str]:
    """Requests that never come to their end, at the gateway and at every server."""
    urls = [httpx.URL(url) for url in (scene.asking.base, *scene.stage.urls)]
    writers = []
    for at in range(SLOW):
        url = urls[at % len(urls)]
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        writers.append(writer)
    try:
        for _ in range(3):
            await asyncio.sleep(1)
            for writer in writers:
                writer.write(b" ")
        closed = sum(writer.transport.is_closing() for writer in writers)
    finally:
        for writer in writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    return [f"{closed} slow connections were cut off"] if closed else []
