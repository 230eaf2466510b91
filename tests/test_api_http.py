"""OpenAI's own client against a real server on a real port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving import EOS, MODEL, SERVERS, SteppedDecoder, Tiny, eventually, served
from tiny import LAYERS
from trimmoe.api.settings import ApiSettings
from trimmoe.policy.presets import trimmoe
from trimmoe.runtime.exact_decoder import ExactDecoder
from trimmoe.runtime.local import Decoded
from trimmoe.runtime.local_service import LocalService

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def service(tiny: Tiny) -> LocalService:
    return tiny.planned(replace(trimmoe(), budget=0.3))


@pytest.fixture(scope="module")
def url(service: LocalService) -> Iterator[str]:
    with served(service) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    # Untyped, because our own fields are not in the client's types.
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


EXACT = {"exact": True, "return_token_ids": True}


def text_of(tiny: Tiny, tokens: list[int]) -> str:
    """What is shown of generated tokens: without the end, and no unfinished character."""
    return tiny.tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")


def test_exact_greedy_completions_are_transformers_own(client: Any, tiny: Tiny) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0, extra_body=EXACT
    )
    expected = tiny.greedy(list(tiny.tokenizer(PROMPT)["input_ids"]), 20)
    (choice,) = answer.choices
    assert choice.token_ids == expected
    assert choice.text == text_of(tiny, expected)
    assert choice.finish_reason == ("stop" if expected[-1] == EOS else "length")
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == len(expected)
    assert answer.usage.total_tokens == len(PROMPT) + len(expected)


def test_a_stream_is_the_same_text_in_pieces_and_ends_with_its_usage(client: Any) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked, extra_body=EXACT)
    chunks = list(
        client.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}, extra_body=EXACT
        )
    )
    *pieces, last = chunks
    assert "".join(one.choices[0].text for one in pieces) == whole.choices[0].text
    assert [t for one in pieces for t in one.choices[0].token_ids] == whole.choices[0].token_ids
    assert [one.choices[0].finish_reason for one in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(one.usage is None for one in pieces)
    assert {one.id for one in chunks} == {chunks[0].id}


def test_the_raw_stream_is_server_sent_events_ended_by_done(url: str) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "stream": True}
    answer = httpx.post(f"{url}/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events[:-1])


def test_the_usage_carries_the_ledger(client: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0,
        extra_body={"quality_budget": 0.3, "confidence": 2.0, "ignore_eos": True},
    )  # fmt: skip
    ledger = answer.usage.trimmoe
    layers = (answer.usage.completion_tokens - 1) * LAYERS
    counted = ("layers_executed", "layers_skipped", "layers_exited")
    assert sum(ledger[name] for name in counted) == layers
    assert ledger["layers_exited"] == 0
    assert ledger["layers_substituted"] <= ledger["layers_executed"]
    assert ledger["budget_credited"] == pytest.approx(23 * 0.3)
    assert 0 < ledger["budget_spent"] <= ledger["budget_credited"]
    assert ledger["bytes"] % ledger["hops"] == 0
    assert ledger["expected_delay_s"] > 0
    exact = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, extra_body={"exact": True, "ignore_eos": True}
    ).usage.trimmoe
    assert exact["layers_executed"] == layers
    assert exact["budget_credited"] == exact["budget_spent"] == exact["layers_substituted"] == 0


def test_traces_say_of_each_token_what_the_ledger_says_of_all(client: Any, tiny: Tiny) -> None:
    extras = {"quality_budget": 0.5, "ignore_eos": True, "return_token_traces": True}
    made = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=9, temperature=0,
        extra_body=extras | {"return_token_ids": True},
    )  # fmt: skip
    first, *others = made.choices[0].token_traces
    assert [first["token"], *(one["token"] for one in others)] == made.choices[0].token_ids
    assert (first["became"], first["layers"]) == ("prompt", "")
    letters = "".join(one["layers"] for one in others)
    ledger = made.usage.trimmoe
    assert len(letters) == 8 * LAYERS
    assert letters.count("-") == ledger["layers_skipped"]
    assert letters.count("x") == ledger["layers_exited"]
    assert letters.count("s") + letters.count("S") == ledger["layers_substituted"]
    assert letters.count("r") + letters.count("S") == ledger["layers_remote"]
    assert sum(one["hops"] for one in others) == ledger["hops"]
    assert sum(one["budget_spent"] for one in others) == pytest.approx(ledger["budget_spent"])
    turns: Any = [{"role": "user", "content": "Hi"}]
    stream = client.chat.completions.create(
        model=MODEL, messages=turns, max_tokens=4, stream=True, extra_body=extras
    )
    told = [chunk.choices[0].token_traces for chunk in stream]
    assert [len(each or []) for each in told] == [0, 1, 1, 1, 1]
    assert len(told[-1][0]["layers"]) == LAYERS


def test_a_stop_string_ends_the_answer_before_it(client: Any) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**asked, extra_body=EXACT)
    text = whole.choices[0].text
    # Two characters from the middle: two or more tokens of this tokenizer.
    stop = text[8:10]
    at = text.index(stop)
    for stream in (False, True):
        answer = client.completions.create(
            **asked, stop=[stop, "\x00"], stream=stream, extra_body=EXACT
        )
        choices = [one.choices[0] for one in (answer if stream else [answer])]
        assert "".join(one.text for one in choices) == text[:at]
        assert choices[-1].finish_reason == "stop"
        made = [token for one in choices for token in one.token_ids]
        assert made == whole.choices[0].token_ids[: len(made)]
        assert len(made) < len(whole.choices[0].token_ids)


def test_one_most_probable_token_is_what_temperature_0_takes(client: Any) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12}
    greedy = client.completions.create(**asked, temperature=0, extra_body=EXACT)
    for only in ({"top_k": 1}, {"min_p": 1.0}):
        drawn = client.completions.create(**asked, temperature=2, seed=3, extra_body=EXACT | only)
        assert drawn.choices[0].token_ids == greedy.choices[0].token_ids


def test_an_answer_ends_with_a_token_that_the_request_names(client: Any) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked, extra_body=EXACT).choices[0].token_ids
    stop = {"stop_token_ids": [whole[5]], "ignore_eos": True}
    ended = client.completions.create(**asked, extra_body=EXACT | stop).choices[0]
    assert ended.token_ids[: whole.index(whole[5])] == whole[: whole.index(whole[5])]
    assert len(ended.token_ids) <= whole.index(whole[5]) + 1
    assert ended.finish_reason == "stop"


def test_a_prompts_logprobs_come_as_vllm_and_as_openai_have_them(client: Any, tiny: Tiny) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    own = client.completions.create(**asked, extra_body=EXACT | {"prompt_logprobs": 1})
    echoed = client.completions.create(**asked, echo=True, logprobs=1, extra_body=EXACT)
    ids = tiny.tokenizer(PROMPT)["input_ids"]
    (theirs,) = (choice.prompt_logprobs for choice in own.choices)
    told = echoed.choices[0].logprobs
    assert theirs[0] is told.token_logprobs[0] is told.top_logprobs[0] is None
    assert "".join(told.tokens[: len(ids)]) == PROMPT
    assert told.text_offset[: len(ids)] == list(range(len(ids)))
    for token, at, logprob in zip(ids[1:], theirs[1:], told.token_logprobs[1:], strict=False):
        assert at[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-5)
        assert len(at) == 1 + (at[str(token)]["rank"] > 1)
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=1,
        extra_body={"prompt_logprobs": 0},
    )  # fmt: skip
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_same_seed_same_answers_and_n_of_them_differ(client: Any) -> None:
    asked = {
        "model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 1.4, "top_p": 0.95,
        "n": 3, "extra_body": EXACT,
    }  # fmt: skip
    first = client.completions.create(**asked, seed=5)
    again = client.completions.create(**asked, seed=5)
    other = client.completions.create(**asked, seed=6)
    tokens = [[one.token_ids for one in answer.choices] for answer in (first, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert [one.index for one in first.choices] == [0, 1, 2]
    assert len({tuple(one) for one in tokens[0]}) == 3
    assert first.usage.prompt_tokens == len(PROMPT)
    assert first.usage.completion_tokens == sum(len(one) for one in tokens[0])
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for chunk in client.completions.create(**asked, seed=5, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.token_ids
    assert list(streamed.values()) == tokens[0]


def test_without_a_seed_answers_differ(client: Any) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 2.0}
    made = [client.completions.create(**asked, extra_body=EXACT) for _ in range(2)]
    assert made[0].choices[0].token_ids != made[1].choices[0].token_ids


def test_prompts_may_be_strings_or_token_ids_one_or_many(client: Any, tiny: Tiny) -> None:
    asked = {"model": MODEL, "max_tokens": 5, "temperature": 0, "extra_body": EXACT}
    ids = [list(tiny.tokenizer(text)["input_ids"]) for text in (PROMPT, "Two")]
    expected = [tiny.greedy(one, 5) for one in ids]
    for prompt in ([PROMPT, "Two"], ids):
        answer = client.completions.create(prompt=prompt, **asked)
        assert [one.token_ids for one in answer.choices] == expected
        assert answer.usage.prompt_tokens == len(PROMPT) + 3
    answer = client.completions.create(prompt=ids[1], **asked)
    assert answer.choices[0].token_ids == expected[1]


def test_echo_puts_the_prompt_before_the_answer(client: Any) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    plain = client.completions.create(**asked, extra_body=EXACT).choices[0].text
    echoed = client.completions.create(**asked, echo=True, extra_body=EXACT).choices[0].text
    assert echoed == PROMPT + plain
    stream = client.completions.create(**asked, echo=True, stream=True, extra_body=EXACT)
    assert "".join(one.choices[0].text for one in stream) == PROMPT + plain


def test_completion_logprobs(client: Any) -> None:
    (choice,) = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3,
        extra_body={"exact": True, "ignore_eos": True},
    ).choices  # fmt: skip
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 6
    assert logprobs.text_offset[0] == 0
    for token, own, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert own <= 0
        # Greedy takes the best; several tokens that are no text share the replacement character.
        assert top[token] == own == max(top.values())


def chat_of(client: Any, **changes: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        temperature=0,
        **changes,
    )


def test_chats_go_through_the_template(client: Any, tiny: Tiny) -> None:
    prompt = "system: Be brief.\nuser: Hi\nassistant:"
    expected = tiny.greedy(list(tiny.tokenizer(prompt)["input_ids"]), 10)
    answer = chat_of(client, max_completion_tokens=10, extra_body=EXACT)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == text_of(tiny, expected)
    assert answer.usage.prompt_tokens == len(prompt)
    *chunks, last = list(
        chat_of(
            client, max_tokens=10, stream=True, stream_options={"include_usage": True},
            extra_body=EXACT,
        )
    )  # fmt: skip
    deltas = [one.choices[0].delta for one in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(one.content for one in deltas) == text_of(tiny, expected)
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason
    # It was read for the first answer, but for the last token, which says what follows.
    assert last.usage.prompt_tokens_details.cached_tokens == len(prompt) - 1
    last.usage.prompt_tokens_details = answer.usage.prompt_tokens_details
    assert last.usage == answer.usage


def test_chat_logprobs_carry_tokens_and_bytes(client: Any) -> None:
    answer = chat_of(client, max_tokens=5, logprobs=True, top_logprobs=2, extra_body=EXACT)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob
        if entry.bytes is not None:
            assert bytes(entry.bytes).decode() == entry.token


def test_models_are_listed(client: Any) -> None:
    assert [one.id for one in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_many_clients_at_once(client: Any, url: str, tiny: Tiny) -> None:
    async def all_at_once() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as many:
            answers: list[Any] = await asyncio.gather(
                *(
                    many.completions.create(
                        model=MODEL, prompt=[i, i + 1], max_tokens=4 + i, temperature=0,
                        extra_body=EXACT,
                    )
                    for i in range(8)
                )
            )  # fmt: skip
            return [answer.choices[0].token_ids for answer in answers]

    assert asyncio.run(all_at_once()) == [tiny.greedy([i, i + 1], 4 + i) for i in range(8)]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slots_at_once(tiny: Tiny, stream: bool) -> None:
    """Two answers of 250 tokens that end with the client, after no further step."""
    decoder = SteppedDecoder(tiny.view, slots=2)
    service = LocalService(decoder, tiny.model())
    body = {
        "model": MODEL, "prompt": "x", "max_tokens": 250, "stream": stream, "ignore_eos": True,
        "return_token_ids": True, "n": 2,
    }  # fmt: skip
    with served(service) as url, httpx.Client(timeout=60) as gone:
        decoder.allowed.release(3)
        if stream:
            with gone.stream("POST", f"{url}/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                gone.post(f"{url}/v1/completions", json=body, timeout=0.5)
        ended = "trimmoe_request_success_total"
        eventually(lambda: _metric(url, ended, finished_reason="abort") == 2)
        decoder.allowed.release(1)
        eventually(lambda: service.stats().running == service.stats().waiting == 0)
        assert _metric(url, "trimmoe_generation_tokens_total") <= 2 * 4


def _metrics(url: str) -> dict[str, list[Any]]:
    answer = httpx.get(f"{url}/metrics")
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    samples: dict[str, list[Any]] = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def _metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels; 0 if there are none."""
    return sum(
        sample.value
        for sample in _metrics(url).get(name, [])
        if labels.items() <= sample.labels.items()
    )


