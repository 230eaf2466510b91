"""Fig. 11: latency and service under 10 to 80 requests per second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimmoe.experiments.figures.base import (
    Content,
    Grid,
    cell,
    figure_json,
    load_row,
    named,
    percent,
    share,
)
from trimmoe.experiments.figures.bench import SLA_S, Bench
from trimmoe.experiments.figures.contenders import Contender, letter, pinned_best
from trimmoe.experiments.figures.draw import Axes, draw_curves
from trimmoe.experiments.figures.overall import full_sentence

_LETTER = ("edgeshard", "moe2", "substitute-only", "trimmoe")
_PINNED = ("pipeline", "edgeshard", "exact", "trimmoe", "speculative")


def under_load() -> tuple[Contender, ...]:
    """Who is put under load."""
    return (
        *(one for one in letter() if one.of in _LETTER),
        *(one for one in pinned_best() if one.of in _PINNED),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnderLoad:
    """An open loop with queues at servers and links."""

    number: str = "11"
    title: str = "Performance under load"
    paper: str = (
        "From 10 to 80 requests/s TrimMoE's latency grows slowest; at 80 it meets 300 ms for 71 % "
        "of requests, the baselines for less than half."
    )

    def measure(self, bench: Bench) -> Content:
        """Everybody at every rate."""
        kept, left_out = bench.there(under_load())
        rows = [
            named(one, {"rate_per_s": rate} | _row(bench, one, rate))
            for one in kept
            for rate in bench.effort.rates
        ]
        for row in rows:
            del row["delay_quantiles_ms"], row["request_quantiles_ms"]
        return figure_json(self, bench, {"sla_s": SLA_S, "rows": rows, "left_out": left_out})

    def plot(self, content: Content, path: Path) -> None:
        """Mean latency and share of requests within the target."""
        draw_curves(path, _PANELS, _curves(content), size=(12, 4))

    def grids(self, content: Content) -> dict[str, Grid]:
        """Latency and service by rate."""
        rates = list(dict.fromkeys(row["rate_per_s"] for row in content["rows"]))
        curves = _curves(content)
        found = {}
        for caption, shown in _TABLES.items():
            found[caption] = Grid(
                headings=("method", *(f"{rate:g}/s" for rate in rates)),
                rows=[(title, *map(shown, rows)) for title, rows in curves.items()],
            )
        return found

    def findings(self, content: Content) -> list[str]:
        """What the load does, and what it does not."""
        found = []
        for title, rows in _curves(content).items():
            first, last = rows[0], rows[-1]
            found.append(
                f"{title}: {first['delay_ms']:.2f} ms at {first['rate_per_s']:g}/s, "
                f"{last['delay_ms']:.2f} ms at {last['rate_per_s']:g}/s, "
                f"{percent(last['sla_share'])} of requests (of {last['answer_tokens']} tokens, "
                f"{last['request_ms']:.0f} ms on average) within 300 ms there; the busiest "
                f"server is {percent(last['server_use_max'])} busy, the busiest link "
                f"{percent(last['link_use_max'])}."
            )
        busiest = max(row["server_use_max"] for row in content["rows"])
        if busiest < 0.5:
            found.append(
                f"No server is ever more than {percent(busiest)} busy: on the paper's own machines "
                "and links these rates queue hardly anybody, so latency is propagation and the "
                "service levels tell placements apart rather than robustness to load."
            )
        return [*found, *full_sentence(content["rows"])]


_PANELS = (
    Axes(
        x="rate_per_s",
        y="delay_ms",
        xlabel="requests/s",
        ylabel="ms per token, simulated",
        yscale="log",
    ),
    Axes(
        x="rate_per_s",
        y="sla_share",
        xlabel="requests/s",
        ylabel="requests within 300 ms",
        ylim=(0, 1.02),
        legend=False,
    ),
)
_TABLES = {
    "ms per token": cell("delay_ms", ".2f"),
    "ms per request": cell("request_ms", ".0f"),
    "requests within 300 ms": share("sla_share"),
    "use of the busiest server": share("server_use_max"),
}


def _row(bench: Bench, contender: Contender, rate: float) -> Content:
    row = load_row(bench.simulated(contender, rate), SLA_S, bench.effort.output_tokens)
    return row | {"began_full": (contender.key, rate) in bench.began_full}


def _curves(content: Content) -> dict[str, list[Content]]:
    titles = dict.fromkeys(row["title"] for row in content["rows"])
    return {title: [r for r in content["rows"] if r["title"] == title] for title in titles}
