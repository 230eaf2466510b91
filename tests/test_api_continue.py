"""Answers that are taken up where another server left them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from nodes import GenerationRequest, answers, read, request, running, tokens_of, world
from serving import EOS, MODEL, Tiny, served
from trimmoe.policy.presets import PRESETS
from trimmoe.runtime.local_service import LocalService
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import TokenEvent

PROMPT = "Once upon a time"
SAMPLED = {"temperature": 1.4, "top_p": 0.95, "seed": 7}
NEW = 40


@pytest.fixture(scope="module", params=["exact", "planned"])
def url(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[str]:
    service: LocalService = tiny.exact() if request.param == "exact" else tiny.planned()
    with served(service) as url:
        yield url


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": MODEL, "prompt": PROMPT, "max_tokens": NEW, "exact": True, "ignore_eos": True,
        "return_token_ids": True, **changes,
    }  # fmt: skip


def post(url: str, path: str = "completions", **changes: Any) -> dict[str, Any]:
    got = httpx.post(f"{url}/v1/{path}", json=changes, timeout=60)
    assert got.status_code == 200, got.text
    return got.json()


def events(url: str, path: str = "completions", **changes: Any) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    got = httpx.post(f"{url}/v1/{path}", json={**changes, "stream": True}, timeout=60)
    assert got.status_code == 200, got.text
    *chunks, last = [each.removeprefix("data: ") for each in got.text.split("\n\n") if each]
    assert last == "[DONE]"
    return [json.loads(each) for each in chunks]


def pieces(chunks: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Token and text of every chunk of a stream of completions."""
    choices = [each["choices"][0] for each in chunks]
    return [(one["token_ids"][0], one["text"]) for one in choices if one["token_ids"]]


@pytest.mark.parametrize("how", [{"temperature": 0}, SAMPLED], ids=["greedy", "sampled"])
def test_wherever_a_stream_breaks_off_the_rest_of_it_follows(url: str, how: dict[str, Any]) -> None:
    """Also in the middle of a character, of which this model's sampled bytes make many."""
    whole = pieces(events(url, **body(**how)))
    assert len(whole) == NEW
    if how is SAMPLED:
        assert any(text == "" for _, text in whole), "no token ends within a character"
    within = (at for at, (_, text) in enumerate(whole) if text == "")
    for cut in sorted({*range(0, NEW, 5), *within}):
        came = [token for token, _ in whole[:cut]]
        rest = pieces(events(url, **body(**how, continue_token_ids=came)))
        assert rest == whole[cut:]


def test_a_whole_answer_is_continued_too_and_counts_all_its_tokens(url: str) -> None:
    asked = body(temperature=0)
    whole = post(url, **asked)
    tokens = whole["choices"][0]["token_ids"]
    rest = post(url, **asked, continue_token_ids=tokens[:11])
    assert rest["choices"][0]["token_ids"] == tokens[11:]
    assert rest["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == NEW
    assert whole["choices"][0]["text"].endswith(rest["choices"][0]["text"])


def test_a_stop_string_counts_that_began_before_the_break(url: str) -> None:
    text = post(url, **body(**SAMPLED))["choices"][0]["text"]
    stop = text[12:18]
    asked = body(**SAMPLED, stop=stop)
    whole = pieces(chunks := events(url, **asked))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert "".join(piece for _, piece in whole) == text[: text.index(stop)]
    for cut in range(len(whole)):
        came = [token for token, _ in whole[:cut]]
        assert pieces(events(url, **asked, continue_token_ids=came)) == whole[cut:]


def test_an_answer_that_was_over_says_so_again(url: str) -> None:
    tokens = post(url, **body(temperature=0))["choices"][0]["token_ids"]
    for changes, reason in (
        ({"continue_token_ids": tokens}, "length"),
        ({"continue_token_ids": tokens[:5], "stop_token_ids": [tokens[4]]}, "stop"),
    ):
        asked = body(temperature=0, **changes)
        (choice,) = post(url, **asked)["choices"]
        assert (choice["finish_reason"], choice["token_ids"], choice["text"]) == (reason, [], "")
        (chunk,) = events(url, **asked)
        assert chunk["choices"][0]["finish_reason"] == reason


def test_every_choice_is_continued_where_it_was(url: str) -> None:
    asked: dict[str, Any] = body(**SAMPLED, n=2) | {"prompt": [PROMPT, "Then"]}
    whole = [choice["token_ids"] for choice in post(url, **asked)["choices"]]
    came = [each[:cut] for each, cut in zip(whole, (3, 0, NEW, 17), strict=True)]
    rest = [each["token_ids"] for each in post(url, **asked, continue_token_ids=came)["choices"]]
    assert [a + b for a, b in zip(came, rest, strict=True)] == whole


def test_logprobs_keep_their_places_and_nothing_is_echoed_twice(url: str) -> None:
    asked = body(temperature=0, logprobs=1)
    whole = post(url, **asked)["choices"][0]
    rest = post(url, **asked, continue_token_ids=whole["token_ids"][:9])["choices"][0]
    for name in ("tokens", "text_offset"):
        assert rest["logprobs"][name] == whole["logprobs"][name][9:]
    echoed = body(temperature=0, echo=True, continue_token_ids=whole["token_ids"][:9])
    assert post(url, **echoed)["choices"][0]["text"] == rest["text"]


def test_chats_are_continued_without_another_opening(url: str) -> None:
    asked = body(temperature=0) | {"messages": [{"role": "user", "content": PROMPT}]}
    del asked["prompt"]
    opening, *rest = events(url, "chat/completions", **asked)
    assert opening["choices"][0]["delta"]["role"] == "assistant"
    tokens = [each["choices"][0]["token_ids"][0] for each in rest]
    again = events(url, "chat/completions", **asked, continue_token_ids=tokens[:6])
    assert [each["choices"] for each in again] == [each["choices"] for each in rest[6:]]


def test_samples_without_a_seed_tell_the_one_they_were_drawn_with(url: str) -> None:
    asked = body(temperature=1.4)
    whole = post(url, **asked)
    tokens = whole["choices"][0]["token_ids"]
    rest = post(url, **asked, seed=whole["seed"], continue_token_ids=tokens[:8])
    assert rest["choices"][0]["token_ids"] == tokens[8:]
    chunks = events(url, **asked)
    assert len({chunk["seed"] for chunk in chunks}) == 1
    assert chunks[0]["seed"] not in (None, whole["seed"])
    assert post(url, **body(temperature=0))["seed"] is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"continue_token_ids": [1] * (NEW + 1)}, "more than"),
        ({"continue_token_ids": [300]}, "Token ids go from 0"),
        ({"continue_token_ids": [[1], [2]]}, "of 2 choices"),
        ({"continue_token_ids": [1], "n": 2}, "of 1 choices"),
        ({"continue_token_ids": [1, [2]]}, "continue_token_ids"),
        ({"continue_token_ids": ["a"]}, "continue_token_ids"),
        ({"continue_token_ids": [-1]}, "continue_token_ids"),
    ],
)
def test_what_cannot_be_continued_is_refused(url: str, changes: dict[str, Any], says: str) -> None:
    got = httpx.post(f"{url}/v1/completions", json=body(**changes), timeout=60)
    assert got.status_code == 400
    assert says in got.json()["error"]["message"]


