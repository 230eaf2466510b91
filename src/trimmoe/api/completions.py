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
from trimmoe.api.respond import requests_for, respond, seeded
from trimmoe.api.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    Usage,
)
from trimmoe.api.structure import checked_grammar
from trimmoe.api.text import TextCodec
from trimmoe.api.traces import traces
from trimmoe.api.wording import finite, prompt_logprobs, shown_tokens
from trimmoe.runtime.service import GenerationRequest

router = APIRouter()


@router.post("/v1/completions", responses=generation_responses(Completion))
async def completions(body: CompletionRequest, http: Request, context: Serving) -> Response:
    """Continue one or more prompts."""
    context.require_model(body.model)
    body = seeded(body)
    prompts = await _prompt_ids(body, context.codec)
    name = f"cmpl-{uuid4().hex}"
    requests = requests_for(
        context,
        body,
        prompts,
        name=name,
        max_new_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max(body.logprobs or 0, body.prompt_logprobs or 0)
        if body.echoes_logprobs
        else None,
        grammar=await checked_grammar(body, context.guides),
    )
    echoes = _echoes(body, prompts, context.codec)
    form = _CompletionForm(body, context.codec, name, echoes, prompts, requests)
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
        self,
        body: CompletionRequest,
        codec: TextCodec,
        name: str,
        echoes: Sequence[str],
        prompts: Sequence[Sequence[int]],
        requests: Sequence[GenerationRequest],
    ) -> None:
        self._body, self._codec, self._name = body, codec, name
        self._prompts = prompts
        self._created = int(time.time())
        received = [request.received for request in requests]
        # What came already has had its echo.
        pairs = list(zip(echoes, received, strict=True))
        self._echoes = ["" if came else echo for echo, came in pairs]
        self._offsets = [
            len(echo) + sum(len(codec.token_text(token)) for token in came) for echo, came in pairs
        ]

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
            seed=self._body.told_seed,
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
            token_traces=traces(piece.tokens, self._codec)
            if self._body.return_token_traces
            else None,
            prompt_logprobs=self._of_prompt(piece),
        )

    def _logprobs(self, index: int, piece: Piece) -> CompletionLogprobs:
        made = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if self._body.echoes_logprobs:
            self._offsets[index] = 0
            self._add(made, index, self._prompts[index // self._body.n][0], None, ())
            for score in piece.tokens[0].prompt:
                self._add(made, index, score.token, score.logprob, score.top)
        for event in shown_tokens(piece):
            self._add(made, index, event.token, finite(event.logprob), event.top_logprobs)
        return made

    def _add(
        self,
        made: CompletionLogprobs,
        index: int,
        token: int,
        logprob: float | None,
        alternatives: Sequence[tuple[int, float]],
    ) -> None:
        """One more token; None for the first one of a prompt, which nothing predicts."""
        text = self._codec.token_text(token)
        top = {self._codec.token_text(one): finite(p) for one, p in alternatives}
        made.tokens.append(text)
        made.token_logprobs.append(None if logprob is None else finite(logprob))
        # Several ids may share a text; the one that is there counts.
        made.top_logprobs.append(None if logprob is None else top | {text: finite(logprob)})
        made.text_offset.append(self._offsets[index])
        self._offsets[index] += len(text)

    def _of_prompt(self, piece: Piece) -> PromptLogprobs | None:
        if self._body.prompt_logprobs is None:
            return None
        return prompt_logprobs(piece, self._codec)
