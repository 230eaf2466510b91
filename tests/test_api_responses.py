"""OpenAI's newer interface, `/v1/responses`, by its own client: text, events, tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from scripted import Scripted, client_of, open_caller
from serving import MODEL, Tiny, served

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["Oslo", "Rome"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return open_caller(tmp_path_factory.mktemp("caller"))


@pytest.fixture(scope="module")
def url(caller: Tiny) -> Iterator[str]:
    with served(caller.exact()) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with client_of(url) as client:
        yield client


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Rain?", "max_output_tokens": 20, "temperature": 0} | changes


def told(response: Any) -> dict[str, Any]:
    """All of a response but for its ids, its time and what was kept of earlier ones."""
    out = response.to_dict()
    out["usage"].pop("input_tokens_details")
    kept = ("id", "call_id")
    items = [{k: v for k, v in item.items() if k not in kept} for item in out["output"]]
    return {"output": items, "status": out["status"], "usage": out["usage"]}


def test_a_response_says_what_a_chat_does(client: Any) -> None:
    response = client.responses.create(**asked(instructions="Be brief."))
    chat = client.chat.completions.create(
        model=MODEL, max_tokens=20, temperature=0,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rain?"},
        ],
    )  # fmt: skip
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.trimmoe == chat.usage.trimmoe
    cut = chat.choices[0].finish_reason == "length"
    assert response.status == ("incomplete" if cut else "completed")
    # Everything that the client's types need is there.
    Response.model_validate(response.to_dict())


def test_events_add_up_to_the_whole_response(client: Any) -> None:
    whole = client.responses.create(**asked())
    events = list(client.responses.create(**asked(stream=True)))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert told(events[-1].response) == told(whole)


def test_the_clients_stream_helper_understands_the_events(caller: Tiny) -> None:
    with (
        served(Scripted(caller.tokenizer, f"Sure.\n{CALL}\n{CALL}")) as url,
        client_of(url) as client,
    ):
        whole = client.responses.create(**asked(tools=[TOOL]))
        with client.responses.stream(**asked(tools=[TOOL])) as events:
            final = events.get_final_response()
    assert whole.output_text == final.output_text == "Sure."
    for response in (whole, final):
        _, first, second = response.output
        assert first.type == second.type == "function_call"
        assert json.loads(first.arguments) == {"place": "Oslo"}
        assert first.call_id != second.call_id
        assert response.status == "completed"


class Sky(BaseModel):
    """What the client wants to have."""

    rain: Literal["yes", "no"]


def test_the_clients_own_types_come_back(client: Any) -> None:
    response = client.responses.parse(**asked(text_format=Sky, max_output_tokens=90))
    assert response.output_parsed.rain in ("yes", "no")


def test_a_call_and_its_result_go_back_to_the_model(client: Any) -> None:
    forced = asked(tools=[TOOL], tool_choice="required", max_output_tokens=150)
    first = client.responses.create(**forced, parallel_tool_calls=False)
    (call,) = first.output
    assert json.loads(call.arguments)["place"] in ("Oslo", "Rome")
    conversation = [
        {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "None."},
    ]
    assert client.responses.create(**asked(input=conversation)).output[0].type == "message"
    answered = client.responses.create(**asked())
    again = [{"role": "user", "content": "Rain?"}, *answered.output]
    assert client.responses.create(**asked(input=again)).output_text


def test_logprobs_come_if_asked_for(client: Any) -> None:
    wanted = asked(include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=3)
    (message,) = client.responses.create(**wanted).output
    assert [len(one.top_logprobs) for one in message.content[0].logprobs] == [2, 2, 2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "messages with text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "messages with text"),
        ({"input": [{"type": "web_search_call"}]}, "messages with text"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "needs `tools`"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "not"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "[]"},
                ]
            },
            "JSON object",
        ),
    ],
)
def test_what_cannot_be_answered_is_said(url: str, change: dict[str, Any], says: str) -> None:
    answer = httpx.post(f"{url}/v1/responses", json=asked(**change))
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


async def test_the_async_client_streams_too(url: str) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client,
        client.responses.stream(**asked()) as events,
    ):
        kinds = [event.type async for event in events]
    assert kinds[0] == "response.created"