def test_the_next_turn_does_not_read_the_first_again(client: Any, url: str) -> None:
    """Usage says so, of several answers to a prompt too, and the metrics count it."""

    def asked(messages: list[dict[str, str]], **options: Any) -> Any:
        return client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=6,
            temperature=0,
            extra_body=EXACT | {"ignore_eos": True},
            **options,
        )

    before = [_metric(url, f"trimmoe_prefix_cache_{name}_total") for name in ("queries", "hits")]
    messages = [{"role": "user", "content": "Where do the swallows go when it is cold?"}]
    first = asked(messages)
    said = first.choices[0].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    second, third = asked(messages), asked(messages, n=2)
    prompts = [each.usage.prompt_tokens for each in (first, second, third)]
    cached = [each.usage.prompt_tokens_details.cached_tokens for each in (first, second, third)]
    # The text of an answer may be other tokens than the ones it was made of.
    assert cached[0] < 16
    assert prompts[0] <= cached[1] < prompts[1]
    assert cached[2] == prompts[2] - 1
    assert [each.choices[0].message.content for each in (second, third)] == [
        third.choices[1].message.content
    ] * 2
    after = [_metric(url, f"trimmoe_prefix_cache_{name}_total") for name in ("queries", "hits")]
    grown = [new - old for new, old in zip(after, before, strict=True)]
    assert grown == [sum(prompts) + prompts[2], sum(cached) + cached[2]]


