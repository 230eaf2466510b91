"""The forms in which models write calls of tools, told by what their chat templates ask for.

One line of the table each: what tells it, the tokens that are shown though they are special, what
reads it, and, where a grammar can hold a model to it, how a call is written.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from trimmoe.api.call_readers import (
    BlockCalls,
    BlockReader,
    JsonCalls,
    JsonReader,
    Reader,
)
from trimmoe.api.call_texts import coder, glm, pythonic
from trimmoe.api.calls import CLOSE, OPEN, CallReader
from trimmoe.api.harmony import HarmonyReader

_ID_LETTERS = string.ascii_letters + string.digits
_NAMED = r'"name"\s*:\s*(?P<quoted>"(?:[^"\\]|\\.)*")\s*,\s*'


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """How calls are written, for a grammar; `{name}` is a tool's, as JSON where it is `quoted`."""

    opening: str
    """What tells that calls follow; empty where they are an answer's beginning."""
    head: str
    tail: str
    start: str = ""
    """Between the opening and the first call."""
    between: str = ""
    """From one call to the next."""
    close: str = ""
    """Behind the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolForm:
    """One form."""

    name: str
    told_by: Callable[[str], bool]
    """Whether a chat template asks for it."""
    reader: Callable[[bool], Reader]
    """Makes one for an answer that may have several calls, or one only."""
    written: Written | None = None
    """None: models cannot be held to it, only read."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens of it that may be special and are part of the text here."""
        return self.reader(True).marks


def form_of(template: str) -> ToolForm | None:
    """The form that a chat template asks for; None if it is none of the table."""
    return next((form for form in FORMS if form.told_by(template)), None)


def _has(*marks: str) -> Callable[[str], bool]:
    return lambda template: all(mark in template for mark in marks)


def _hermes(template: str) -> bool:
    return OPEN in template and '"arguments"' in template.replace('\\"', '"')


def _json(form: JsonCalls) -> Callable[[bool], Reader]:
    return lambda parallel: JsonReader(form, parallel=parallel)


def _blocks(form: BlockCalls) -> Callable[[bool], Reader]:
    return lambda parallel: BlockReader(form, parallel=parallel)


def _short_id(_name: str, _at: int) -> str:
    """Nine letters: Mistral's templates refuse all else."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


def _counted_id(name: str, at: int) -> str:
    return f"functions.{name}:{at}"


_BAR, _LOW = "\uff5c", "\u2581"
"""DeepSeek's own bar and space."""


def _deep(words: str) -> str:
    return f"<{_BAR}{words.replace(' ', _LOW)}{_BAR}>"


_CALLS, _END = _deep("tool calls begin"), _deep("tool calls end")
_CALL, _CALL_END, _SEP = _deep("tool call begin"), _deep("tool call end"), _deep("tool sep")
_FENCE = "```"

