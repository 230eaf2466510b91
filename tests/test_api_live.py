"""The page, and the picture of the cluster that it shows."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving import MODEL, SERVERS, SteppedDecoder, Tiny, served
from tiny import LAYERS
from trimmoe.api.page import made_page
from trimmoe.api.recent import RATE_S, WINDOW_S, Recent
from trimmoe.api.settings import ApiSettings
from trimmoe.runtime.local_service import LocalService

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def service(tiny: Tiny) -> LocalService:
    return tiny.planned()


@pytest.fixture(scope="module")
def url(service: LocalService) -> Iterator[str]:
    with served(service, ApiSettings(api_keys=("secret",))) as url:
        yield url


def events(lines: Iterator[str], count: int) -> list[tuple[str, Any]]:
    """The next events of a stream."""
    made, name = [], ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            made.append((name, json.loads(line.removeprefix("data: "))))
            if len(made) == count:
                break
    return made


def test_the_page_needs_no_key_and_everything_on_it_does(url: str) -> None:
    page = httpx.get(f"{url}/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert httpx.head(f"{url}/").status_code == 200
    for path in ("/v1/trimmoe/live", "/v1/trimmoe/cluster", "/v1/models", "/docs"):
        assert httpx.get(f"{url}{path}").status_code == 401
    assert httpx.get(f"{url}/v1/trimmoe/cluster", headers=KEY).status_code == 200


def test_nothing_runs_on_the_page_but_what_it_came_with() -> None:
    page = made_page()
    text = page.content.decode()
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    parts = re.findall(r"<(script|style)[^>]*>(.*?)</\1>", text, re.DOTALL)
    assert [kind for kind, _ in parts] == ["style", "script", "script"]
    for kind, part in parts:
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        (sources,) = [each for each in policy.split("; ") if each.startswith(f"{kind}-src ")]
        assert f"'sha256-{digest}'" in sources
    assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}
    assert not re.findall(r"<[^>]* (?:style|on\w+)=", text.split("<script>")[0])


def test_a_server_may_have_no_page(tiny: Tiny) -> None:
    with served(tiny.exact(), ApiSettings(page=False)) as url:
        assert httpx.get(f"{url}/").status_code == 404
        told = httpx.get(f"{url}/v1/trimmoe/cluster").json()
    layout = told["layout"]["cluster"]
    (only,) = layout["servers"]
    assert only["experts"] == [list(range(layout["experts"]))] * LAYERS
    assert told["now"]["policy"]["trims"] is False
    with served(tiny.exact(), ApiSettings(page=False, api_keys=("secret",))) as url:
        assert httpx.get(f"{url}/").status_code == 401


def test_the_picture_comes_every_second_and_who_holds_what_once(url: str, tiny: Tiny) -> None:
    with httpx.stream("GET", f"{url}/v1/trimmoe/live", headers=KEY) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        (first, layout), (second, before) = events(lines, 2)
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
        made = httpx.post(f"{url}/v1/completions", json=body, headers=KEY).json()
        (third, now), (fourth, _) = events(lines, 2)
    assert [first, second, third, fourth] == ["layout", "now", "now", "now"]
    assert layout["model"]["id"] == MODEL
    cluster, spec = layout["cluster"], tiny.view.spec
    assert (cluster["layers"], cluster["experts"]) == (spec.layer_count, spec.expert_count)
    held = [[set(layer) for layer in each["experts"]] for each in cluster["servers"]]
    assert len(held) == SERVERS
    for layer in range(LAYERS):
        assert set.union(*(one[layer] for one in held)) == set(range(spec.expert_count))
    assert [len(route) for route in now["routes"]] == [LAYERS] * SERVERS
    assert len(now["links"]) == SERVERS * (SERVERS - 1)
    access = now["server"]
    assert now["servers"][access]["tokens"] - before["servers"][access]["tokens"] == 5
    assert now["servers"][access]["memory_bytes"] > 0
    sent = [sum(each["sent_bytes"] for each in one["links"]) for one in (before, now)]
    assert sent[1] - sent[0] == made["usage"]["trimmoe"]["bytes"]
    assert now["speed"]["first_token_s"]["count"] == 1
    assert now["speed"]["per_token_s"]["p50"] > 0
    assert now["time_s"] > before["time_s"]


def test_who_only_watches_is_sent_away_by_a_server_that_stops(tiny: Tiny) -> None:
    """At once, not when patience with answers ends."""
    grace_s = 60
    with served(tiny.exact(), grace_s=grace_s) as url:
        client = httpx.Client(timeout=grace_s)
        asked = client.build_request("GET", f"{url}/v1/trimmoe/live")
        stream = client.send(asked, stream=True)
        lines = stream.iter_lines()
        assert [name for name, _ in events(lines, 2)] == ["layout", "now"]
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < grace_s / 2
    assert "event: end" in list(lines)
    client.close()


def test_requests_are_shown_as_far_as_they_are(tiny: Tiny) -> None:
    decoder = SteppedDecoder(tiny.view, slots=1)
    with served(LocalService(decoder, tiny.model())) as url:
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 9, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            now = httpx.get(f"{url}/v1/trimmoe/cluster").json()["now"]
            decoder.allowed.release(8)
            assert "data: [DONE]" in list(lines)
        after = httpx.get(f"{url}/v1/trimmoe/cluster").json()["now"]
    (request,) = now["requests"]
    assert (request["state"], request["tokens"], request["most_tokens"]) == ("answering", 1, 9)
    assert request["prompt_tokens"] == 5
    assert (now["running"], now["waiting"]) == (1, 0)
    assert after["requests"] == []


def test_speeds_are_those_of_late() -> None:
    recent = Recent()
    assert recent.speed(0.0).first_token_s.count == 0
    for at in range(10):
        recent.first(float(at), 0.1 * (at + 1))
        recent.ended(float(at), 0.01)
        recent.token(float(at))
    speed = recent.speed(9.5)
    assert speed.first_token_s.p50 == pytest.approx(0.55)
    assert (speed.per_token_s.p99, speed.per_token_s.count) == (pytest.approx(0.01), 10)
    assert speed.tokens_per_s == 5 / RATE_S
    later = recent.speed(WINDOW_S + 5.0)
    assert later.tokens_per_s == 0.0
    assert later.first_token_s.count == 5
