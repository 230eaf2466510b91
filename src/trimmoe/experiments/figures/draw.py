"""The look of all pictures, and how they are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from trimmoe.core.artifact import written_whole
from trimmoe.experiments.plots import LAYER_LOOK

OURS_COLOUR, OTHER_COLOUR = "#0072B2", "#999999"
LINES = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#555555",
    "#000000",
    "#B09A00",
    "#7A3B9E",
    "#8C564B",
)
MARKS = "osD^vP*X"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """A panel of curves: which figure of every row is drawn over which."""

    x: str
    y: str
    xlabel: str
    ylabel: str
    yscale: str = "linear"
    ylim: tuple[float, float] | None = None
    legend: bool = True


@contextmanager
def picture(path: Path, rows: int, columns: int, *, size: tuple[float, float]) -> Iterator[Any]:
    """Panels [rows, columns] of a picture that is written to `path` at the end, atomically."""
    figure = Figure(figsize=size, layout="constrained")
    yield figure.subplots(rows, columns, squeeze=False)
    with written_whole(path) as temporary:
        # No time and no version in the file: the same numbers give the same picture.
        figure.savefig(temporary, format="png", dpi=110, metadata={"Software": None})


def draw_curves(
    path: Path,
    panels: Sequence[Axes],
    curves: Mapping[str, Sequence[Row]],
    *,
    size: tuple[float, float],
) -> None:
    """Panels beside one another, each with every curve, which are rows by name."""
    with picture(path, 1, len(panels), size=size) as (drawn,):
        for axes, panel in zip(panels, drawn, strict=True):
            for index, (name, rows) in enumerate(curves.items()):
                xs, ys = ([row[key] for row in rows] for key in (axes.x, axes.y))
                line(panel, xs, ys, name, index)
            panel.set(xlabel=axes.xlabel, ylabel=axes.ylabel, yscale=axes.yscale)
            if axes.ylim is not None:
                panel.set(ylim=axes.ylim)
            if axes.legend:
                panel.legend(fontsize=7)


def draw_bars(
    path: Path,
    panels: Sequence[tuple[str, str]],
    arenas: Mapping[str, Sequence[Row]],
    *,
    size: tuple[float, float],
    named_once: bool = False,
) -> None:
    """A line of panels for each arena, which is rows by title: bars of what rows have under a key,
    and what that is called. With `named_once` rows have their names in the first panel only."""
    with picture(path, len(arenas), len(panels), size=size) as drawn:
        for those, (title, rows) in zip(drawn, arenas.items(), strict=True):
            for at, (panel, (key, label)) in enumerate(zip(those, panels, strict=True)):
                bars(panel, rows, key, label)
                if named_once and at > 0:
                    panel.set_yticks([])
            those[0].set_title(title, fontsize=9, loc="left")


def bars(panel: Any, rows: Sequence[Row], key: str, label: str) -> None:
    """Horizontal bars, ours in colour, the first row at the top."""
    names, values = [row["title"] for row in rows], [row[key] for row in rows]
    colours = [OURS_COLOUR if row["of"] == "trimmoe" else OTHER_COLOUR for row in rows]
    places = range(len(rows))
    panel.barh(places, values, color=colours)
    panel.set_yticks(places, names, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel(label, fontsize=9)
    for place, value in zip(places, values, strict=True):
        panel.text(value, place, f" {value:.3g}", va="center", fontsize=7)
    panel.margins(x=0.18)


def stacked_kinds(panel: Any, rows: Sequence[Row]) -> None:
    """Shares of token-layers by what was done, one bar per row."""
    left = [0.0] * len(rows)
    places = range(len(rows))
    for name, (colour, hatch) in LAYER_LOOK.items():
        parts = [row["kinds"][name] for row in rows]
        panel.barh(
            places,
            parts,
            left=left,
            color=colour,
            hatch=hatch,
            edgecolor="#555555",
            linewidth=0.3,
            label=name.replace("_", " "),
        )
        left = [before + part for before, part in zip(left, parts, strict=True)]
    panel.set_yticks(places, [row["title"] for row in rows], fontsize=8)
    panel.invert_yaxis()
    panel.set(xlim=(0, 1))
    panel.set_xlabel("share of token-layers", fontsize=9)
    panel.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def line(
    panel: Any,
    xs: Sequence[float],
    ys: Sequence[float],
    label: str,
    index: int,
    *,
    marked: bool = True,
) -> None:
    """One curve, with a mark of its own at its points."""
    panel.plot(
        xs,
        ys,
        label=label,
        color=LINES[index % len(LINES)],
        marker=MARKS[index % len(MARKS)] if marked else None,
        markersize=4,
        linewidth=1.2,
    )
