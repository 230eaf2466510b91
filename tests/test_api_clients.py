"""Clients as they are: what they send is replayed, and what they get has what their types need.

`client_requests.json` holds bodies that langchain-openai 1.7 and litellm 1.110 sent to a server
that wrote them down, and those that Open WebUI and Continue build by their source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel

from scripted import Scripted, open_caller
from serving import MODEL, served

REQUESTS = json.loads(Path(__file__).with_name("client_requests.json").read_text())
CALL = '{"name": "get_weather", "arguments": {"place": "Oslo"}}'
SAYS = f"Sure.\n<tool_call>\n{CALL}\n</tool_call>"
WHOLE: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": Response,
}
CHUNKS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/completions": Completion,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tokenizer = open_caller(tmp_path_factory.mktemp("caller")).tokenizer
    with served(Scripted(tokenizer, SAYS)) as url:
        yield url


@pytest.mark.parametrize("sent", REQUESTS, ids=[one["client"] for one in REQUESTS])
def test_what_clients_send_is_answered(url: str, sent: dict[str, Any]) -> None:
    path, body = sent["path"], sent["body"]
    headers = {"Authorization": "Bearer key", "api-key": "key"}
    answer = httpx.post(url + path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        told = answer.json()
        WHOLE[path].model_validate(told)
        assert text_of(told).startswith("Sure.")
        return
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for chunk in chunks:
        # The client's type of a streamed completion lacks the null that OpenAI sends, too.
        if path == "/v1/completions" and chunk["choices"]:
            chunk["choices"][0]["finish_reason"] = "stop"
        CHUNKS[path].model_validate(chunk)
    usage = (body.get("stream_options") or {}).get("include_usage", False)
    assert (chunks[-1]["usage"] is not None) == usage
    assert "".join(text_of(chunk) for chunk in chunks).startswith("Sure.")


def text_of(told: dict[str, Any]) -> str:
    """What an answer or a chunk of one says."""
    if told["object"] == "response":
        return told["output"][0]["content"][0]["text"]
    if not told["choices"]:
        return ""
    (choice,) = told["choices"]
    said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    return said["content"] or ""


def test_models_are_listed_as_clients_read_them(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key") as client:
        assert [one.id for one in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).object == "model"


async def test_the_async_client_is_answered_whole_and_streamed(url: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key") as client:
        whole = await client.chat.completions.create(**asked)
        stream: Any = await client.chat.completions.create(**asked, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        text = await client.completions.create(model=MODEL, prompt="Hi")
    assert whole.choices[0].message.content == "".join(pieces) == text.choices[0].text == SAYS
