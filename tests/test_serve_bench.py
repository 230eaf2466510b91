"""The load generator: its figures on a virtual clock, where they are known, and a real server."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import MODEL, Tiny, served
from trimmoe import cli
from trimmoe.core.errors import UserError
from trimmoe.experiments.serve_bench import Load, Sent, arrival_times, run_load, summarise
from trimmoe.experiments.serve_prompts import (
    parse_goodput,
    parse_object,
    parse_percentiles,
    random_prompts,
    text_prompts,
)
from trimmoe.experiments.serve_report import result_json

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        loop: Any = self
        due = [timer.when() for timer in loop._scheduled if not timer.cancelled()]
        if not loop._ready and due:
            self.now_s = max(self.now_s, min(due))
        super()._run_once()  # type: ignore[misc]


def virtually(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work())


class Paced(httpx.AsyncBaseTransport):
    """A server of known pace: a first event after `first_s`, then one every `next_s`."""

    def __init__(self, *, first_s: float, next_s: float, tokens: int, usage: bool = True) -> None:
        self.first_s, self.next_s, self.tokens, self.usage = first_s, next_s, tokens, usage
        self.arrived_s: list[float] = []
        self.bodies: list[dict[str, Any]] = []
        self.busy = self.most_busy = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.arrived_s.append(asyncio.get_running_loop().time())
        self.bodies.append(json.loads(await request.aread()))
        return httpx.Response(200, stream=_Body(self._events()))

    async def _events(self) -> AsyncIterator[bytes]:
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        for number in range(self.tokens):
            await asyncio.sleep(self.next_s if number else self.first_s)
            yield _event({"choices": [{"index": 0, "text": "a"}]})
        self.busy -= 1
        if self.usage:
            counts = {"prompt_tokens": 10, "completion_tokens": self.tokens}
            yield _event({"choices": [], "usage": counts})
        yield b"data: [DONE]\n\n"


class _Body(httpx.AsyncByteStream):
    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


def load(count: int = 4, **changes: Any) -> Load:
    settings: dict[str, Any] = {
        "base_url": "http://server",
        "endpoint": "/v1/completions",
        "model": "m",
        "prompts": tuple(f"prompt {i}" for i in range(count)),
        "output_tokens": 5,
    }
    return Load(**settings | changes)


def test_latencies_are_those_of_the_server() -> None:
    server = Paced(first_s=0.5, next_s=0.1, tokens=5)
    sent, duration_s = virtually(lambda: run_load(load(), transport=server))
    for one in sent:
        assert one.error is None
        assert one.ttft_s == pytest.approx(0.5)
        assert one.itl_s == pytest.approx([0.1] * 4)
        assert one.e2el_s == pytest.approx(0.9)
        assert one.tpot_s == pytest.approx(0.1)
        assert (one.prompt_tokens, one.output_tokens) == (10, 5)
    assert duration_s == pytest.approx(0.9)
    figures = summarise(sent, duration_s, percentiles=(50, 99.5), goodput_ms={"ttft": 500.1})
    assert figures["completed"] == 4
    assert figures["failed"] == 0
    assert figures["total_input_tokens"] == 40
    assert figures["total_output_tokens"] == 20
    assert figures["request_throughput"] == pytest.approx(4 / 0.9)
    assert figures["request_goodput"] == pytest.approx(4 / 0.9)
    assert figures["output_throughput"] == pytest.approx(20 / 0.9)
    assert figures["total_token_throughput"] == pytest.approx(60 / 0.9)
    assert figures["mean_ttft_ms"] == pytest.approx(500)
    assert figures["median_tpot_ms"] == pytest.approx(100)
    assert figures["std_itl_ms"] == pytest.approx(0)
    assert figures["p99.5_e2el_ms"] == figures["p50_e2el_ms"] == pytest.approx(900)


def test_requests_leave_when_they_should_whatever_the_server_does() -> None:
    server = Paced(first_s=50.0, next_s=1.0, tokens=2)
    slow = load(20, request_rate=2.0, seed=3)
    virtually(lambda: run_load(slow, transport=server))
    assert server.arrived_s == pytest.approx(arrival_times(slow).tolist())
    assert server.most_busy == 20


def test_no_more_run_at_once_than_allowed() -> None:
    server = Paced(first_s=1.0, next_s=1.0, tokens=2)
    sent, duration_s = virtually(lambda: run_load(load(6, max_concurrency=2), transport=server))
    assert server.most_busy == 2
    assert duration_s == pytest.approx(3 * 2.0)
    # Waiting for one's turn is the generator's doing, not the server's.
    assert [one.e2el_s for one in sent] == pytest.approx([2.0] * 6)


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    fast = Sent(output_tokens=3, ttft_s=0.1, itl_s=[0.1, 0.1], e2el_s=0.3)
    late = Sent(output_tokens=3, ttft_s=0.4, itl_s=[0.1, 0.1], e2el_s=0.6)
    slow = Sent(output_tokens=3, ttft_s=0.1, itl_s=[0.1, 0.9], e2el_s=1.1)
    single = Sent(output_tokens=1, ttft_s=0.1, e2el_s=0.1)
    sent = [fast, late, slow, single]
    figures = summarise(sent, 2.0, goodput_ms={"ttft": 200, "tpot": 150})
    assert figures["request_goodput"] == pytest.approx(2 / 2.0)
    assert summarise(sent, 2.0, goodput_ms={"e2el": 700})["request_goodput"] == 3 / 2.0
    assert summarise(sent, 2.0)["request_goodput"] is None
    # An answer of one token has no time per token.
    assert figures["mean_tpot_ms"] == pytest.approx(np.mean([100, 100, 500]))


def test_failures_are_counted_and_none_at_all_is_an_error() -> None:
    class Half(Paced):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            answer = await super().handle_async_request(request)
            if len(self.bodies) == 1:
                return httpx.Response(503, json={"error": {"message": "starting"}})
            if len(self.bodies) == 2:
                raise httpx.ConnectError("refused")
            if len(self.bodies) == 3:
                broken = _event({"error": {"message": "lost a server"}})
                return httpx.Response(200, content=broken)
            return answer

    server = Half(first_s=0.1, next_s=0.1, tokens=2)
    sent, duration_s = virtually(lambda: run_load(load(4), transport=server))
    figures = summarise(sent, duration_s)
    assert (figures["completed"], figures["failed"]) == (1, 3)
    errors = [one.error for one in sent if one.error is not None]
    for says, error in zip(("starting", "refused", "lost a server"), errors, strict=True):
        assert says in error
    with pytest.raises(UserError, match="starting"):
        summarise(sent[:1], duration_s)


def test_without_a_usage_each_event_is_a_token() -> None:
    server = Paced(first_s=0.1, next_s=0.1, tokens=7, usage=False)
    (sent,), _ = virtually(lambda: run_load(load(1), transport=server))
    assert sent.output_tokens == 7


def test_a_chat_is_asked_and_its_opening_is_no_token() -> None:
    class Chat(Paced):
        async def _events(self) -> AsyncIterator[bytes]:
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            await asyncio.sleep(0.3)
            yield _event({"choices": [{"delta": {"content": "a"}}]})
            yield b"data: [DONE]\n\n"

    server = Chat(first_s=0, next_s=0, tokens=1)
    chat = load(1, endpoint="/v1/chat/completions", extra_body={"exact": True})
    (sent,), _ = virtually(lambda: run_load(chat, transport=server))
    assert sent.ttft_s == pytest.approx(0.3)
    (body,) = server.bodies
    assert body["messages"] == [{"role": "user", "content": "prompt 0"}]
    assert body["max_tokens"] == 5
    assert body["exact"] is True
    assert "prompt" not in body


@given(st.floats(0.1, 50), st.floats(0.1, 20), st.integers(0, 100))
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(
    rate: float, burstiness: float, seed: int
) -> None:
    count = 4000
    many = load(count, request_rate=rate, burstiness=burstiness, seed=seed)
    times = arrival_times(many)
    assert times[0] == 0
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    # A gamma's coefficient of variation is burstiness ** -0.5; six standard errors of the mean.
    spread = burstiness**-0.5
    assert gaps.mean() * rate == pytest.approx(1, abs=6 * spread / math.sqrt(count))
    assert gaps.std() * rate == pytest.approx(spread, rel=0.5)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(load(3)).tolist() == [0, 0, 0]


def test_prompts_are_reproducible_and_of_the_length_asked_for(tiny: Tiny) -> None:
    by_token = random_prompts(3, 20, seed=1, tokenizer=tiny.tokenizer)
    # Random bytes are no text: the length comes out nearly right.
    for prompt in by_token:
        assert 20 <= len(tiny.tokenizer(prompt)["input_ids"]) <= 20 * 3
    words = random_prompts(3, 20, seed=1)
    assert [len(prompt.split()) for prompt in words] == [20] * 3
    assert len(set(words)) == 3
    assert words == random_prompts(3, 20, seed=1) != random_prompts(3, 20, seed=2)
    passages = text_prompts(["a b c d", "e f"], 5, 3, seed=0)
    assert all(passage in "a b c d e f" for passage in passages)
    assert [len(passage.split()) for passage in passages] == [3] * 5
    with pytest.raises(UserError, match="6 words"):
        text_prompts(["a b c d", "e f"], 5, 7, seed=0)


def test_options_that_make_no_sense_are_refused() -> None:
    assert parse_goodput(["ttft:200", "e2el:1500.5"]) == {"ttft": 200.0, "e2el": 1500.5}
    assert parse_percentiles("25,99.9") == (25.0, 99.9)
    assert parse_object('{"exact": true}', "--extra-body") == {"exact": True}
    for wrong in ("ttft", "ttft:fast", "itl:3", ":3"):
        with pytest.raises(UserError, match="--goodput"):
            parse_goodput([wrong])
    for wrong in ("", "a", "101", "-1", "nan"):
        with pytest.raises(UserError, match="--metric-percentiles"):
            parse_percentiles(wrong)
    for wrong in ("[]", "{", "3"):
        with pytest.raises(UserError, match="--extra-body"):
            parse_object(wrong, "--extra-body")


def test_the_result_names_what_was_asked() -> None:
    content = result_json(load(7), {"duration": 1.0}, date="20260101-000000")
    assert content["request_rate"] == "inf"
    assert content["num_prompts"] == 7
    assert content["backend"] == "openai"
    assert json.loads(json.dumps(content)) == content


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_against_the_real_server(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    result = tmp_path / "result.json"
    with served(tiny.exact(slots=4, max_waiting=16)) as url:
        arguments = [
            "bench", "serve", "--base-url", url, "--endpoint", endpoint, "--model", MODEL,
            "--num-prompts", "6", "--random-input-len", "4", "--random-output-len", "5",
            "--request-rate", "200", "--burstiness", "0.5", "--max-concurrency", "3",
            "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el",
            "--metric-percentiles", "50,99", "--goodput", "e2el:600000", "ttft:600000",
            "--save-result", "--result-filename", str(result),
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["trimmoe", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    assert not stopped.value.code
    content = json.loads(result.read_text())
    assert content["completed"] == 6
    assert content["failed"] == 0
    assert content["total_output_tokens"] == 30
    assert content["total_input_tokens"] > 6 * 4
    assert content["model_id"] == MODEL
    assert content["num_prompts"] == 6
    assert content["request_rate"] == 200
    assert content["burstiness"] == 0.5
    assert content["max_concurrency"] == 3
    assert content["request_goodput"] == content["request_throughput"]
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p50", "p99"):
            assert content[f"{statistic}_{metric}_ms"] >= 0
    assert 0 < content["mean_ttft_ms"] <= content["mean_e2el_ms"] <= content["duration"] * 1e3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [(["twice"], "`twice` belongs to no option"), (["--goodput", "ttft:1", "twice"], "--goodput")],
)
def test_a_stray_word_is_refused(
    given: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["trimmoe", "bench", "serve", "--model", "m", *given])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_server_that_is_not_there_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "serve", "--port", "1", "--model", "m", "--num-prompts", "2"]
    monkeypatch.setattr(sys, "argv", ["trimmoe", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "Every request failed" in capsys.readouterr().err
