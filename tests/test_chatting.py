"""Chats in the terminal: what is asked, what is shown, and what is said of each answer."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from trimmoe.core.errors import UserError
from trimmoe.experiments.chatting import Chat, account
from trimmoe.experiments.client import Answer, Client, TooLong
from trimmoe.experiments.demo import Shown, demo_table

LEDGER = {
    "layers_executed": 90, "layers_remote": 30, "layers_stood_in": 5, "layers_skipped": 10,
    "hops": 7, "bytes": 4_000,
}  # fmt: skip


class Server:
    """Answers every chat with the same words."""

    def __init__(self, longest: int = 99) -> None:
        self.asked: list[dict[str, Any]] = []
        self.longest = longest

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "small"}]})
        if request.url.path == "/metrics":
            made = 3 * len(self.asked)
            text = f'trimmoe_guesses_total{{model_name="m"}} {made}\n'
            text += f'trimmoe_guesses_right_total{{model_name="m"}} {made - 1}\n'
            return httpx.Response(200, text=text)
        body = json.loads(request.content)
        if len(body["messages"]) > self.longest:
            error = {"message": "over the context", "code": "context_length_exceeded"}
            return httpx.Response(400, json={"error": error})
        self.asked.append(body)
        words = ("Hello", " there")
        events: list[Any] = [{"choices": [{"delta": {"content": word}}]} for word in words]
        events.append({"choices": [], "usage": {"completion_tokens": 5, "trimmoe": LEDGER}})
        lines = "".join(f"data: {json.dumps(each)}\n\n" for each in events)
        return httpx.Response(200, text=lines + "data: [DONE]\n\n")


def talk(server: Server, lines: list[str]) -> tuple[str, Chat]:
    """What a chat of these lines prints."""
    given: Iterator[str] = iter(lines)

    def read() -> str:
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    out = io.StringIO()
    console = Console(file=out, width=80, color_system=None)
    with Client("http://desk/v1", transport=httpx.MockTransport(server)) as client:
        assert client.model() == "small"
        chat = Chat(client, "small", console, system="Be kind.", max_tokens=9)
        chat.run(read)
    return out.getvalue(), chat


def test_turns_are_kept_until_they_are_to_be_forgotten() -> None:
    server = Server()
    said, chat = talk(server, ["Hi", "And?", "/new", "Again", "/exit", "never"])
    assert [len(each["messages"]) for each in server.asked] == [2, 4, 2]
    assert server.asked[1]["messages"][2] == {"role": "assistant", "content": "Hello there"}
    assert server.asked[0]["max_tokens"] == 9
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"]
    assert said.count("Hello there") == 3


def test_an_answer_says_what_became_of_it() -> None:
    said, _ = talk(Server(), ["Hi"])
    assert "5 tokens" in said
    assert "60% local, 30% remote, 5% with stand-ins, 10% skipped; 7 hops, 4 kB" in said
    assert "guessed 3 right of 3" in said


def test_a_conversation_too_long_loses_its_oldest_turn() -> None:
    server = Server(longest=4)
    said, chat = talk(server, ["one", "two", "three"])
    assert "the oldest turn is forgotten" in said
    assert [turn["content"] for turn in chat.turns[::2]] == ["two", "three"]
    alone = Server(longest=0)
    with (
        Client("http://desk", transport=httpx.MockTransport(alone)) as client,
        pytest.raises(TooLong),
    ):
        client.chat("small", [{"role": "user", "content": "x"}])


def test_where_nobody_answers_one_sentence_says_so() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with (
        Client("http://nowhere", transport=httpx.MockTransport(refuse)) as client,
        pytest.raises(UserError, match="start one with `trimmoe serve`"),
    ):
        client.model()


def test_the_demonstrations_table_fits_a_terminal_and_is_the_clients_own() -> None:
    quick = Answer(text="a", tokens=11, ttft_s=0.1, last_s=0.6, ledger=LEDGER)
    slow = Answer(text="b", tokens=11, ttft_s=0.1, last_s=2.1)
    out = io.StringIO()
    Console(file=out, width=80).print(
        demo_table(
            [
                Shown(method="pipeline", answer=quick, expected_s=0.0432),
                Shown(method="auto", answer=slow),
            ]
        )
    )
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:4] == ["pipeline", "20.0", "50.0", "43.2"] for line in lines)
    assert any(line.split()[:4] == ["auto", "5.0", "200.0", "?"] for line in lines)
    assert [line.split()[-1] for line in lines if "200.0" in line or "50.0" in line] == [
        "yes",
        "no",
    ]
    assert "stopped" in account(Answer(tokens=1, stopped=True))


class Interrupted(httpx.SyncByteStream):
    """An answer whose reader presses Ctrl-C after its first word."""

    def __iter__(self) -> Iterator[bytes]:
        yield b'data: {"choices": [{"delta": {"content": "Hello"}}]}\n\n'
        raise KeyboardInterrupt


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on() -> None:
    server = Server()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("completions") and len(server.asked) == 0:
            server.asked.append(json.loads(request.content))
            return httpx.Response(200, stream=Interrupted())
        return server(request)

    console = Console(file=io.StringIO(), width=80)
    lines = iter(["one", "two"])

    def read() -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    with Client("http://there", transport=httpx.MockTransport(answer)) as client:
        chat = Chat(client, "small", console)
        chat.run(read)
    said = [turn["content"] for turn in chat.turns]
    assert said == ["one", "Hello", "two", "Hello there"]
    assert [turn["content"] for turn in server.asked[1]["messages"]] == said[:3]