@pytest.mark.parametrize("policy", ["exact", "speculative", "lossless"])
async def test_another_server_of_the_cluster_goes_on_where_one_stopped(
    tiny: Tiny, policy: str
) -> None:
    profile, plan = world(tiny, servers=3)
    how = Sampling(temperature=1.2, seed=5)
    async with running(tiny, profile=profile, plan=plan, policy=PRESETS[policy]()) as cluster:
        (whole,) = await answers(cluster, [(0, request([5, 9, 77], NEW, sampling=how))])
        tokens = tokens_of(whole)
        asked: list[tuple[int, GenerationRequest]] = [
            (1 + cut % 2, request([5, 9, 77], NEW, sampling=how, received=tuple(tokens[:cut])))
            for cut in (1, 8, 21, NEW - 1)
        ]
        rests: list[list[TokenEvent]] = await answers(cluster, asked)
        for (_, one), rest in zip(asked, rests, strict=True):
            assert [*one.received, *tokens_of(rest)] == tokens
            assert rest[-1].finish_reason == "length"
        await cluster.all_free()


async def test_what_was_left_of_the_budget_elsewhere_is_not_spent_here(tiny: Tiny) -> None:
    """The new server knows only its own tokens' credit, so that no budget is spent twice."""
    profile, plan = world(tiny, servers=3)
    policy = PRESETS["trimmoe"]()
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        one = request([5, 9, 77], NEW, quality_budget=0.2, received=(4, 5, 6, EOS))
        events = await read(cluster.nodes[1].service.submit(one))
    spent = credited = 0.0
    for event in events:
        if event.ledger is not None:
            spent, credited = spent + event.ledger.loss, credited + event.ledger.budget
            assert spent <= credited + 1e-9
    assert credited <= 0.2 * len(events) + 1e-9


LOOKING_BACK = [
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"guided_regex": "[a-z]{3}( [a-z]{2,7}){9}"},
    {"min_tokens": 30, "stop": ["a", "b", "c"]},
]


@pytest.mark.parametrize("how", LOOKING_BACK, ids=["penalties", "repetition", "regex", "least"])
def test_what_looks_back_sees_the_tokens_that_came(url: str, how: dict[str, Any]) -> None:
    asked = body(**SAMPLED, **how)
    whole = pieces(chunks := events(url, **asked))
    for cut in (1, 7, 18, len(whole) - 1):
        came = [token for token, _ in whole[:cut]]
        again = events(url, **asked, continue_token_ids=came)
        assert pieces(again) == whole[cut:]
        reasons = [each[-1]["choices"][0]["finish_reason"] for each in (again, chunks)]
        assert reasons[0] == reasons[1]


async def test_penalties_count_what_came_from_another_server(tiny: Tiny) -> None:
    profile, plan = world(tiny, servers=3)
    how = Sampling(temperature=1.2, seed=5, frequency_penalty=1.0, min_tokens=12, stop_ids=(EOS,))
    policy = PRESETS["speculative"]()
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        stops = frozenset({EOS})
        one = request([5, 9, 77], NEW, sampling=how, stop_ids=stops)
        (whole,) = await answers(cluster, [(0, one)])
        tokens = tokens_of(whole)
        for cut in (3, 15):
            again = request(
                [5, 9, 77], NEW, sampling=how, stop_ids=stops, received=tuple(tokens[:cut])
            )
            (rest,) = await answers(cluster, [(1, again)])
            assert [*tokens[:cut], *tokens_of(rest)] == tokens
