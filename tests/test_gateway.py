"""The gateway: whatever happens to servers, its clients see one answer."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from serving import MODEL, SteppedDecoder, Tiny, eventually, served
from trimmoe.api.gateway.app import GatewaySettings, create_gateway, urls_of
from trimmoe.api.gateway.progress import Progress, continuable
from trimmoe.api.gateway.whole import Whole
from trimmoe.api.settings import ApiSettings
from trimmoe.runtime.launch.tls import Tls
from trimmoe.runtime.local_service import LocalService

NEW = 24
SAMPLED = {"temperature": 1.4, "seed": 3}


@contextmanager
def listening(app: Any, tls: Tls | None = None) -> Iterator[str]:
    """An ASGI app on a free port; its base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    shown = tls.for_uvicorn() if tls else {}
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, **shown)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def gateway(*urls: str, patience_s: float = 60.0, silence_s: float = 5.0) -> Iterator[str]:
    settings = GatewaySettings(servers=urls, patience_s=patience_s, silence_s=silence_s)
    with listening(create_gateway(settings)) as url:
        yield url


class Faulty:
    """A server that passes everything on to a good one, but for what it is told to do wrong."""

    def __init__(self, good: str) -> None:
        self.good = good
        limits = httpx.Limits(max_keepalive_connections=0)
        self.client = httpx.AsyncClient(timeout=60, limits=limits)
        self.events = 10**9
        """Of a stream, after which it breaks off."""
        self.ending = "cut"
        """How: `cut`, or `hang`, or the type of an error event."""
        self.status: int | None = None
        """What it answers instead."""
        self.deaf = False
        self.asked: list[dict[str, Any]] = []
        self.app = FastAPI(on_shutdown=[self.client.aclose])
        self.app.add_api_route("/{path:path}", self.answer, methods=["GET", "POST"])

    async def answer(self, http: Request) -> Response:
        while self.deaf:
            await asyncio.sleep(0.01)
        if http.method == "GET":
            got = await self.client.get(f"{self.good}{http.url.path}")
            return Response(got.content, got.status_code)
        self.asked.append(json.loads(await http.body()))
        if self.status is not None:
            error = {"message": "told to", "type": "server_error"}
            wait = {"Retry-After": "7"}
            return JSONResponse({"error": error}, self.status, headers=wait)
        return StreamingResponse(self.broken(http.url.path), media_type="text/event-stream")

    async def broken(self, path: str) -> AsyncGenerator[bytes]:
        left = self.events
        url = f"{self.good}{path}"
        async with self.client.stream("POST", url, json=self.asked[-1]) as got:
            async for line in got.aiter_lines():
                if not line:
                    continue
                if left == 0:
                    break
                left -= 1
                yield f"{line}\n\n".encode()
            else:
                return
        if self.ending == "hang":
            self.deaf = True
            await asyncio.sleep(60)
        if self.ending != "cut":
            yield self.failure(path)
            return
        raise ConnectionResetError

    def failure(self, path: str) -> bytes:
        """What a stream ends with that cannot go on."""
        if path == "/v1/responses":
            codes = {"server_error": "unavailable", "rate_limit_error": "overloaded"}
            body: Any = {"type": "error", "code": codes[self.ending], "message": "told to"}
            return f"event: error\ndata: {json.dumps(body)}\n\n".encode()
        body = {"error": {"message": "told to", "type": self.ending}}
        return f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n".encode()


@pytest.fixture(scope="module")
def good(tiny: Tiny) -> Iterator[str]:
    with served(tiny.exact(slots=8)) as url:
        yield url


@pytest.fixture
def faulty(good: str) -> Iterator[tuple[Faulty, str]]:
    made = Faulty(good)
    with listening(made.app) as url:
        yield made, url


def body(chat: bool = False, **changes: Any) -> dict[str, Any]:
    asks = {"messages": [{"role": "user", "content": "Once"}]} if chat else {"prompt": "Once"}
    return {"model": MODEL, "max_tokens": NEW, "ignore_eos": True, **asks, **changes}


