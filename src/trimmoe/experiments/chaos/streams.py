"""Where failures happen, and clients that know nothing of servers: what they saw of answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from trimmoe.api.gateway.events import DONE, payloads
from trimmoe.experiments.chaos.lan import Lan
from trimmoe.experiments.chaos.stage import Stage

PROMPTS = (
    "The history of the city begins with",
    "An operator is a symbol that tells",
    "In 1969, the first astronauts",
    "She opened the door and saw",
    "The main reason for the war was",
    "Water boils at",
    "A prime number is",
    "The capital of France",
)


@dataclass(eq=False, kw_only=True, slots=True)
class Seen:
    """One stream, as far as it came."""

    text: str = ""
    events: int = 0
    finished: bool = False
    error: str = ""
    refused: bool = False
    """Whether it was told to come back later."""
    silence_s: float = 0.0
    """The longest time without anything."""

    def is_like(self, other: Seen) -> bool:
        """Whether it is complete and equal."""
        return self.finished and not self.error and self.text == other.text


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """How clients ask."""

    client: httpx.AsyncClient
    base: str
    model: str
    tokens: int
    """Of every answer."""
    stuck_s: float
    """Without anything for so long, an answer is given up."""

    def body(self, prompt: int, **changes: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": PROMPTS[prompt % len(PROMPTS)],
            "max_tokens": self.tokens,
            "temperature": 0,
            "exact": True,
            "ignore_eos": True,
            **changes,
        }

    async def read(self, prompt: int, seen: Seen, most: int | None = None) -> None:
        """Read an answer, or so many events of it, as a stream."""
        url, last_s = f"{self.base}/v1/completions", time.monotonic()
        try:
            async with self.client.stream("POST", url, json=self.body(prompt, stream=True)) as got:
                if got.status_code != httpx.codes.OK:
                    busy = got.status_code == httpx.codes.TOO_MANY_REQUESTS
                    seen.refused = busy and "retry-after" in got.headers
                    seen.error = f"HTTP {got.status_code}: {(await got.aread()).decode()[:200]}"
                    return
                async with aclosing(payloads(got.aiter_raw())) as events:
                    while seen.events != most:
                        async with asyncio.timeout(self.stuck_s):
                            payload = await anext(events, None)
                        now_s = time.monotonic()
                        seen.silence_s, last_s = max(seen.silence_s, now_s - last_s), now_s
                        if payload is None or payload == DONE:
                            return
                        _book(json.loads(payload), seen)
        except TimeoutError:
            seen.error = "stuck"
        except httpx.HTTPError as error:
            seen.error = type(error).__name__

    async def all(self, seen: Sequence[Seen]) -> None:
        """All prompts at once."""
        await asyncio.gather(*(self.read(prompt, each) for prompt, each in enumerate(seen)))


def _book(event: dict[str, Any], seen: Seen) -> None:
    if "error" in event:
        seen.error = str(event["error"].get("message"))
        return
    for choice in event["choices"]:
        seen.events += 1
        if seen.finished:
            seen.error = "more after its end"
        seen.text += choice["text"]
        seen.finished |= choice["finish_reason"] is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One run's servers and clients."""

    stage: Stage
    asking: Asking
    rng: np.random.Generator
    capacity: int
    """Answers at a time that servers have places for."""
    expected: Sequence[Seen]
    notes: list[str] = field(default_factory=list)
    """What is worth telling of the failure at hand, and no fault."""
    spared: int | None = None
    """A server that nothing is done to."""

    def some_server(self) -> int:
        others = [at for at in range(len(self.stage.names)) if at != self.spared]
        return int(self.rng.choice(others))

    @property
    def lan(self) -> Lan:
        assert self.stage.lan is not None
        return self.stage.lan
