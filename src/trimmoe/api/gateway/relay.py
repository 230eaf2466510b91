"""One answer from as many servers as it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import msgspec

from trimmoe.api.errors import ApiError
from trimmoe.api.gateway.events import DONE, payloads
from trimmoe.api.gateway.pool import Backend, Pool
from trimmoe.api.gateway.progress import Chunk

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
MOST_FAULTS = 3
"""Failures of servers' own (500) without a new token, after which a request is at fault itself."""
_BUSY, _FAULT = 429, 500
NOBODY = "None of the servers can be reached; try again shortly."


class Refused(Exception):
    """A server's answer that the client is to have as it is."""

    def __init__(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers, self.content = status, headers, content

    def error(self) -> ApiError:
        """The same for a client that has had a part of an answer."""
        try:
            told = msgspec.json.decode(self.content)
            message = told.get("error", told)["message"]
        except (AttributeError, msgspec.DecodeError, KeyError, TypeError):
            message = "The answer could not be continued; try again shortly."
        return ApiError(self.status, str(message))


class Course(Protocol):
    """How far an answer has come at its client."""

    begun: bool
    """Whether anything of it came."""
    over: bool
    """Whether all of it came."""

    @property
    def body(self) -> dict[str, Any]:
        """What to ask a server for now."""
        ...

    def received(self, chunk: Chunk, /) -> Chunk | None:
        """Book a server's chunk; what the client is to see of it."""
        ...


class _Trouble(Exception):
    """An attempt ended before its answer; `refused` is what the server said, if it said why."""

    def __init__(self, refused: Refused | None = None) -> None:
        super().__init__()
        self.refused = refused

    @property
    def status(self) -> int | None:
        return self.refused.status if self.refused else None


@dataclass(kw_only=True, slots=True)
class _Tries:
    """What happened since the last token."""

    until_s: float | None = None
    """When patience ends; it begins when all servers were asked in vain once."""
    pause_s: float = FIRST_PAUSE_S
    faults: int = 0
    busy: Refused | None = None
    """What a server said that has too much to do, in this round of all servers."""
    last: Refused | None = None


class Relay:
    """Asks servers until an answer is complete."""

    def __init__(self, pool: Pool, client: httpx.AsyncClient, *, patience_s: float) -> None:
        self._pool, self._client, self._patience_s = pool, client, patience_s
        self.continued = 0
        """How often an answer went on at another server."""

    async def chunks(
        self, path: str, headers: Mapping[str, str], progress: Course
    ) -> AsyncGenerator[Chunk]:
        """What the client is to see. Raises `Refused` before the first chunk, `ApiError` after."""
        tries, tried = _Tries(), set[Backend]()
        while not progress.over:
            backend = self._pool.choose(tried)
            if backend is None:
                await self._next_round(tries, progress)
                tried.clear()
                continue
            tried.add(backend)
            continued = progress.begun
            try:
                async with aclosing(self._attempt(backend, path, headers, progress)) as chunks:
                    async for chunk in chunks:
                        # Others may take it up again if this one breaks off too.
                        tries, tried = _Tries(), {backend}
                        self.continued += continued
                        continued = False
                        if (shown := progress.received(chunk)) is not None:
                            yield shown
            except _Trouble as trouble:
                self._book(trouble, tries, progress)

    def _book(self, trouble: _Trouble, tries: _Tries, progress: Course) -> None:
        """Remember why an attempt ended; raises if nobody else can do better."""
        refused = trouble.refused
        if refused is None:
            return
        tries.last = refused
        if refused.status == _BUSY:
            tries.busy = refused
        elif refused.status == _FAULT:
            tries.faults += 1
        if (400 <= refused.status < 500 and refused.status != _BUSY) or tries.faults == MOST_FAULTS:
            _give_up(refused, progress)

    async def _next_round(self, tries: _Tries, progress: Course) -> None:
        """All servers were asked: whether and when to ask them again."""
        if tries.busy is not None and not progress.begun:
            # They have queues of their own; another one here would only be longer.
            raise tries.busy
        now_s = asyncio.get_running_loop().time()
        if tries.until_s is None:
            tries.until_s = now_s + self._patience_s
        if now_s > tries.until_s:
            _give_up(tries.last, progress)
        await asyncio.sleep(tries.pause_s)
        tries.pause_s = min(2 * tries.pause_s, LONGEST_PAUSE_S)
        tries.busy = None

    async def _attempt(
        self, backend: Backend, path: str, headers: Mapping[str, str], progress: Course
    ) -> AsyncGenerator[Chunk]:
        """Chunks from one server. Raises `_Trouble` unless the answer is complete."""
        with backend.serving():
            try:
                async with aclosing(self._events(backend, path, headers, progress)) as events:
                    while (payload := await _heard(backend, anext(events, DONE))) != DONE:
                        chunk: Any = msgspec.json.decode(payload)
                        if "error" in chunk or chunk.get("type") == "error":
                            raise _Trouble(_said(chunk.get("error", chunk), payload))
                        backend.spoke()
                        yield chunk
            except (httpx.HTTPError, msgspec.DecodeError) as error:
                backend.failed()
                raise _Trouble from error
            if not progress.over:
                raise _Trouble

    async def _events(
        self, backend: Backend, path: str, headers: Mapping[str, str], progress: Course
    ) -> AsyncGenerator[bytes]:
        url, content = f"{backend.url}{path}", msgspec.json.encode(progress.body)
        async with self._client.stream("POST", url, headers=headers, content=content) as got:
            if got.status_code != httpx.codes.OK:
                raise _Trouble(Refused(got.status_code, got.headers, await got.aread()))
            async with aclosing(payloads(got.aiter_raw())) as events:
                async for payload in events:
                    yield payload


async def _heard(backend: Backend, wait: Any) -> bytes:
    """What is awaited from a server; trouble if that is found not to answer anything."""
    try:
        async with asyncio.timeout(None) as limit:
            with backend.waiting(limit):
                return await wait
    except TimeoutError as error:
        raise _Trouble from error


def _give_up(refused: Refused | None, progress: Course) -> None:
    if refused is None:
        raise ApiError(503, NOBODY, code="unavailable")
    raise refused.error() if progress.begun else refused


def _said(error: Any, payload: bytes) -> Refused:
    """An event that says why a stream ends; by then there is no status any more."""
    if not isinstance(error, dict):
        return Refused(400, {}, payload)
    if error.get("type") == "error":
        # Of responses: they have no other type, and servers' own failures no code.
        return Refused(_BY_CODE.get(str(error.get("code")), 400), {}, payload)
    return Refused(_BY_TYPE.get(str(error.get("type")), 400), {}, payload)


_BY_TYPE = {"server_error": 503, "rate_limit_error": _BUSY}
_BY_CODE = {"None": 503, "unavailable": 503, "overloaded": _BUSY}
