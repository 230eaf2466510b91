"""Fig. 5: the distribution of latencies, and what became of every layer of every token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimmoe.experiments.figures.base import (
    KIND_NAMES,
    Content,
    Grid,
    cell,
    change,
    figure_json,
    find,
    load_row,
    named,
    percent,
    share,
    table,
)
from trimmoe.experiments.figures.bench import SLA_S, Bench
from trimmoe.experiments.figures.contenders import ARENA_TITLES, ARENAS
from trimmoe.experiments.figures.draw import line, picture, stacked_kinds

_SHOWN = ("letter", "pinned_best")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """Latency of requests at 40 per second, and of their tokens; six kinds of layer executions."""

    number: str = "5"
    title: str = "Tail latency and execution behaviour"
    paper: str = (
        "P99 268 ms, 41.1 % below MoE^2 and 64.0 % below EdgeShard; 11 % of layer executions "
        "skipped, 12 % exited, 16 % of the others remote (EdgeShard 71 %, Substitute-Only 26 %)."
    )

    def measure(self, bench: Bench) -> Content:
        """Quantiles and kinds of everybody."""
        arenas = {}
        for name, contenders in ARENAS.items():
            kept, _ = bench.there(contenders())
            arenas[name] = [
                named(one, load_row(bench.simulated(one), SLA_S, bench.effort.output_tokens))
                for one in kept
            ]
        return figure_json(self, bench, {"arenas": arenas})

    def plot(self, content: Content, path: Path) -> None:
        """CDF beside the breakdown, for the paper's arena and the physical one."""
        with picture(path, len(_SHOWN), 2, size=(13, 3.6 * len(_SHOWN))) as panels:
            for (left, right), name in zip(panels, _SHOWN, strict=True):
                rows = content["arenas"][name]
                for index, row in enumerate(rows):
                    xs = row["request_quantiles_ms"]
                    shares = np.linspace(0, 1, len(xs)).tolist()
                    line(left, xs, shares, row["title"], index, marked=False)
                left.set_xlabel(f"ms per {_answer(rows)}, simulated under load", fontsize=9)
                left.set_ylabel("share of requests", fontsize=9)
                left.set_title(ARENA_TITLES[name], fontsize=9, loc="left")
                left.legend(fontsize=6)
                stacked_kinds(right, rows)

    def grids(self, content: Content) -> dict[str, Grid]:
        """P99 and shares, by arena."""
        return {
            ARENA_TITLES[name]: table(_COLUMNS, rows) for name, rows in content["arenas"].items()
        }

    def findings(self, content: Content) -> list[str]:
        """How much of the layers we remove, and the tail beside the others'."""
        found = []
        for name in _SHOWN:
            rows = content["arenas"][name]
            ours = find(rows, "trimmoe")
            assert ours is not None
            tails = [
                f"{percent(change(ours['request_p99_ms'], row['request_p99_ms']), signed=True)} "
                f"against {row['title']}"
                for row in rows
                if row is not ours
            ]
            found.append(
                f"{ARENA_TITLES[name]}: {percent(ours['kinds']['skipped'])} skipped and "
                f"{percent(ours['kinds']['exited'])} exited (paper: 11 % and 12 %); P99 "
                f"of a {_answer(rows)} {', '.join(tails)}."
            )
        return found


def _answer(rows: list[Content]) -> str:
    """What a request is."""
    return f"request of {rows[0]['answer_tokens']} tokens"


def _kind(name: str) -> Callable[[Content], str]:
    return lambda row: percent(row["kinds"][name])


_COLUMNS = (
    ("method", cell("title")),
    ("requests", cell("requests")),
    ("mean ms", cell("request_ms", ".0f")),
    ("P99 ms", cell("request_p99_ms", ".0f")),
    ("P99 of tokens", cell("delay_p99_ms", ".1f")),
    *((name.replace("_", " "), _kind(name)) for name in KIND_NAMES),
    ("remote", share("remote_share")),
)
