"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from trimmoe.api.chat import turn_of
from trimmoe.api.context import Serving
from trimmoe.api.errors import ApiError
from trimmoe.api.openapi import error_responses
from trimmoe.api.requests import Message
from trimmoe.api.sampled import Body, TokenId

router = APIRouter()


class TokenizeRequest(Body):
    """A text or a chat."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Needed by clients that name one; there is only one."""
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    """Instead of `prompt`: what the chat template makes of them."""
    add_special_tokens: bool = True
    """With those that the model wants around a prompt; a chat template has its own."""
    add_generation_prompt: bool = True
    """End a chat where the assistant's turn begins."""
    return_token_strs: bool = False


class Tokenized(BaseModel):
    """The answer to `POST /tokenize`."""

    count: int
    max_model_len: int
    """Tokens of prompt and answer together."""
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Ids of tokens."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class Detokenized(BaseModel):
    """The answer to `POST /detokenize`."""

    prompt: str
    """With special tokens."""


@router.post("/tokenize", responses=error_responses(400, 404, 413))
async def tokenize(body: TokenizeRequest, context: Serving) -> Tokenized:
    """The tokens of a text or of a chat."""
    if body.model is not None:
        context.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either `prompt` or `messages`.", param="prompt")
    codec = context.codec
    if body.messages is not None:
        turns = [turn_of(message) for message in body.messages]
        tokens = await codec.encode_chat(turns, answering=body.add_generation_prompt)
    else:
        tokens = await codec.encode(body.prompt or "", special=body.add_special_tokens)
    return Tokenized(
        count=len(tokens),
        max_model_len=context.service.model.context_length,
        tokens=tokens,
        token_strs=[codec.token_text(one) for one in tokens] if body.return_token_strs else None,
    )


@router.post("/detokenize", responses=error_responses(400, 404, 413))
async def detokenize(body: DetokenizeRequest, context: Serving) -> Detokenized:
    """The text of tokens."""
    if body.model is not None:
        context.require_model(body.model)
    last = context.service.model.vocab_size - 1
    if max(body.tokens, default=0) > last:
        raise ApiError(400, f"Token ids go from 0 to {last}; mend `tokens`.", param="tokens")
    return Detokenized(prompt=context.codec.decode(body.tokens, special=True))
