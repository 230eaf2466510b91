"""What every figure has: a measurement that gives a JSON, a picture, a table, and sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import trimmoe
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.experiments.figures.bench import BUDGET, CONFIDENCE, Bench, ledger_row
from trimmoe.experiments.figures.contenders import EXACT, GUESSED, Contender
from trimmoe.experiments.figures.world import effort_json
from trimmoe.simulator.measure import Sample, estimate, figures

Content = dict[str, Any]
"""A figure's JSON."""

CLOCK = "clock"
"""The one key under which figures keep what this machine's clock showed: all else repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A table for people."""

    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


Columns = Sequence[tuple[str, Callable[[Content], str]]]
"""Of a table: what is above each column, and what it shows of a row."""


def table(columns: Columns, rows: Iterable[Content]) -> Grid:
    """Rows as columns declare them."""
    return Grid(
        headings=tuple(heading for heading, _ in columns),
        rows=[tuple(cell(row) for _, cell in columns) for row in rows],
    )


def cell(key: str, form: str = "") -> Callable[[Content], str]:
    """What a row has under `key`, formatted; a dash where that is None."""
    return lambda row: "-" if row[key] is None else format(row[key], form)


def share(key: str) -> Callable[[Content], str]:
    """The same of a share, in percent."""
    return lambda row: percent(row[key])


class Figure(Protocol):
    """One figure of the paper's section VI."""

    @property
    def number(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def paper(self) -> str:
        """What the paper reports, in a sentence."""
        ...

    def measure(self, bench: Bench) -> Content:
        """Everything the picture shows, JSON-like and finite."""
        ...

    def plot(self, content: Content, path: Path) -> None:
        """Write the picture as PNG."""
        ...

    def grids(self, content: Content) -> dict[str, Grid]:
        """Tables by caption."""
        ...

    def findings(self, content: Content) -> list[str]:
        """What the numbers say beside the paper's, and why, in sentences made from them."""
        ...


def figure_json(figure: Figure, bench: Bench, body: Content) -> Content:
    """`body` with all that is needed to repeat it."""
    return {
        "figure": figure.number,
        "title": figure.title,
        "trimmoe_version": trimmoe.__version__,
        "seed": bench.seed,
        "settings": {"budget": BUDGET, "confidence": CONFIDENCE, **effort_json(bench.effort)},
        "world": bench.world.described(),
        **body,
    }


def load_row(samples: Sequence[Sample], sla_s: float, answer_tokens: int) -> Content:
    """Figures of simulations under load: means over seeds, and the 95 % half width of the delay.

    Requests are answers of `answer_tokens` at the pace of those of their tokens that were measured:
    the exact time of all that lie whole in what is measured, and what others come to.
    """
    by_seed = [figures(one, sla_s) for one in samples]
    delay = estimate([one["token_ms"] for one in by_seed])
    half = (delay.high_95 - delay.low_95) / 2.0
    ledgers = [one.ledger for one in samples]
    ledger: Ledger = sum(ledgers[1:], ledgers[0])
    token_s = np.concatenate([one.token_s for one in samples])
    known = {
        key: estimate([one[key] for one in by_seed]).mean
        for key in ("tokens_per_s", "server_use_max", "link_use_max")
    }
    request_s = answer_tokens * np.concatenate([one.pace_s for one in samples])
    return {
        "tokens": int(token_s.size),
        "delay_ms": float(token_s.mean()) * 1e3,
        "delay_half_width_ms": float(half) if np.isfinite(half) else None,
        "delay_p99_ms": float(np.quantile(token_s, 0.99)) * 1e3,
        "delay_quantiles_ms": (np.quantile(token_s, np.linspace(0, 1, 101)) * 1e3).tolist(),
        "answer_tokens": answer_tokens,
        "requests": int(request_s.size),
        "request_ms": float(request_s.mean()) * 1e3,
        "request_p99_ms": float(np.quantile(request_s, 0.99)) * 1e3,
        "request_quantiles_ms": (np.quantile(request_s, np.linspace(0, 1, 101)) * 1e3).tolist(),
        "sla_share": float((request_s <= sla_s).mean()),
        **known,
        **ledger_row(ledger),
    }


def named(contender: Contender, row: Content) -> Content:
    """A row with whose it is."""
    who = {"key": contender.key, "title": contender.title, "of": contender.of}
    return who | {"lossless": contender.lossless} | row


def find(rows: Sequence[Content], of: str) -> Content | None:
    """The row of the paper's method `of`, or None where it could not run."""
    return next((row for row in rows if row["of"] == of), None)


def fastest_lossless(rows: Sequence[Content], *, ours: bool) -> Content | None:
    """The fastest lossless row without guesses: ours, on our own plan, or of all others; None
    without any."""
    plain = [row for row in rows if row["lossless"] and row["of"] != GUESSED]
    chosen = [row for row in plain if (row["of"] == EXACT) == ours]
    return min(chosen, key=lambda row: row["delay_ms"]) if chosen else None


def change(ours: float, theirs: float) -> float | None:
    """How much more ours is, as a share of theirs; negative is less."""
    return ours / theirs - 1.0 if theirs else None


def percent(share: float | None, *, signed: bool = False) -> str:
    """A share for people."""
    if share is None:
        return "-"
    share = round(share, 3) + 0.0  # No "-0.0%".
    return f"{share:+.1%}" if signed else f"{share:.1%}"


KIND_NAMES = tuple(kind.name.lower() for kind in Kind)
