"""Fig. 7: where tokens exit and which layers are skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimmoe.core.ledger import Kind, Ledger
from trimmoe.experiments.figures.base import Content, Grid, cell, figure_json, percent, table
from trimmoe.experiments.figures.bench import Bench
from trimmoe.experiments.figures.contenders import letter, pinned_best
from trimmoe.experiments.figures.draw import Axes, draw_curves


@dataclass(frozen=True, kw_only=True, slots=True)
class Depth:
    """Ours, physical and to the letter."""

    number: str = "7"
    title: str = "Depth reduction"
    paper: str = (
        "Exits peak around layers 20 to 22 of 32 with a residue at full depth; skips are rare in "
        "shallow layers and rise in the middle and deep ones."
    )

    def measure(self, bench: Bench) -> Content:
        """Exit layers and skip ratios from the ledgers of the replay."""
        chosen = [one for one in (*pinned_best(), *letter()) if one.of == "trimmoe"]
        rows = [
            {"key": one.key, "title": one.title} | depth_row(bench.replayed(one).ledger)
            for one in bench.there(tuple(chosen))[0]
        ]
        return figure_json(self, bench, {"rows": rows})

    def plot(self, content: Content, path: Path) -> None:
        """Exit distribution left, skip ratio right."""
        curves = {row["title"]: _by_layer(row) for row in content["rows"]}
        draw_curves(path, _PANELS, curves, size=(12, 3.6))

    def grids(self, content: Content) -> dict[str, Grid]:
        """By thirds of the depth."""
        return {"Where tokens end and skip": table(_COLUMNS, content["rows"])}

    def findings(self, content: Content) -> list[str]:
        """Whether depth is saved where the paper says."""
        found = []
        for row in content["rows"]:
            exits, skips = np.array(row["exit_share"]), np.array(row["skip_ratio"])
            early = float(exits[:-1].sum())
            half = skips.size // 2
            shape = "more" if skips[half:].mean() > skips[:half].mean() else "not more"
            peak = f", most of them after layer {int(exits[:-1].argmax()) + 1}" if early else ""
            found.append(
                f"{row['title']}: {percent(early)} of tokens exit early{peak}; of {exits.size} the "
                f"deeper half of the layers is skipped {shape} often than the shallower "
                f"({percent(float(skips[half:].mean()))} against "
                f"{percent(float(skips[:half].mean()))})."
            )
        return found


_PANELS = (
    Axes(x="layer", y="exit_share", xlabel="MoE layer", ylabel="share of tokens that end here"),
    Axes(
        x="layer",
        y="skip_ratio",
        xlabel="MoE layer",
        ylabel="share of tokens that get here and skip",
    ),
)


def _exits(third: int) -> Callable[[Content], str]:
    return lambda row: percent(float(np.array_split(row["exit_share"][:-1], 3)[third].sum()))


def _skips(third: int) -> Callable[[Content], str]:
    return lambda row: percent(float(np.array_split(row["skip_ratio"], 3)[third].mean()))


_COLUMNS = (
    ("method", cell("title")),
    ("exit, first third", _exits(0)),
    ("middle", _exits(1)),
    ("last", _exits(2)),
    ("full depth", lambda row: percent(row["exit_share"][-1])),
    ("skip, first third", _skips(0)),
    ("middle", _skips(1)),
    ("last", _skips(2)),
)


def _by_layer(row: Content) -> list[Content]:
    pairs = zip(row["exit_share"], row["skip_ratio"], strict=True)
    return [
        {"layer": layer, "exit_share": ends, "skip_ratio": skips}
        for layer, (ends, skips) in enumerate(pairs, start=1)
    ]


def depth_row(ledger: Ledger) -> Content:
    """Share of tokens whose last layer is each, and of those that reach a layer who skip it."""
    exited = ledger.kinds[:, Kind.EXITED]
    ends = np.diff(np.append(exited, ledger.tokens))
    reached = ledger.tokens - exited
    skip_ratio = ledger.kinds[:, Kind.SKIPPED] / np.maximum(reached, 1)
    return {
        "tokens": ledger.tokens,
        "exit_share": (ends / ledger.tokens).tolist(),
        "skip_ratio": skip_ratio.tolist(),
    }
