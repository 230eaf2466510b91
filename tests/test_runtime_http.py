"""A server that another one takes the place of."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from trimmoe.runtime import http
from trimmoe.runtime.http import HttpServer
from trimmoe.runtime.launch.addresses import listener
from wires import soon, until

QUESTION = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"


async def answers(scope: Any, receive: Any, send: Any) -> None:
    """An app that says yes."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"yes"})


@pytest.mark.parametrize("drains", [True, False])
async def test_who_has_just_connected_is_heard_before_another_server_takes_over(
    monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    monkeypatch.setattr(http, "HEARD_S", 0.3)
    service: Any = SimpleNamespace(leave=lambda: None)
    config = uvicorn.Config(answers, lifespan="off", log_config=None)
    server = HttpServer(config, service)
    with listener("127.0.0.1", 0) as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        await until(lambda: server.started)
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        await until(lambda: len(server.server_state.connections) == 1)
        server.should_exit, server.drains = True, drains
        await asyncio.sleep(0.2)
        writer.write(QUESTION)
        said = await soon(reader.read())
        writer.close()
        await soon(serving)
    assert (b"200 OK" in said and b"yes" in said) == drains
