"""Tools: what the model reads of them, calls in its answers, whole and streamed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from scripted import TEMPLATE, Scripted, client_of, open_caller
from serving import EOS, MODEL, Tiny, served
from tiny import VOCABULARY, byte_tokenizer
from trimmoe.api.calls import CallPart, CallReader, joined
from trimmoe.api.requests import Tool
from trimmoe.api.text import TextCodec
from trimmoe.runtime.guides import guides_of

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"enum": [{}]}}}
CHAT: list[Any] = [{"role": "user", "content": "Rain?"}]
ARGUMENTS = '{"a": "</tool_call> {\\"", "b": [1, {}]}'
ONE = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
PIECES = ["x ", "\n", ONE, "<tool_call>", "</tool_call>", "{", '"']


def said(text: str, cuts: Sequence[int] = (), *, parallel: bool = True) -> tuple[str, list[Any]]:
    """A text's own text and calls, read in pieces."""
    reader, shown, parts = CallReader(parallel=parallel), "", list[CallPart]()
    at = [0, *sorted(cuts), len(text)]
    for begin, end in itertools.pairwise(at):
        piece, more = reader.push(text[begin:end])
        shown, parts = shown + piece, parts + list(more)
    piece, more = reader.flush()
    whole = joined([*parts, *more])
    assert all(part.id for part in whole)
    return shown + piece, [(part.name, part.arguments) for part in whole]


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("nothing to call", "nothing to call", []),
        ("a < b <tool", "a < b <tool", []),
        (ONE, "", [("f", ARGUMENTS)]),
        (f"Let me see.\n\n{ONE}\n", "Let me see.", [("f", ARGUMENTS)]),
        (f"{ONE}\n{ONE}", "", [("f", ARGUMENTS)] * 2),
        ('<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>', "", [("g", '{"x": 1}')]),
        ('<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
        ('<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', "", [("g", "{}")]),
        ('<tool_call>{"name": "g", "arguments": {}}', "", [("g", "{}")]),
        ('<tool_call>\n{"arguments": {}, "name": "g"}\n', "", [("g", "{}")]),
        ("<tool_call>no JSON</tool_call>!", "<tool_call>no JSON</tool_call>!", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"na', '<tool_call>{"na', []),
        ('<tool_call>{"name": "g", "arguments": {"a": 1</tool_call>', "", [("g", '{"a": 1')]),
        ('<tool_call>{"name": "g", "arguments": {"a": "un', "", [("g", '{"a": "un')]),
        ("  spaces  ", "  spaces  ", []),
    ],
)
def test_calls_are_parted_from_text(text: str, shown: str, calls: list[Any]) -> None:
    assert said(text) == (shown, calls)
    assert said(text, range(1, len(text))) == (shown, calls)


@given(st.lists(st.sampled_from(PIECES), max_size=6), st.data())
def test_it_does_not_matter_how_the_text_is_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert said(text, cuts) == said(text)


def test_where_one_call_is_allowed_the_answer_ends_with_it() -> None:
    reader = CallReader(parallel=False)
    _, parts = reader.push(ONE + "\n" + ONE)
    assert reader.done
    assert [part.name for part in joined(parts)] == ["f"]
    assert reader.flush() == ("", ())


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return open_caller(tmp_path_factory.mktemp("caller"))


@pytest.fixture(scope="module")
def client(caller: Tiny) -> Iterator[Any]:
    with served(caller.exact()) as url, client_of(url) as client:
        yield client


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": CHAT, "tools": [WEATHER, CLOCK], "seed": 7} | changes


def arguments_of(call: Any) -> Any:
    return json.loads(call.function.arguments)


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_has_to_call_does(client: Any, stream: bool) -> None:
    """Whatever the model, since its answer is held to the form."""
    wanted = asked(tool_choice="required", max_tokens=160, parallel_tool_calls=False)
    if stream:
        with client.chat.completions.stream(**wanted) as events:
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**wanted)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name in ("get_weather", "clock")
    if call.function.name == "get_weather":
        assert arguments_of(call).keys() == {"place", "days"}


def test_a_tool_that_is_named_is_called(client: Any) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(**asked(tool_choice=named, max_tokens=160, n=2))
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        assert arguments_of(call)["place"] in ("Oslo", "Rome")


def test_results_go_back_to_the_model(client: Any) -> None:
    single = {"tool_choice": "required", "parallel_tool_calls": False}
    first = client.chat.completions.create(**asked(**single, max_tokens=160))
    message = first.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    following = asked(messages=[*CHAT, message, result], max_tokens=4)
    assert client.chat.completions.create(**following).usage.completion_tokens <= 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "not among `tools`"),
        ({"guided_regex": "a+"}, "leaves no room"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": {"not": {}}},
                    }
                ],
            },
            "not",
        ),
    ],
)
def test_what_cannot_be_called_is_said(client: Any, change: dict[str, Any], says: str) -> None:
    body = {key: value for key, value in change.items() if key.startswith("guided")}
    fields = {key: value for key, value in change.items() if key not in body}
    with pytest.raises(openai.BadRequestError, match=says):
        client.chat.completions.create(**asked(**fields), extra_body=body)


