"""One server from its description: its own part of the model, its links, its port, its end."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from launching import Files, answers, free_ports, write_files
from standin import ECHO
from test_tls import pem
from trimmoe.api.app import create_app
from trimmoe.core.errors import UserError
from trimmoe.core.plan import load_plan
from trimmoe.core.precision import Precision
from trimmoe.core.profile import load_profile
from trimmoe.models.load import model_spec
from trimmoe.policy.presets import exact
from trimmoe.runtime.launch import process
from trimmoe.runtime.launch.addresses import endpoints
from trimmoe.runtime.launch.emulated import SlowSelector
from trimmoe.runtime.launch.nodes import real_node
from trimmoe.runtime.launch.process import ServerProcess
from trimmoe.runtime.launch.server import Orders, ServerSpec, Started, open_own_part, run_server
from trimmoe.runtime.launch.status import Phase
from trimmoe.runtime.launch.tls import trusted
from trimmoe.runtime.wire.keys import generate_token

NAMES = ("desk", "attic")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"), NAMES)


@pytest.fixture
def specs(files: Files) -> list[ServerSpec]:
    """Two servers that serve a stand-in."""
    port = free_ports(20)
    where = endpoints(
        NAMES,
        dict.fromkeys(NAMES, "127.0.0.1"),
        http_host=None,
        port_base=port,
        wire_port_base=port + 10,
    )
    one = ServerSpec(
        index=0,
        endpoints=where,
        model=str(files.model),
        served_name="tiny",
        device="cpu",
        dtype="float32",
        profile=load_profile(files.profile),
        plan=load_plan(files.plan),
        policy=exact(),
        maker=None,
        title="exact",
        kv_slots=4,
        max_waiting=4,
        patience_s=60.0,
        quantise=Precision.NONE,
        threads=None,
        emulate_links=True,
        emulate_machines=True,
        encrypt=False,
        app=partial(create_app),
        node=ECHO,
    )
    return [one, replace(one, index=1)]


def test_a_server_reads_its_own_experts_and_what_all_hold(files: Files) -> None:
    plan, whole = load_plan(files.plan), model_spec(files.model, hashed=True)
    read = []
    for index in range(len(NAMES)):
        spec = ServerSpec(
            index=index, endpoints=(), model="", served_name="", device="cpu", dtype="float32",
            profile=load_profile(files.profile), plan=plan, policy=exact(), kv_slots=1,
            maker=None, title="exact",
            max_waiting=0, patience_s=60.0, quantise=Precision.NONE, threads=1, emulate_links=False,
            emulate_machines=False, encrypt=False, app=create_app, node=ECHO,
        )  # fmt: skip
        view = open_own_part(spec, str(files.model))
        held = [set(np.flatnonzero(row).tolist()) for row in plan.hosts[index]]
        assert [set(layer) for layer in view.loaded] == held
        assert view.bytes_read.experts == whole.expert_bytes[plan.hosts[index]].sum()
        assert view.bytes_read.dense == whole.dense_bytes
        read.append(view.bytes_read.experts)
    assert max(read) < whole.total_expert_bytes, "no server reads all experts"


async def _serving(
    specs: list[ServerSpec], orders: Orders
) -> tuple[list[asyncio.Task[None]], list[Started]]:
    """Servers in this loop, once all are started."""
    started: list[Started] = []
    tasks = [asyncio.create_task(run_server(spec, orders, started.append)) for spec in specs]
    while len(started) < len(specs):
        assert not any(task.done() for task in tasks), [task.result() for task in tasks]
        await asyncio.sleep(0.01)
    return tasks, started


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("node", [ECHO, real_node], ids=["echo", "node"])
async def test_servers_meet_answer_and_give_their_ports_back(
    specs: list[ServerSpec], encrypt: bool, node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMMOE_TOKEN", generate_token())
    specs = [replace(spec, encrypt=encrypt, node=node) for spec in specs]
    orders = Orders()
    tasks, started = await _serving(specs, orders)
    for each in started:
        await asyncio.wait_for(each.transport.wait_up(*(set(NAMES) - {each.transport.name})), 60)
    ports = [spec.endpoint.http_port for spec in specs]
    assert [await asyncio.to_thread(answers, port) for port in ports] == [200, 200]
    orders.stop.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    for spec in specs:
        for port in (spec.endpoint.http_port, spec.endpoint.wire_port):
            socket.create_server(("127.0.0.1", port)).close()


async def test_a_server_with_a_certificate_answers_https_only(
    specs: list[ServerSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimmoe.runtime.launch.server._MEETING_S", 0.0)
    files, orders = pem(tmp_path), Orders()
    endpoint = replace(specs[0].endpoint, tls=True)
    spec = replace(specs[0], endpoints=(endpoint, specs[1].endpoint), tls=files.tls)
    tasks, _ = await _serving([spec], orders)
    async with httpx.AsyncClient(verify=trusted(files.authority)) as client:
        got = await client.get(f"{endpoint.url}/models")
        assert got.json()["data"][0]["id"] == "tiny"
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(f"{endpoint.url}/models".replace("https", "http"))
    orders.stop.set()
    await asyncio.gather(*tasks)


async def test_another_token_is_another_cluster(
    specs: list[ServerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimmoe.runtime.launch.server._MEETING_S", 0.2)
    orders, all_started = Orders(), []
    tasks = []
    for spec in specs:
        monkeypatch.setenv("TRIMMOE_TOKEN", generate_token())
        made, started = await _serving([replace(spec, encrypt=True)], orders)
        tasks += made
        all_started += started
    end_s = time.monotonic() + 60
    while not any(each.transport.counters.dropped for each in all_started):
        assert time.monotonic() < end_s, "nobody was refused"
        await asyncio.sleep(0.01)
    assert all(each.transport.peers_up() == frozenset() for each in all_started)
    orders.stop.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": "0.0.0"}, "TrimMoE 0.0.0 was to run here and was replaced"),
        ({"encrypt": True}, "no cluster token"),
        ({"model": "/nowhere"}, "There is no directory /nowhere"),
    ],
)
async def test_what_the_operator_can_mend_is_a_sentence(
    specs: list[ServerSpec], change: dict, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRIMMOE_TOKEN", raising=False)
    with pytest.raises(UserError, match=sentence):
        await run_server(replace(specs[0], **change), Orders(), lambda _: None)


async def test_a_port_taken_meanwhile_is_a_sentence(
    specs: list[ServerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimmoe.runtime.launch.server._MEETING_S", 0.0)
    port = specs[0].endpoint.http_port
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(UserError, match=f"desk cannot listen on 127.0.0.1, port {port}"),
    ):
        await run_server(specs[0], Orders(), lambda _: None)


def test_the_slower_machine_computes_slower(specs: list[ServerSpec]) -> None:
    speed = specs[0].plan.cluster.flops_per_s
    assert [spec.slowdown for spec in specs] == [1.0, speed[0] / speed[1]]
    assert replace(specs[1], emulate_machines=False).slowdown == 1.0


def test_what_a_loop_does_takes_a_slower_machine_longer() -> None:
    """It rests before it waits, and waits for that much less."""
    worked_s = iter([1.0, 1.5, 2.0])  # after waiting, before, and after again
    rested_s: list[float] = []
    with SlowSelector(lambda: next(worked_s), rested_s.append) as selector:
        selector.slowdown = 3.0
        selector.select(0.0)
        selector.select(1.0)  # else this test would take a second
    assert rested_s == [1.0], "half a second of work takes one and a half"


async def test_a_slower_loop_keeps_its_times() -> None:
    """Callbacks come in their order, none before its time."""
    selector = SlowSelector()
    selector.slowdown = 4.0
    loop = asyncio.SelectorEventLoop(selector)

    async def waits() -> list[tuple[str, bool]]:
        came: list[tuple[str, bool]] = []
        began_s = loop.time()
        for name, at_s in (("late", 0.02), ("soon", 0.01)):
            loop.call_at(
                began_s + at_s,
                lambda name=name, at_s=at_s: came.append((name, loop.time() - began_s >= at_s)),
            )
        await asyncio.sleep(0.05)
        return came

    assert await asyncio.to_thread(lambda: loop.run_until_complete(waits())) == [
        ("soon", True),
        ("late", True),
    ]
    loop.close()


def test_a_process_tells_how_it_is(
    specs: list[ServerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimmoe.runtime.launch.server._MEETING_S", 0.0)
    threads = torch.get_num_threads()
    served = ServerProcess(specs[0])
    try:
        while (status := served.status()).phase is Phase.STARTING:
            time.sleep(0.01)
        assert status.phase is Phase.SERVING
        assert (status.healthy, status.reason) == (False, "waits for attic")
        assert status.dense_bytes > 0
        assert status.expert_bytes > 0
    finally:
        served.stop(60.0)
        torch.set_num_threads(threads)
    assert served.status().phase is Phase.STOPPED


def test_a_process_that_failed_says_why_and_where_to_look(
    specs: list[ServerSpec], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("TRIMMOE_CACHE", str(tmp_path))

    async def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(process, "run_server", broken)
    served = ServerProcess(specs[0])
    while (status := served.status()).phase is Phase.STARTING:
        time.sleep(0.01)
    port = specs[0].endpoint.http_port
    assert status.phase is Phase.FAILED
    assert status.error == (
        f"desk failed (RuntimeError: a defect); see {tmp_path}/logs/desk-{port}.log."
    )
