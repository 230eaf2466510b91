"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from trimmoe.api.call_readers import Reader
from trimmoe.api.calls import CallPart
from trimmoe.api.context import Context, Serving
from trimmoe.api.generation import Piece
from trimmoe.api.openapi import generation_responses
from trimmoe.api.requests import ChatRequest, Message, ToolCall
from trimmoe.api.respond import requests_for, respond, seeded
from trimmoe.api.responses import (
    AssistantMessage,
    Call,
    CallText,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Usage,
)
from trimmoe.api.structure import check_grammar, checked_grammar
from trimmoe.api.text import TextCodec
from trimmoe.api.tools import Offer, offer_grammar, offered
from trimmoe.api.traces import TokenTrace, traces
from trimmoe.api.wording import prompt_logprobs, token_logprobs
from trimmoe.runtime.service import GenerationRequest

router = APIRouter()


@router.post("/v1/chat/completions", responses=generation_responses(ChatCompletion))
async def chat_completions(body: ChatRequest, http: Request, context: Serving) -> Response:
    """Answer a chat."""
    context.require_model(body.model)
    body = seeded(body)
    name = f"chatcmpl-{uuid4().hex}"
    requests, offer = await chat_requests(context, body, name)
    form = _ChatForm(body, context.codec, name, requests)
    return await respond(http, context, body, requests, form, reader_of(offer))


async def chat_requests(
    context: Context, body: ChatRequest, name: str
) -> tuple[list[GenerationRequest], Offer | None]:
    """What a chat asks of the service, and the tools that its answers may call; raises
    `ApiError`."""
    codec, offer = context.codec, offered(body, context.codec)
    prompt = await codec.encode_chat(
        [turn_of(message) for message in body.messages],
        tools=None if offer is None else offer.described(),
    )
    requests = requests_for(
        context,
        body,
        [prompt],
        name=name,
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=await _grammar(body, offer, context),
    )
    return requests, offer


async def _grammar(body: ChatRequest, offer: Offer | None, context: Context) -> str:
    """What the answer is held to; raises `ApiError` if it cannot be."""
    if offer is None:
        return await checked_grammar(body, context.guides)
    grammar, option = offer_grammar(body, offer, context.codec)
    if grammar:
        await check_grammar(context.guides, grammar, option)
    return grammar


def reader_of(offer: Offer | None) -> Callable[[], Reader | None]:
    """What makes a reader of calls for each answer, if tools are offered."""
    if offer is None:
        return lambda: None
    form, parallel = offer.form, offer.parallel
    return lambda: form.reader(parallel)


def turn_of(message: Message) -> dict[str, Any]:
    """What chat templates read; they know developers as the system."""
    turn: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [_call_of(call) for call in message.tool_calls]
    return turn


def _call_of(call: ToolCall) -> dict[str, Any]:
    """A call that was made, its arguments no longer text: templates write them down themselves."""
    function = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
    return {"type": call.type, "id": call.id, "function": function}


class _ChatForm:
    """A `Form` for chats."""

    def __init__(
        self,
        body: ChatRequest,
        codec: TextCodec,
        name: str,
        requests: Sequence[GenerationRequest],
    ) -> None:
        self._body, self._codec, self._name, self._requests = body, codec, name, requests
        self._created = int(time.time())

    def whole(self, pieces: Sequence[Piece], counts: Usage) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(
                    role="assistant",
                    content=None if piece.calls and not piece.text else piece.text,
                    tool_calls=[_told(part, None) for part in piece.calls] or None,
                ),
                logprobs=self._logprobs(piece),
                finish_reason=piece.finish_reason,
                token_ids=self._token_ids(piece),
                token_traces=self._traces(piece),
            )
            for index, piece in enumerate(pieces)
        ]
        return ChatCompletion(
            id=self._name,
            created=self._created,
            model=self._body.model,
            choices=choices,
            usage=counts,
            prompt_logprobs=None
            if self._body.prompt_logprobs is None
            else prompt_logprobs(pieces[0], self._codec),
            seed=self._body.told_seed,
        )

    def opening(self, index: int) -> ChatChunk | None:
        if self._requests[index].received:
            return None
        delta = AssistantMessage(role="assistant", content="")
        return self._chunk([ChatDelta(index=index, delta=delta)], None)

    def chunk(self, index: int, piece: Piece) -> ChatChunk:
        delta = ChatDelta(
            index=index,
            delta=AssistantMessage(
                content=None if piece.calls and not piece.text else piece.text,
                tool_calls=[_told(part, part.index) for part in piece.calls] or None,
            ),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            token_ids=self._token_ids(piece),
            token_traces=self._traces(piece),
        )
        return self._chunk([delta], None)

    def closing(self, counts: Usage) -> ChatChunk:
        return self._chunk([], counts)

    def _chunk(self, choices: list[ChatDelta], counts: Usage | None) -> ChatChunk:
        return ChatChunk(
            id=self._name,
            created=self._created,
            model=self._body.model,
            choices=choices,
            usage=counts,
            seed=self._body.told_seed,
        )

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return ChatLogprobs(content=token_logprobs(piece, self._codec))

    def _token_ids(self, piece: Piece) -> list[int] | None:
        return [e.token for e in piece.tokens] if self._body.return_token_ids else None

    def _traces(self, piece: Piece) -> list[TokenTrace] | None:
        return traces(piece.tokens, self._codec) if self._body.return_token_traces else None


def _told(part: CallPart, index: int | None) -> Call:
    """A call, or with its index a part of one."""
    return Call(
        index=index,
        id=part.id,
        type=None if part.id is None else "function",
        function=CallText(name=part.name, arguments=part.arguments),
    )
