"""`trimmoe serve` on four processes with real sockets, used through the official client.

Exact mode must give what transformers' `generate` gives, whatever is killed meanwhile.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from browsing import browser_page, complaints
from checkpoints import judged, opened
from devices import ON_DEVICE
from launching import PATIENCE_S, SERVERS, Files, Serving, await_answer, free_ports, write_files
from trimmoe.core.plan import load_plan
from trimmoe.runtime.launch import family

pytestmark = pytest.mark.slow
KILLED = 1
"""The server that dies; every route crosses it."""
STALL_S = 10.0


EXTRAS = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A plan in which every route crosses three servers and every expert has two hosts."""
    files = write_files(tmp_path_factory.mktemp("files"))
    plan = load_plan(files.plan)
    servers, layers, experts = plan.hosts.shape
    layer, expert = np.indices((layers, experts))
    first = (layer + expert) % servers
    hosts = np.zeros_like(plan.hosts)
    for copy in range(2):
        hosts[(first + copy) % servers, layer, expert] = True
    access = np.arange(servers)
    routes = np.stack([access, np.full(servers, KILLED), (access + 1) % servers, access], axis=1)
    assert routes.shape == (servers, layers)
    replace(plan, hosts=hosts, routes=routes).save(files.plan)
    return files


Judge = Callable[[list[int], list[int]], list[int]]


@pytest.fixture(scope="module")
def judge(files: Files) -> Judge:
    """What transformers says of an answer to a prompt; see `checkpoints.judged`."""
    return partial(judged, opened(Path(files.model)))


def assert_greedy(
    judge: Judge, prompts: list[list[int]], answers: list[list[int]], lengths: list[int]
) -> None:
    """Answers of these lengths are what transformers generates."""
    assert [len(answer) for answer in answers] == lengths
    assert answers == [judge(*each) for each in zip(prompts, answers, strict=True)]


@dataclass(frozen=True)
class Cluster:
    serving: Serving
    port: int
    cache: Path

    def client(self, server: int) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port + server}/v1"
        return openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=PATIENCE_S)

    def pid(self, server: int) -> int:
        """The number of a server's process, from its own log."""
        log = self.cache / "logs" / f"{SERVERS[server]}-{self.port + server}.log"
        return int(re.findall(r"Started server process \[(\d+)\]", log.read_text())[-1])


@pytest.fixture(scope="module")
def cluster(files: Files) -> Iterator[Cluster]:
    """Exact mode on four processes; afterwards Ctrl-C must leave nothing."""
    port, cache = free_ports(110), files.folder / "cache"
    command = [
        *("-m", "trimmoe.cli", "serve", "--policy", "exact", "--api-key", "secret"),
        *("--cluster", str(files.cluster), "--model", str(files.model)),
        *("--profile", str(files.profile), "--plan", str(files.plan)),
        *("--port-base", str(port), "--kv-slots", "40", "--encrypt"),
        *ON_DEVICE,
    ]
    with Serving(command, cache=cache, quickly=False) as serving:
        serving.said("Ready")
        yield Cluster(serving, port, cache)
        started = family.descendants(serving.process.pid)
        serving.process.send_signal(signal.SIGINT)
        assert serving.ended() == 0
        assert family.alive(started) == frozenset()


def _prompts(count: int, seed: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, rng.integers(1, longest)).tolist() for _ in range(count)]


def _whole(client: openai.OpenAI, prompt: list[int], new: int) -> list[int]:
    made: Any = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=new, temperature=0, extra_body=EXTRAS
    )
    return made.choices[0].token_ids


def test_32_requests_at_once_get_what_transformers_generates(
    cluster: Cluster, judge: Judge
) -> None:
    prompts = _prompts(32, seed=1, longest=80)
    lengths = np.random.default_rng(2).integers(2, 16, len(prompts)).tolist()
    clients = [cluster.client(index) for index in range(len(SERVERS))]
    with ThreadPoolExecutor(32) as pool:
        asked = [
            pool.submit(_whole, clients[index % len(clients)], prompt, new)
            for index, (prompt, new) in enumerate(zip(prompts, lengths, strict=True))
        ]
        got = [each.result() for each in asked]
    assert_greedy(judge, prompts, got, lengths)


def test_a_server_killed_during_streams_costs_nobody_their_answer(
    cluster: Cluster, judge: Judge
) -> None:
    prompts, new = _prompts(6, seed=3, longest=20), 60
    before = cluster.pid(KILLED)
    got = _disturbed(cluster, prompts, new, lambda: os.kill(before, signal.SIGKILL))
    assert_greedy(judge, prompts, got, [new] * len(prompts))

    cluster.serving.said(f"Server {SERVERS[KILLED]} is back")
    await_answer(cluster.port + KILLED)
    assert cluster.pid(KILLED) != before
    answer = _whole_in_the_end(cluster, [10, 20, 30], 12)
    assert_greedy(judge, [[10, 20, 30]], [answer], [12])


