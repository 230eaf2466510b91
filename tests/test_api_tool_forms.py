"""Calls in the forms of published models: told by their templates, read whole and in pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from scripted import Scripted, client_of
from serving import EOS, MODEL, served
from tiny import byte_tokenizer
from trimmoe.api.calls import CallPart, joined
from trimmoe.api.requests import Tool
from trimmoe.api.text import TextCodec
from trimmoe.api.tool_forms import FORMS, form_of
from trimmoe.api.tools import Offer
from trimmoe.runtime.guides import guides_of

DEEP = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
DEEP_END = DEEP.replace("begin", "end")
CALL, CALL_END = DEEP.replace("calls", "call"), DEEP_END.replace("calls", "call")
SEP = "<\uff5ctool\u2581sep\uff5c>"
OSLO, BOTH = '{"place": "Oslo"}', [("weather", {"place": "Oslo"}), ("clock", {})]
TEMPLATES = {
    "gpt-oss": "{{ tools }}<|start|>assistant<|channel|>analysis<|message|>",
    "DeepSeek-V3": f"{{{{ tools }}}}{DEEP}{CALL}function{SEP}f\n```json\n",
    "DeepSeek-V3.1": f"{{{{ tools }}}}{DEEP}{CALL}f{SEP}",
    "Kimi": "{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|>",
    "Mistral since 2025": "{{ tools }}[TOOL_CALLS]f[ARGS]",
    "Mistral": '{{ tools }}[TOOL_CALLS] [{"name": "f", "arguments": {}}]',
    "GLM": "{{ tools }}<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>",
    "Qwen3-Coder": "{{ tools }}<tool_call><function=f></function></tool_call>",
    "Hermes and Qwen": '{{ tools }}<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "Llama's Python": "{{ tools }}[func_name1(params_name1=params_value1), func_name2(params)]",
    "Llama's JSON": '{{ tools }}{"name": function name, "parameters": dictionary of names}',
}
"""What tells each form in the templates that models come with."""
RECORDED = [
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>They ask for rain.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{OSLO}<|call|>"
        "<|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{}",
        "I look.",
        BOTH,
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
        "No < rain.",
        "No < rain.",
        [],
    ),
    ("gpt-oss", "Plain text.", "Plain text.", []),
    (
        "DeepSeek-V3",
        f"Let me see.{DEEP}{CALL}function{SEP}weather\n```json\n{OSLO}\n```{CALL_END}\n"
        f"{CALL}function{SEP}clock\n```json\n{{}}\n```{CALL_END}{DEEP_END}",
        "Let me see.",
        BOTH,
    ),
    (
        "DeepSeek-V3.1",
        f"{DEEP}{CALL}weather{SEP}{OSLO}{CALL_END}{CALL}clock{SEP}{{}}{CALL_END}{DEEP_END}",
        "",
        BOTH,
    ),
    (
        "Kimi",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{OSLO}<|tool_call_end|><|tool_call_begin|>functions.clock:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "I look.",
        BOTH,
    ),
    ("Mistral since 2025", f"[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]clock[ARGS]{{}}", "", BOTH),
    ("Mistral since 2025", f"[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{OSLO}", "", BOTH[:1]),
    (
        "Mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}, "id": "a1B2c3D4e"}}, '
        '{"name": "clock", "arguments": {}}]',
        "",
        BOTH,
    ),
    ("Mistral", "[TOOL_CALLS] is what I would write.", "[TOOL_CALLS] is what I would write.", []),
    (
        "GLM",
        "\n<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
        "\n<tool_call>clock\n</tool_call>",
        "",
        BOTH,
    ),
    ("GLM", "<tool_call>two words</tool_call>!", "<tool_call>two words</tool_call>!", []),
    (
        "Qwen3-Coder",
        "Yes.\n<tool_call>\n<function=weather>\n<parameter=place>\nOslo\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        "Yes.",
        BOTH,
    ),
    ("Llama's Python", "[weather(place='Oslo'), clock()]", "", BOTH),
    ("Llama's Python", "<|python_start|>[weather(place='Oslo')]<|python_end|>", "", BOTH[:1]),
    (
        "Llama's Python",
        '[f(a=[1, 2.5, "]"], b={"c": true, "d": None}, e=-1)]',
        "",
        [("f", {"a": [1, 2.5, "]"], "b": {"c": True, "d": None}, "e": -1})],
    ),
    ("Llama's Python", "[1] says who?", "[1] says who?", []),
    ("Llama's Python", "[f(open('x'))] and more", "[f(open('x'))] and more", []),
    ("Llama's Python", "As [f(a=1)] shows.", "As [f(a=1)] shows.", []),
    ("Llama's JSON", f'{{"name": "weather", "parameters": {OSLO}}}', "", BOTH[:1]),
    (
        "Llama's JSON",
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {OSLO}}}; '
        '{"name": "clock", "parameters": {}}',
        "",
        BOTH,
    ),
    ("Llama's JSON", '{"rain": true}', '{"rain": true}', []),
    ("Llama's JSON", "{" + 600 * "a" + "b", "{" + 600 * "a" + "b", []),
    ("Llama's JSON", 'As {"name": "f"} says.', 'As {"name": "f"} says.', []),
]


def said(name: str, text: str, cuts: Sequence[int] = (), parallel: bool = True) -> Any:
    """A text's own text and calls, read in pieces."""
    (form,) = (each for each in FORMS if each.name == name)
    reader, shown, parts = form.reader(parallel), "", list[CallPart]()
    for begin, end in itertools.pairwise([0, *cuts, len(text)]):
        piece, more = reader.push(text[begin:end])
        shown, parts = shown + piece, parts + list(more)
    piece, more = reader.flush()
    whole = joined([*parts, *more])
    assert len({part.id for part in whole}) == len(whole) == reader.count
    return shown + piece, [(part.name, json.loads(part.arguments)) for part in whole]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_its_form(name: str) -> None:
    form = form_of(TEMPLATES[name])
    assert form is not None
    assert form.name == name