_MISTRAL = JsonCalls(
    opens=("[TOOL_CALLS]",),
    head=re.compile(
        r"\{\s*" + _NAMED + r'"arguments"\s*:\s*(?=\{)'
        r"|(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)"
    ),
    between=re.compile(r'(?:\[TOOL_CALLS\]|\s|[\[\],}]|"id"\s*:\s*"\w*")*'),
    make_id=_short_id,
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)
_LLAMA = JsonCalls(
    opens=("<|python_tag|>", "{"),
    head=re.compile(
        r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
        + _NAMED
        + r'"(?:parameters|arguments)"\s*:\s*(?=\{)'
    ),
    between=re.compile(r"(?:\s|[;,}]|<\|python_tag\|>|<\|eom_id\|>)*"),
    at_start=True,
    marks=("<|python_tag|>",),
)
_DEEPSEEK = JsonCalls(
    opens=(_CALLS,),
    head=re.compile(
        re.escape(_CALL) + rf"(?:function{_SEP})?(?P<name>[^\s{_BAR}<]+?)"
        rf"\s*(?:{_SEP}|{_FENCE}json)\s*(?=\{{)"
    ),
    between=re.compile(rf"(?:\s|{_FENCE}|{re.escape(_CALL_END)})*"),
    closes=(_END,),
    marks=(_CALLS, _END, _CALL, _CALL_END, _SEP),
)
_KIMI = JsonCalls(
    opens=("<|tool_calls_section_begin|>",),
    head=re.compile(
        r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?\s*"
        r"<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
    between=re.compile(r"(?:\s|<\|tool_call_end\|>)*"),
    closes=("<|tool_calls_section_end|>",),
    make_id=_counted_id,
    marks=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
)
_PYTHONIC = BlockCalls(
    open="<|python_start|>",
    close="<|python_end|>",
    read=pythonic,
    marks=("<|python_start|>", "<|python_end|>"),
    at_start=True,
)
_GLM = BlockCalls(
    open=OPEN,
    close=CLOSE,
    read=glm,
    marks=(OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_CODER = BlockCalls(open=OPEN, close=CLOSE, read=coder, marks=(OPEN, CLOSE))

FORMS = (
    ToolForm(
        name="gpt-oss",
        told_by=_has("<|channel|>", "<|message|>"),
        reader=lambda parallel: HarmonyReader(parallel=parallel),
    ),
    ToolForm(
        name="DeepSeek-V3",
        told_by=_has(_CALLS, f"{_FENCE}json"),
        reader=_json(_DEEPSEEK),
        written=Written(
            opening=_CALLS,
            head=f"{_CALL}function{_SEP}{{name}}\n{_FENCE}json\n",
            tail=f"\n{_FENCE}{_CALL_END}",
            between="\n",
            close=_END,
        ),
    ),
    ToolForm(
        name="DeepSeek-V3.1",
        told_by=_has(_CALLS),
        reader=_json(_DEEPSEEK),
        written=Written(
            opening=_CALLS,
            head=f"{_CALL}{{name}}{_SEP}",
            tail=_CALL_END,
            close=_END,
        ),
    ),
    ToolForm(
        name="Kimi",
        told_by=_has("<|tool_calls_section_begin|>"),
        reader=_json(_KIMI),
        written=Written(
            opening="<|tool_calls_section_begin|>",
            head="<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
            tail="<|tool_call_end|>",
            close="<|tool_calls_section_end|>",
        ),
    ),
    ToolForm(
        name="Mistral since 2025",
        told_by=_has("[TOOL_CALLS]", "[ARGS]"),
        reader=_json(_MISTRAL),
        written=Written(
            opening="[TOOL_CALLS]", head="{name}[ARGS]", tail="", between="[TOOL_CALLS]"
        ),
    ),
    ToolForm(
        name="Mistral",
        told_by=_has("[TOOL_CALLS]"),
        reader=_json(_MISTRAL),
        written=Written(
            opening="[TOOL_CALLS]",
            start="[",
            head='{"name": "{name}", "arguments": ',
            tail="}",
            between=", ",
            close="]",
        ),
    ),
    ToolForm(
        name="GLM",
        told_by=_has(OPEN, "<arg_key>"),
        reader=_blocks(_GLM),
    ),
    ToolForm(
        name="Qwen3-Coder",
        told_by=_has(OPEN, "<function="),
        reader=_blocks(_CODER),
    ),
    ToolForm(
        name="Hermes and Qwen",
        told_by=_hermes,
        reader=lambda parallel: CallReader(parallel=parallel),
        written=Written(
            opening=OPEN,
            start="\n",
            head='{"name": "{name}", "arguments": ',
            tail=f"}}\n{CLOSE}",
            between=f"\n{OPEN}\n",
        ),
    ),
    ToolForm(
        name="Llama's Python",
        told_by=lambda template: "[func_name1(" in template or "<|python_start|>" in template,
        reader=_blocks(_PYTHONIC),
    ),
    ToolForm(
        name="Llama's JSON",
        told_by=lambda template: (
            '{"name": function name, "parameters":' in template.replace('\\"', '"')
            or "<|python_tag|>" in template
        ),
        reader=_json(_LLAMA),
        written=Written(
            opening="",
            head='{"name": "{name}", "parameters": ',
            tail="}",
            between="; ",
        ),
    ),
)
"""The first that a template asks for is taken."""