def path(chat: bool) -> str:
    return "/v1/chat/completions" if chat else "/v1/completions"


def post(url: str, asked: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}{path('messages' in asked)}", json=asked, timeout=60)


def chunks(got: httpx.Response) -> list[dict[str, Any]]:
    assert got.status_code == 200, got.text
    *events, last = [each.removeprefix("data: ") for each in got.text.split("\n\n") if each]
    assert last == "[DONE]"
    return [json.loads(each) for each in events]


def plain(got: Any) -> Any:
    """Without what no two answers share; the ledger is of the last server's tokens."""
    if isinstance(got, list):
        return [plain(each) for each in got]
    apart = ("trimmoe", "prompt_tokens_details")
    usage = got["usage"] and {k: v for k, v in got["usage"].items() if k not in apart}
    return {k: v for k, v in got.items() if k not in ("id", "created")} | {"usage": usage}


either = pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
ASKED = [
    {"temperature": 0},
    SAMPLED | {"return_token_ids": True},
    SAMPLED | {"n": 2},
    SAMPLED | {"stop": ["\u0001", "zz"]},
]


@either
@pytest.mark.parametrize("asked", ASKED, ids=["greedy", "ids", "two", "stop"])
def test_what_comes_through_is_what_a_server_gives(
    good: str, chat: bool, asked: dict[str, Any]
) -> None:
    logprobs = {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}
    asked = body(chat, **asked, **logprobs)
    streamed = asked | {"stream": True, "stream_options": {"include_usage": True}}
    with gateway(good) as url:
        assert plain(post(url, asked).json()) == plain(post(good, asked).json())
        if asked.get("n") is None:  # Else chunks of several choices come in any order.
            through = plain(chunks(post(url, streamed)))
            assert through == plain(chunks(post(good, streamed)))
        without = chunks(post(url, asked | {"stream": True}))
        assert all(each["usage"] is None for each in without)


@either
@pytest.mark.parametrize(
    ("ending", "after"),
    [
        *((ending, after) for ending in ("cut", "server_error") for after in (0, 1, 2, 9, NEW)),
        ("rate_limit_error", 2),
        *(("hang", after) for after in (0, 5)),
    ],
)
def test_a_stream_that_breaks_off_goes_on_elsewhere(
    good: str, faulty: tuple[Faulty, str], chat: bool, ending: str, after: int
) -> None:
    bad, bad_url = faulty
    bad.events, bad.ending = after, ending
    asked = body(chat, **SAMPLED, stream=True)
    expected = plain(chunks(post(good, asked)))
    # What never was asked and is idle is asked first, and the good one keeps its second place.
    with gateway(bad_url, good, silence_s=1.5 if ending == "hang" else 5) as url:
        got = chunks(post(url, asked))
        state = httpx.get(f"{url}/health").json()
    assert len(bad.asked) == 1
    assert plain(got) == expected
    assert len({each["id"] for each in got}) == 1
    assert state["continued"] == (1 if after else 0)


@either
def test_several_choices_and_whole_answers_go_on_likewise(
    good: str, faulty: tuple[Faulty, str], chat: bool
) -> None:
    bad, bad_url = faulty
    asked = body(chat, **SAMPLED, n=3)
    expected = plain(post(good, asked).json())
    with gateway(bad_url, good) as url:
        for bad.events in (1, 5, 20, 3 * NEW):
            assert plain(post(url, asked).json()) == expected
    assert bad.asked


def test_unseeded_samples_are_continued_as_they_began(
    good: str, faulty: tuple[Faulty, str]
) -> None:
    bad, bad_url = faulty
    bad.events = 9
    asked = body(temperature=1.4)
    with gateway(bad_url, good) as url:
        got = post(url, asked).json()
    expected = post(good, asked | {"seed": got["seed"]}).json()
    assert got["choices"][0]["text"] == expected["choices"][0]["text"]