def test_every_form_has_a_template_and_recorded_calls() -> None:
    names = {form.name for form in FORMS}
    assert names == TEMPLATES.keys()
    assert names - {"Hermes and Qwen"} == {name for name, _, _, calls in RECORDED if calls}


@pytest.mark.parametrize(("name", "text", "shown", "calls"), RECORDED)
def test_recorded_answers_are_parted(name: str, text: str, shown: str, calls: list[Any]) -> None:
    assert said(name, text) == (shown, calls)
    assert said(name, text, range(1, len(text))) == (shown, calls)
    for at in range(1, len(text), 7):
        assert said(name, text, [at]) == (shown, calls)
    if calls:
        assert said(name, text, range(1, len(text)), parallel=False)[1] == calls[:1]


def test_arguments_come_before_a_call_is_complete() -> None:
    for name, text, _, calls in RECORDED:
        (form,) = (each for each in FORMS if each.name == name)
        if not calls or form.written is None:
            continue
        reader = form.reader(True)
        _, parts = reader.push(text[: text.index('"Oslo') + 2])
        assert joined(parts)[0].arguments == '{"place": "O', name


def test_ids_are_those_that_templates_take() -> None:
    for name, wanted in (("Mistral", 9), ("Kimi", len("functions.weather:0"))):
        (text,) = (told for form, told, _, calls in RECORDED if form == name and calls)
        (form,) = (each for each in FORMS if each.name == name)
        _, parts = form.reader(True).push(text)
        made = joined(parts)[0].id
        assert made is not None
        assert len(made) == wanted


SCHEMA = {"type": "object", "properties": {"place": {"enum": ["Oslo", "Rome"]}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.mark.parametrize("marked", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("form", [form for form in FORMS if form.written], ids=lambda f: f.name)
def test_what_a_grammar_lets_through_is_read_as_a_call(form: Any, marked: bool) -> None:
    tokenizer = byte_tokenizer()
    if marked:
        tokenizer.add_tokens(list(form.marks), special_tokens=True)
    tool = Tool.model_validate(TOOL)
    offer = Offer(tools=(tool,), forced=True, parallel=True, form=form)
    service = Scripted(tokenizer, "x")
    guide = guides_of(service.model).guide(offer.grammar(TextCodec(tokenizer), None))
    assert guide is not None
    written = form.written
    call = written.head.replace("{name}", "weather") + '{"place": "Oslo"}' + written.tail
    text = written.opening + written.start + call + written.between + call + written.close
    for told, fits in ((text, True), (text.replace("Oslo", "Bonn"), True), ("No.", False)):
        tokens = [*tokenizer(told)["input_ids"], EOS]
        allowed = all(guide.allowed(tokens[:at])[token] for at, token in enumerate(tokens))
        assert allowed == (fits and told == text)
    assert said(form.name, text)[1] == [("weather", {"place": "Oslo"})] * 2


def test_forms_that_can_only_be_read_say_so_and_are_streamed() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES["GLM"]
    (text,) = (text for name, text, _, calls in RECORDED if name == "GLM" and calls)
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Rain?"}], "seed": 7}
    asked |= {"tools": [TOOL]}
    with served(Scripted(tokenizer, text)) as url, client_of(url) as client:
        with client.chat.completions.stream(**asked) as events:
            (choice,) = events.get_final_completion().choices
        with pytest.raises(openai.BadRequestError, match="cannot be held"):
            client.chat.completions.create(**asked, tool_choice="required")
    assert choice.finish_reason == "tool_calls"
    assert [each.function.name for each in choice.message.tool_calls] == ["weather", "clock"]
