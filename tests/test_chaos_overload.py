"""What chaos makes of clients that are too many, on servers that answer as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from launching import free_ports
from serving import Tiny
from trimmoe.api.gateway.app import GatewaySettings
from trimmoe.api.settings import ApiSettings
from trimmoe.experiments.chaos import mixed, overload
from trimmoe.experiments.chaos.mixed import Load, Told
from trimmoe.experiments.chaos.overload import burst, vanish
from trimmoe.experiments.chaos.stage import Usage
from trimmoe.experiments.chaos.streams import PROMPTS, Asking, Scene, Seen
from trimmoe.experiments.serve_local import listen, run_gateway, serve

Answer = Callable[[httpx.Request], httpx.Response]
TEXT = "abcdefgh"


class FakeStage:
    """One server whose memory is first this and then that."""

    urls, names = (), ("desk",)

    def __init__(self, *memory_mb: float) -> None:
        self._memory_mb = list(memory_mb)

    def usage(self) -> dict[tuple[str, int], Usage]:
        now = self._memory_mb.pop(0) if len(self._memory_mb) > 1 else self._memory_mb[0]
        return {("desk", 1): Usage(memory_mb=now, descriptors=9, threads=9)}


def scene(answer: Answer, stage: FakeStage | None = None) -> Scene:
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    asking = Asking(client=client, base="http://x", model="m", tokens=8, stuck_s=9.0)
    return Scene(
        stage=stage or FakeStage(100.0),  # type: ignore[arg-type]
        asking=asking,
        rng=np.random.default_rng(0),
        capacity=2,
        expected=[Seen(text=TEXT, finished=True)] * 8,
    )


def whole(text: str = "ab", tokens: int = 2) -> httpx.Response:
    usage = {"completion_tokens": tokens}
    return httpx.Response(200, json={"choices": [{"text": text}], "usage": usage})


def events(text: str) -> list[bytes]:
    """A stream of one token for each letter."""
    ends = [None] * (len(text) - 1) + ["length"]
    told = [{"choices": [{"text": c, "finish_reason": e}]} for c, e in zip(text, ends, strict=True)]
    return [b"data: %s\n\n" % json.dumps(each).encode() for each in told] + [b"data: [DONE]\n\n"]


def busy(**headers: str) -> httpx.Response:
    return httpx.Response(429, headers=headers)


class Doorkeeper:
    """Lets so many of every twenty in."""

    def __init__(self, room: int, served: httpx.Response, refused: httpx.Response) -> None:
        self.room, self.served, self.refused, self.count = room, served, refused, 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.count += 1
        return self.served if (self.count - 1) % 20 < self.room else self.refused


async def test_a_burst_is_well_if_all_are_served_or_told_to_come_back() -> None:
    told = scene(Doorkeeper(13, whole(), busy(**{"retry-after": "1"})))
    assert await burst(told) == []
    assert told.notes[0] == "servers took at most 0 MB more"
    assert told.notes[1].startswith("13 served, 7 told when to come back; p99 ")
    assert told.notes[1].endswith(" at capacity")


@pytest.mark.parametrize(
    ("room", "served", "refused", "fault"),
    [
        (13, whole(), busy(), "429 without Retry-After"),
        (13, whole("xy"), busy(**{"retry-after": "1"}), "an answer is another one"),
        (13, httpx.Response(500), busy(**{"retry-after": "1"}), "a request got HTTP 500"),
        (0, whole(), busy(**{"retry-after": "1"}), "nobody of the burst was served"),
        (20, whole(), busy(**{"retry-after": "1"}), "nobody of the burst was sent away"),
    ],
)
async def test_whatever_else_comes_of_a_burst_is_a_fault(
    room: int, served: httpx.Response, refused: httpx.Response, fault: str
) -> None:
    assert fault in await burst(scene(Doorkeeper(room, served, refused)))


async def test_memory_that_grows_under_load_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = scene(
        Doorkeeper(13, whole(), busy(**{"retry-after": "1"})), FakeStage(100, 100, 900, 900)
    )
    monkeypatch.setattr(overload, "_LOOK_S", 0.01)
    async with overload._bounded(grown) as faults:
        while len(grown.stage._memory_mb) > 1:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
    assert faults == ["the memory of desk grew by 800 MB"]


async def test_those_who_vanish_are_let_in_or_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overload, "VANISHING", 20)
    event = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'

    def stream(*_: object) -> httpx.Response:
        return httpx.Response(200, stream=httpx.ByteStream(event * 9))

    told = scene(stream)
    assert await vanish(told) == []
    assert told.notes[1] == "20 vanished, 0 told when to come back"
    for refused, faults in (
        (busy(**{"retry-after": "1"}), ["nobody who was to vanish was let in"]),
        (busy(), ["nobody who was to vanish was let in", "HTTP 429: "]),
    ):
        assert await vanish(scene(lambda _, refused=refused: refused)) == faults


async def test_whatever_clients_who_never_stop_get_wrong_is_counted() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        if not asked.get("stream"):
            return whole(TEXT[: asked["max_tokens"]], asked["max_tokens"])
        text = "abcdefgX" if asked["prompt"] == PROMPTS[0] else TEXT
        return httpx.Response(200, stream=httpx.ByteStream(b"".join(events(text))))

    made = scene(answer)
    load, told = Load(made, seed=1), Told()
    while told.right < 40 or not told.wrong:
        await asyncio.sleep(0.01)
        heard = load.told()
        told.right, told.wrong = told.right + heard.right, told.wrong + heard.wrong
    await load.stop()
    assert set(told.wrong) == {"an answer is cut off or another one"}
    assert told.asked == told.right + len(told.wrong)


async def test_whoever_is_told_to_come_back_does_so_and_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mixed, "_LATER_S", 0.01)
    load = Load(scene(lambda _: busy(**{"retry-after": "1"})), seed=1)
    await asyncio.sleep(0.1)
    await load.stop()
    assert load.told().asked == 0


def test_idle_connections_outlive_what_clients_keep(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients on httpx, OpenAI's among them, let go of theirs after five seconds."""
    kept: list[Any] = []
    monkeypatch.setattr(
        uvicorn.Server, "run", lambda self, **_: kept.append(self.config.timeout_keep_alive)
    )
    port = free_ports(2)
    run_gateway(GatewaySettings(servers=("http://x",)), "127.0.0.1", port)
    with listen("127.0.0.1", port + 1) as listener:
        serve(tiny.exact(), ApiSettings(), listener)
    assert min(kept) > 60
    assert len(kept) == 2
