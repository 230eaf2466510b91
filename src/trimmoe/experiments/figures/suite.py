"""All figures of one world: measured, drawn, written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trimmoe.core.errors import UserError
from trimmoe.experiments.compare import write_json
from trimmoe.experiments.figures.ablation import Ablation
from trimmoe.experiments.figures.base import Content, Figure
from trimmoe.experiments.figures.bench import Bench
from trimmoe.experiments.figures.curves import Curves
from trimmoe.experiments.figures.depth import Depth
from trimmoe.experiments.figures.horizon import Horizon
from trimmoe.experiments.figures.load import UnderLoad
from trimmoe.experiments.figures.models import Models
from trimmoe.experiments.figures.overall import Overall
from trimmoe.experiments.figures.quality import Quality
from trimmoe.experiments.figures.sensitivity import Sensitivity
from trimmoe.experiments.figures.tail import Tail

FIGURES: dict[str, Figure] = {
    figure.number: figure
    for figure in (
        Overall(),
        Tail(),
        Quality(),
        Depth(),
        Horizon(),
        Models(),
        Ablation(),
        UnderLoad(),
        Curves(),
        Sensitivity(),
    )
}
"""By number; E are the equal-quality curves, S is the sensitivity to generated tokens."""
_NAMES = {"E": "equal-quality", "S": "sensitivity"}
"""Of the files of figures that are not the paper's."""


def find_figures(numbers: Sequence[str]) -> list[Figure]:
    """The figures with these numbers, or all; raises `UserError` naming those there are."""
    unknown = [number for number in numbers if number not in FIGURES]
    if unknown:
        raise UserError(f"There is no figure {unknown[0]}; choose from {', '.join(FIGURES)}.")
    return [FIGURES[number] for number in numbers] if numbers else list(FIGURES.values())


def stem(number: str) -> str:
    """The name of a figure's files."""
    return _NAMES[number] if number in _NAMES else f"fig{int(number):02d}"


def run_figures(
    bench: Bench,
    numbers: Sequence[str],
    folder: Path,
    *,
    done: Callable[[str], None] = lambda _: None,
) -> dict[str, Content]:
    """Measure, draw and write figures into `folder`, which is made if need be; JSONs by number.

    Raises `UserError` if the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot make {folder}: {error.strerror}; choose another.") from error
    contents = {}
    for figure in find_figures(numbers):
        content = figure.measure(bench)
        write_json(folder / f"{stem(figure.number)}.json", content)
        figure.plot(content, folder / f"{stem(figure.number)}.png")
        contents[figure.number] = content
        done(figure.number)
    return contents
