"""The gateway and `/v1/responses`: events go on at another server as if one had told them all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from scripted import Scripted, client_of, open_caller
from serving import MODEL, Tiny, served
from test_api_responses import CALL, TOOL
from test_gateway import Faulty, gateway, listening
from trimmoe.api.gateway.response_progress import ResponseProgress, response_continuable

SAMPLED = {"temperature": 1.4, "seed": 3, "max_output_tokens": 8, "ignore_eos": True}
OWN = ("id", "call_id", "item_id", "created_at")
"""Names that every answer has of its own."""
SAID = f"Sure, I look.\n{CALL}\nAnd then:\n{CALL}"


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return open_caller(tmp_path_factory.mktemp("caller"))


@pytest.fixture(scope="module")
def good(caller: Tiny) -> Iterator[str]:
    with served(caller.exact(slots=4)) as url:
        yield url


def body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Rain?"} | changes


def post(url: str, asked: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/responses", json=asked, timeout=60)


def events(url: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    got = post(url, asked | {"stream": True})
    assert got.status_code == 200, got.text
    blocks = [block.split("\n") for block in got.text.split("\n\n") if block]
    told = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [each["type"] for each in told]
    return told


def plain(told: Any) -> Any:
    """Without what no two answers share; the ledger is of the last server's tokens."""
    if isinstance(told, list):
        return [plain(each) for each in told]
    if not isinstance(told, dict):
        return told
    apart = (*OWN, "trimmoe", "input_tokens_details")
    return {name: plain(value) for name, value in told.items() if name not in apart}


def names(told: Any) -> set[tuple[str, Any]]:
    """All that an answer calls something by."""
    if isinstance(told, list):
        return set().union(*map(names, told))
    if not isinstance(told, dict):
        return set()
    own = {(name, value) for name, value in told.items() if name in OWN}
    return own.union(*(names(each) for each in told.values()))


SCORED = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


@pytest.mark.parametrize("asked", [SAMPLED, SAMPLED | SCORED], ids=["text", "logprobs"])
def test_wherever_events_break_off_they_go_on_elsewhere(good: str, asked: dict[str, Any]) -> None:
    """Also within a piece's events, within a character, and between the last ones."""
    asked = body(**asked)
    expected = events(good, asked)
    faulty = Faulty(good)
    with listening(faulty.app) as bad, gateway(bad, good) as url:
        # A line of its name and one of its data make an event.
        for faulty.events in range(0, 2 * len(expected), 2):
            faulty.asked.clear()
            got = events(url, asked)
            assert plain(got) == plain(expected)
            assert len(names(got)) == len(names(expected)), "ids change on the way"
    assert httpx.get(f"{good}/health").status_code == 200


@pytest.mark.parametrize("ending", ["server_error", "rate_limit_error", "hang"])
def test_however_they_break_off(good: str, ending: str) -> None:
    asked = body(**SAMPLED)
    faulty = Faulty(good)
    faulty.events, faulty.ending = 14, ending
    silence_s = 1.5 if ending == "hang" else 5
    with listening(faulty.app) as bad, gateway(bad, good, silence_s=silence_s) as url:
        assert plain(events(url, asked)) == plain(events(good, asked))
        assert httpx.get(f"{url}/health").json()["continued"] == 1


def test_calls_of_tools_go_on_under_the_names_they_began_with(caller: Tiny) -> None:
    asked = body(tools=[TOOL])
    with served(Scripted(caller.tokenizer, SAID)) as good:
        expected = events(good, asked)
        kinds = {each["type"] for each in expected}
        assert "response.function_call_arguments.delta" in kinds
        faulty = Faulty(good)
        with listening(faulty.app) as bad, gateway(bad, good) as url:
            for faulty.events in range(0, 2 * len(expected), 14):
                got = events(url, asked)
                assert plain(got) == plain(expected)
                assert len(names(got)) == len(names(expected))


def test_whole_responses_are_continued_too(good: str) -> None:
    asked = body(**SAMPLED)
    expected = post(good, asked).json()
    faulty = Faulty(good)
    faulty.events = 20
    with listening(faulty.app) as bad, gateway(bad, good) as url:
        got = post(url, asked).json()
        assert plain(got) == plain(expected)
        Response.model_validate(got)
        assert faulty.asked
        greedy = body(temperature=0, max_output_tokens=6)
        with client_of(url) as client:
            *_, last = client.responses.create(**greedy, stream=True)
            final = last.response
        assert plain(final.output[0].to_dict()) == plain(post(good, greedy).json()["output"][0])


def test_token_ids_come_only_where_asked_for(good: str) -> None:
    asked = body(**SAMPLED)
    with gateway(good) as url:
        assert not any("token_ids" in each for each in events(url, asked))
        wanted = events(url, asked | {"return_token_ids": True})
        tokens = [token for each in wanted for token in each.get("token_ids", ())]
        assert 0 < len(tokens) <= 8
        # What a client has by itself goes on as well.
        rest = events(url, asked | {"return_token_ids": True, "continue_token_ids": tokens[:1]})
    told = [token for each in rest for token in each.get("token_ids", ())]
    assert tokens[:1] + told == tokens
    assert rest[0]["sequence_number"] > 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "other"},
        {"stream": "yes"},
        {"return_token_ids": 1},
        {"continue_token_ids": [1, "a"]},
        {"continue_token_ids": [[1], [2]]},
        {"input": []},
        {"what": 1},
    ],
)
def test_what_servers_refuse_is_refused_in_their_words(good: str, wrong: dict[str, Any]) -> None:
    asked = body(**wrong)
    with gateway(good) as url:
        got, expected = post(url, asked), post(good, asked)
        assert (got.status_code, got.content) == (expected.status_code, expected.content)
        assert 400 <= got.status_code < 500


def test_bodies_that_make_no_sense_are_left_to_servers() -> None:
    assert response_continuable({"input": "a", "continue_token_ids": [1], "stream": None})
    for wrong in (
        None,
        [],
        {"stream": 1},
        {"continue_token_ids": 5},
        {"continue_token_ids": [True]},
    ):
        assert not response_continuable(wrong)


def test_every_attempt_draws_with_the_same_seed() -> None:
    progress = ResponseProgress({"input": "a"})
    first = progress.body
    progress.received({"type": "x", "sequence_number": 4, "token_ids": [7]})
    assert progress.body == first | {"continue_token_ids": [7]}