def test_what_a_client_has_from_elsewhere_is_continued_too(
    good: str, faulty: tuple[Faulty, str]
) -> None:
    bad, bad_url = faulty
    bad.events = 5
    asked = body(**SAMPLED, return_token_ids=True)
    tokens = post(good, asked).json()["choices"][0]["token_ids"]
    with gateway(bad_url, good) as url:
        rest = post(url, asked | {"continue_token_ids": tokens[:6]}).json()
    assert tokens[:6] + rest["choices"][0]["token_ids"] == tokens


@pytest.mark.parametrize("status", [429, 500, 503])
def test_another_server_is_asked_where_one_refuses(
    good: str, faulty: tuple[Faulty, str], status: int
) -> None:
    bad, bad_url = faulty
    bad.status = status
    with gateway(bad_url, good) as url:
        assert len(chunks(post(url, body(temperature=0, stream=True)))) == NEW
    assert len(bad.asked) == 1


def test_where_all_have_too_much_to_do_the_client_is_told_when_to_come_back(
    faulty: tuple[Faulty, str],
) -> None:
    bad, bad_url = faulty
    bad.status = 429
    with gateway(bad_url) as url:
        for stream in (False, True):
            got = post(url, body(stream=stream))
            assert got.status_code == 429
            assert got.headers["retry-after"] == "7"
            assert got.json()["error"]["message"] == "told to"


def test_a_request_that_every_server_fails_at_is_given_up(faulty: tuple[Faulty, str]) -> None:
    bad, bad_url = faulty
    bad.status = 500
    with gateway(bad_url) as url:
        assert post(url, body()).status_code == 500
    assert len(bad.asked) == 3


def test_a_server_that_comes_back_is_waited_for(good: str, faulty: tuple[Faulty, str]) -> None:
    bad, bad_url = faulty
    bad.status = 503
    threading.Timer(0.7, lambda: setattr(bad, "status", None)).start()
    with gateway(bad_url) as url:
        assert len(chunks(post(url, body(temperature=0, stream=True)))) == NEW


def test_patience_ends(faulty: tuple[Faulty, str]) -> None:
    bad, bad_url = faulty
    nobody = "http://127.0.0.1:9"
    bad.events, asked = 3, body(temperature=0, stream=True)
    with gateway(nobody, patience_s=0.2) as url:
        got = post(url, asked)
        assert got.status_code == 503
        assert "reached" in got.json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.get(f"{url}/v1/models").status_code == 503
    bad.status = None
    with gateway(bad_url, patience_s=0.2) as url:
        # Every attempt gets three tokens further.
        assert len(chunks(post(url, asked))) == NEW
        bad.events = 0
        assert post(url, asked).status_code == 503


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "other"},
        {"max_tokens": 0},
        {"stream": "yes"},
        {"n": 0},
        {"n": "2"},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": 1}},
        {"return_token_ids": 1},
        {"continue_token_ids": [1, "a"]},
        {"continue_token_ids": [[1], [2]]},
        {"prompt": []},
        {"what": 1},
    ],
)
def test_what_servers_refuse_is_refused_in_their_words(good: str, wrong: dict[str, Any]) -> None:
    asked = body(**wrong)
    with gateway(good) as url:
        got, expected = post(url, asked), post(good, asked)
        assert (got.status_code, got.content) == (expected.status_code, expected.content)
        assert 400 <= got.status_code < 500


def test_all_else_passes(good: str) -> None:
    with gateway(good) as url:
        for what in ("/v1/models", "/v1/models/tiny", "/openapi.json", "/nowhere"):
            got, expected = (httpx.get(f"{base}{what}", timeout=60) for base in (url, good))
            assert (got.status_code, got.content) == (expected.status_code, expected.content)
        got = httpx.post(f"{url}/v1/completions", content=b"{no json")
        assert got.status_code == 400
        assert "JSON" in got.json()["error"]["message"]
        large = httpx.post(f"{url}/v1/completions", content=b" " * 2_000_000)
        assert large.status_code == 413


def test_keys_pass_to_the_servers(tiny: Tiny) -> None:
    with served(tiny.exact(), ApiSettings(api_keys=("secret",))) as good, gateway(good) as url:
        assert post(url, body()).status_code == 401
        named = {"Authorization": "Bearer secret"}
        got = httpx.post(f"{url}/v1/completions", json=body(), headers=named, timeout=60)
        assert got.status_code == 200


