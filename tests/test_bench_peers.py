"""What the comparison with other systems rests on: its ratios, and the links it gives them."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from launching import free_ports

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_peers", BENCHMARKS / "bench_peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_peers"] = module
    spec.loader.exec_module(module)
    return module


def test_a_ratio_is_one_of_means_with_the_extremes_of_pairs(bench: ModuleType) -> None:
    assert bench._ratios([10.0, 30.0], [20.0, 20.0]) == {
        "ratio": 1.0,
        "lowest": 0.5,
        "highest": 1.5,
    }
    assert bench._ratios([], []) is None


def test_every_goal_is_measured(bench: ModuleType) -> None:
    assert len({case.name for case in bench.CASES}) == len(bench.CASES)
    assert {case.servers for case in bench.CASES} == {1, 4}


async def test_a_proxy_delays_both_ways() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    target = free_ports(2)
    listen = target + 1
    server = await asyncio.start_server(echo, "127.0.0.1", target)
    proxy = await asyncio.create_subprocess_exec(
        sys.executable, str(BENCHMARKS / "delay_proxy.py"), str(listen), str(target), "30"
    )
    try:
        reader, writer = await _connected(listen)
        began_s = time.perf_counter()
        writer.write(b"there and back")
        assert await reader.readexactly(14) == b"there and back"
        assert time.perf_counter() - began_s >= 0.06
        writer.close()
    finally:
        proxy.terminate()
        await proxy.wait()
        server.close()


async def _connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(200):
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.05)
    raise AssertionError("the proxy does not listen")
