"""Fig. 7: where tokens exit and which layers are skipped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimmoe.core.ledger import Kind, Ledger
from trimmoe.experiments.figures.base import Content, Grid, figure_json, percent
from trimmoe.experiments.figures.bench import Bench
from trimmoe.experiments.figures.contenders import letter, pinned_best
from trimmoe.experiments.figures.draw import line, picture


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
        with picture(path, 1, 2, size=(12, 3.6)) as ((left, right),):
            for index, row in enumerate(content["rows"]):
                layers = list(range(1, len(row["exit_share"]) + 1))
                line(left, layers, row["exit_share"], row["title"], index)
                line(right, layers, row["skip_ratio"], row["title"], index)
            left.set(xlabel="MoE layer", ylabel="share of tokens that end here")
            right.set(xlabel="MoE layer", ylabel="share of tokens that get here and skip")
            for panel in (left, right):
                panel.legend(fontsize=7)

    def grids(self, content: Content) -> dict[str, Grid]:
        """By thirds of the depth."""
        rows = []
        for row in content["rows"]:
            exits = [float(part.sum()) for part in np.array_split(row["exit_share"][:-1], 3)]
            skips = [float(part.mean()) for part in np.array_split(row["skip_ratio"], 3)]
            cells = (*(percent(e) for e in exits), percent(row["exit_share"][-1]))
            rows.append((row["title"], *cells, *(percent(skip) for skip in skips)))
        headings = ("method", "exit, first third", "middle", "last", "full depth")
        return {
            "Where tokens end and skip": Grid(
                headings=(*headings, "skip, first third", "middle", "last"), rows=rows
            )
        }

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
