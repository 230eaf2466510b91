"""`POST /v1/responses`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from trimmoe.api.chat import chat_requests, reader_of
from trimmoe.api.context import Serving
from trimmoe.api.generation import Answer, EndReason, collect, usage
from trimmoe.api.openapi import generation_responses
from trimmoe.api.response_items import ResponseBody, ResponseEvent, Transcript
from trimmoe.api.response_requests import ResponseRequest, as_chat
from trimmoe.api.responses import Usage
from trimmoe.api.streaming import (
    EventStream,
    Framing,
    named_event,
    named_failure,
    until_gone,
)

router = APIRouter()


@router.post("/v1/responses", responses=generation_responses(ResponseBody))
async def responses(body: ResponseRequest, http: Request, context: Serving) -> Response:
    """Answer a conversation; nothing of it is kept."""
    context.require_model(body.model)
    chat, transcript = as_chat(body), Transcript(body, context.codec)
    (request,), offer = await chat_requests(context, chat, transcript.response.id)
    answer = Answer(
        context.service,
        context.metrics,
        context.codec,
        request,
        chat.stop_strings,
        reader_of(offer)(),
    )
    try:
        transcript.replay(answer.replayed)
        if not body.stream:
            piece = await until_gone(http.receive, collect(answer.pieces()))
            for _ in transcript.push(piece):
                pass
            for _ in transcript.close(piece.finish_reason, _counts(answer)):
                pass
            return JSONResponse(transcript.response.model_dump())
        events = _events(answer, transcript)
        # The headers wait for the first token, so that what prevents it still has a status.
        first = await until_gone(http.receive, anext(events))
        return EventStream(first, events, _EVENTS)
    except BaseException:
        await answer.close()
        raise


def _counts(answer: Answer) -> Usage:
    return usage([answer], len(answer.request.prompt_ids))


async def _events(answer: Answer, transcript: Transcript) -> AsyncGenerator[BaseModel]:
    """Everything in order, from the first token on, or behind the tokens that came already."""
    reason: EndReason | None = None
    try:
        async with aclosing(answer.pieces()) as pieces:
            begun = bool(answer.replayed)
            async for piece in pieces:
                if not begun:
                    for event in transcript.open():
                        yield event
                begun, reason = True, piece.finish_reason
                for event in transcript.push(piece):
                    yield event
    finally:
        await answer.close()
    for event in transcript.close(reason, _counts(answer)):
        yield event


def _event(event: BaseModel) -> bytes:
    assert isinstance(event, ResponseEvent)
    return named_event(event.type, event.model_dump_json())


_EVENTS = Framing(event=_event, failure=named_failure, end=b"")
