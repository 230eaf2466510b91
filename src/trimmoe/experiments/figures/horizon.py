"""Fig. 8: what looking ahead is worth, and what deciding costs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from trimmoe.cost.model import Accounting
from trimmoe.experiments.figures.base import (
    CLOCK,
    Content,
    Grid,
    cell,
    change,
    figure_json,
    percent,
    table,
)
from trimmoe.experiments.figures.bench import Bench, replay_row
from trimmoe.experiments.figures.contenders import Contender, letter, pinned_best
from trimmoe.experiments.figures.draw import Axes, draw_curves
from trimmoe.policy.settings import PolicySettings

FULL = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class Horizon:
    """H = 1, 2, ... and tables to the last layer; pinned on our plan, at home on the paper's, and
    moving."""

    number: str = "8"
    title: str = "The look-ahead horizon"
    paper: str = "From H = 1 to 3 latency falls by 17.0 %, traffic by 29.1 %; then both saturate."

    def measure(self, bench: Bench) -> Content:
        """The same tokens with every horizon; the clock is kept apart."""
        curves, clock = {}, {}
        for name, base in _bases(bench).items():
            moves = bench.rig(base).settings.accounting is Accounting.MIGRATE
            horizons = bench.effort.moving_horizons if moves else bench.effort.horizons
            rows, times = [], {}
            for horizon in (*horizons, None):
                label = FULL if horizon is None else str(horizon)
                one = _looking(base, horizon, label)
                tokens = bench.effort.horizon_tokens
                bench.rig(one)
                start = time.perf_counter()
                done = bench.replayed(one, tokens=tokens)
                times[label] = (time.perf_counter() - start) / done.ledger.tokens * 1e3
                rows.append({"horizon": label} | replay_row(done))
            curves[name], clock[name] = rows, times
        body = {"curves": curves, CLOCK: {"replay_ms_per_token": clock}}
        return figure_json(self, bench, body)

    def plot(self, content: Content, path: Path) -> None:
        """Delay, traffic, and the time of deciding."""
        draw_curves(path, _PANELS, _timed(content), size=(15, 3.6))

    def grids(self, content: Content) -> dict[str, Grid]:
        """One table per curve."""
        return {name: table(_COLUMNS, rows) for name, rows in _timed(content).items()}

    def findings(self, content: Content) -> list[str]:
        """The gain from H = 1 to the longest horizons beside the paper's."""
        found = []
        for name, rows in content["curves"].items():
            first, last = rows[0], rows[-1]
            three = next((row for row in rows if row["horizon"] == "3"), last)
            found.append(
                f"{name}: from H = 1 to {three['horizon']} delay "
                f"{percent(change(three['delay_ms'], first['delay_ms']), signed=True)}, traffic "
                f"{_traffic(three, first)}; to full depth delay "
                f"{percent(change(last['delay_ms'], first['delay_ms']), signed=True)} "
                "(paper, H = 3: -17.0 % and -29.1 %)."
            )
        return [
            *found,
            "Our myopic policy already prices quality at what the rest of the budget could buy, "
            "and pinned tokens stay on their route whatever is decided, so less is left for the "
            "look-ahead than where a step moves the token.",
        ]


_PANELS = (
    Axes(x="horizon", y="delay_ms", xlabel="H", ylabel="ms per token"),
    Axes(x="horizon", y="mb_per_1000_tokens", xlabel="H", ylabel="MB per 1000 tokens"),
    Axes(
        x="horizon",
        y="replay_ms",
        xlabel="H",
        ylabel="ms of this machine per token replayed",
        yscale="log",
    ),
)
_COLUMNS = (
    ("H", cell("horizon")),
    ("ms", cell("delay_ms", ".2f")),
    ("MB/1000", cell("mb_per_1000_tokens", ".2f")),
    ("charged", cell("charged_loss_per_token", ".4f")),
    ("ms to decide (this machine)", cell("replay_ms", ".1f")),
)


def _timed(content: Content) -> dict[str, list[Content]]:
    """The curves with what the clock showed."""
    clock = content[CLOCK]["replay_ms_per_token"]
    return {
        name: [row | {"replay_ms": clock[name][row["horizon"]]} for row in rows]
        for name, rows in content["curves"].items()
    }


def _traffic(row: Content, first: Content) -> str:
    return percent(change(row["mb_per_1000_tokens"], first["mb_per_1000_tokens"]), signed=True)


def _bases(bench: Bench) -> dict[str, Contender]:
    ours = next(one for one in pinned_best() if one.of == "trimmoe")
    moved = next(one for one in letter() if one.of == "trimmoe")
    at_home = replace(ours, key="home/trimmoe", on="paper")
    bases = {
        "pinned, our plan": ours,
        "pinned, the paper's placement at home": at_home,
        "migrate, the paper's preset (not physical)": moved,
    }
    return {name: one for name, one in bases.items() if bench.there((one,))[0]}


def _looking(base: Contender, horizon: int | None, label: str) -> Contender:
    def looking(policy: PolicySettings) -> PolicySettings:
        # What the figure's clock times for a finite horizon is the recursion of the paper.
        return replace(base.change(policy), horizon=horizon, literal_lookahead=horizon is not None)

    return replace(base, key=f"{base.key}/H={label}", change=looking)
