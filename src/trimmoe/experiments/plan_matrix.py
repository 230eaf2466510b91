"""`trimmoe experiment plan-matrix`: `plan-vs-real` on cluster after cluster, and what it says.

Every cluster is probed, planned for, simulated and served by real processes of this machine, so
that links are emulated; machines are only where a file's name begins with `uneven`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from trimmoe.core.errors import UserError
from trimmoe.core.sample_clusters import cluster_path
from trimmoe.experiments.plan_vs_real import MEAN_WITHIN, TAIL_WITHIN, ranks_alike
from trimmoe.runtime.launch.config import ServeConfig

MATRIX = ("single", "pair40", "star5", "uneven4", "local4", "testbed10")
"""One server, two 40 ms apart, five around a hub, four of which one is ten times slower, and the
two sample clusters that most figures are of."""
METHODS = ("exact", "speculative", "auto")
AUTO, AUTO_WITHIN = "auto", 0.05
"""What chooses by itself, and how much slower than the best single choice it may be."""
SLOWED = "uneven"
"""Clusters whose point is that machines differ."""
_PROMPT, _ANSWER = 32, 32
"""Tokens of each request and of its answer."""
_RECORDED = 2048
"""Tokens that the simulator plays."""

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """What is compared."""

    profile: Path
    folder: Path
    """For all that is made."""
    clusters: tuple[str, ...] = MATRIX
    methods: tuple[str, ...] = METHODS
    streams: tuple[int, ...] = (1, 8, 32)
    rounds: int = 1
    quantise: str = "int8"
    port_base: int = 8400


def plan_matrix(asked: Matrix) -> dict[str, list[Row]]:
    """The rows of `plan_vs_real`, by cluster; also printed and kept as they come. Raises
    `UserError` where a command fails."""
    asked.folder.mkdir(parents=True, exist_ok=True)
    text = asked.folder / "text.txt"
    _trimmoe("sample-text", "--part", "held-out", "-o", text)
    files = [cluster_path(Path(given)) for given in asked.clusters]
    return {file.stem: _one(file, text, asked) for file in files}


def _one(file: Path, text: Path, asked: Matrix) -> list[Row]:
    """Probe, plan, record, compare."""
    made = {
        kind: asked.folder / f"{file.stem}.{kind}" for kind in ("machines", "plan", "trace", "json")
    }
    profile = "--profile", asked.profile
    served = "--quantise", asked.quantise, "--threads", 1, "--port-base", asked.port_base
    slowed = "--emulate-machines" if file.stem.startswith(SLOWED) else "--no-emulate-machines"
    _trimmoe("probe", file, "-o", made["machines"], *profile, *served, slowed)
    measured = "--machines", made["machines"], "--quantise", asked.quantise
    searched = "--optimise", "--iterations", ServeConfig.model_fields["plan_iterations"].default
    _trimmoe("plan", asked.profile, file, "-o", made["plan"], *measured, *searched)
    _trimmoe(
        "record", "embedded", "--text", text, *profile, "--plan", made["plan"],
        "-o", made["trace"], "--tokens", _RECORDED, "--length", _PROMPT + _ANSWER,
        "--answers", _ANSWER, "--quantise", asked.quantise,
    )  # fmt: skip
    methods = [word for name in asked.methods for word in ("--method", name)]
    streams = [word for count in asked.streams for word in ("--streams", count)]
    _trimmoe(
        "experiment", "plan-vs-real", "--trace", made["trace"], *profile, "--plan", made["plan"],
        *served, slowed, *methods, *streams, "--rounds", asked.rounds, "--json", made["json"],
        "--prompt-tokens", _PROMPT, "--output-tokens", _ANSWER,
    )  # fmt: skip
    return json.loads(made["json"].read_text())["rows"]


def _trimmoe(*arguments: object) -> None:
    command = [sys.executable, "-m", "trimmoe.cli", *map(str, arguments)]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise UserError(f"`trimmoe {arguments[0]}` failed with {code}; it said why above.")


def held(rows: Sequence[Row]) -> tuple[int, int]:
    """In how many rows the mean is as near as it should be, and in how many the tail."""
    return (
        sum(abs(row["mean_ratio"] - 1) <= MEAN_WITHIN for row in rows),
        sum(abs(row["p99_ratio"] - 1) <= TAIL_WITHIN for row in rows),
    )


def goals_table(found: Mapping[str, Sequence[Row]]) -> Table:
    """One line per cluster: how far expectations were off, and whether methods rank alike."""
    table = Table(
        title="Plans and reality",
        caption=f"goal: means within {MEAN_WITHIN:.0%}, 99th percentiles within {TAIL_WITHIN:.0%}",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("cluster", no_wrap=True)
    for heading in ("means hold", "ratios", "p99 hold", "ratios", "ranking"):
        table.add_column(heading, justify="right")
    for name, rows in found.items():
        means, tails = held(rows)
        table.add_row(
            name,
            f"{means} of {len(rows)}",
            _range(row["mean_ratio"] for row in rows),
            f"{tails} of {len(rows)}",
            _range(row["p99_ratio"] for row in rows),
            "alike" if ranks_alike([dict(row) for row in rows]) else "otherwise",
        )
    return table


def _range(values: Any) -> str:
    known = list(values)
    return f"{min(known):.2f} to {max(known):.2f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What chooses by itself beside the best of the others, on one cluster under one load."""

    cluster: str
    streams: int
    best: str
    slower: float
    """By what share: of a token's time with one stream, else of the tokens in a second; negative
    where it is faster."""

    @property
    def holds(self) -> bool:
        return self.slower <= AUTO_WITHIN


def choices(found: Mapping[str, Sequence[Row]]) -> list[Choice]:
    """Of every cluster and load that `auto` and something else were measured with."""
    made = []
    for cluster, rows in found.items():
        for streams in dict.fromkeys(row["streams"] for row in rows):
            taken_s = {row["method"]: _taken(row) for row in rows if row["streams"] == streams}
            own_s = taken_s.pop(AUTO, None)
            if own_s is None or not taken_s:
                continue
            best = min(taken_s, key=lambda name: taken_s[name])
            slower = own_s / taken_s[best] - 1
            made.append(Choice(cluster=cluster, streams=streams, best=best, slower=slower))
    return made


def _taken(row: Row) -> float:
    """Time of a token as the goal has it: one user's, or of all of them together."""
    if row["streams"] == 1:
        return row["measured_mean_ms"]
    return 1.0 / row["measured_tokens_per_s"]


def choices_table(found: Sequence[Choice]) -> Table:
    """One line per cluster and load."""
    table = Table(
        title="auto beside the best single choice",
        caption=(
            f"goal: never more than {AUTO_WITHIN:.0%} slower; in latency with one stream, else in "
            "tokens a second"
        ),
        box=box.SIMPLE_HEAD,
    )
    table.add_column("cluster", no_wrap=True)
    for heading in ("streams", "best", "slower by", ""):
        table.add_column(heading, justify="right")
    for one in found:
        holds = "holds" if one.holds else "off"
        table.add_row(one.cluster, str(one.streams), one.best, f"{one.slower:+.1%}", holds)
    return table


def show(asked: Matrix, show_table: Callable[[Table], None]) -> None:
    """Run it all and show what came of it."""
    found = plan_matrix(asked)
    show_table(goals_table(found))
    if chosen := choices(found):
        show_table(choices_table(chosen))
