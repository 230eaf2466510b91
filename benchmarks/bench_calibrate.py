"""Time and memory of calibrating a model on a text.

    python benchmarks/bench_calibrate.py MODEL --text FILE [--tokens N] [--dtype float32]
        [--streamed] [--output JSON]

MODEL is a checkpoint directory, a hub id, or `embedded`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from trimmoe.calibrate.settings import CalibrationSettings


def main() -> None:
    """Calibrate once, print seconds per phase and peak memory."""
    options = _options()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # As the command line does, before torch.
    import torch

    from trimmoe.calibrate.run import calibrate
    from trimmoe.calibrate.text import read_texts
    from trimmoe.models.embedded import ensure_embedded_model
    from trimmoe.models.load import load_tokenizer, open_model

    path = ensure_embedded_model() if options.model == "embedded" else options.model
    start = time.perf_counter()
    dtype = getattr(torch, options.dtype)
    view = open_model(path, hashed=True, dtype=dtype, streamed=options.streamed)
    phases = {"Opening": time.perf_counter() - start}

    def on_phase(name: str, seconds: float) -> None:
        phases[name] = seconds
        print(f"{name}: {seconds:.1f} s", flush=True)

    settings = CalibrationSettings(tokens=options.tokens, seed=options.seed)
    profile = calibrate(
        view,
        load_tokenizer(path),
        read_texts(options.text),
        settings,
        on_phase=on_phase,
    )
    if options.profile:
        profile.save(options.profile)
    result = _result(phases, profile.header.extra["tokens"])
    result |= {"dtype": options.dtype, "streamed": options.streamed}
    result["expert_bytes_read"] = view.bytes_read.experts
    result["expert_bytes"] = view.spec.total_expert_bytes
    for name, value in result.items():
        print(f"{name}: {value}")
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _result(phases: dict[str, float], tokens: int) -> dict[str, Any]:
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {
        "tokens": tokens,
        "seconds": {name: round(seconds, 2) for name, seconds in phases.items()},
        "total_seconds": round(sum(phases.values()), 2),
        # Of all threads: says more than the clock does where others use the processor too.
        "cpu_seconds": round(time.process_time(), 2),
        "peak_rss_gb": round(peak / 1e9, 3),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=CalibrationSettings().tokens)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streamed", action="store_true", help="one layer's experts in memory")
    parser.add_argument("--profile", type=Path, help="also save the profile here")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
