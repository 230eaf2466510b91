"""Tools that a model may call: what requests say of them, and what answers are held to.

The form of calls is the one that the model's own chat template asks for (`tool_forms`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimmoe.api.errors import ApiError
from trimmoe.api.requests import ChatRequest, NamedTool, Tool
from trimmoe.api.structure import asked_grammar, asked_schema
from trimmoe.api.text import TextCodec
from trimmoe.api.tool_forms import FORMS, ToolForm, Written, form_of
from trimmoe.runtime.guides import lark_grammar, quoted, spaced


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The tools that an answer may or must call."""

    tools: tuple[Tool, ...]
    forced: bool
    """Whether nothing but calls will do."""
    parallel: bool
    """Whether there may be several."""
    form: ToolForm
    """How the model writes calls."""

    def described(self) -> list[dict[str, Any]]:
        """As chat templates read them."""
        return [tool.described() for tool in self.tools]

    def grammar(self, codec: TextCodec, schema: Mapping[str, Any] | None) -> str:
        """What answers are held to; empty where the model is free. `schema` describes an answer
        that is no call."""
        strict = any(tool.function.strict for tool in self.tools)
        if not (self.forced or strict or schema is not None):
            return ""
        written = self.form.written
        if written is None:
            raise ApiError(
                400,
                f"Calls in the form of {self.form.name} are read here, but answers cannot be held "
                'to it; leave `tool_choice` at "auto" and `strict` and `response_format` out.',
                param="tools",
            )
        lines = self._body(codec, written)
        opening = _literal(codec, self.form, written.opening)
        again = _literal(codec, self.form, written.between)
        repeats = self.parallel and bool(written.opening) and written.opening in written.between
        more = f"({again} any)*" if repeats else ""
        lines.insert(0, f"calls: {opening} body {more}")
        if self.forced:
            lines.insert(0, "start: calls")
        elif schema is not None:
            answer = json.dumps(spaced(dict(schema)))
            lines[:0] = ["start: calls | answer", f"answer: %json {answer}"]
        elif written.opening:
            del lines[0]
            lines[:0] = _free(codec, written.opening, opening)
        else:
            lines[:0] = ["start: calls | other", "other: OTHER?", r"OTHER: /[^\s{](.|\n)*/"]
        return lark_grammar("\n".join(lines))

    def _body(self, codec: TextCodec, written: Written) -> list[str]:
        """Rules of everything behind the opening, and of every call."""

        def told(text: str) -> str:
            return _literal(codec, self.form, text)

        again = self.parallel and (not written.opening or written.opening not in written.between)
        more = f"({told(written.between)} any)*" if again else ""
        return [
            f"body: {told(written.start)} any {more} {told(written.close)}",
            "any: " + " | ".join(f"one_{at}" for at in range(len(self.tools))),
            *(self._one(codec, written, at, tool) for at, tool in enumerate(self.tools)),
        ]

    def _one(self, codec: TextCodec, written: Written, at: int, tool: Tool) -> str:
        """The rules of a call of one tool."""
        options: dict[str, Any] = {} if tool.function.strict else {"lenient": True}
        schema = spaced(tool.function.parameters or {"type": "object"})
        schema["x-guidance"] = schema["x-guidance"] | options
        name = tool.function.name
        in_json = '"{name}"' in written.head
        head = written.head.replace('"{name}"' if in_json else "{name}", _name(name, in_json))
        begin, end = (_literal(codec, self.form, text) for text in (head, written.tail))
        return f"one_{at}: {begin} args_{at} {end}\nargs_{at}: %json {json.dumps(schema)}"


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
    return Offer(
        form=_form(codec.chat_template(tools=True)),
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


def _form(template: str) -> ToolForm:
    if "tools" not in template:
        raise ApiError(
            400, "The model's chat template knows no tools; leave out `tools`.", param="tools"
        )
    form = form_of(template)
    if form is None:
        known = ", ".join(each.name for each in FORMS)
        raise ApiError(
            400,
            f"The model's chat template asks for calls in none of the forms that are read here "
            f"({known}); leave out `tools`.",
            param="tools",
        )
    return form


def _name(name: str, in_json: bool) -> str:
    return json.dumps(name) if in_json else name


def _free(codec: TextCodec, opening: str, mark: str) -> list[str]:
    """Rules of any text with calls in it."""
    lazy = "" if codec.token_of(opening) is not None else "[lazy]"
    head = f"head{lazy}: TEXT {mark}"
    return ["start: (head body)* end", "end: TEXT", head, r"TEXT: /(.|\n)*/"]


def _literal(codec: TextCodec, form: ToolForm, text: str) -> str:
    """A text as a grammar has it: marks that are tokens of their own as those."""
    marks = [mark for mark in form.marks if codec.token_of(mark) is not None]
    if not marks:
        return quoted(text) if text else ""
    parts = re.split("(" + "|".join(re.escape(mark) for mark in marks) + ")", text)
    return " ".join(
        f"<[{codec.token_of(part)}]>" if part in marks else quoted(part) for part in parts if part
    )
