"""More clients than there is room for: some vanish, some never finish asking, most come at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import httpx
import numpy as np

from trimmoe.experiments.chaos.streams import PROMPTS, Scene, Seen

VANISHING = 200
SLOW = 500
"""Connections that send a byte a second."""
BURST = 10
"""Times what servers have places for."""
_SHARE = 4
"""Answers in a burst are so many times as short as others."""
REFUSED = "refused"
_MOST_MB = 256.0
"""What a server may take more while it has too much to do: places in caches that it had not used
before, and buffers of connections."""
_LOOK_S = 0.25


async def vanish(scene: Scene) -> list[str]:
    """Clients hang up in the midst of their answers; those that find no room are told so."""
    most = max(2, scene.asking.tokens // 2)
    counts = scene.rng.integers(1, most, VANISHING).tolist()
    seen = [Seen() for _ in counts]
    async with _bounded(scene) as faults:
        await asyncio.gather(
            *(
                scene.asking.read(at, each, most=count)
                for at, (each, count) in enumerate(zip(seen, counts, strict=True))
            )
        )
    errors = [each.error for each in seen if each.error]
    refused = sum(each.refused for each in seen)
    scene.notes.append(f"{VANISHING - refused} vanished, {refused} told when to come back")
    if len(errors) == VANISHING:
        faults.append("nobody who was to vanish was let in")
    return faults + sorted({each.error for each in seen if each.error and not each.refused})


async def burst(scene: Scene) -> list[str]:
    """Whoever is let in gets its answer, the others are told when to come back; how long answers
    take is compared with as many at once that nobody is turned away beside."""
    async with _bounded(scene) as faults:
        got = await _at_once(scene, BURST * scene.capacity)
    served = [took_s for wrong, took_s in got if not wrong]
    refused = sum(wrong == REFUSED for wrong, _ in got)
    faults += sorted({wrong for wrong, _ in got if wrong not in ("", REFUSED)})
    note = f"{len(served)} served, {refused} told when to come back"
    if not served:
        faults.append("nobody of the burst was served")
    if not refused:
        faults.append("nobody of the burst was sent away")
    if served and not faults:
        alone = [took_s for wrong, took_s in await _at_once(scene, len(served)) if not wrong]
        if alone:
            in_burst_s, alone_s = (float(np.quantile(each, 0.99)) for each in (served, alone))
            note += f"; p99 {in_burst_s:.1f} s, {alone_s:.1f} s with {len(alone)} at capacity"
    scene.notes.append(note)
    return faults


async def slow(scene: Scene) -> list[str]:
    """Requests that never come to their end, at the gateway and at every server."""
    urls = [httpx.URL(url) for url in (scene.asking.base, *scene.stage.urls)]
    writers = list[asyncio.StreamWriter]()
    try:
        async with _bounded(scene) as faults:
            for at in range(SLOW):
                url = urls[at % len(urls)]
                _, writer = await asyncio.open_connection(url.host, url.port)
                writer.write(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
                )
                writers.append(writer)
            for _ in range(3):
                await asyncio.sleep(1)
                for writer in writers:
                    writer.write(b" ")
            closed = sum(writer.transport.is_closing() for writer in writers)
            wrong, took_s = await _short(scene, 0)
        if closed:
            faults.append(f"{closed} slow connections were cut off")
        if wrong:
            faults.append(f"beside slow connections {wrong}")
        scene.notes.append(f"another client's answer took {took_s:.1f} s")
    finally:
        for writer in writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    return faults


async def _at_once(scene: Scene, count: int) -> Sequence[tuple[str, float]]:
    """What is wrong with so many short answers, asked for at once, and how long each took."""
    return await asyncio.gather(*(_short(scene, at) for at in range(count)))


async def _short(scene: Scene, at: int) -> tuple[str, float]:
    return await ask(scene, at, max(1, scene.asking.tokens // _SHARE))


async def ask(scene: Scene, at: int, tokens: int) -> tuple[str, float]:
    """What is wrong with a whole answer of so many tokens, and the seconds that it took; `REFUSED`
    if it was refused as it should be."""
    asking, began_s = scene.asking, time.monotonic()
    asked = asking.body(at, max_tokens=tokens)
    try:
        got = await asking.client.post(f"{asking.base}/v1/completions", json=asked)
    except httpx.HTTPError as error:
        return f"a request broke off ({type(error).__name__})", 0.0
    took_s = time.monotonic() - began_s
    if got.status_code == httpx.codes.TOO_MANY_REQUESTS:
        return REFUSED if "retry-after" in got.headers else "429 without Retry-After", took_s
    if got.status_code != httpx.codes.OK:
        return f"a request got HTTP {got.status_code}", took_s
    answer = got.json()
    whole = answer["usage"]["completion_tokens"] == tokens
    text = answer["choices"][0]["text"]
    right = scene.expected[at % len(PROMPTS)].text.startswith(text)
    return "" if whole and right else "an answer is another one", took_s


@asynccontextmanager
async def _bounded(scene: Scene) -> AsyncIterator[list[str]]:
    """Faults; the memory of servers that grows by too much meanwhile is one of them."""
    faults, before = list[str](), scene.stage.usage()
    most = {process: usage.memory_mb for process, usage in before.items()}

    async def look() -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for process, usage in scene.stage.usage().items():
                if process in most:
                    most[process] = max(most[process], usage.memory_mb)

    looking = asyncio.create_task(look())
    try:
        yield faults
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
    grown = {process: most[process] - usage.memory_mb for process, usage in before.items()}
    scene.notes.append(f"servers took at most {max(grown.values(), default=0.0):.0f} MB more")
    faults += [
        f"the memory of {name} grew by {more_mb:.0f} MB"
        for (name, _), more_mb in grown.items()
        if more_mb > _MOST_MB
    ]
