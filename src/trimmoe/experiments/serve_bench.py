"""Load an OpenAI-compatible server and measure it, with the options and figures of vLLM's tool.

Times are those of the event loop's clock. A request's first token is its first event with a
choice in it; what follows is timed event by event.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.specs import FloatArray

CHAT_SUFFIX = "/chat/completions"


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What to send where, and how fast."""

    base_url: str
    endpoint: str
    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    """Text, or token ids, which chats do not take."""
    output_tokens: int
    """Tokens each answer is asked to have."""
    request_rate: float = math.inf
    """Requests per second; infinite sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma-distributed gaps: 1 is a Poisson process, less comes in bursts."""
    max_concurrency: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    timeout_s: float = 6 * 3600
    seed: int = 0


@dataclass(kw_only=True, slots=True)
class Sent:
    """One request and what became of it."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float = 0.0
    """From sending to the first token."""
    itl_s: list[float] = field(default_factory=list)
    """Between successive events with tokens."""
    token_gaps_s: list[float] = field(default_factory=list)
    """Between successive tokens; those of one event, which waits until their text is whole, are
    taken to have come one by one. Only if `extra_body` asks for token ids."""
    e2el_s: float = 0.0
    """From sending to the end."""
    token_ids: list[int] = field(default_factory=list)
    """Of the answer; empty unless `extra_body` asks for them."""
    usage: dict[str, Any] = field(default_factory=dict)
    """As the server reports it; empty if it reports none."""
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for answers without one."""
        if self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)


def arrival_times(load: Load) -> FloatArray:
    """When each request is sent, in seconds from the start, ascending, the first at 0."""
    count = len(load.prompts)
    if math.isinf(load.request_rate):
        return np.zeros(count)
    rng = np.random.default_rng(load.seed)
    scale_s = 1.0 / (load.request_rate * load.burstiness)
    gaps_s = rng.gamma(load.burstiness, scale_s, count)
    return np.cumsum(gaps_s) - gaps_s[0]


async def run_load(
    load: Load,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
) -> tuple[list[Sent], float]:
    """Send everything; what became of each request, and how long all took in seconds.

    `transport` stands in for the network in tests.
    """
    clock = asyncio.get_running_loop().time
    gate = asyncio.Semaphore(load.max_concurrency or len(load.prompts))
    headers = {} if load.api_key is None else {"Authorization": f"Bearer {load.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=load.base_url,
        headers=headers,
        timeout=load.timeout_s,
        limits=limits,
        transport=transport,
        trust_env=False,
        # To read a machine's certificates takes as long as an answer to a few tokens.
        verify=load.base_url.startswith("https"),
    ) as client:
        start_s = clock()

        async def one(prompt: str | tuple[int, ...], at_s: float) -> Sent:
            await asyncio.sleep(start_s + at_s - clock())
            async with gate:
                return await _send(client, load, prompt, clock)

        times = arrival_times(load).tolist()
        tasks = [one(prompt, at) for prompt, at in zip(load.prompts, times, strict=True)]
        sent = await asyncio.gather(*tasks)
        return list(sent), clock() - start_s


async def _send(
    client: httpx.AsyncClient, load: Load, prompt: str | tuple[int, ...], clock: Callable[[], float]
) -> Sent:
    """One request, timed."""
    sent, start_s = Sent(), clock()
    last_s: float | None = None
    events = 0
    try:
        async with client.stream("POST", load.endpoint, json=_body(load, prompt)) as answer:
            if answer.status_code != 200:
                said = (await answer.aread()).decode(errors="replace")
                sent.error = f"HTTP {answer.status_code}: {said[:300]}"
                return sent
            async for event in _events(answer):
                if "error" in event:
                    sent.error = f"The stream broke off: {event['error']}"
                    return sent
                if event.get("choices"):
                    now_s, events = clock(), events + 1
                    token_ids = event["choices"][0].get("token_ids") or []
                    if last_s is None:
                        sent.ttft_s = now_s - start_s
                    else:
                        gap_s, count = now_s - last_s, len(token_ids)
                        sent.itl_s.append(gap_s)
                        sent.token_gaps_s += [gap_s / max(count, 1)] * count
                    last_s = now_s
                    sent.token_ids += token_ids
                if usage := event.get("usage"):
                    sent.usage = usage
                    sent.prompt_tokens = usage["prompt_tokens"]
                    sent.output_tokens = usage["completion_tokens"]
        if last_s is None:
            sent.error = "The answer has no token."
        else:
            sent.e2el_s = last_s - start_s
            # Servers that report no usage are taken to send a token per event.
            sent.output_tokens = sent.output_tokens or events
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        sent.error = f"{type(error).__name__}: {error}"
    return sent


def _body(load: Load, prompt: str | tuple[int, ...]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": load.model,
        "temperature": load.temperature,
        "max_tokens": load.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.endpoint.endswith(CHAT_SUFFIX):
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if load.ignore_eos:
        body["ignore_eos"] = True
    return body | load.extra_body


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The stream's JSON events, but for a chat's opening, which carries no token."""
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if not _is_opening(event):
            yield event


def _is_opening(event: dict[str, Any]) -> bool:
    choices = event.get("choices") or []
    return bool(choices) and all(
        (choice.get("delta") or {}).get("role")
        and not choice["delta"].get("content")
        and choice.get("finish_reason") is None
        for choice in choices
    )


METRICS = ("ttft", "tpot", "itl", "e2el")


def summarise(
    sent: Sequence[Sent],
    duration_s: float,
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (99.0,),
    goodput_ms: dict[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of one run; raises `UserError` if not one request succeeded.

    `goodput_ms` says what a good request does not exceed, by metric.
    """
    done = [one for one in sent if one.error is None]
    if not done:
        raise UserError(f"Every request failed; the first: {sent[0].error}")
    inputs = sum(one.prompt_tokens for one in done)
    outputs = sum(one.output_tokens for one in done)
    good = sum(_is_good(one, goodput_ms) for one in done) if goodput_ms else None
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(sent) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration_s,
        "request_goodput": None if good is None else good / duration_s,
        "output_throughput": outputs / duration_s,
        "total_token_throughput": (inputs + outputs) / duration_s,
    }
    values = _values_ms(done)
    for name in METRICS:
        if name in metrics:
            figures |= _statistics(name, values[name], percentiles)
    return figures


def _values_ms(done: Sequence[Sent]) -> dict[str, list[float]]:
    return {
        "ttft": [one.ttft_s * 1e3 for one in done],
        "tpot": [one.tpot_s * 1e3 for one in done if one.tpot_s is not None],
        "itl": [gap * 1e3 for one in done for gap in one.itl_s],
        "e2el": [one.e2el_s * 1e3 for one in done],
    }


def _statistics(
    name: str, values_ms: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float]:
    values = np.array(values_ms) if values_ms else np.zeros(1)
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        **{f"p{p:g}_{name}_ms": float(np.percentile(values, p)) for p in percentiles},
    }


def _is_good(one: Sent, goodput_ms: dict[str, float]) -> bool:
    """Whether a request met every objective; an answer of one token has no time per token."""
    measured = {"ttft": one.ttft_s, "tpot": one.tpot_s or 0.0, "e2el": one.e2el_s}
    return all(measured[name] * 1e3 <= limit for name, limit in goodput_ms.items())
