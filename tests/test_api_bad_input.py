"""Whatever is sent, the answer is a clear error in OpenAI's form, and the server lives on."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from serving import MODEL, open_tiny, served
from tiny import CONTEXT, VOCABULARY
from trimmoe.api.guards import BodyLimit
from trimmoe.api.requests import ChatRequest, CompletionRequest

COMPLETION = {"model": MODEL, "prompt": "x", "max_tokens": 2}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(open_tiny(tmp_path_factory.mktemp("tiny")).exact(max_waiting=64)) as url:
        yield url


def refused(answer: httpx.Response, status: int, says: str) -> None:
    """The status is right, and the body is OpenAI's and says what is wrong."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert says in error["message"]


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"model": "gpt-9"}, 404, "gpt-9"),
        ({"model": 3}, 400, "model"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [""]}, 400, "prompt"),
        ({"prompt": [[]]}, 400, "prompt"),
        ({"prompt": {"text": "x"}}, 400, "prompt"),
        ({"prompt": ["x", 3]}, 400, "prompt"),
        ({"prompt": [1, -1]}, 400, "prompt"),
        ({"prompt": [True]}, 400, "prompt"),
        ({"prompt": [VOCABULARY]}, 400, f"to {VOCABULARY - 1}"),
        ({"prompt": ["x"] * 257}, 400, "256 prompts"),
        ({"prompt": [10**30]}, 400, f"to {VOCABULARY - 1}"),
        ({"prompt": "x" * CONTEXT}, 400, "context"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": -5}, 400, "max_tokens"),
        ({"max_tokens": 2**31 - 1}, 400, "context"),
        ({"max_tokens": 10**40}, 400, "max_tokens"),
        ({"max_tokens": "7"}, 400, "max_tokens"),
        ({"max_tokens": 1.5}, 400, "max_tokens"),
        ({"max_tokens": True}, 400, "max_tokens"),
        ({"temperature": -0.1}, 400, "temperature"),
        ({"temperature": 1e9}, 400, "temperature"),
        ({"temperature": float("nan")}, 400, "temperature"),
        ({"temperature": float("inf")}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"top_p": 1.01}, 400, "top_p"),
        ({"top_k": -2}, 400, "top_k"),
        ({"top_k": 2.5}, 400, "top_k"),
        ({"min_p": -0.1}, 400, "min_p"),
        ({"min_p": 1.1}, 400, "min_p"),
        ({"metadata": "me"}, 400, "metadata"),
        ({"n": 0}, 400, "`n`"),
        ({"n": 10_000}, 400, "`n`"),
        ({"seed": 2**70}, 400, "seed"),
        ({"stop": ""}, 400, "stop"),
        ({"stop": ["a"] * 65}, 400, "stop"),
        ({"stop": [None]}, 400, "stop"),
        ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
        ({"stop_token_ids": 7}, 400, "stop_token_ids"),
        ({"logprobs": 1000}, 400, "logprobs"),
        ({"logprobs": -1}, 400, "logprobs"),
        ({"logprobs": 1, "echo": True, "stream": True}, 400, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, 400, "prompt_logprobs"),
        ({"stream": "yes"}, 400, "stream"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"quality_budget": -0.01}, 400, "quality_budget"),
        ({"quality_budget": 1.5}, 400, "quality_budget"),
        ({"confidence": -1}, 400, "confidence"),
        ({"exact": 1}, 400, "exact"),
        ({"frequency_penalty": 2.5}, 400, "frequency_penalty"),
        ({"presence_penalty": -3}, 400, "presence_penalty"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty"),
        ({"repetition_penalty": "1.1"}, 400, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, 400, "logit_bias"),
        ({"logit_bias": {"word": 1}}, 400, "ids of tokens"),
        ({"logit_bias": {"-1": 1}}, 400, "ids of tokens"),
        ({"logit_bias": {str(VOCABULARY): 1}}, 400, f"to {VOCABULARY - 1}"),
        ({"logit_bias": [1]}, 400, "logit_bias"),
        ({"min_tokens": -1}, 400, "min_tokens"),
        ({"min_tokens": 3}, 400, "no more than 2"),
        ({"suffix": "end"}, 400, "suffix"),
        ({"guided_regex": "(a"}, 400, "guided_regex"),
        ({"guided_regex": ""}, 400, "guided_regex"),
        ({"guided_json": {"not": {}}}, 400, "guided_json"),
        ({"guided_json": "{}"}, 400, "guided_json"),
        ({"guided_choice": []}, 400, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, 400, "exclude one another"),
        ({"response_format": {"type": "xml"}}, 400, "response_format"),
        ({"response_format": {"type": "json_schema"}}, 400, "`json_schema`"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, 400, "`json_schema`"),
        ({"no_such_option": 1}, 400, "no_such_option"),
    ],
)
def test_wrong_values_are_named(url: str, change: dict[str, Any], status: int, says: str) -> None:
    # json.dumps writes NaN and Infinity, as careless clients do.
    body = json.dumps(COMPLETION | change)
    headers = {"content-type": "application/json"}
    refused(httpx.post(f"{url}/v1/completions", content=body, headers=headers), status, says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 3}, "max_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "knows no tools"),
        ({"tool_choice": "required"}, "needs `tools`"),
        ({"tool_choice": "often"}, "tool_choice"),
        ({"messages": [{"role": "assistant"}]}, "says nothing"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "assistant"),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "context"),
    ],
)
def test_wrong_chats_are_refused(url: str, change: dict[str, Any], says: str) -> None:
    refused(httpx.post(f"{url}/v1/chat/completions", json=CHAT | change), 400, says)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": None, "stop": None, "logprobs": None},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "me"},
        {"best_of": 1, "repetition_penalty": 1.0, "top_k": -1, "min_p": 0},
        {"metadata": {"who": "me"}, "service_tier": "auto", "prompt_cache_key": "a", "store": True},
        {"parallel_tool_calls": True, "modalities": ["text"], "safety_identifier": "me"},
        {"confidence": 2, "temperature": 1, "top_p": 1, "seed": -1},
    ],
)
def test_what_changes_nothing_is_accepted(url: str, change: dict[str, Any]) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=COMPLETION | change)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b"[]",
        b"3",
        b"null",
        b'"x"',
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
        b"[" * 100_000,
    ],
    ids=lambda body: body[:24].decode(errors="replace"),
)
def test_bodies_that_are_no_request(url: str, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        for kind in ("application/json", "text/plain"):
            answer = httpx.post(url + path, content=body, headers={"content-type": kind})
            refused(answer, 400, "")


def test_unknown_paths_and_methods(url: str) -> None:
    refused(httpx.get(f"{url}/v2/everything"), 404, "")
    refused(httpx.get(f"{url}/v1/completions"), 405, "")
    refused(httpx.delete(f"{url}/v1/models"), 405, "")


def test_a_body_of_ten_megabytes_is_413_declared_or_not(url: str) -> None:
    big = b"x" * 10_000_000
    refused(httpx.post(f"{url}/v1/completions", content=big), 413, "1000000 bytes")

    def in_chunks() -> Iterator[bytes]:
        for start in range(0, len(big), 100_000):
            yield big[start : start + 100_000]

    refused(httpx.post(f"{url}/v1/completions", content=in_chunks()), 413, "1000000 bytes")
    just_fits = json.dumps(COMPLETION | {"prompt": "x" * 999_900})
    refused(httpx.post(f"{url}/v1/completions", content=just_fits), 400, "")


async def test_nothing_of_a_large_body_is_kept() -> None:
    """The app behind the limit never sees more than the limit."""
    seen = 0

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        nonlocal seen
        while True:
            message = await receive()
            seen += len(message["body"])
            if not message["more_body"]:
                return

    chunks = [{"type": "http.request", "body": b"x" * 300, "more_body": True} for _ in range(9)]
    chunks.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        return chunks.pop(0)

    async def send(_message: Any) -> None:
        raise AssertionError("the app's error handler answers")

    with pytest.raises(Exception, match="larger than 1000 bytes"):
        await BodyLimit(app, max_bytes=1000)({"type": "http", "headers": []}, receive, send)
    assert seen == 900
    assert chunks == []


@pytest.mark.parametrize(
    "body",
    [
        COMPLETION | {"prompt": [None] * 190_000},
        COMPLETION | {"prompt": [[]] * 240_000},
        COMPLETION | {"prompt": ["x"] * 190_000},
        COMPLETION | {"stop": [0] * 300_000},
        COMPLETION | {f"option {i}": i for i in range(40_000)},
        CHAT | {"messages": [{}] * 240_000},
        CHAT | {"messages": [{"role": "user", "content": [0] * 300_000}]},
    ],
    ids=lambda body: str(body)[-40:],
)
def test_a_body_full_of_faults_is_refused_at_the_first(body: dict[str, Any]) -> None:
    """Hundreds of thousands of error records would take the server's time and memory."""
    kind: type[BaseModel] = ChatRequest if "messages" in body else CompletionRequest
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 4


@pytest.mark.parametrize("length", ["-1", "banana"])
def test_a_content_length_that_is_none(url: str, length: str) -> None:
    """No HTTP client would send it, so this talks to the socket."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", length)
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()


def test_the_server_still_answers(url: str) -> None:
    """Run after all of the above: each was refused without a trace."""
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "reason": ""}
    assert httpx.post(f"{url}/v1/completions", json=COMPLETION).status_code == 200
    assert "trimmoe_num_requests_running{" in httpx.get(f"{url}/metrics").text


def test_any_request_that_the_document_allows_or_not_is_answered_as_it_says(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Schemathesis against the OpenAPI document, the service answering for real."""
    from hostile_http import fuzz  # Only here: every process that collects tests would take it.

    tiny = open_tiny(tmp_path_factory.mktemp("fuzzed"))
    with served(tiny.exact(slots=8, max_waiting=512)) as url:
        assert fuzz(url, 18).keys() == {
            "post /v1/completions",
            "post /v1/chat/completions",
            "post /v1/responses",
            "get /v1/models",
            "get /v1/models/{name}",
            "get /health",
            "get /metrics",
            "get /v1/trimmoe/cluster",
            "post /tokenize",
            "post /detokenize",
        }
        assert httpx.get(f"{url}/health").status_code == 200
        # Whether any of it was answered is a matter of chance; what follows it is.
        assert httpx.post(f"{url}/v1/completions", json=COMPLETION).status_code == 200
        assert "trimmoe_generation_tokens_total{" in httpx.get(f"{url}/metrics").text
