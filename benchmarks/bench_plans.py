"""Do plans come true? Clusters are probed, planned for, simulated and then served, one by one.

    python benchmarks/bench_plans.py --profile P --output DIR [CLUSTER ...]

For each cluster file: `trimmoe probe`, `plan`, `record` and `experiment plan-vs-real`, whose tables
are printed and kept as JSON. Everything runs on this machine, so that links are emulated; machines
are only where a file's name begins with `uneven`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

CLUSTERS = Path(__file__).parent.parent / "clusters"
MATRIX = ("single", "pair40", "star5", "uneven4", "local4", "testbed10")
SLOWED = "uneven"
"""Clusters whose point is that machines differ."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clusters", nargs="*", default=MATRIX, help="Names or files.")
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quantise", default="int8")
    parser.add_argument("--methods", nargs="+", default=["exact", "speculative"])
    parser.add_argument("--streams", nargs="+", default=["1", "8"])
    parser.add_argument("--tokens", default="1000", help="Recorded for the simulator.")
    parser.add_argument("--port-base", default="8400")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    text = asked.output / "text.txt"
    _trimmoe("sample-text", "--part", "held-out", "-o", text)
    for given in asked.clusters:
        file = Path(given) if Path(given).is_file() else CLUSTERS / f"{given}.yaml"
        _one(file, text, asked)


def _one(file: Path, text: Path, asked: argparse.Namespace) -> None:
    """Probe, plan, record, compare."""
    made = {
        kind: asked.output / f"{file.stem}.{kind}" for kind in ("machines", "plan", "trace", "json")
    }
    profile = "--profile", asked.profile
    served = "--quantise", asked.quantise, "--threads", "1", "--port-base", asked.port_base
    slowed = "--emulate-machines" if file.stem.startswith(SLOWED) else "--no-emulate-machines"
    _trimmoe("probe", file, "-o", made["machines"], *profile, *served, slowed)
    measured = "--machines", made["machines"], "--quantise", asked.quantise
    _trimmoe("plan", asked.profile, file, "-o", made["plan"], *measured)
    recorded = "--tokens", asked.tokens, "--length", "100"
    _trimmoe(
        "record", "embedded", "--text", text, *profile, "--plan", made["plan"],
        "-o", made["trace"], *recorded,
    )  # fmt: skip
    methods = [word for name in asked.methods for word in ("--method", name)]
    streams = [word for count in asked.streams for word in ("--streams", count)]
    _trimmoe(
        "experiment", "plan-vs-real", "--trace", made["trace"], *profile, "--plan", made["plan"],
        *served, slowed, *methods, *streams, "--json", made["json"],
    )  # fmt: skip
    rows = json.loads(made["json"].read_text())["rows"]
    print(f"{file.stem}: {sum(row['holds'] for row in rows)} of {len(rows)} hold", flush=True)


def _trimmoe(*arguments: object) -> None:
    command = [sys.executable, "-m", "trimmoe.cli", *map(str, arguments)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
