"""Fig. 6: what quality is given up, and what for; charged by the proxies and, where the model is
at hand, measured by executing it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimmoe.experiments.figures.base import (
    Content,
    Grid,
    cell,
    figure_json,
    find,
    named,
    percent,
    share,
    table,
)
from trimmoe.experiments.figures.bench import Bench, replay_row
from trimmoe.experiments.figures.contenders import Contender, pinned_best
from trimmoe.experiments.figures.draw import bars, line, picture

CHARGED = "loss charged per token, by calibration (not measured)"
MEASURED = "measured flips"
_RUN = (
    "exact",
    "mod",
    "mod-matched",
    "local-prior",
    "moe2",
    "moe2-matched",
    "substitute-only",
    "trimmoe",
)


def ours() -> Contender:
    """The default policy on our plan."""
    return next(one for one in pinned_best() if one.of == "trimmoe")


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """Quality per method at 2 %, and the budget's sweep from 0.5 % to 3 %."""

    number: str = "6"
    title: str = "Inference quality and the quality budget"
    paper: str = (
        "WikiText-103 perplexity +0.38, SQuAD F1 -0.8, GSM8K -1.1 (Mixture-of-Depths -2.4); from "
        "0.5 % to 3 % latency falls smoothly, degradation stays below the budget, knee at 2 %."
    )

    def measure(self, bench: Bench) -> Content:
        """Charged losses of everybody and along the budget; measured flips where possible."""
        kept, _ = bench.there(tuple(one for one in pinned_best() if one.of in _RUN))
        methods = [named(one, replay_row(bench.replayed(one))) for one in kept]
        sweep = [
            {"budget": budget} | replay_row(bench.replayed(ours(), budget))
            for budget in bench.effort.budgets
        ]
        body: Content = {"methods": methods, "sweep": sweep, "executed": None}
        if bench.execute is not None:
            body["executed"] = {
                "methods": [named(one, bench.executed(one)) for one in kept],
                "sweep": [
                    {"budget": budget} | bench.executed(ours(), budget)
                    for budget in bench.effort.budgets
                ],
            }
        return figure_json(self, bench, body)

    def plot(self, content: Content, path: Path) -> None:
        """Per method left; delay and degradation against the budget right."""
        executed = content["executed"]
        with picture(path, 1, 3, size=(15, 3.8)) as ((left, middle, right),):
            if executed:
                bars(left, executed["methods"], "flip_rate", f"{MEASURED}, share of tokens")
            else:
                bars(left, content["methods"], "charged_loss_per_token", CHARGED)
            budgets = [row["budget"] for row in content["sweep"]]
            delays = [row["delay_ms"] for row in content["sweep"]]
            line(middle, budgets, delays, "expected, without load", 0)
            middle.set(xlabel="budget per token", ylabel="ms per token")
            middle.legend(fontsize=7)
            right.plot(budgets, budgets, color="#555555", linestyle=":", label="budget")
            charged = [row["charged_loss_per_token"] for row in content["sweep"]]
            line(right, budgets, charged, CHARGED, 0)
            if executed:
                self._draw_flips(right, executed["sweep"])
            right.set(xlabel="budget per token", ylabel="per token")
            right.legend(fontsize=7)

    @staticmethod
    def _draw_flips(panel, sweep: list[Content]) -> None:
        rates = np.array([row["flip_rate"] for row in sweep])
        low = rates - [row["flip_rate_low_95"] for row in sweep]
        high = np.array([row["flip_rate_high_95"] for row in sweep]) - rates
        panel.errorbar(
            [row["budget"] for row in sweep],
            rates,
            yerr=np.maximum([low, high], 0.0),
            label=f"{MEASURED}, 95 % interval",
            color="#D55E00",
            marker="s",
            markersize=4,
        )

    def grids(self, content: Content) -> dict[str, Grid]:
        """Charged and measured, apart."""
        found = {f"Budget sweep, {CHARGED}": table(_SWEPT, content["sweep"])}
        executed = content["executed"]
        if executed:
            swept = [
                row | {"title": f"TrimMoE {percent(row['budget'])}"} for row in executed["sweep"]
            ]
            labelled = [*executed["methods"], *swept]
            found["Measured by executing the model"] = table(_EXECUTED, labelled)
        return found

    def findings(self, content: Content) -> list[str]:
        """Whether the budget held, in what sense, and where the curve flattens."""
        worst = max(row["charged_loss_per_token"] / row["budget"] for row in content["sweep"])
        found = [
            f"Along the sweep the charged loss reaches at most {percent(worst)} of the budget: the "
            "budget bounds what calibration charges, at every prefix."
        ]
        executed = content["executed"]
        if not executed:
            return [
                *found,
                "Nothing was executed here (give --measure, a model and --text for measured "
                "flips and perplexity), so no statement about real quality is made.",
            ]
        over = [row for row in executed["sweep"] if row["flip_rate_low_95"] > row["budget"]]
        if over:
            budgets = ", ".join(percent(row["budget"]) for row in over)
            found.append(f"Measured flips exceed the budget significantly at {budgets}.")
        else:
            found.append("At no budget do measured flips exceed it significantly (95 %).")
        mine = find(executed["methods"], "trimmoe")
        assert mine is not None
        rise = mine["perplexity"] - mine["exact_perplexity"]
        found.append(
            f"At 2 % the perplexity rises by {rise:+.3f} (paper, another model and text: +0.38); "
            "SQuAD and GSM8K are `trimmoe evaluate`'s."
        )
        return found


_SWEPT = (
    ("budget", share("budget")),
    ("ms", cell("delay_ms", ".2f")),
    ("charged", cell("charged_loss_per_token", ".4f")),
    ("of the budget", lambda row: percent(row["charged_loss_per_token"] / row["budget"])),
)
_EXECUTED = (
    ("method", cell("title")),
    ("ms", cell("delay_ms", ".2f")),
    ("flips", share("flip_rate")),
    (
        "95 % interval",
        lambda row: f"{percent(row['flip_rate_low_95'])} to {percent(row['flip_rate_high_95'])}",
    ),
    ("perplexity", cell("perplexity", ".3f")),
    ("exact's", cell("exact_perplexity", ".3f")),
)
