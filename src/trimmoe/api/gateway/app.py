"""The gateway's app: answers that may be continued, and everything else passed on as it is."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from trimmoe.api import errors
from trimmoe.api.errors import ApiError, ClientGone
from trimmoe.api.gateway.pool import Backend, Pool
from trimmoe.api.gateway.progress import Chunk, Progress, continuable
from trimmoe.api.gateway.relay import NOBODY, Refused, Relay
from trimmoe.api.gateway.response_progress import (
    ResponseProgress,
    response_continuable,
    whole_response,
)
from trimmoe.api.gateway.whole import Whole
from trimmoe.api.guards import BodyLimit, Stopping
from trimmoe.api.streaming import (
    CHUNKS,
    EventStream,
    Framing,
    named_event,
    named_failure,
    until_gone,
)

ANSWERS, RESPONSES = ("/v1/completions", "/v1/chat/completions"), "/v1/responses"
_HOP = frozenset(
    {
        *("accept-encoding", "connection", "content-length", "host", "keep-alive"),
        *(
            "proxy-authenticate",
            "proxy-authorization",
            "te",
            "trailer",
            "transfer-encoding",
            "upgrade",
        ),
    }
)
"""Headers that concern one connection only."""
_ELSEWHERE = frozenset({429, 502, 503, 504})
"""Statuses that say nothing of what other servers would answer."""
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """What the operator decides."""

    servers: tuple[str, ...]
    """Base URLs, without a slash at their end."""
    patience_s: float = 60.0
    """How long a request goes without a token until it is given up."""
    silence_s: float = 5.0
    """How long a server may say nothing, not even to be asked for its health, until its answers go
    on elsewhere."""
    max_body_bytes: int = 1_000_000
    trusted: ssl.SSLContext | bool = True
    """What servers' certificates are checked with; True: what the system trusts."""


class _Gateway:
    """What requests are passed on with."""

    def __init__(self, settings: GatewaySettings) -> None:
        # A connection that was kept may be one that the server is about to close.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, connect=settings.silence_s)
        plain = {"accept-encoding": "identity"}
        self.client = httpx.AsyncClient(
            limits=limits,
            timeout=timeout,
            headers=plain,
            trust_env=False,
            verify=settings.trusted,
        )
        self.pool = Pool(settings.servers, self.client, silence_s=settings.silence_s)
        self.relay = Relay(self.pool, self.client, patience_s=settings.patience_s)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        watching = asyncio.create_task(self.pool.watch())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await self.client.aclose()

    async def answer(self, http: Request) -> Response:
        """An answer from whichever servers it takes."""
        content = await _content(http)
        body = _json(content)
        if not continuable(body):
            return await self.passed_on(http, content)
        progress = Progress(body)
        chunks = self.relay.chunks(http.url.path, _onward(http.headers), progress)
        if not progress.streamed:
            return JSONResponse(await until_gone(http.receive, _whole(chunks)))
        return await _stream(http, chunks, _CHUNKS)

    async def respond(self, http: Request) -> Response:
        """The same in the newer form."""
        content = await _content(http)
        body = _json(content)
        if not response_continuable(body):
            return await self.passed_on(http, content)
        progress = ResponseProgress(body)
        events = self.relay.chunks(http.url.path, _onward(http.headers), progress)
        if not progress.streamed:
            return JSONResponse(await until_gone(http.receive, whole_response(events)))
        return await _stream(http, events, _EVENTS)

    async def passed_on(self, http: Request, content: bytes) -> Response:
        """Whatever it is, from the first server that takes it, as it comes."""
        tried: set[Backend] = set()
        query = f"?{http.url.query}" if http.url.query else ""
        last: httpx.Response | None = None
        while (backend := self.pool.choose(tried)) is not None:
            tried.add(backend)
            asked = self.client.build_request(
                http.method,
                f"{backend.url}{http.url.path}{query}",
                headers=_onward(http.headers),
                content=content,
            )
            try:
                got = await until_gone(http.receive, self.client.send(asked, stream=True))
            except httpx.TransportError:
                backend.failed()
                continue
            if last is not None:
                await last.aclose()
            last = got
            if got.status_code not in _ELSEWHERE:
                return _Passing(got, backend)
        if last is None:
            raise ApiError(503, NOBODY, code="unavailable")
        return _Passing(last)

    def health(self) -> Response:
        servers = [
            {"url": each.url, "healthy": each.healthy, "in_flight": each.in_flight}
            for each in self.pool.backends
        ]
        ok = bool(self.pool.healthy)
        body = {
            "status": "ok" if ok else "unavailable",
            "reason": "" if ok else NOBODY,
            "servers": servers,
            "continued": self.relay.continued,
        }
        return JSONResponse(body, status_code=200 if ok else 503)


class _Passing(StreamingResponse):
    """A server's response as it comes; what is left of it is dropped when the client hangs up."""

    def __init__(self, got: httpx.Response, backend: Backend | None = None) -> None:
        super().__init__(got.aiter_raw(), got.status_code, _onward(got.headers))
        self._got, self._backend = got, backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._backend.serving() if self._backend else nullcontext():
                await super().__call__(scope, receive, send)
        finally:
            await self._got.aclose()


def create_gateway(settings: GatewaySettings) -> FastAPI:
    """An app that watches the servers as long as it runs."""
    gateway = _Gateway(settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        async with gateway.running():
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    errors.install(app)

    @app.exception_handler(Refused)
    async def _(_http: Request, refused: Refused) -> Response:
        return Response(refused.content, refused.status, _onward(refused.headers))

    @app.get("/health")
    async def health() -> Response:
        return gateway.health()

    async def answer(http: Request) -> Response:
        return await gateway.answer(http)

    async def respond(http: Request) -> Response:
        return await gateway.respond(http)

    async def anything(http: Request) -> Response:
        return await gateway.passed_on(http, await _content(http))

    for path in ANSWERS:
        app.add_api_route(path, answer, methods=["POST"])
    app.add_api_route(RESPONSES, respond, methods=["POST"])
    app.add_api_route("/{path:path}", anything, methods=_METHODS)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(Stopping)
    return app


async def _content(http: Request) -> bytes:
    """The body; raises `ClientGone` if it never comes to its end."""
    try:
        return await http.body()
    except ClientDisconnect as error:
        raise ClientGone from error


def _json(content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return None


def _onward(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of the other end."""
    return {name: value for name, value in headers.items() if name.lower() not in _HOP}


async def _stream(http: Request, chunks: AsyncGenerator[Chunk], framing: Framing) -> Response:
    """Chunks as they come, from the first on: what prevents it still has a status."""
    first = await until_gone(http.receive, anext(chunks))
    return EventStream(first, chunks, framing)


async def _whole(chunks: AsyncGenerator[Chunk]) -> dict[str, Any]:
    whole = Whole()
    async with aclosing(chunks):
        async for chunk in chunks:
            whole.add(chunk)
    return whole.response()


def _event(chunk: Chunk) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _named(event: Chunk) -> bytes:
    return named_event(event["type"], msgspec.json.encode(event).decode())


_CHUNKS = replace(CHUNKS, event=_event)
_EVENTS = Framing(event=_named, failure=named_failure, end=b"")


def urls_of(servers: Sequence[str]) -> tuple[str, ...]:
    """Base URLs from what an operator writes: `http://` and `/v1` may be there or not. Raises
    `ValueError` for what names no server."""
    made = []
    for each in servers:
        url = httpx.URL(each if "://" in each else f"http://{each}")
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(each)
        made.append(str(url).rstrip("/").removesuffix("/v1"))
    return tuple(dict.fromkeys(made))
