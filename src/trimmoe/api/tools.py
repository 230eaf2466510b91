"""Tools that a model may call: what requests say of them, and the form that calls have.

One form is read and written, that of Hermes and Qwen: `<tool_call>`, a JSON object with `name` and
`arguments`, `</tool_call>`. The model's own chat template has to ask for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimmoe.api.errors import ApiError
from trimmoe.api.requests import ChatRequest, NamedTool, Tool
from trimmoe.api.structure import asked_grammar, asked_schema
from trimmoe.api.text import TextCodec
from trimmoe.runtime.guides import lark_grammar, quoted, spaced

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OTHER_FORMS = ("<function=", "<arg_key>")
"""What templates ask for inside of `OPEN` instead of JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The tools that an answer may or must call."""

    tools: tuple[Tool, ...]
    forced: bool
    """Whether nothing but calls will do."""
    parallel: bool
    """Whether there may be several."""

    def described(self) -> list[dict[str, Any]]:
        """As chat templates read them."""
        return [tool.described() for tool in self.tools]

    def grammar(self, codec: TextCodec, schema: Mapping[str, Any] | None) -> str:
        """What answers are held to; empty where the model is free. `schema` describes an answer
        that is no call."""
        strict = any(tool.function.strict for tool in self.tools)
        if not (self.forced or strict or schema is not None):
            return ""
        mark = {tag: _mark(codec, tag) for tag in (OPEN, CLOSE)}
        lines = [
            f'body: "\\n" ({_any_of("one", len(self.tools))}) "\\n" {mark[CLOSE]}',
            *(_one(at, tool) for at, tool in enumerate(self.tools)),
        ]
        more = f'("\\n" {mark[OPEN]} body)*' if self.parallel else ""
        calls = f"{mark[OPEN]} body {more}"
        if self.forced:
            lines.insert(0, f"start: {calls}")
        elif schema is not None:
            answer = json.dumps(spaced(dict(schema)))
            lines[:0] = [f"start: {calls} | answer", f"answer: %json {answer}"]
        else:
            lines[:0] = _free(codec, mark[OPEN])
        return lark_grammar("\n".join(lines))


def offered(body: ChatRequest, codec: TextCodec) -> Offer | None:
    """The tools that a body offers, if any; raises `ApiError` if the model cannot call them."""
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return None
    tools = tuple(body.tools)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        tools = tuple(tool for tool in tools if tool.function.name == name)
        if not tools:
            raise ApiError(
                400,
                f"`tool_choice` names `{name}`, which is not among `tools`; add it.",
                param="tool_choice",
            )
    _check_template(codec.chat_template(tools=True))
    return Offer(
        tools=tools,
        forced=choice == "required" or isinstance(choice, NamedTool),
        parallel=body.parallel_tool_calls is not False and not isinstance(choice, NamedTool),
    )


def offer_grammar(body: ChatRequest, offer: Offer, codec: TextCodec) -> tuple[str, str]:
    """The grammar of answers that may call tools, empty if there is none, and the option that it
    is due to; raises `ApiError` if a body asks for what excludes calls."""
    _, option = asked_grammar(body)
    if option not in ("", "response_format"):
        raise ApiError(
            400, f"`{option}` leaves no room for calls of `tools`; give one of them.", param=option
        )
    return offer.grammar(codec, asked_schema(body)), "tools"


def _check_template(template: str) -> None:
    if "tools" not in template:
        raise ApiError(
            400, "The model's chat template knows no tools; leave out `tools`.", param="tools"
        )
    json_inside = '"arguments"' in template.replace('\\"', '"')
    if OPEN not in template or not json_inside or any(each in template for each in _OTHER_FORMS):
        raise ApiError(
            400,
            f"This model does not write its calls as JSON in {OPEN}, the one form that is read "
            "here (that of Hermes and Qwen); leave out `tools`.",
            param="tools",
        )


def _one(at: int, tool: Tool) -> str:
    """The rule of a call of one tool."""
    options: dict[str, Any] = {} if tool.function.strict else {"lenient": True}
    schema = spaced(tool.function.parameters or {"type": "object"})
    schema["x-guidance"] = schema["x-guidance"] | options
    begin = quoted(f'{{"name": {json.dumps(tool.function.name)}, "arguments": ')
    return f'one_{at}: {begin} args_{at} "}}"\nargs_{at}: %json {json.dumps(schema)}'


def _any_of(rule: str, count: int) -> str:
    return " | ".join(f"{rule}_{at}" for at in range(count))


def _free(codec: TextCodec, opening: str) -> list[str]:
    """Rules of any text with calls in it."""
    if codec.token_of(OPEN) is not None:
        head = f"head: TEXT {opening}"
    else:
        head = f"head[lazy]: TEXT {opening}"
    return ["start: (head body)* end", "end: TEXT", head, r"TEXT: /(.|\n)*/"]


def _mark(codec: TextCodec, tag: str) -> str:
    """A tag as a grammar has it: a token of its own or text."""
    return quoted(tag) if codec.token_of(tag) is None else tag
