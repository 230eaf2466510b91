"""`make bench`: calibration, decisions, hops, serving, the simulator, its validation against real
servers and the model view, one JSON each.

    python benchmarks/run_all.py --output FOLDER [--peers DIR]

`DIR` holds llama.cpp's `llama-server` and `ggml-rpc-server` in `bin/`, and F32.gguf and Q8_0.gguf
in `weights/`; without it nobody is compared with.

Timings depend on the machine; the view is therefore reported as a ratio to transformers' own
`generate`, both measured in one run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from trimmoe.core.artifact import written_whole
from trimmoe.experiments.sample_text import sample_text
from trimmoe.models.embedded import ensure_embedded_model

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("bench-output"))
    parser.add_argument("--peers", type=Path)
    arguments = parser.parse_args()
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    model = str(ensure_embedded_model())
    text = folder / "calibration.txt"
    with written_whole(text) as temporary:
        temporary.write_text(sample_text("calibration"), encoding="utf-8")
    run("bench_decisions.py", "--output", str(folder / "decisions.json"))
    run("bench_hop.py", "--output", str(folder / "hop.json"))
    run("bench_serve.py", "--output", str(folder / "serve.json"))
    run("bench_simulator.py", "--output", str(folder / "simulator.json"))
    run("bench_validation.py", "--output", str(folder / "validation.json"))
    for dtype in ("float32", "bfloat16"):
        run(
            "bench_view.py", model, "--dtype", dtype, "--output", str(folder / f"view-{dtype}.json")
        )
    run(
        "bench_calibrate.py", model, "--text", str(text), "--output", str(folder / "calibrate.json")
    )
    if arguments.peers is not None:
        _peers(arguments.peers, text, folder)


def _peers(peers: Path, text: Path, folder: Path) -> None:
    """What is measured beside llama.cpp, and where a token's time goes on a plan of ours."""
    profile, plan = folder / "profile.trim", folder / "plan.trim"
    trimmoe = str(Path(sys.executable).parent / "trimmoe")
    cluster = str(HERE.parent / "clusters" / "local4.yaml")
    calibrating = [trimmoe, "calibrate", "embedded", "--text", str(text), "-o", str(profile)]
    subprocess.run(calibrating, check=True)
    subprocess.run([trimmoe, "plan", str(profile), cluster, "-o", str(plan)], check=True)
    folders = "--llama", str(peers / "bin"), "--weights", str(peers / "weights")
    run("bench_peers.py", *folders, "--profile", str(profile), "--output", str(folder / "peers"))
    to = str(folder / "interpreter.json")
    run("bench_interpreter.py", "--profile", str(profile), "--plan", str(plan), "--output", to)


def run(script: str, *arguments: str) -> None:
    """Run one benchmark in a process of its own, so that peak memory is its own too."""
    print(f"\n== {script} {' '.join(arguments)}", flush=True)
    paths = {"PYTHONPATH": str(HERE.parent / "tests")}

    subprocess.run(
        [sys.executable, str(HERE / script), *arguments], check=True, env={**os.environ, **paths}
    )


if __name__ == "__main__":
    main()
