"""The servers behind a gateway: which of them live, and who gets the next request."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

_log = logging.getLogger(__name__)
_LOOK_S = 0.5
"""Between two looks at a server's health."""


@dataclass(eq=False, kw_only=True, slots=True)
class Backend:
    """One server."""

    url: str
    healthy: bool = True
    """Whether it said so when last asked; one that was never asked is taken at its best."""
    heard_s: float = field(default_factory=time.monotonic)
    """When it last answered anything."""
    deaf: bool = False
    """Whether that is too long ago: its process stands still, or the network is cut."""
    in_flight: int = 0
    """What the gateway waits for there."""
    turn: int = 0
    """When it last got something, in requests."""
    _waits: set[asyncio.Timeout] = field(default_factory=set)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """One request more is there."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    @contextmanager
    def waiting(self, wait: asyncio.Timeout) -> Iterator[None]:
        """Something is awaited from it; the wait ends when it is found deaf."""
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)

    def heard(self, *, healthy: bool) -> None:
        """It answered."""
        self.heard_s, self.deaf, self.healthy = time.monotonic(), False, healthy

    def spoke(self) -> None:
        """Something of an answer came from it."""
        self.heard_s, self.deaf = time.monotonic(), False

    def failed(self) -> None:
        """It cannot be reached, or broke off."""
        self.healthy = False

    def look_after(self, silence_s: float) -> None:
        """Wait no longer for a server that has said nothing for so long."""
        if self.deaf or time.monotonic() - self.heard_s < silence_s:
            return
        _log.warning("%s does not answer; what it was at goes on elsewhere.", self.url)
        self.deaf, self.healthy = True, False
        now_s = asyncio.get_running_loop().time()
        for wait in list(self._waits):
            wait.reschedule(now_s)


class Pool:
    """All servers, watched while `watch` runs."""

    def __init__(self, urls: Sequence[str], client: httpx.AsyncClient, *, silence_s: float) -> None:
        self.backends = tuple(Backend(url=url) for url in urls)
        self._client, self._silence_s = client, silence_s
        self._turns = itertools.count(1)

    def choose(self, tried: Collection[Backend]) -> Backend | None:
        """The healthy server with the least to do; one that is not if there is no other, and None
        if all that answer were `tried`."""
        left = [each for each in self.backends if each not in tried and not each.deaf]
        if not left:
            return None
        best = min(left, key=lambda each: (not each.healthy, each.in_flight, each.turn))
        best.turn = next(self._turns)
        return best

    @property
    def healthy(self) -> list[Backend]:
        return [each for each in self.backends if each.healthy]

    async def watch(self) -> None:
        """Ask all servers for their health, for ever."""
        await asyncio.gather(*(self._watch(each) for each in self.backends))

    async def _watch(self, backend: Backend) -> None:
        while True:
            asked = asyncio.create_task(self._ask(backend))
            # A server may be slow to answer; it is not asked twice at a time.
            while not (await asyncio.wait((asked,), timeout=_LOOK_S))[0]:
                backend.look_after(self._silence_s)
            backend.look_after(self._silence_s)
            await asyncio.sleep(_LOOK_S)

    async def _ask(self, backend: Backend) -> None:
        try:
            got = await self._client.get(f"{backend.url}/health", timeout=self._silence_s)
        except httpx.ConnectError:
            # Nobody listens: there is no process that could be waited for.
            backend.failed()
            backend.heard_s = time.monotonic()
        except httpx.HTTPError:
            backend.failed()
        else:
            backend.heard(healthy=got.status_code == httpx.codes.OK)
