"""What the interpreter adds to the kernels, per layer and token of one stream.

    PYTHONPATH=tests python benchmarks/bench_interpreter.py --profile P --plan P [--output FILE]

The servers of a plan run in one process over a network in memory, so that nothing but our own code
comes on top of the compiled kernels, whose time is taken where they are called. The processor's
caches are warmer than those of servers by themselves, where the same code takes up to twice as
long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nodes import Servers, request
from trimmoe import __version__
from trimmoe.core.artifact import file_hash, written_whole
from trimmoe.core.plan import load_plan
from trimmoe.core.precision import Precision
from trimmoe.core.profile import load_profile
from trimmoe.models.base import MoEView
from trimmoe.models.compiled import calls
from trimmoe.models.compiled import view as compiled
from trimmoe.models.embedded import ensure_embedded_model
from trimmoe.models.load import open_model
from trimmoe.policy.presets import PRESETS
from trimmoe.runtime.service import ServedModel

KERNELS = (
    "segment", "home_segment", "finish", "routed", "dense", "attend", "read", "route", "norm",
    "multiply", "gathered", "behind", "dense_block", "leave",
)  # fmt: skip
PROMPT = tuple(range(300, 310))
WARM_UP = 24


class Clock:
    """Adds up what kernels take."""

    def __init__(self) -> None:
        self.kernels_s = 0.0

    def timed(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began_s = time.perf_counter()
            result = kernel(*arguments)
            self.kernels_s += time.perf_counter() - began_s
            return result

        return run

    def install(self) -> None:
        """Time the kernels where the view calls them."""
        shown = {name: getattr(calls, name) for name in dir(calls)}
        for name in KERNELS:
            shown[name] = self.timed(shown[name])
        compiled.calls = SimpleNamespace(**shown)  # pyright: ignore[reportAttributeAccessIssue]


class OneProcess(Servers):
    """Servers of the embedded model."""

    precision = Precision.NONE

    def view(self, server: int) -> MoEView:
        if server not in self.views:
            hosts = self.plan.hosts[server]
            held = {layer: np.flatnonzero(here).tolist() for layer, here in enumerate(hosts)}
            self.views[server] = open_model(
                self.tiny.folder, experts=held, dtype=torch.float32, quantise=self.precision
            )
        return self.views[server]


async def measure(arguments: argparse.Namespace, clock: Clock) -> tuple[list[float], list[float]]:
    """Milliseconds of each token, whole and outside kernels."""
    torch.set_num_threads(1)
    folder = ensure_embedded_model()
    model = ServedModel(
        id="embedded", tokenizer=None, context_length=2048, vocab_size=49152, created=0
    )
    servers = OneProcess(
        tiny=SimpleNamespace(folder=folder, model=lambda: model),  # pyright: ignore[reportArgumentType]
        profile=load_profile(arguments.profile),
        plan=load_plan(arguments.plan),
        policy=PRESETS[arguments.policy](),
        settings={"measures": False, "report_every_s": 5.0},
    )
    servers.precision = Precision(arguments.quantise)
    count = len(servers.names)
    for server in range(count):
        await servers.connect(server)
    for transport in servers.transports.values():
        await transport.wait_up(*(set(servers.names) - {transport.name}))
    for server in range(count):
        await servers.start(server)
    came: list[tuple[float, float]] = []
    asked = request(PROMPT, WARM_UP + arguments.tokens)
    async for _ in servers.nodes[0].service.submit(asked):
        came.append((time.perf_counter(), clock.kernels_s))
    for node in servers.nodes.values():
        await node.close()
    for transport in servers.transports.values():
        await transport.close()
    between = np.diff(np.array(came[WARM_UP:]), axis=0) * 1e3
    return between[:, 0].tolist(), (between[:, 0] - between[:, 1]).tolist()


def main() -> None:
    """Measure once and say it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--policy", default="exact")
    parser.add_argument("--quantise", default="int8", choices=[each.value for each in Precision])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    clock = Clock()
    clock.install()
    whole_ms, outside_ms = asyncio.run(measure(arguments, clock))
    layers = load_profile(arguments.profile).layer_count
    median_us = float(np.median(outside_ms)) / layers * 1e3
    print(
        f"a token: {np.median(whole_ms):.2f} ms, outside kernels {np.median(outside_ms):.2f} ms, "
        f"{median_us:.0f} us per layer (medians)"
    )
    if arguments.output is not None:
        content = {
            "version": __version__,
            "configuration": {
                "policy": arguments.policy,
                "quantise": arguments.quantise,
                "cores": os.cpu_count(),
            },
            "seed": None,
            "inputs": {path.name: file_hash(path) for path in (arguments.profile, arguments.plan)},
            "token_ms": whole_ms,
            "outside_kernels_ms": outside_ms,
            "per_layer_us": median_us,
        }
        with written_whole(arguments.output) as temporary:
            temporary.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