def marked_tokenizer(*, special: bool) -> Any:
    """One to which the tags are tokens of their own."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tags: Any = [AddedToken(tag, special=special) for tag in ("<tool_call>", "</tool_call>")]
    tokenizer.add_tokens(tags, special_tokens=special)
    return tokenizer


SAYS = 'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"place": "Oslo", "days": 1}}\n'
SAYS += '</tool_call>\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("kind", ["bytes", "tokens", "special"])
def test_a_model_that_may_call_is_read_whole_and_streamed(kind: str, caller: Tiny) -> None:
    tokenizer = caller.tokenizer
    if kind != "bytes":
        tokenizer = marked_tokenizer(special=kind == "special")
    service = Scripted(tokenizer, SAYS)
    with served(service) as url, client_of(url) as client:
        whole = client.chat.completions.create(**asked())
        with client.chat.completions.stream(**asked()) as events:
            streamed = events.get_final_completion()
        single = client.chat.completions.create(**asked(parallel_tool_calls=False))
        unoffered = client.chat.completions.create(**asked(tool_choice="none"))
    for answer in (whole, streamed):
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Sure."
        weather, clock = choice.message.tool_calls
        assert (weather.function.name, clock.function.name) == ("get_weather", "clock")
        assert arguments_of(weather) == {"place": "Oslo", "days": 1}
        assert arguments_of(clock) == {}
    assert [c.function.name for c in single.choices[0].message.tool_calls] == ["get_weather"]
    assert unoffered.choices[0].message.tool_calls is None
    # The model is free where it may call; nothing of the tools is in a prompt without them.
    assert all(not one.sampling.grammar for one in service.asked)
    assert len(service.asked[3].prompt_ids) < len(service.asked[0].prompt_ids)


@pytest.mark.parametrize("kind", ["bytes", "tokens"])
def test_strict_tools_and_described_answers_hold_a_free_model(kind: str, caller: Tiny) -> None:
    """What the grammar of each lets through."""
    tokenizer = caller.tokenizer if kind == "bytes" else marked_tokenizer(special=False)
    service = Scripted(tokenizer, "x")
    strict = WEATHER | {"function": WEATHER["function"] | {"strict": True}}
    schema = {"name": "a", "schema": {"enum": ["yes"]}}
    form = {"type": "json_schema", "json_schema": schema}
    with served(service) as url, client_of(url) as client:
        client.chat.completions.create(**asked(tools=[strict]))
        client.chat.completions.create(**asked(response_format=form))
    free, described = (one.sampling.grammar for one in service.asked)
    assert goes_through(service, free, "Well, well.")
    assert goes_through(service, free, SAYS.split("</tool_call>")[0] + "</tool_call>")
    assert not goes_through(service, free, SAYS.replace("Oslo", "Bonn"))
    assert goes_through(service, described, '"yes"')
    assert not goes_through(service, described, "Well, well.")
    assert goes_through(service, described, SAYS[SAYS.index("<") :])


def goes_through(service: Scripted, grammar: str, text: str) -> bool:
    """Whether an answer may be this text."""
    guide = guides_of(service.model).guide(grammar)
    tokens = [*service.model.tokenizer(text)["input_ids"], EOS]
    assert guide is not None
    return all(guide.allowed(tokens[:at])[token] for at, token in enumerate(tokens))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages }}", "knows no tools"),
        ("{{ tools }} <function=f>", "Hermes and Qwen"),
        ("{{ tools }} <tool_call>f</tool_call>", "Hermes and Qwen"),
    ],
)
def test_templates_of_other_forms_are_refused(template: str, says: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with (
        served(Scripted(tokenizer, "x")) as url,
        client_of(url) as client,
        pytest.raises(openai.BadRequestError, match=says),
    ):
        client.chat.completions.create(**asked())


async def test_what_templates_read_is_what_the_client_sent(caller: Tiny) -> None:
    codec = TextCodec(caller.tokenizer)
    strict = WEATHER | {"function": WEATHER["function"] | {"strict": True}}
    tokens = await codec.encode_chat(CHAT, tools=[Tool.model_validate(strict).described()])
    text = codec.decode(tokens)
    assert json.loads(text[len("Tools: ") : text.index("Answer")]) == WEATHER
    assert max(tokens) < VOCABULARY
