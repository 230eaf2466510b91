"""How many token-layers a second the simulator plays, with queues and without.

    python benchmarks/bench_simulator.py --output simulator.json

A generated model of Mixtral's geometry, planned on the ten-server testbed, under exact execution
and under TrimMoE. *Replay*: no load, all sequences advance together. *Queues*: the event loop with
servers, links and batches; an event is a message, a token's begin, or a batch's start or end. Time
is the process's own (one core), compilation left out.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import trimmoe
from trimmoe.core.artifact import file_hash, written_whole
from trimmoe.core.cluster_file import load_cluster
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.core.trace import Trace
from trimmoe.experiments.method_engines import make_engine
from trimmoe.placement.make import default, make_plan
from trimmoe.policy.build import deploy
from trimmoe.policy.presets import PRESETS
from trimmoe.simulator import loop
from trimmoe.simulator.generate import Parameters
from trimmoe.simulator.generated_profile import generate_profile_and_trace
from trimmoe.simulator.geometries import find_geometry
from trimmoe.simulator.replay import replay
from trimmoe.simulator.run import simulate
from trimmoe.simulator.settings import Load, Prefill, SimulationSettings

SEED = 0
CLUSTER = Path(__file__).parents[1] / "clusters" / "testbed10.yaml"


def world(geometry: str) -> tuple[ModelSpec, Profile, Plan, Trace]:
    """A generated model and its plan."""
    model, parameters = find_geometry(geometry), Parameters(skip_flip=0.05, drop_flip=0.05)
    profile, trace = generate_profile_and_trace(
        model, parameters, sequences=512, length=16, seed=SEED
    )
    cluster = load_cluster(CLUSTER)
    plan = make_plan(profile, model, cluster, default(), cluster_hash=file_hash(CLUSTER))
    return model, profile, plan, trace


class Stopwatch:
    """Seconds of processor time spent in the event loop."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._run = loop.run_until

    def __call__(self, *arguments: Any) -> int:
        started = time.process_time()
        stopped = self._run(*arguments)
        self.seconds += time.process_time() - started
        return stopped


def measure(
    model: ModelSpec, profile: Profile, plan: Plan, trace: Trace, preset: str, concurrency: int
) -> dict[str, Any]:
    """Both speeds of one policy."""
    settings = PRESETS[preset]()
    engine = make_engine(plan, profile, model, settings)
    access = np.arange(trace.sequence_count) % plan.cluster.server_count
    quality: dict[str, Any] = {"budget": settings.budget, "confidence": settings.confidence}
    replay(engine, trace, access, **quality)
    started = time.process_time()
    replay(engine, trace, access, **quality)
    replayed = trace.token_count * model.layer_count / (time.process_time() - started)
    asked = SimulationSettings(
        load=Load(concurrency=concurrency, output_tokens=100.0, prefill=Prefill.EXCLUDED),
        warm_up_s=0.0,
        duration_s=4.0,
        seeds=(SEED,),
        control_s=2.0,
        **quality,
    )
    deployment = deploy(plan, profile, model, settings.accounting)
    simulate(engine, deployment, trace, replace(asked, duration_s=0.2))
    watch = Stopwatch()
    loop.run_until, kept = watch, loop.run_until
    started = time.process_time()
    (sample,) = simulate(engine, deployment, trace, asked)
    taken_s = time.process_time() - started
    loop.run_until = kept
    token_layers = sample.all_ledger.tokens * model.layer_count
    row = {
        "preset": preset,
        "concurrency": concurrency,
        "tokens": sample.all_ledger.tokens,
        "events": sample.after.events,
        "hops_per_token": sample.all_ledger.hops / sample.all_ledger.tokens,
        "replay_token_layers_per_s": replayed,
        "queues_token_layers_per_s": token_layers / taken_s,
        "queues_events_per_s": sample.after.events / taken_s,
        "event_loop_share": watch.seconds / taken_s,
        "event_loop_token_layers_per_s": token_layers / watch.seconds,
        "event_loop_events_per_s": sample.after.events / watch.seconds,
    }
    print(
        f"{preset:>8}: replay {replayed:,.0f} token-layers/s; with queues "
        f"{row['queues_token_layers_per_s']:,.0f} ({row['queues_events_per_s']:,.0f} events/s), "
        f"{row['event_loop_share']:.0%} of it in the event loop, which alone plays "
        f"{row['event_loop_token_layers_per_s']:,.0f} token-layers/s "
        f"({row['event_loop_events_per_s']:,.0f} events/s)",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometry", default="mixtral-8x7b")
    parser.add_argument("--concurrency", type=int, default=1024)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    made = world(arguments.geometry)
    content = {
        "benchmark": "simulator",
        "trimmoe_version": trimmoe.__version__,
        "geometry": arguments.geometry,
        "seed": SEED,
        "rows": [measure(*made, preset, arguments.concurrency) for preset in ("exact", "trimmoe")],
    }
    if arguments.output:
        with written_whole(arguments.output) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
