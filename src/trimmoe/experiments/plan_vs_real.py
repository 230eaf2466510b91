"""`trimmoe experiment plan-vs-real`: what a plan promises beside what a client's clock shows.

Every method is served by real processes, loaded at several numbers of streams, and simulated under
the same load from what was measured of the machines. Nothing is slowed down but links that the
cluster file says are slower than this machine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

import trimmoe
from trimmoe.calibrate.trace import asked_of
from trimmoe.core.errors import UserError
from trimmoe.core.trace import Trace
from trimmoe.experiments.compare import access_servers
from trimmoe.experiments.methods import find_method, replayed
from trimmoe.experiments.overheads import expected_exact_s
from trimmoe.experiments.sample_text import sample_file
from trimmoe.experiments.serve_bench import Sent, run_load
from trimmoe.experiments.serve_methods import one_server, serving
from trimmoe.experiments.serve_prompts import token_prompts
from trimmoe.experiments.simulation import simulate_methods
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.simulator import settings as simulated
from trimmoe.simulator.arrivals import Source

MEAN_WITHIN, TAIL_WITHIN = 0.15, 0.25
"""How far expectations may be from the mean and the 99th percentile that are measured."""
SEEDS = (0, 1, 2)
_MS = 1e3
_WARM_TOKENS = 8
_LONGEST_S = 600.0
"""That a run takes in the simulator; what is over sooner costs nothing."""
FEWEST_ROUNDS = 3
"""Requests of each stream at least, so that most of them meet as many others as it says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What every method is asked."""

    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int
    streams: tuple[int, ...]
    """Requests under way at a time in the whole cluster, one run each."""
    requests: int
    """Of a run at least."""
    recorded: bool = False
    """Whether the prompts are those of the trace's sequences, in their order: the simulator plays
    the very answers that servers give."""
    seed: int = 0
    rounds: int = 1
    """Runs of each method, in turns there and back, so that a machine that is slower for a while is
    so for all of them."""

    def count(self, streams: int) -> int:
        """Requests of a run with so many streams."""
        return max(self.requests, FEWEST_ROUNDS * streams)


def ask(
    trace: Trace, tokenizer: Any, *, prompt_tokens: int, output_tokens: int, seed: int, **run: Any
) -> Asked:
    """What the answers of a trace were recorded of where it holds as long ones to held-out prose,
    else random passages of that; `run` is what else there is to say. Raises `UserError`."""
    text = sample_file("held-out")
    found = asked_of(trace, tokenizer, [text])
    answers = trace.header.settings.get("answers", 0)
    recorded = found is not None and found.shape[1] == prompt_tokens and output_tokens <= answers
    if found is not None and recorded:
        prompts = tuple(map(tuple, found.tolist()))
    else:
        ids = tokenizer(text, verbose=False)["input_ids"]
        prompts = token_prompts(ids, run["requests"], prompt_tokens, seed=seed)
    return Asked(prompts=prompts, recorded=recorded, output_tokens=output_tokens, seed=seed, **run)


def plan_vs_real(
    methods: Sequence[str],
    config: ServeConfig,
    artifacts: Artifacts,
    trace: Trace,
    asked: Asked,
    *,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Serve, load and simulate every method; raises `UserError` if the machines were not measured.

    `config` names the files that `artifacts` were read from.
    """
    if artifacts.plan.cluster.speeds is None:
        raise UserError("Nothing was measured of these machines; run `trimmoe probe` first.")
    for name in methods:
        replayed(replace(config.choice, method=name))
    sent: dict[tuple[str, int], list[Sent]] = {
        (name, streams): [] for name in methods for streams in asked.streams
    }
    for name in turns(methods, asked.rounds):
        say(f"{find_method(name).title} ...")
        measured = _measured(name, config, artifacts, asked)
        for streams, found in zip(asked.streams, measured, strict=True):
            sent[name, streams] += found
    rows = [
        _row(name, streams, found, config, artifacts, trace, asked)
        for (name, streams), found in sent.items()
    ]
    return {
        "trimmoe_version": trimmoe.__version__,
        "configuration": {
            **config.model_dump(mode="json", exclude={"api_keys"}),
            "requests": asked.requests,
            "prompt_tokens": len(asked.prompts[0]),
            "recorded": asked.recorded,
            "output_tokens": asked.output_tokens,
            "rounds": asked.rounds,
        },
        "seed": asked.seed,
        "input_hashes": {
            "model": artifacts.profile.model_hash,
            "profile": artifacts.profile.hash,
            "plan": artifacts.plan.hash,
            "trace": trace.hash,
        },
        "cluster": artifacts.plan.cluster.name,
        "rows": rows,
    }


def turns(methods: Sequence[str], rounds: int) -> list[str]:
    """So many of each, every other round backwards."""
    there, back = list(methods), list(reversed(methods))
    return [name for at in range(rounds) for name in (back if at % 2 else there)]


def _measured(
    name: str, config: ServeConfig, artifacts: Artifacts, asked: Asked
) -> list[list[Sent]]:
    """What became of the requests, by number of streams."""
    with serving(name, config, artifacts.plan.cluster.server_names) as urls:
        return [asyncio.run(_loaded(urls, artifacts, asked, streams)) for streams in asked.streams]


