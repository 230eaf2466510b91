"""From a checked body to a response, whole or streamed; completions and chats differ by `Form`."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from trimmoe.api.call_readers import Reader
from trimmoe.api.context import Context
from trimmoe.api.errors import ApiError
from trimmoe.api.generation import Answer, Piece, collect, submit_all, usage
from trimmoe.api.responses import Usage
from trimmoe.api.sampled import Sampled
from trimmoe.api.streaming import EventStream, gathered, merged, until_gone
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import GenerationRequest, ServedModel

B = TypeVar("B", bound=Sampled)
_SEED_BITS = 53
"""Whole numbers of JSON are exact up to these."""


class Form(Protocol):
    """How answers are written down. Indices are those of choices."""

    def whole(self, pieces: Sequence[Piece], counts: Usage) -> BaseModel:
        """The body of a response that is not streamed."""
        ...

    def opening(self, index: int) -> BaseModel | None:
        """What comes before a choice's first piece in a stream, if anything."""
        ...

    def chunk(self, index: int, piece: Piece) -> BaseModel:
        """One event of a stream."""
        ...

    def closing(self, counts: Usage) -> BaseModel:
        """The event that carries the usage."""
        ...


def requests_for(
    context: Context,
    body: Sampled,
    prompts: Sequence[Sequence[int]],
    *,
    name: str,
    max_new_tokens: int | None,
    logprobs: int | None,
    grammar: str = "",
    prompt_logprobs: int | None = None,
) -> list[GenerationRequest]:
    """One request per prompt and answer, prompt by prompt; raises `ApiError`.

    `grammar`, if there is one, was checked. `prompt_logprobs` is instead of the body's own.
    `max_new_tokens` None asks for all that the context holds.
    """
    model = context.service.model
    # Without a seed every request draws its own numbers.
    seed = secrets.randbits(_SEED_BITS) if body.seed is None else body.seed
    _check_tokens(body, model.vocab_size)
    _check_least(body.min_tokens, max_new_tokens)
    stop_ids = _stop_ids(body, model, guided=bool(grammar))
    sampling = replace(
        _sampling(body, model, stop_ids),
        seed=seed,
        logprobs=logprobs,
        grammar=grammar,
        prompt_logprobs=body.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
    )
    received = _received(body, len(prompts) * body.n, model.vocab_size)
    made = []
    for at, prompt in enumerate(prompts):
        _check_prompt(prompt, model.vocab_size)
        room = max(1, model.context_length - len(prompt))
        for answer in range(body.n):
            begun, most = received[len(made)], max_new_tokens or room
            if len(begun) > most:
                raise ApiError(
                    400,
                    f"`continue_token_ids` has {len(begun)} tokens, more than the {most} that the "
                    "answer may have; ask for more or leave some out.",
                    param="continue_token_ids",
                )
            made.append(
                GenerationRequest(
                    request_id=f"{name}-{len(made)}",
                    prompt_ids=tuple(prompt),
                    max_new_tokens=most,
                    received=tuple(begun),
                    sampling=replace(sampling, stream=at * body.n + answer),
                    stop_ids=stop_ids,
                    quality_budget=body.quality_budget,
                    confidence=body.confidence,
                    exact=body.exact,
                )
            )
    return made


def seeded(body: B) -> B:
    """The body with a seed if it asks for samples, so that whatever they are drawn with is told and
    the answer can be continued elsewhere."""
    if body.seed is not None or body.temperature == 0:
        return body
    return body.model_copy(update={"seed": secrets.randbits(_SEED_BITS)})


