"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from trimmoe.api.context import Serving
from trimmoe.api.generation import Piece
from trimmoe.api.openapi import generation_responses
from trimmoe.api.requests import ChatRequest, Message
from trimmoe.api.respond import requests_for, respond
from trimmoe.api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from trimmoe.api.structure import checked_grammar
from trimmoe.api.text import TextCodec
from trimmoe.api.wording import finite, shown_tokens

router = APIRouter()


@router.post("/v1/chat/completions", responses=generation_responses(ChatCompletion))
async def chat_completions(body: ChatRequest, http: Request, context: Serving) -> Response:
    """Answer a chat."""
    context.require_model(body.model)
    prompt = await context.codec.encode_chat([turn_of(message) for message in body.messages])
    name = f"chatcmpl-{uuid4().hex}"
    requests = requests_for(
        context,
        body,
        [prompt],
        name=name,
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=await checked_grammar(body, context.guides),
    )
    return await respond(http, context, body, requests, _ChatForm(body, context.codec, name))


def turn_of(message: Message) -> dict[str, str]:
    """What chat templates read; they know developers as the system."""
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.text, **named}


class _ChatForm:
    """A `Form` for chats."""

    def __init__(self, body: ChatRequest, codec: TextCodec, name: str) -> None:
        self._body, self._codec, self._name = body, codec, name
        self._created = int(time.time())

    def whole(self, pieces: Sequence[Piece], counts: Usage) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(role="assistant", content=piece.text),
                logprobs=self._logprobs(piece),
                finish_reason=piece.finish_reason,
                token_ids=self._token_ids(piece),
            )
            for index, piece in enumerate(pieces)
        ]
        return ChatCompletion(
            id=self._name,
            created=self._created,
            model=self._body.model,
            choices=choices,
            usage=counts,
        )

    def opening(self, index: int) -> ChatChunk | None:
        delta = AssistantMessage(role="assistant", content="")
        return self._chunk([ChatDelta(index=index, delta=delta)], None)

    def chunk(self, index: int, piece: Piece) -> ChatChunk:
        delta = ChatDelta(
            index=index,
            delta=AssistantMessage(content=piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            token_ids=self._token_ids(piece),
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
        )

    def _token_ids(self, piece: Piece) -> list[int] | None:
        return [e.token for e in piece.tokens] if self._body.return_token_ids else None

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    **self._logprob(event.token, event.logprob).model_dump(),
                    top_logprobs=[self._logprob(*one) for one in event.top_logprobs],
                )
                for event in shown_tokens(piece)
            ]
        )

    def _logprob(self, token: int, logprob: float | None) -> TopLogprob:
        return TopLogprob(
            token=self._codec.token_text(token),
            logprob=finite(logprob),
            bytes=self._codec.token_bytes(token),
        )
