"""`docs/claims.md`: the paper's numbers and ours in three columns, failures first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import trimmoe
from trimmoe.experiments.figures.claim_list import CLAIMS, Facts, Said, borne_out
from trimmoe.simulator.measure import Estimate, estimate

COLUMNS = {
    "letter, generated": "by the letter, generated tokens",
    "letter, embedded": "by the letter, embedded model",
    "pinned": "pinned, our plan",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed:
    """What the importance of layers is assumed to do, and what follows for one claim."""

    importance: tuple[float, float]
    """Mean importance of the first and the last layer."""
    deeper_skips: float | None
    """Skips of the deeper half over the shallower's, less 1; None: no shallow layer is skipped."""


def claims_page(
    worlds: Mapping[str, Sequence[Facts]],
    assumed: Sequence[Assumed],
    *,
    command: str,
    notes: Sequence[str],
) -> str:
    """The whole page; `worlds` holds each column's facts, one of each world."""
    rows = [(said, _estimates(said, worlds)) for said in CLAIMS]
    failed = [row for row in rows if _verdict(*row) == "no"]
    mixed = [row for row in rows if _verdict(*row) == "in part"]
    held = [row for row in rows if _verdict(*row) == "yes"]
    unknown = [row for row in rows if _verdict(*row) == "not measured"]
    parts = [
        "# The paper's claims and ours",
        "",
        f"Made by `{command}`, TrimMoE {trimmoe.__version__}; do not edit. {' '.join(notes)}",
        "",
        "Each number of ours is a mean over worlds with its 95 % interval. `migrate`, by the "
        "letter, lets tokens move without their cache and is not physical.",
    ]
    sections = (
        ("Does not come out", failed),
        ("Comes out in part", mixed),
        ("Comes out", held),
        ("Not measured by this command", unknown),
    )
    for title, kept in sections:
        if kept:
            parts += ["", f"## {title}", "", *_table(kept)]
    parts += ["", "## Where the generator's assumption decides", "", *_assumption(assumed)]
    return "\n".join(parts) + "\n"


def _estimates(said: Said, worlds: Mapping[str, Sequence[Facts]]) -> dict[str, Estimate]:
    found = {}
    for column, facts in worlds.items():
        values = []
        for each in facts:
            try:
                values.append(said.ours(each) if said.ours is not None else np.nan)
            except KeyError:
                values.append(np.nan)
        found[column] = estimate(values)
    return found


def _verdict(said: Said, found: dict[str, Estimate]) -> str:
    known = [each.mean for each in found.values() if np.isfinite(each.mean)]
    if not known:
        return "not measured"
    true = [borne_out(said, mean) for mean in known]
    return "yes" if all(true) else "in part" if any(true) else "no"


def _table(rows: Sequence[tuple[Said, dict[str, Estimate]]]) -> list[str]:
    columns = list(rows[0][1])
    lines = [
        "| figure | claim | paper | " + " | ".join(COLUMNS[name] for name in columns) + " | why |",
        "|" + "---|" * (4 + len(columns)),
    ]
    for said, found in rows:
        cells = [_cell(said, found[name]) for name in columns]
        why = "" if _verdict(said, found) in ("yes", "not measured") else said.why
        paper = shown(said, said.paper)
        lines.append(f"| {said.where} | {said.text} | {paper} | {' | '.join(cells)} | {why} |")
    return lines


def _cell(said: Said, found: Estimate) -> str:
    if not np.isfinite(found.mean):
        return "-"
    text = shown(said, found.mean)
    if np.isfinite(found.low_95):
        text += f" ({shown(said, found.low_95)} to {shown(said, found.high_95)})"
    return text


def shown(said: Said, value: float) -> str:
    """A number as its claim has it."""
    match said.kind:
        case "change":
            return f"{value:+.1%}"
        case "share":
            return f"{value:.1%}"
        case "ratio":
            return f"{value:.2f}x"
        case "plain":
            return f"{value:.3g}"


def _assumption(assumed: Sequence[Assumed]) -> list[str]:
    """Fig. 7(b) over what importance may do with depth."""
    lines = [
        "Fig. 7(b), skips that rise with depth, follows from what importance does with depth, "
        "which generated tokens assume and the paper does not publish. By the letter:",
        "",
        "| importance, first to last layer | skips of the deeper half against the shallower |",
        "|---|---|",
    ]
    for each in assumed:
        first, last = each.importance
        value = "no skips in the shallower" if each.deeper_skips is None else None
        lines.append(f"| {first:g} to {last:g} | {value or f'{each.deeper_skips:+.0%}'} |")
    return lines
