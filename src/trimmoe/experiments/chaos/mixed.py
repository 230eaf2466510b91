"""Clients who never stop asking, for streams and whole answers, short and long; some hang up."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

from trimmoe.experiments.chaos.overload import REFUSED, ask
from trimmoe.experiments.chaos.streams import PROMPTS, Scene, Seen

CLIENTS = 8
_STREAMS, _WHOLE = 0.5, 0.3
"""Shares of requests; the others are streams that nobody reads to their end."""
_LATER_S = 1.0
"""Until a client that was told to come back does."""


@dataclass(eq=False, kw_only=True, slots=True)
class Told:
    """What clients saw since it was last asked."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    silence_s: float = 0.0

    @property
    def asked(self) -> int:
        return self.right + len(self.wrong)


class Load:
    """All clients, from when this is made until it is told to `stop`."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self._scene, self._told, self._stopping = scene, Told(), False
        rngs = np.random.default_rng(seed).spawn(CLIENTS)
        self._clients = [asyncio.create_task(self._client(rng)) for rng in rngs]

    def told(self) -> Told:
        """What has come to its end since the last time."""
        told, self._told = self._told, Told()
        return told

    async def stop(self) -> None:
        """Once what is under way has come to its end."""
        self._stopping = True
        await asyncio.gather(*self._clients)

    async def _client(self, rng: np.random.Generator) -> None:
        while not self._stopping:
            prompt, kind = int(rng.integers(len(PROMPTS))), rng.random()
            tokens = int(rng.integers(1, self._scene.asking.tokens + 1))
            if kind < _STREAMS:
                wrong = await self._stream(prompt)
            elif kind < _STREAMS + _WHOLE:
                began_s = time.monotonic()
                wrong, _ = await ask(self._scene, prompt, tokens)
                self._heard(time.monotonic() - began_s)
            else:
                wrong = await self._stream(prompt, most=tokens)
            if wrong == REFUSED:
                await asyncio.sleep(_LATER_S)
            elif wrong:
                self._told.wrong.append(wrong)
            else:
                self._told.right += 1
            # An answer may come without anything to wait for, and others want to ask too.
            await asyncio.sleep(0)

    async def _stream(self, prompt: int, most: int | None = None) -> str:
        """What is wrong with an answer, or with so many events of it."""
        seen, wanted = Seen(), self._scene.expected[prompt]
        await self._scene.asking.read(prompt, seen, most)
        if seen.refused:
            return REFUSED
        self._heard(seen.silence_s)
        if seen.error:
            return seen.error
        right = wanted.text.startswith(seen.text) if most else seen.is_like(wanted)
        return "" if right else "an answer is cut off or another one"

    def _heard(self, silence_s: float) -> None:
        self._told.silence_s = max(self._told.silence_s, silence_s)