async def _loaded(
    urls: Sequence[str], artifacts: Artifacts, asked: Asked, streams: int
) -> list[Sent]:
    """Prompts at their users' servers, so many at a time, after one at each that does not count."""
    count = asked.count(streams)
    prompts = [asked.prompts[at % len(asked.prompts)] for at in range(count)]
    users = access_servers(artifacts.plan, count, asked.seed).tolist()
    for url in urls:
        await run_load(one_server(url, asked.prompts[:1], _WARM_TOKENS, 1))
    gate = asyncio.Semaphore(streams)

    async def ask(server: int, prompt: tuple[int, ...]) -> Sent:
        async with gate:
            (sent,), _ = await run_load(one_server(urls[server], (prompt,), asked.output_tokens, 1))
            return sent

    pairs = zip(users, prompts, strict=True)
    return list(await asyncio.gather(*(ask(server, prompt) for server, prompt in pairs)))


def _row(
    name: str,
    streams: int,
    sent: Sequence[Sent],
    config: ServeConfig,
    artifacts: Artifacts,
    trace: Trace,
    asked: Asked,
) -> dict[str, Any]:
    """One method with so many streams, in milliseconds a token: measured, simulated, and what the
    cost model says of exact execution without load."""
    failed = [one.error for one in sent if one.error is not None]
    if failed:
        raise UserError(f"{find_method(name).title} failed on real servers: {failed[0]}")
    gaps_ms = np.concatenate([np.array(one.token_gaps_s) for one in sent]) * _MS
    paces_ms = np.array([one.tpot_s for one in sent if one.tpot_s is not None]) * _MS
    simulated_ms = _simulated_ms(name, streams, config, artifacts, trace, asked)
    row = {
        "method": name,
        "streams": streams,
        "measured_mean_ms": float(paces_ms.mean()),
        "measured_p99_ms": float(np.quantile(gaps_ms, 0.99)),
        "measured_tokens_per_s": _tokens_per_s(streams, sent),
        "measured_error_ms": float(paces_ms.std(ddof=1) / np.sqrt(paces_ms.size)),
        "simulated_mean_ms": float(simulated_ms.mean()),
        "simulated_p99_ms": float(np.quantile(simulated_ms, 0.99)),
    }
    if name == "exact" and streams == 1:
        share = artifacts.plan.cluster.access_share
        exact_s = float(share @ expected_exact_s(artifacts.plan, artifacts))
        row["expected_mean_ms"] = exact_s * _MS
    mean, tail = (
        row[f"simulated_{each}_ms"] / row[f"measured_{each}_ms"] for each in ("mean", "p99")
    )
    return row | {
        "mean_ratio": mean,
        "p99_ratio": tail,
        "holds": abs(mean - 1) <= MEAN_WITHIN and abs(tail - 1) <= TAIL_WITHIN,
    }


def _tokens_per_s(streams: int, sent: Sequence[Sent]) -> float:
    """Of all streams together, prompts included, while each has a request under way."""
    return streams * sum(one.output_tokens for one in sent) / sum(one.e2el_s for one in sent)


def _simulated_ms(
    name: str, streams: int, config: ServeConfig, artifacts: Artifacts, trace: Trace, asked: Asked
) -> np.ndarray:
    """Times of decoded tokens, from one that a user is shown to the next, [n]."""
    load = simulated.Load(
        concurrency=streams,
        prompt_tokens=float(len(asked.prompts[0])),
        output_tokens=float(asked.output_tokens),
        fixed_lengths=True,
    )
    settings = simulated.SimulationSettings(
        load=load,
        budget=config.choice.allowed,
        confidence=config.confidence,
        # All of them count, as they do by the clock: streams begin together.
        warm_up_s=0.0,
        duration_s=_LONGEST_S,
        seeds=SEEDS,
    )
    share = artifacts.plan.cluster.access_share
    sizes = {"sequences": trace.sequence_count, "length": trace.length}
    count = asked.count(streams)
    drawn = Source(load, share, **sizes, seed=asked.seed).draw(count)
    requests = replace(
        drawn,
        sequence=np.arange(count) % len(asked.prompts) if asked.recorded else drawn.sequence,
        access=access_servers(artifacts.plan, count, asked.seed),
        # Where answers were recorded they are behind what was asked.
        offset=np.zeros(count, dtype=np.int64),
    )
    (found,) = simulate_methods(
        artifacts.plan,
        artifacts.profile,
        artifacts.model,
        trace,
        [name],
        settings,
        requests=requests,
    )
    return np.concatenate([one.token_s for one in found.samples]) * _MS


def ranks_alike(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether methods of which the measured intervals do not overlap are in the same order in the
    simulator, at each number of streams."""
    for a in rows:
        for b in rows:
            margin = 1.96 * (a["measured_error_ms"] + b["measured_error_ms"])
            faster = a["measured_mean_ms"] + margin < b["measured_mean_ms"]
            same = a["streams"] == b["streams"]
            if same and faster and a["simulated_mean_ms"] > b["simulated_mean_ms"]:
                return False
    return True


def plan_vs_real_table(content: dict[str, Any]) -> Table:
    """One line per method and number of streams."""
    table = Table(
        title=f"Plan and reality on {content['cluster']}, ms per token",
        caption="measured: a client's clock on real processes; ratio: simulated over measured",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("method", no_wrap=True)
    headings = (
        "streams", "measured", "p99", "tok/s", "simulated", "p99", "ratio", "p99 ratio", "",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in content["rows"]:
        cells = [
            row[f"{side}_{each}_ms"]
            for side in ("measured", "simulated")
            for each in ("mean", "p99")
        ]
        table.add_row(
            row["method"],
            str(row["streams"]),
            *(f"{cell:.1f}" for cell in cells[:2]),
            f"{row['measured_tokens_per_s']:.0f}",
            *(f"{cell:.1f}" for cell in cells[2:]),
            f"{row['mean_ratio']:.2f}",
            f"{row['p99_ratio']:.2f}",
            "holds" if row["holds"] else "off",
        )
    return table
