"""How often servers of a plan guess what the whole model predicts, by what stands in for the
experts that they do not hold, and what that takes.

    python benchmarks/bench_stand_ins.py --plan plan.trim --text FILE [--text FILE]
    python benchmarks/bench_stand_ins.py --plan plan.trim --text FILE --shares 0.01 0.02 0.04 0.08

With `--shares`, servers have what a plan would give them within so much memory, as a share of what
all experts take in single precision.

Nothing here is timed: the same inputs give the same figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from trimmoe.calibrate.text import read_texts, token_windows
from trimmoe.calibrate.trace import trace_header, trace_windows
from trimmoe.calibrate.windows import Windows
from trimmoe.core.plan import Plan, load_plan
from trimmoe.core.precision import Precision
from trimmoe.core.profile import Profile, load_profile
from trimmoe.core.specs import FloatArray, IntArray, ModelSpec
from trimmoe.core.stand_ins import ASCENDING
from trimmoe.experiments.opening import profile_path, resolved
from trimmoe.models.base import MoEView
from trimmoe.models.load import load_tokenizer, open_model
from trimmoe.placement.stand_ins import allowance_bytes, copied_bits, copies_bytes, passed_by
from trimmoe.progress import Bars

_LENGTH = 256
_FROM = 32
"""Tokens of each window that are context alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--quantise", type=Precision, default=Precision.NONE)
    parser.add_argument("--shares", type=float, nargs="*")
    options = parser.parse_args()
    path = resolved(options.model)
    view = open_model(path, dtype=torch.float32, hashed=True, quantise=options.quantise)
    profile = load_profile(profile_path(options.profile, options.model))
    plan, tokenizer = load_plan(options.plan), load_tokenizer(path)
    print("| text | instead of other experts | MB a server | guessed right |\n|---|---|---|---|")
    for text in options.text:
        ids = token_windows(
            read_texts([text]), tokenizer=tokenizer, tokens=options.tokens, window=_LENGTH, seed=0
        )
        rows = _stand_ins(plan)
        if options.shares is not None:
            rows = _within(plan, profile, view.spec, options.shares)
        for name, bits in rows:
            sizes = np.zeros(len(plan.hosts)) if bits is None else copies_bytes(view.spec, bits)
            right = _right(view, profile, Windows(ids=ids), plan, bits)
            print(
                f"| {text.name} | {name} | {_range(sizes / 1e6, 1)} | {_range(right * 100, 1)} % |"
            )


def _stand_ins(plan: Plan) -> Iterator[tuple[str, IntArray | None]]:
    yield "the profile's linear maps", None
    for bits in ASCENDING:
        yield f"copies in {bits} bits", np.where(plan.hosts, 0, bits)
    if plan.stand_in_bits is not None:
        yield "what the plan has", plan.stand_in_bits


def _within(
    plan: Plan, profile: Profile, model: ModelSpec, shares: list[float]
) -> Iterator[tuple[str, IntArray | None]]:
    passing = passed_by(plan.routes, len(plan.hosts))
    for share in shares:
        allowed = np.full(len(plan.hosts), allowance_bytes(model, share))
        frequency = profile.expected_executions
        yield f"within {share:.1%}", copied_bits(model, plan.hosts, frequency, allowed, passing)


def _right(
    view: MoEView, profile: Profile, windows: Windows, plan: Plan, bits: IntArray | None
) -> FloatArray:
    """Share of tokens of which each server guesses what the whole model predicts, [M]."""
    hashes = {"model": profile.model_hash, "profile": profile.hash}
    header = trace_header(settings={"length": windows.length}, input_hashes=hashes, seed=0)
    passes = (1 + len(plan.hosts)) * windows.tokens * view.spec.layer_count
    with Bars() as progress:
        bar = progress.add_task("Guessing", total=passes)
        trace = trace_windows(
            view,
            profile,
            windows,
            header,
            lambda done: progress.advance(bar, done),
            hosts=plan.hosts,
            stand_in_bits=bits,
        )
    assert trace.home_wrong is not None
    wrong = trace.home_wrong.reshape(-1, windows.length, len(plan.hosts))
    return 1.0 - wrong[:, _FROM:].mean(axis=(0, 1))


def _range(values: FloatArray, digits: int) -> str:
    low, high = (f"{bound:.{digits}f}" for bound in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    main()