def test_metrics_count_what_was_served(client: Any, url: str) -> None:
    before = _metrics(url)

    def grown(name: str, **labels: str) -> float:
        old = sum(s.value for s in before.get(name, []) if labels.items() <= s.labels.items())
        return _metric(url, name, **labels) - old

    usage = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=9,
        extra_body={"quality_budget": 0.2, "confidence": 2.0, "ignore_eos": True},
    ).usage  # fmt: skip
    ledger = usage.trimmoe
    assert grown("trimmoe_prompt_tokens_total", model_name=MODEL) == len(PROMPT)
    assert grown("trimmoe_generation_tokens_total") == 9
    assert grown("trimmoe_request_success_total", finished_reason="length") == 1
    assert grown("trimmoe_time_to_first_token_seconds_count") == 1
    assert grown("trimmoe_inter_token_latency_seconds_count") == 8
    assert grown("trimmoe_e2e_request_latency_seconds_count") == 1
    assert grown("trimmoe_request_prompt_tokens_sum") == len(PROMPT)
    assert grown("trimmoe_request_generation_tokens_sum") == 9
    assert grown("trimmoe_budget_spent_total") == pytest.approx(ledger["budget_spent"])
    assert grown("trimmoe_budget_credited_total") == pytest.approx(8 * 0.2)
    assert grown("trimmoe_token_layers_total") == 8 * LAYERS
    assert grown("trimmoe_token_layers_total", kind="skipped") == ledger["layers_skipped"]
    assert grown("trimmoe_link_bytes_total") == ledger["bytes"]
    assert grown("trimmoe_expert_executions_total") == 8 * LAYERS * 2
    now = _metrics(url)
    assert len(now["trimmoe_link_round_trip_seconds"]) == SERVERS * (SERVERS - 1)
    assert {"trimmoe_num_requests_running", "trimmoe_num_requests_waiting"} <= now.keys()
    assert {"trimmoe_kv_cache_usage_perc", "trimmoe_exits_audited_total"} <= now.keys()