def _received(body: Sampled, choices: int, vocab_size: int) -> Sequence[Sequence[int]]:
    """What there is of every choice already."""
    given = body.continue_token_ids
    if not given:
        return [()] * choices
    many = [each for each in given if isinstance(each, list)]
    received = many or [[each for each in given if isinstance(each, int)]]
    if len(received) != choices:
        raise ApiError(
            400,
            f"`continue_token_ids` is of {len(received)} choices, but {choices} are asked for; "
            "give a list of tokens for each, empty where nothing came.",
            param="continue_token_ids",
        )
    if max((token for each in received for token in each), default=0) >= vocab_size:
        raise ApiError(
            400,
            f"Token ids go from 0 to {vocab_size - 1}; mend `continue_token_ids`.",
            param="continue_token_ids",
        )
    return received


def _sampling(body: Sampled, model: ServedModel, stop_ids: frozenset[int]) -> Sampling:
    """How all answers are drawn, as far as completions and chats say it alike."""
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in body.logit_bias.items()),
        min_tokens=body.min_tokens,
        stop_ids=tuple(sorted(one for one in stop_ids if one < model.vocab_size)),
    )


def _check_tokens(body: Sampled, vocab_size: int) -> None:
    if any(int(token) >= vocab_size for token in body.logit_bias):
        raise ApiError(
            400,
            f"`logit_bias`: ids of tokens go from 0 to {vocab_size - 1}; leave out the others.",
            param="logit_bias",
        )


def _check_least(least: int, most: int | None) -> None:
    if most is not None and least > most:
        raise ApiError(
            400,
            f"`min_tokens` is {least}, but no more than {most} tokens are asked for; lower it.",
            param="min_tokens",
        )


def _stop_ids(body: Sampled, model: ServedModel, *, guided: bool) -> frozenset[int]:
    """What ends an answer: the tokens asked for, and the model's own unless they are ignored; a
    grammar's end cannot be."""
    own = frozenset[int]() if body.ignore_eos and not guided else model.stop_ids
    return own | frozenset(body.stop_token_ids)


def _check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    if not prompt:
        raise ApiError(400, "The prompt is empty; give some text to continue.", param="prompt")
    if max(prompt) >= vocab_size:
        raise ApiError(
            400, f"Token ids go from 0 to {vocab_size - 1}; mend the prompt.", param="prompt"
        )


async def respond(
    http: Request,
    context: Context,
    body: Sampled,
    requests: Sequence[GenerationRequest],
    form: Form,
    reader: Callable[[], Reader | None] = lambda: None,
) -> Response:
    """Generate and answer; a client that hangs up cancels the generation. `reader` makes what
    reads calls of tools out of an answer."""
    answers = await submit_all(
        context.service, context.metrics, context.codec, requests, body.stop_strings, reader
    )
    prompt_tokens = sum(len(one.prompt_ids) for one in requests[:: body.n])
    try:
        if not body.stream:
            work = gathered([collect(answer.pieces()) for answer in answers])
            pieces = await until_gone(http.receive, work)
            whole = form.whole(pieces, usage(answers, prompt_tokens))
            return JSONResponse(whole.model_dump())
        wanted = body.stream_options is not None and body.stream_options.include_usage
        chunks = _chunks(answers, form, prompt_tokens if wanted else None)
        # The headers wait for the first token, so that what prevents it still has a status.
        first = await until_gone(http.receive, anext(chunks))
        return EventStream(first, chunks)
    except BaseException:
        await _close(answers)
        raise


async def _close(answers: Sequence[Answer]) -> None:
    """Also answers that nobody began to read hold their place in the service."""
    for answer in answers:
        await answer.close()


async def _chunks(
    answers: Sequence[Answer], form: Form, prompt_tokens: int | None
) -> AsyncGenerator[BaseModel]:
    """Every choice's events as they come, then the usage if its prompt tokens are given."""
    begun: set[int] = set()
    try:
        async with aclosing(merged([answer.pieces() for answer in answers])) as pieces:
            async for index, piece in pieces:
                if index not in begun and (opening := form.opening(index)) is not None:
                    yield opening
                begun.add(index)
                yield form.chunk(index, piece)
    finally:
        await _close(answers)
    if prompt_tokens is not None:
        yield form.closing(usage(answers, prompt_tokens))
