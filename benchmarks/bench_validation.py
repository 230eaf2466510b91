"""The simulator against the real servers on the same cluster, plan, arrivals and tokens.

    python benchmarks/bench_validation.py --output validation.json

Ten real servers in one process, with links and machines emulated from a cluster file, answer
requests to a tiny random model; what their tokens did is the trace that the simulator plays, under
`pinned` accounting. Emulated time runs in slow motion, so that what this machine really computes
hardly counts, and several such clusters, each in its own process, run side by side. Printed are
mean and 99th percentile of the time per decoded token on both sides over the tokens of all seeds,
the simulator's relative to the servers', the least and the greatest such ratio of a single seed,
and how the methods rank: every two of them that the servers tell apart from seed to seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

import trimmoe
from rehearsing import LIKE_BYTES, subject
from trimmoe.core.artifact import file_hash, written_whole
from trimmoe.core.cluster_file import load_cluster
from validation import (
    Order,
    Pair,
    Subject,
    Traffic,
    orders,
    pooled,
    ranking,
    validate,
)

CLUSTER = Path(__file__).parents[1] / "clusters" / "testbed10.yaml"
METHODS = ("pipeline", "edgeshard", "exact", "final-exits", "lossless", "speculative")
WARM_UP = Traffic(name="warm-up", requests=2, prompt=8, output=4, streams=2)
TRAFFICS = (
    Traffic(name="1 stream", requests=4, prompt=8, output=9, streams=1),
    Traffic(name="8 streams", requests=24, prompt=8, output=17, streams=8),
    Traffic(name="open loop", requests=18, prompt=8, output=17, rate_per_s=5.4),
)
"""Rates are by the cluster's own clock, which slow motion slows down."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", type=Path, default=CLUSTER)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--expert-ms", type=float, default=2.0, help="mean over the machines")
    parser.add_argument("--slow-motion", type=float, default=36.0)
    parser.add_argument("--budget", type=float, default=0.04)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--traffic", nargs="+", default=[one.name for one in TRAFFICS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the traffic")
    parser.add_argument("--clusters", type=int, default=9, help="how many run side by side")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.output:
        with written_whole(arguments.output) as temporary:
            temporary.write_text(json.dumps(measured(arguments), indent=2) + "\n")
    else:
        measured(arguments)


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """All methods under all traffics, printed as they come."""
    # What takes longest begins first, so that nothing long is left to run alone.
    traffics = [
        each.slowed(arguments.slow_motion)
        for each in TRAFFICS[::-1]
        if each.name in arguments.traffic
    ]
    methods, seeds = arguments.methods, arguments.seeds
    cases = list(itertools.product(traffics, methods, seeds))
    rows, rankings = [], {}
    clusters, spawning = min(arguments.clusters, len(cases)), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        _warm_up(arguments, Path(folder))  # What has to be compiled is by one, not by all at once.
        ready = spawning.Barrier(clusters)
        with ProcessPoolExecutor(
            clusters, spawning, _prepare, (arguments, folder, ready)
        ) as processes:
            pairs = processes.map(_validated, cases)
            for traffic in traffics:
                print(f"{traffic.name}: ms per token, real / simulated (ratio)", flush=True)
                drawn = {each: list(itertools.islice(pairs, len(seeds))) for each in methods}
                of_traffic = [row_of(draws) for draws in drawn.values()]
                rows += of_traffic
                rankings[traffic.name] = ranked(of_traffic, orders(drawn))
        one = _subject(arguments, Path(folder), arguments.slow_motion)
    ratios = np.array([[row["mean_ratio"], row["p99_ratio"]] for row in rows])
    worst = np.abs(ratios - 1.0).max(0)
    print(f"farthest from 1: mean {worst[0]:.1%}, 99th percentile {worst[1]:.1%}")
    return {
        "benchmark": "validation",
        "trimmoe_version": trimmoe.__version__,
        "settings": {
            "cluster": arguments.cluster.name,
            "layers": arguments.layers,
            "expert_ms": arguments.expert_ms,
            "vector_like_bytes": LIKE_BYTES,
            "slow_motion": arguments.slow_motion,
            "side_by_side": arguments.clusters,
            "budget": arguments.budget,
            "confidence": one.confidence,
            "batch_share": one.batch_share,
            "max_batch": one.max_batch,
        },
        "seeds": seeds,
        "input_hashes": {
            "cluster": file_hash(arguments.cluster),
            "model": one.profile.model_hash,
            "profile": one.profile.hash,
            "plan": one.plan.hash,
        },
        "rows": rows,
        "rankings": rankings,
    }