def test_two_apps_in_one_process_share_no_metrics(tiny: Tiny, url: str) -> None:
    with served(tiny.exact()) as other:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "ignore_eos": True}
        before = _metric(url, "trimmoe_generation_tokens_total")
        assert httpx.post(f"{other}/v1/completions", json=body).status_code == 200
        assert _metric(other, "trimmoe_generation_tokens_total") == 2
        assert _metric(url, "trimmoe_generation_tokens_total") == before


def test_keys_open_every_route_and_health_needs_none(tiny: Tiny) -> None:
    settings = ApiSettings(api_keys=("first", "zweiter Schlüssel"))
    with served(tiny.exact(), settings) as url:
        paths = ("/v1/models", "/metrics", "/openapi.json", "/nowhere")
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}):
            for path in paths:
                answer = httpx.get(url + path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            assert httpx.get(f"{url}/health", headers=headers).status_code == 200
        for key in settings.api_keys:
            right = {b"Authorization": f"Bearer {key}".encode()}
            statuses = [httpx.get(url + path, headers=right).status_code for path in paths]
            assert statuses == [200, 200, 200, 404]
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="firs").models.list()


def test_a_full_queue_is_429_with_when_to_come_back(tiny: Tiny) -> None:
    decoder = SteppedDecoder(tiny.view, slots=1)
    service = LocalService(decoder, tiny.model(), max_waiting=0)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 250, "stream": True, "ignore_eos": True}
    with served(service) as url, httpx.Client(timeout=60) as busy:
        with busy.stream("POST", f"{url}/v1/completions", json=body):
            refused = httpx.post(f"{url}/v1/completions", json=body | {"stream": False})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        ended = "trimmoe_request_success_total"
        eventually(lambda: _metric(url, ended, finished_reason="abort") == 1)
        decoder.allowed.release(1)
        eventually(lambda: service.stats().running == 0)
        # Two at once do not fit; the one that would is not left running.
        both = httpx.post(f"{url}/v1/completions", json=body | {"n": 2})
        assert both.status_code == 429
        decoder.allowed.release(1)
        eventually(lambda: service.stats().running == service.stats().waiting == 0)


