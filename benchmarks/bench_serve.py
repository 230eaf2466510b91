"""What users of served clusters see: time per token by method, and throughput by streams.

    python benchmarks/bench_serve.py --output serve.json

Every server is a process of its own with its real share of the model, real sockets and HTTP; only
the links are emulated, as the cluster file has them. Computing takes what it takes on this machine,
which all servers share: the smaller the emulated share of the time, the less the methods differ.
Ratios are of one run on one machine. The methods are compared on `testbed10`, one stream after the
other from servers as users are spread; throughput is measured on `local4`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trimmoe
from forked import forked
from trimmoe.api.app import create_app
from trimmoe.core.artifact import written_whole
from trimmoe.core.choice import Choice
from trimmoe.experiments.compare import CompareSettings, access_servers, compare
from trimmoe.experiments.method_engines import plan_for
from trimmoe.experiments.methods import find_method, served
from trimmoe.experiments.preparation import prepare
from trimmoe.experiments.sample_text import sample_text
from trimmoe.experiments.serve_bench import Load, Sent, run_load
from trimmoe.models.load import load_tokenizer, open_model
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.job import Pieces
from trimmoe.runtime.launch.model import model_folder
from trimmoe.runtime.launch.nodes import real_node
from trimmoe.runtime.launch.server import NodeParts, RunningNode
from trimmoe.runtime.node.node import Node
from trimmoe.runtime.node.settings import NodeSettings

CLUSTERS = Path(__file__).parents[1] / "clusters"
METHODS = ("exact-home", "pipeline", "substitute-only", "trimmoe")
GOALS = {"exact-home": 0.6, "pipeline": 0.85}
"""What TrimMoE's time per token may be of these."""
STREAMS = (1, 8, 32)
SPEED_UP = 6.0
"""What 32 streams are to give, in tokens of one."""
CONFIDENCE = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--profile", type=Path, help="else made and kept, as by `trimmoe serve`")
    parser.add_argument("--parts", nargs="+", default=["methods", "streams"])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--stream-methods", nargs="+", default=["trimmoe"])
    parser.add_argument("--streams", nargs="+", type=int, default=STREAMS)
    parser.add_argument("--requests", type=int, default=6, help="per method")
    parser.add_argument("--tokens", type=int, default=17, help="per answer")
    parser.add_argument("--stream-tokens", type=int, default=48, help="per answer, of streams")
    parser.add_argument("--budget", type=float, default=0.02)
    parser.add_argument("--flip-passages", type=int, default=12, help="0: flips are not measured")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    content: dict[str, Any] = {
        "benchmark": "serve",
        "trimmoe_version": trimmoe.__version__,
        "machine": platform.platform(),
        "processors": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "budget": arguments.budget,
    }
    if "methods" in arguments.parts:
        content |= compared(arguments)
    if "streams" in arguments.parts:
        made = artifacts(arguments, "local4.yaml")
        content["streams"] = [
            throughput(arguments, made, name) for name in arguments.stream_methods
        ]
    if arguments.output:
        with written_whole(arguments.output) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")