def test_each_request_goes_where_least_is_under_way(tiny: Tiny) -> None:
    decoders = [SteppedDecoder(tiny.view, slots=8) for _ in range(2)]
    services = [LocalService(each, tiny.model()) for each in decoders]
    with ExitStack() as stack:
        urls = [stack.enter_context(served(each)) for each in services]
        url = stack.enter_context(gateway(*urls))
        asked = body(max_tokens=2)
        threads = [threading.Thread(target=post, args=(url, asked)) for _ in range(6)]
        for thread in threads:
            thread.start()

        def loads() -> list[int]:
            stats = [each.stats() for each in services]
            return [each.running + each.waiting for each in stats]

        eventually(lambda: loads() == [3, 3])
        for decoder in decoders:
            decoder.allowed.release(100)
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_answer(tiny: Tiny, stream: bool) -> None:
    decoder = SteppedDecoder(tiny.view, slots=2)
    service = LocalService(decoder, tiny.model())
    with served(service) as good, gateway(good) as url:
        asked = body(stream=stream, max_tokens=200)
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=1) as r,
        ):
            r.read()

        def gone() -> bool:
            decoder.allowed.release()
            return service.stats().running == 0

        eventually(gone)
        eventually(lambda: httpx.get(f"{url}/health").json()["servers"][0]["in_flight"] == 0)
        assert 'finished_reason="abort"' in httpx.get(f"{good}/metrics").text


def test_progress_asks_for_what_is_missing_only() -> None:
    progress = Progress({"prompt": "a", "n": 2, "temperature": 0})
    first = {"id": "x", "created": 1, "usage": None}
    text = {"text": "a", "finish_reason": None}
    progress.received(first | {"choices": [text | {"index": 1, "token_ids": [5]}]})
    assert progress.body["continue_token_ids"] == [[], [5]]
    ended = text | {"index": 1, "token_ids": [6], "finish_reason": "length"}
    shown = progress.received(first | {"id": "y", "choices": [ended]})
    assert shown is not None
    assert (shown["id"], shown["choices"][0]["token_ids"]) == ("x", None)
    again = text | {"index": 1, "token_ids": [], "finish_reason": "length"}
    assert progress.received(first | {"choices": [again]}) is None
    assert not progress.over
    assert progress.received(first | {"choices": [], "usage": {}}) is not None
    assert progress.over


def test_bodies_that_make_no_sense_are_left_to_servers() -> None:
    assert continuable({"prompt": [[1, 2], [3]], "n": 2, "continue_token_ids": [[], [1], [], []]})
    for wrong in (None, [], {"n": True}, {"n": 10**9}, {"continue_token_ids": 5}):
        assert not continuable(wrong)


def test_addresses_are_taken_as_people_write_them() -> None:
    assert urls_of(["a:1", "http://a:1/v1/", "https://b"]) == ("http://a:1", "https://b")
    for wrong in ("", "ftp://a"):
        with pytest.raises(ValueError, match=r"^$|ftp"):
            urls_of([wrong])


def test_calls_of_tools_come_together_from_their_parts() -> None:
    whole = Whole()
    frame = {"id": "x", "object": "chat.completion.chunk", "created": 1, "usage": None}
    begun = {"index": 0, "id": "call_1", "type": "function"}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"content": None, "tool_calls": [begun | {"function": {"name": "f", "arguments": ""}}]},
        {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    for delta in deltas:
        last = delta is deltas[-1]
        piece = {"logprobs": None, "finish_reason": "tool_calls" if last else None}
        whole.add(frame | {"choices": [piece | {"index": 0, "delta": delta, "token_ids": None}]})
    made = whole.response()
    (choice,) = made["choices"]
    called = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }
    expected = {"role": "assistant", "content": None, "tool_calls": [called]}
    assert (made["object"], choice["message"]) == ("chat.completion", expected)
    assert choice["finish_reason"] == "tool_calls"