def test_a_failure_in_mid_stream_is_an_error_event(tiny: Tiny) -> None:
    """The status was sent long ago; OpenAI's client still raises."""
    decoder = SteppedDecoder(tiny.view, slots=1)
    with served(LocalService(decoder, tiny.model())) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
            stream = client.completions.create(
                model=MODEL, prompt="x", max_tokens=9, stream=True, logprobs=0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            decoder.decode = _fail
            decoder.allowed.release(1)
            with pytest.raises(openai.APIError, match="Decoding failed"):
                list(stream)
        assert httpx.get(f"{url}/health").status_code == 503
        refused = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert refused.status_code == 503


class _Slow(ExactDecoder):
    """250 tokens take longer than the server waits for them."""

    def decode(self, tokens: dict[int, int]) -> list[Decoded]:
        time.sleep(0.02)
        return super().decode(tokens)


def test_a_stopping_server_tells_those_it_cannot_wait_for(tiny: Tiny) -> None:
    service = LocalService(_Slow(tiny.view, slots=2), tiny.model())
    body = {"model": MODEL, "prompt": "x", "max_tokens": 250, "ignore_eos": True}
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(1) as other:
        with served(service, grace_s=1) as url:
            whole = other.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
            request = client.build_request(
                "POST", f"{url}/v1/completions", json=body | {"stream": True}
            )
            answer = client.send(request, stream=True)
            lines = answer.iter_lines()
            next(lines)
            eventually(lambda: service.stats().running == 2)
        rest = [line for line in lines if line]
        assert "stopping" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert whole.result().status_code == 503


def _fail(tokens: dict[int, int]) -> list[Decoded]:
    raise RuntimeError(f"broken on purpose with {tokens}")