def _subject(arguments: argparse.Namespace, folder: Path, slow_motion: float) -> Subject:
    disable_progress_bar()  # Of writing the tiny model, once per process.
    return subject(
        Path(tempfile.mkdtemp(dir=folder)),
        load_cluster(arguments.cluster),
        layers=arguments.layers,
        expert_s=arguments.expert_ms / 1e3,
        budget=arguments.budget,
        slow_motion=slow_motion,
    )


_PATIENCE_S = 600.0
"""After which a process that the others wait for has failed."""
_own: dict[str, Subject] = {}
"""What a process that stands for a cluster runs."""


def _prepare(arguments: argparse.Namespace, folder: str, ready: Barrier) -> None:
    """A process becomes a cluster; it begins when all are ready, lest their start be measured."""
    torch.set_num_threads(1)
    _own["measured"] = _subject(arguments, Path(folder), arguments.slow_motion)
    _warm_up(arguments, Path(folder))
    ready.wait(_PATIENCE_S)


def _warm_up(arguments: argparse.Namespace, folder: Path) -> None:
    """What is compiled is not to be compiled meanwhile."""
    quick = _subject(arguments, folder, 1.0)
    for method in ("exact", "trimmoe"):
        validate(quick, method, WARM_UP, seed=0)


def _validated(case: tuple[Traffic, str, int]) -> Pair:
    """One method under one draw of one traffic, in a process of the pool."""
    traffic, method, seed = case
    return validate(_own["measured"], method, traffic, seed=seed)


def row_of(pairs: Sequence[Pair]) -> dict[str, Any]:
    """One method under one traffic over all seeds, printed for people."""
    row = pooled(pairs).figures
    for name in ("mean", "p99"):
        row[f"{name}_ratio_by_seed"] = [pair.figures[f"{name}_ratio"] for pair in pairs]
    print(line(row), flush=True)
    return row


def ranked(rows: Sequence[dict[str, Any]], of_two: Sequence[Order]) -> dict[str, Any]:
    """Methods of one traffic on both sides, printed for people.

    Servers rank two methods if their difference exceeds what chance does from draw to draw.
    """
    both = {key: ranking(rows, f"mean_{key}_ms") for key in ("real", "simulated")}
    for key, names in both.items():
        print(f"  {key}: {' < '.join(names)}", flush=True)
    decided = [one for one in of_two if one.decided]
    alike = sum(one.alike for one in decided)
    contrary = sum(one.contrary for one in decided)
    print(
        f"  servers tell {len(decided)} of {len(of_two)} pairs of methods apart, the simulator "
        f"ranks {alike} of those as they do and {contrary} otherwise beyond chance"
    )
    for one in of_two:
        if not (one.alike and one.decided):
            print(f"    {_told(one)}", flush=True)
    return {**both, "pairs": [asdict(one) for one in of_two]}


def _told(one: Order) -> str:
    """Two methods that are not told apart, or not ranked alike."""
    kind = "not alike" if one.decided else "not told apart"
    real, simulated = (
        f"{1e3 * of.mean:.1f} ({1e3 * of.low_95:.1f} to {1e3 * of.high_95:.1f})"
        for of in (one.real, one.simulated)
    )
    return f"{kind}: {one.slower} takes {real} ms more than {one.quicker}, {simulated} ms simulated"


def line(row: dict[str, Any]) -> str:
    """One method."""
    figures = ", ".join(
        f"{name} {row[f'{name}_real_ms']:.0f} / {row[f'{name}_simulated_ms']:.0f} "
        f"({row[f'{name}_ratio']:.2f}; {min(row[f'{name}_ratio_by_seed']):.2f} to "
        f"{max(row[f'{name}_ratio_by_seed']):.2f})"
        for name in ("mean", "p99")
    )
    hops = f"{row['hops_real']:.2f} / {row['hops_simulated']:.2f} vectors per token"
    return f"  {row['method']:>16}: {figures}; {hops}; {row['tokens']} tokens"


if __name__ == "__main__":
    main()
