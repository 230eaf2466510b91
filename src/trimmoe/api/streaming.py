"""Several answers at once, server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trimmoe.api.errors import STOPPING, ApiError, ClientGone, ErrorBody, ErrorDetail, from_service
from trimmoe.runtime.service import ServiceError, Unavailable

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


async def merged(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Items of all streams as they come, each with the index of its stream.

    The first exception of any ends all. Closing this closes them.
    """
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        await _cancelled(tasks)


async def gathered(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first exception cancels the rest."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancelled(tasks)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises `ClientGone` as soon as the client hangs up."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancelled((task, watcher))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs and see it end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """How a stream is written down."""

    event: Callable[[Any], bytes]
    failure: Callable[[ErrorDetail], bytes]
    """What a stream ends with that cannot go on; it is too late for a status."""
    end: bytes


def _chunk(chunk: BaseModel) -> bytes:
    return f"data: {chunk.model_dump_json()}\n\n".encode()


CHUNKS = Framing(
    event=_chunk, failure=lambda error: _chunk(ErrorBody(error=error)) + DONE, end=DONE
)
"""Of completions and chats."""


def named_event(kind: str, text: str) -> bytes:
    """An event of a stream whose events have names."""
    return f"event: {kind}\ndata: {text}\n\n".encode()


def named_failure(error: ErrorDetail) -> bytes:
    """What such a stream ends with that cannot go on."""
    told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return named_event("error", json.dumps(told))


class EventStream(Response):
    """Chunks as server-sent events.

    The stream is closed as soon as the client hangs up, not at the next attempt to send.
    """

    media_type = "text/event-stream"

    def __init__(self, first: Any, rest: AsyncGenerator[Any], framing: Framing = CHUNKS) -> None:
        """Chunks are as `framing` takes them. A `ServiceError` or an `ApiError` in their place ends
        the stream."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest, self._framing = first, rest, framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send_all(send))
        except ClientGone:
            pass
        except asyncio.CancelledError:
            # The server stops and has waited long enough; the client should know why.
            await self._break_off(send, from_service(Unavailable(STOPPING)))
        finally:
            await self._rest.aclose()

    async def _break_off(self, send: Send, error: ApiError) -> None:
        await _send(send, self._framing.failure(error.detail))
        await send(_END)

    async def _send_all(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await _send(send, self._framing.event(self._first))
        try:
            async for chunk in self._rest:
                await _send(send, self._framing.event(chunk))
        except ServiceError as error:
            await self._break_off(send, from_service(error))
            return
        except ApiError as error:
            await self._break_off(send, error)
            return
        await _send(send, self._framing.end)
        await send(_END)


_END = {"type": "http.response.body", "body": b"", "more_body": False}


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