def compared(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time per token and traffic of each method on testbed10, and TrimMoE's against the others'."""
    made = artifacts(arguments, "testbed10.yaml")
    share = access_servers(made.plan, arguments.requests, seed=0).tolist()
    prompts = texts(arguments.requests)
    rows = {name: method_row(arguments, made, name, share, prompts) for name in arguments.methods}
    flips: dict[str, float] = {}
    if arguments.flip_passages:
        flips = measured_flips(arguments, made)
        print(f"flips, as `trimmoe compare` measures them: {flips}", flush=True)
    ratios = {}
    for name, goal in GOALS.items():
        if {name, "trimmoe"} <= rows.keys():
            ratios[name] = rows["trimmoe"]["mean_ms"] / rows[name]["mean_ms"]
            print(f"trimmoe / {name}: {ratios[name]:.2f} (goal {goal})", flush=True)
    return {"methods": list(rows.values()), "trimmoe_ratios": ratios, "flip_rate": flips}


def method_row(
    arguments: argparse.Namespace,
    made: Artifacts,
    name: str,
    access: Sequence[int],
    prompts: Sequence[str],
) -> dict[str, Any]:
    """One method's servers, asked one request after the other."""
    method = find_method(name)
    policy = served(Choice(method=name, budget=arguments.budget, confidence=CONFIDENCE))
    plan = plan_for(method, made.plan, made.profile, made.model)
    pieces = Pieces(policy=policy, app=partial(create_app), node=this_machines_node)
    with forked(arguments.model, made.profile, plan, made.model, pieces, emulate=True) as urls:
        warm_up([urls[server] for server in sorted(set(access))], prompts[0])
        sent = [
            asyncio.run(asked(urls[server], [prompt], 1, arguments.tokens))[0][0]
            for server, prompt in zip(access, prompts, strict=True)
        ]
    row = {"method": name, "title": method.title, **client_figures(sent)}
    print(
        f"{name}: {row['mean_ms']:.0f} ms per token (p99 {row['p99_ms']:.0f}), of which expected "
        f"on the links {row['expected_ms']:.1f} ({row['expected_share']:.0%}); "
        f"{row['hops']:.1f} vectors, {row['bytes'] / 1e3:.1f} kB per token",
        flush=True,
    )
    return row


def client_figures(sent: Sequence[Sent]) -> dict[str, Any]:
    """By decoded token; the first one of each answer comes from its prompt."""
    gaps_ms = 1e3 * np.concatenate([one.itl_s for one in sent])
    total = {
        key: sum(one.usage["trimmoe"][key] for one in sent)
        for key in ("expected_delay_s", "hops", "bytes", "budget_spent", "budget_credited")
    }
    expected_ms = 1e3 * total["expected_delay_s"] / gaps_ms.size
    return {
        "tokens": int(gaps_ms.size),
        "mean_ms": float(gaps_ms.mean()),
        "p50_ms": float(np.quantile(gaps_ms, 0.5)),
        "p99_ms": float(np.quantile(gaps_ms, 0.99)),
        "expected_ms": expected_ms,
        "expected_share": expected_ms / float(gaps_ms.mean()),
        "hops": total["hops"] / gaps_ms.size,
        "bytes": total["bytes"] / gaps_ms.size,
        "budget_spent": total["budget_spent"] / gaps_ms.size,
        "budget_credited": total["budget_credited"] / gaps_ms.size,
    }


def measured_flips(arguments: argparse.Namespace, made: Artifacts) -> dict[str, float]:
    """Flip rates of the methods that trade quality, on held-out text."""
    path = model_folder(arguments.model)
    view = open_model(path, dtype=torch.float32, hashed=True)
    ids = load_tokenizer(path)(sample_text("held-out"), verbose=False)["input_ids"]
    settings = CompareSettings(
        methods=tuple(name for name in arguments.methods if name in ("trimmoe", "substitute-only")),
        budgets=(arguments.budget,),
        confidence=CONFIDENCE,
        passages=arguments.flip_passages,
    )
    _, outcomes = compare(view, made.profile, made.plan, ids, settings)
    return {one.name: one.score.flips / one.score.tokens for one in outcomes}


def throughput(arguments: argparse.Namespace, made: Artifacts, name: str) -> dict[str, Any]:
    """Tokens per second of so many streams on local4, spread over its servers."""
    policy = served(Choice(method=name, budget=arguments.budget, confidence=CONFIDENCE))
    print(f"{name}:", flush=True)
    pieces = Pieces(policy=policy, app=partial(create_app), node=this_machines_node)
    rows = []
    with forked(
        arguments.model, made.profile, made.plan, made.model, pieces,
        emulate=True, kv_slots=max(arguments.streams) + 8,
    ) as urls:  # fmt: skip
        warm_up(urls, texts(1)[0])
        for streams in arguments.streams:
            rows.append(streams_row(arguments, urls, streams))
    ratios = {key: rows[-1][key] / rows[0][key] for key in ("tokens_per_s", "decoded_per_s")}
    print(
        f"{rows[-1]['streams']} streams / {rows[0]['streams']}: {ratios['tokens_per_s']:.1f} with "
        f"prompts, {ratios['decoded_per_s']:.1f} while decoding (goal {SPEED_UP})",
        flush=True,
    )
    return {"method": name, "rows": rows, "speed_up": ratios}


def streams_row(arguments: argparse.Namespace, urls: Sequence[str], streams: int) -> dict[str, Any]:
    """Two requests per stream, at least four."""
    count = max(2 * streams, 4)
    sent, duration_s = asyncio.run(spread(urls, texts(count), streams, arguments.stream_tokens))
    tokens = sum(one.output_tokens for one in sent)
    gaps_ms = 1e3 * np.concatenate([one.itl_s for one in sent])
    row = {
        "streams": streams,
        "requests": count,
        "tokens_per_s": tokens / duration_s,
        "decoded_per_s": streams * 1e3 / float(gaps_ms.mean()),
        "mean_ms": float(gaps_ms.mean()),
        "p99_ms": float(np.quantile(gaps_ms, 0.99)),
    }
    print(
        f"{streams} streams: {row['tokens_per_s']:.1f} tokens/s with prompts, "
        f"{row['mean_ms']:.0f} ms per token (p99 {row['p99_ms']:.0f})",
        flush=True,
    )
    return row


async def spread(
    urls: Sequence[str], prompts: Sequence[str], streams: int, tokens: int
) -> tuple[list[Sent], float]:
    """`streams` requests at a time over all servers, evenly where there are as many."""
    users = min(streams, len(urls))
    began_s = asyncio.get_running_loop().time()
    parts = await asyncio.gather(
        *(
            asked(urls[user], prompts[user::users], streams // users, tokens)
            for user in range(users)
        )
    )
    duration_s = asyncio.get_running_loop().time() - began_s
    return [one for sent, _ in parts for one in sent], duration_s


async def asked(
    url: str, prompts: Sequence[str], streams: int, tokens: int
) -> tuple[list[Sent], float]:
    """Answers of a server, and how long they took in seconds."""
    load = Load(
        base_url=url.removesuffix("/v1"),
        endpoint="/v1/completions",
        model="embedded",
        prompts=tuple(prompts),
        output_tokens=tokens,
        max_concurrency=streams,
        ignore_eos=True,
    )
    sent, duration_s = await run_load(load)
    failed = [one.error for one in sent if one.error]
    assert not failed, failed[0]
    return sent, duration_s


def warm_up(urls: Sequence[str], prompt: str) -> None:
    """One short answer from each of these servers."""
    for url in urls:
        asyncio.run(asked(url, [prompt], 1, 3))


def artifacts(arguments: argparse.Namespace, cluster: str) -> Artifacts:
    """Profile and plan, as `trimmoe serve` finds or makes them."""
    config = ServeConfig(
        cluster=CLUSTERS / cluster, model=arguments.model, profile=arguments.profile
    )
    return prepare(config, sample=partial(sample_text, "calibration"), say=print)


def texts(count: int) -> list[str]:
    """Beginnings of held-out paragraphs, some twenty words each."""
    paragraphs = sample_text("held-out").split("\n\n")
    return [" ".join(one.split()[:20]) for one in paragraphs[:: len(paragraphs) // count][:count]]


def make_node(parts: NodeParts) -> RunningNode:
    """A real node that computes as fast as this machine does, and knows its links from the cluster
    file: measuring them where processes outnumber cores would measure the scheduler."""
    spec = parts.spec
    settings = NodeSettings(
        server=spec.index,
        kv_slots=spec.kv_slots,
        max_waiting=spec.max_waiting,
        # Every round asks the same again.
        prefix_cache=False,
        seed=spec.index,
        measures=False,
    )
    return Node(
        view=parts.view,
        profile=spec.profile,
        plan=spec.plan,
        policy=spec.policy,
        transport=parts.transport,
        settings=settings,
        model=parts.model,
    )


this_machines_node = replace(real_node, make=make_node)

if __name__ == "__main__":
    main()
