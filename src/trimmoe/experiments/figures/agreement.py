"""What guesses are worth, however often users' servers are right.

Of the embedded model that is measured, of a geometry it is assumed. The world's own tokens keep
their routing and get guesses drawn anew, on all servers alike and independent of everything else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trimmoe.core.trace import Trace
from trimmoe.experiments.figures.base import Content, Grid, percent
from trimmoe.experiments.figures.bench import Bench
from trimmoe.experiments.figures.contenders import EXACT, GUESSED, pinned_best
from trimmoe.experiments.figures.draw import line
from trimmoe.simulator.generate import Parameters, home_passes

AGREEMENTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Values of `home_agreement`."""


def measure_agreement(bench: Bench, base: Parameters, *, recorded: bool) -> Content:
    """Replays of `speculative` on our plan, beside exact execution of the same tokens; `recorded`:
    they are of a real model, and so are their own guesses if they have any."""
    by_name = {one.of: one for one in pinned_best()}
    guessed, exact = by_name[GUESSED], bench.replayed(by_name[EXACT]).ledger

    def row(other: Bench, agreement: float) -> Content:
        ledger = other.replayed(guessed).ledger
        return {
            "agreement": agreement,
            "speculative_ms": ledger.mean_delay_s * 1e3,
            "ratio": ledger.mean_delay_s / exact.mean_delay_s,
            "hops_ratio": ledger.hops / exact.hops if exact.hops else None,
        }

    rows = []
    for agreement in AGREEMENTS:
        bench.announce(f"{guessed.title}: agreement {agreement:g}")
        trace = _guessed_anew(bench, replace(base, home_agreement=agreement))
        other = Bench(world=replace(bench.world, trace=trace), effort=bench.effort, seed=bench.seed)
        rows.append(row(other, agreement))
    there = bool(bench.there((guessed,))[0])
    return {
        "exact_ms": exact.mean_delay_s * 1e3,
        "recorded": row(bench, base.home_agreement) if recorded and there else None,
        "assumed": None if recorded else base.home_agreement,
        "rows": rows,
    }


def _guessed_anew(bench: Bench, parameters: Parameters) -> Trace:
    """The world's tokens with the guesses of generated ones."""
    trace = bench.world.trace
    wrong, confidence = home_passes(parameters, trace.token_count, trace.header.seed)
    return replace(trace, home_wrong=wrong, home_confidence=confidence)


def draw_agreement(panel: Any, content: Content) -> None:
    """The ratio over the agreement; dotted where it takes as long as exact execution."""
    rows, recorded = content["rows"], content["recorded"]
    agreements, ratios = [row["agreement"] for row in rows], [row["ratio"] for row in rows]
    line(panel, agreements, ratios, "guesses drawn at random", 0)
    if recorded is not None:
        panel.plot(recorded["agreement"], recorded["ratio"], "D", color="#D55E00", label="recorded")
    if content["assumed"] is not None:
        panel.axvline(content["assumed"], color="#555555", ls=":", label="assumed elsewhere")
    panel.axhline(1.0, color="#555555", linewidth=0.6)
    panel.set(xlabel="home_agreement", ylabel="speculative over exact, our plan")
    panel.legend(fontsize=7)


def agreement_grid(content: Content) -> Grid:
    """A line per agreement, and what was recorded."""
    rows = [(f"{row['agreement']:g}", row) for row in content["rows"]]
    recorded = content["recorded"]
    if recorded is not None:
        rows.append((f"{recorded['agreement']:.2f}, recorded", recorded))
    return Grid(
        headings=("home_agreement", "exact", "speculative", "ratio", "hops"),
        rows=[
            (
                name,
                f"{content['exact_ms']:.2f}",
                f"{row['speculative_ms']:.2f}",
                percent(row["ratio"]),
                percent(row["hops_ratio"]),
            )
            for name, row in rows
        ],
    )


def agreement_sentence(content: Content) -> str:
    """How much hangs on the agreement, and what is known of it here."""
    first, last = content["rows"][0], content["rows"][-1]
    recorded, assumed = content["recorded"], content["assumed"]
    if recorded is not None:
        known = (
            f"recorded, servers agree on {percent(recorded['agreement'])} of the tokens and it "
            f"takes {percent(recorded['ratio'])}"
        )
    elif assumed is not None:
        known = f"elsewhere {percent(assumed)} are assumed, and nobody has measured it"
    else:
        known = "the trace does not say how often they are"
    return (
        f"On our plan `speculative` takes {percent(first['ratio'])} of exact execution's delay "
        f"where users' servers are right about {percent(first['agreement'])} of the tokens, and "
        f"{percent(last['ratio'])} where about {percent(last['agreement'])}; {known}."
    )