def test_a_server_whose_links_stall_for_ten_seconds_costs_only_time(
    cluster: Cluster, judge: Judge
) -> None:
    """Longer than the others wait for it: they go on without it, and with it again afterwards."""
    prompts, new, pid = _prompts(6, seed=5, longest=20), 60, cluster.pid(KILLED)

    def stall() -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(STALL_S)
        finally:
            os.kill(pid, signal.SIGCONT)

    got = _disturbed(cluster, prompts, new, stall)
    assert_greedy(judge, prompts, got, [new] * len(prompts))
    answer = _whole_in_the_end(cluster, [10, 20, 30], 12)
    assert_greedy(judge, [[10, 20, 30]], [answer], [12])
    assert cluster.pid(KILLED) == pid, "it was not started anew"


def _disturbed(
    cluster: Cluster, prompts: list[list[int]], new: int, disturb: Callable[[], None]
) -> list[list[int]]:
    """Streams by way of all servers but `KILLED`, during which something happens."""
    others = [server for server in range(len(SERVERS)) if server != KILLED]
    under_way = threading.Semaphore(0)

    def stream(index: int) -> list[int]:
        client = cluster.client(others[index % len(others)])
        tokens: list[int] = []
        with client.completions.create(
            model="tiny", prompt=prompts[index], max_tokens=new, temperature=0, stream=True,
            extra_body=EXTRAS,
        ) as events:  # fmt: skip
            for event in events:
                each: Any
                for each in event.choices:
                    tokens += each.token_ids or []
                under_way.release()
        return tokens

    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(stream, index) for index in range(len(prompts))]
        for _ in range(3 * len(prompts)):
            assert under_way.acquire(timeout=PATIENCE_S)
        unfinished = sum(not each.done() for each in asked)
        disturb()
        got = [each.result() for each in asked]
    assert unfinished >= len(prompts) // 2, "the streams were over before anything happened"
    return got


def _whole_in_the_end(cluster: Cluster, prompt: list[int], new: int) -> list[int]:
    """An answer of `KILLED`, once it has met the others again."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return _whole(cluster.client(KILLED), prompt, new)
        except openai.InternalServerError:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)


def test_without_the_key_nobody_comes_in(cluster: Cluster) -> None:
    stranger = openai.OpenAI(
        base_url=f"http://127.0.0.1:{cluster.port}/v1", api_key="guess", max_retries=0
    )
    with pytest.raises(openai.AuthenticationError):
        _whole(stranger, [1, 2, 3], 2)


def test_the_page_chats_and_shows_a_server_die_and_come_back(cluster: Cluster) -> None:
    with browser_page() as page:
        page.goto(f"http://127.0.0.1:{cluster.port}/")
        # Keys are asked for as soon as the server wants one.
        page.get_by_role("textbox", name="API key").fill("secret")
        page.keyboard.press("Enter")
        page.get_by_text("all up", exact=True).wait_for()
        said = complaints(page)

        made: Any = cluster.client(0).completions.create(
            model="tiny", prompt="Once upon", max_tokens=48, temperature=0,
            extra_body={"exact": True},
        )  # fmt: skip
        page.get_by_role("switch", name="Exact").check()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("At most").fill("48")
        page.get_by_label("Message").fill("Once upon")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Regenerate").wait_for()
        assert page.locator(".tokens").text_content() == made.choices[0].text
        fates = {each.get_attribute("class") for each in page.locator(".token").all()}
        assert fates & {"token local ", "token remote "}
        page.get_by_role("group", name="Answer").focus()
        page.keyboard.press("End")
        assert page.locator(".tip .strip li").count() == 4

        shown = page.locator(".server-card h3", has_text=SERVERS[KILLED])
        assert shown.count() == 1
        os.kill(cluster.pid(KILLED), signal.SIGKILL)
        news = rf"{SERVERS[KILLED]} (is lost|is restarting|came back)"
        page.get_by_text(re.compile(news)).wait_for()
        page.get_by_text(re.compile(rf"{SERVERS[KILLED]} came back")).wait_for()
        page.get_by_text("all up", exact=True).wait_for()
        page.get_by_role("button", name="Regenerate").click()
        page.get_by_role("button", name="Regenerate").wait_for()
        assert page.locator(".tokens").text_content() == made.choices[0].text

        # On a telephone, by keyboard alone.
        page.set_viewport_size({"width": 390, "height": 780})
        page.emulate_media(color_scheme="dark")
        page.get_by_role("button", name="Cluster", exact=True).press("Enter")
        page.get_by_role("group", name="Experts held").focus()
        page.keyboard.press("ArrowRight")
        page.locator(".tip", has_text=f"{SERVERS[0]}, layer 1").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert said == []
