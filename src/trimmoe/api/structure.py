"""What answers are held to: `response_format` and vLLM's `guided_*`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from trimmoe.api.errors import ApiError
from trimmoe.api.sampled import Sampled
from trimmoe.runtime.guides import (
    Guides,
    Ungrammatical,
    choice_grammar,
    json_grammar,
    regex_grammar,
)

_OBJECT: Mapping[str, Any] = {"type": "object"}


def asked_grammar(body: Sampled) -> tuple[str, str]:
    """The grammar that a body asks for, and the option that does; two empty texts if none does."""
    if body.guided_regex is not None:
        return regex_grammar(body.guided_regex), "guided_regex"
    if body.guided_choice is not None:
        return choice_grammar(body.guided_choice), "guided_choice"
    if body.guided_json is not None:
        return json_grammar(body.guided_json), "guided_json"
    schema = asked_schema(body)
    return ("", "") if schema is None else (json_grammar(dict(schema)), "response_format")


def asked_schema(body: Sampled) -> Mapping[str, Any] | None:
    """The schema of `response_format`, if it asks for JSON."""
    if body.response_format is None or body.response_format.type == "text":
        return None
    described = body.response_format.json_schema
    return _OBJECT if described is None else described.described


async def checked_grammar(body: Sampled, guides: Guides) -> str:
    """The grammar that a body asks for, empty if it asks for none; raises `ApiError` if answers
    cannot be held to it."""
    grammar, option = asked_grammar(body)
    if grammar:
        await check_grammar(guides, grammar, option)
    return grammar


async def check_grammar(guides: Guides, grammar: str, option: str) -> None:
    """Raise `ApiError` if answers cannot be held to what an option asks for."""
    try:
        # Large ones take a while.
        await asyncio.to_thread(guides.check, grammar)
    except Ungrammatical as error:
        raise ApiError(
            400, f"`{option}`: answers cannot be held to this ({error}); change it.", param=option
        ) from error
