"""The cluster as it is now: once, or every second for as long as somebody looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, fields
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from trimmoe.api.context import Context, Serving
from trimmoe.api.errors import ErrorDetail
from trimmoe.api.streaming import EventStream, Framing
from trimmoe.runtime.picture import Picture

router = APIRouter()
EVERY_S = 1.0
_LOOK_S = 0.25
"""How soon a stream ends when the server is about to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One server-sent event."""

    name: str
    data: bytes


@router.get("/v1/trimmoe/cluster")
async def cluster(context: Serving) -> Response:
    """The model, what each server holds, and how servers, links, routes and requests are now."""
    picture = context.service.picture()
    told = {"layout": _layout(context, picture), "now": _now(context, picture)}
    return Response(msgspec.json.encode(told), media_type="application/json")


# Not in the document of the interface: such an answer never ends.
@router.get("/v1/trimmoe/live", include_in_schema=False)
async def live(context: Serving) -> Response:
    """The same as server-sent events: `layout` at first and when it changes, `now` every second."""
    events = _events(context)
    return EventStream(await anext(events), events, _FRAMING)


async def _events(context: Context) -> AsyncGenerator[Event]:
    sent = b""
    while True:
        picture = context.service.picture()
        layout = msgspec.json.encode(_layout(context, picture))
        if layout != sent:
            yield Event(name="layout", data=layout)
            sent = layout
        yield Event(name="now", data=msgspec.json.encode(_now(context, picture)))
        until_s = time.monotonic() + EVERY_S
        while time.monotonic() < until_s:
            if context.service.leaving:
                return
            await asyncio.sleep(_LOOK_S)


def _layout(context: Context, picture: Picture) -> dict[str, Any]:
    """What changes only with the plan."""
    model = context.service.model
    shown = {
        "id": model.id,
        "context_length": model.context_length,
        "chats": context.codec.chats,
    }
    return {"model": shown, "cluster": picture.layout}


def _now(context: Context, picture: Picture) -> dict[str, Any]:
    told = {each.name: getattr(picture, each.name) for each in fields(picture)}
    del told["layout"]
    told["time_s"] = time.time()
    told["speed"] = context.metrics.recent.speed(time.perf_counter())
    return told


def _event(event: Event) -> bytes:
    return f"event: {event.name}\ndata: ".encode() + event.data + b"\n\n"


def _failure(error: ErrorDetail) -> bytes:
    return b"event: error\ndata: " + error.model_dump_json().encode() + b"\n\n"


_FRAMING = Framing(event=_event, failure=_failure, end=b"event: end\ndata: {}\n\n")
