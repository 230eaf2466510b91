"""The simulator against the real servers on the same cluster, plan, arrivals and tokens.

    python benchmarks/bench_validation.py --output validation.json

Ten real servers in this process, with links and machines emulated from a cluster file, answer
requests to a tiny random model; what their tokens did is the trace that the simulator plays, under
`pinned` accounting. Emulated time runs in slow motion, so that what this machine really computes
hardly counts. Printed are mean and 99th percentile of the time per decoded token on both sides,
the simulator's relative to the servers', and how the methods rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trimmoe
from rehearsing import LIKE_BYTES, subject
from trimmoe.core.artifact import file_hash, written_whole
from trimmoe.core.cluster_file import load_cluster
from trimmoe.experiments.validation import Traffic, ranking, validate

CLUSTER = Path(__file__).parents[1] / "clusters" / "testbed10.yaml"
METHODS = ("pipeline", "edgeshard", "exact", "final-exits", "lossless", "speculative")
WARM_UP = Traffic(name="warm-up", requests=2, prompt=8, output=4, streams=2)
TRAFFICS = (
    Traffic(name="1 stream", requests=4, prompt=8, output=9, streams=1),
    Traffic(name="8 streams", requests=24, prompt=8, output=17, streams=8),
    Traffic(name="open loop", requests=18, prompt=8, output=17, rate_per_s=0.45),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", type=Path, default=CLUSTER)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--expert-ms", type=float, default=2.0, help="mean over the machines")
    parser.add_argument("--slow-motion", type=float, default=12.0)
    parser.add_argument("--budget", type=float, default=0.04)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--traffic", nargs="+", default=[one.name for one in TRAFFICS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        content = measured(arguments, Path(folder))
    if arguments.output:
        with written_whole(arguments.output) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")


def measured(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All methods under all traffics, printed as they come."""
    one = subject(
        folder,
        load_cluster(arguments.cluster),
        layers=arguments.layers,
        expert_s=arguments.expert_ms / 1e3,
        budget=arguments.budget,
        slow_motion=arguments.slow_motion,
        seed=arguments.seed,
    )
    for method in ("exact", "trimmoe"):  # What is compiled is not to be compiled meanwhile.
        validate(one, method, WARM_UP, seed=arguments.seed)
    rows, ranks = [], {}
    for traffic in (each for each in TRAFFICS if each.name in arguments.traffic):
        print(f"{traffic.name}: ms per token, real / simulated (ratio)", flush=True)
        of_traffic = []
        for method in arguments.methods:
            of_traffic.append(validate(one, method, traffic, seed=arguments.seed).figures)
            print(line(of_traffic[-1]), flush=True)
        rows += of_traffic
        ranks[traffic.name] = {
            key: ranking(of_traffic, f"mean_{key}_ms") for key in ("real", "simulated")
        }
        both = ranks[traffic.name]
        same = "the same" if both["real"] == both["simulated"] else "NOT the same"
        print(f"  ranking {same}: {' < '.join(both['real'])}", flush=True)
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
            "budget": arguments.budget,
            "confidence": one.confidence,
            "batch_share": one.batch_share,
            "max_batch": one.max_batch,
        },
        "seed": arguments.seed,
        "input_hashes": {
            "cluster": file_hash(arguments.cluster),
            "model": one.profile.model_hash,
            "profile": one.profile.hash,
            "plan": one.plan.hash,
        },
        "rows": rows,
        "rankings": ranks,
    }


def line(row: dict[str, Any]) -> str:
    """One method, for people."""
    figures = ", ".join(
        f"{name} {row[f'{name}_real_ms']:.0f} / {row[f'{name}_simulated_ms']:.0f} "
        f"({row[f'{name}_ratio']:.2f})"
        for name in ("mean", "p99")
    )
    hops = f"{row['hops_real']:.2f} / {row['hops_simulated']:.2f} vectors per token"
    return f"  {row['method']:>16}: {figures}; {hops}; {row['tokens']} tokens"


if __name__ == "__main__":
    main()
