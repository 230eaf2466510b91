"""What stands before every route: API keys and the limit on bodies, as plain ASGI."""

from __future__ import annotations

import asyncio
import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimmoe.api.errors import STOPPING, ApiError

OPEN_PATHS = frozenset({"/health"})
DISCARDED_BYTES = 64_000_000
"""How much of a body that is too large is read and thrown away before the connection closes."""


class Stopping:
    """Answers 503 where a stopping server cancels a request that has no response yet."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if started:
                raise
            await ApiError(503, STOPPING, code="unavailable").response()(scope, receive, send)


class ApiKeys:
    """Lets requests with one of the keys pass, and everybody to paths that are open."""

    def __init__(
        self, app: ASGIApp, keys: tuple[str, ...], open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            401,
            "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # All keys are compared, in constant time each, so that timing tells nothing about them.
        matches = [hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys]
        return any(matches) and scheme.lower() == "bearer"


class BodyLimit:
    """Refuses bodies over a size (413) without ever holding more than that."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await _discard(receive)
            await ApiError(413, self._message, headers=_CLOSE).response()(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                await _discard(receive)
                # The only exception that FastAPI does not take for a broken body.
                raise HTTPException(413, self._message, headers=_CLOSE)
            return message

        await self._app(scope, counted, send)

    @property
    def _message(self) -> str:
        return f"The body is larger than {self._max_bytes} bytes; send a shorter prompt."


_CLOSE = {"Connection": "close"}


async def _discard(receive: Receive) -> None:
    """Throw the rest of a body away, or a client still sending would miss the answer."""
    left = DISCARDED_BYTES
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if not message.get("more_body", False):
            return
