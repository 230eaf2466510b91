"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from trimmoe.api.context import Serving
from trimmoe.api.generation import Piece
from trimmoe.api.openapi import generation_responses
from trimmoe.api.requests import CompletionRequest
from trimmoe.api.respond import requests_for, respond
from trimmoe.api.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from trimmoe.api.structure import checked_grammar
from trimmoe.api.text import TextCodec
from trimmoe.api.wording import finite, shown_tokens

router = APIRouter()


@router.post("/v1/completions", responses=generation_responses(Completion))
async def completions(body: CompletionRequest, http: Request, context: Serving) -> Response:
    """Continue one or more prompts."""
    context.require_model(body.model)
    prompts = await _prompt_ids(body, context.codec)
    name = f"cmpl-{uuid4().hex}"
    requests = requests_for(
        context,
        body,
        prompts,
        name=name,
        max_new_tokens=body.max_tokens,
        logprobs=body.logprobs,
        grammar=await checked_grammar(body, context.guides),
    )
    echoes = _echoes(body, prompts, context.codec)
    form = _CompletionForm(body, context.codec, name, echoes)
    return await respond(http, context, body, requests, form)


async def _prompt_ids(body: CompletionRequest, codec: TextCodec) -> list[list[int]]:
    """Token ids of each prompt, whatever way they were given."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await codec.encode(prompt)]
    if isinstance(prompt[0], int):
        return [[one for one in prompt if isinstance(one, int)]]
    return [await codec.encode(one) if isinstance(one, str) else one for one in prompt]  # type: ignore[misc]


def _echoes(
    body: CompletionRequest, prompts: Sequence[Sequence[int]], codec: TextCodec
) -> list[str]:
    """What comes before each choice."""
    if not body.echo:
        return [""] * (len(prompts) * body.n)
    return [codec.decode(prompt) for prompt in prompts for _ in range(body.n)]


class _CompletionForm:
    """A `Form` for completions; remembers where each choice's text has got to."""

    def __init__(
        self, body: CompletionRequest, codec: TextCodec, name: str, echoes: Sequence[str]
    ) -> None:
        self._body, self._codec, self._name = body, codec, name
        self._created = int(time.time())
        self._echoes = list(echoes)
        self._offsets = [len(echo) for echo in echoes]

    def whole(self, pieces: Sequence[Piece], counts: Usage) -> Completion:
        return self._completion([self._choice(i, p) for i, p in enumerate(pieces)], counts)

    def opening(self, index: int) -> Completion | None:
        return None

    def chunk(self, index: int, piece: Piece) -> Completion:
        return self._completion([self._choice(index, piece)], None)

    def closing(self, counts: Usage) -> Completion:
        return self._completion([], counts)

    def _completion(self, choices: list[CompletionChoice], counts: Usage | None) -> Completion:
        return Completion(
            id=self._name,
            created=self._created,
            model=self._body.model,
            choices=choices,
            usage=counts,
        )

    def _choice(self, index: int, piece: Piece) -> CompletionChoice:
        echo, self._echoes[index] = self._echoes[index], ""
        assert piece.finish_reason != "tool_calls", "completions offer no tools"
        return CompletionChoice(
            index=index,
            text=echo + piece.text,
            logprobs=None if self._body.logprobs is None else self._logprobs(index, piece),
            finish_reason=piece.finish_reason,
            token_ids=[e.token for e in piece.tokens] if self._body.return_token_ids else None,
        )

    def _logprobs(self, index: int, piece: Piece) -> CompletionLogprobs:
        made = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for event in shown_tokens(piece):
            text = self._codec.token_text(event.token)
            top = {self._codec.token_text(one): finite(p) for one, p in event.top_logprobs}
            # Several ids may share a text; the drawn one counts.
            top[text] = finite(event.logprob)
            made.tokens.append(text)
            made.token_logprobs.append(finite(event.logprob))
            made.top_logprobs.append(top)
            made.text_offset.append(self._offsets[index])
            self._offsets[index] += len(text)
        return made
