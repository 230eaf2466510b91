"""`docs/claims.md`: the paper's numbers and ours in three columns, failures first, and whether ours
say what the paper's say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

import trimmoe
from trimmoe.experiments.figures.claim_list import CLAIMS, Facts, Said
from trimmoe.simulator.measure import Estimate, estimate

NEAR = 0.25
"""How far from the paper's number, as a share of it, one still is `near`."""


class Verdict(StrEnum):
    """Of one number in one column, or of a claim over all columns."""

    HOLDS = "holds"
    """The whole 95 % interval bears the claim out."""
    SMALLER = "smaller"
    """The whole interval is in the paper's direction and short of its size."""
    FAILS = "fails"
    """The whole interval contradicts it."""
    NOISE = "within noise"
    """The interval allows both, or one world gives none."""
    UNKNOWN = "not measured"
    PART = "in part"
    """Of a claim: it holds in some columns only."""


def judged(said: Said, found: Estimate) -> Verdict:
    """What one column's number says."""
    if not np.isfinite(found.mean):
        return Verdict.UNKNOWN
    if not np.isfinite(found.low_95):
        return Verdict.NOISE
    inside = [_bears_out(said, end) for end in (found.low_95, found.high_95)]
    if all(inside):
        return Verdict.HOLDS
    if any(inside) or _around(said, found):
        return Verdict.NOISE
    return Verdict.SMALLER if _same_direction(said, found) else Verdict.FAILS


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """What all columns say of a claim together."""
    known = [each for each in verdicts if each is not Verdict.UNKNOWN]
    if not known:
        return Verdict.UNKNOWN
    if all(each is Verdict.HOLDS for each in known):
        return Verdict.HOLDS
    if any(each is Verdict.HOLDS for each in known):
        return Verdict.PART
    return Verdict.NOISE if all(each is Verdict.NOISE for each in known) else Verdict.FAILS


def _bears_out(said: Said, value: float) -> bool:
    if said.better == "near":
        return abs(value - said.paper) <= NEAR * abs(said.paper)
    return value <= said.paper if said.better == "less" else value >= said.paper


def _around(said: Said, found: Estimate) -> bool:
    """Whether the paper's number is inside the interval."""
    return found.low_95 <= said.paper <= found.high_95


def _same_direction(said: Said, found: Estimate) -> bool:
    """Whether a change has the paper's sign throughout, if only that."""
    if said.kind != "change" or said.paper == 0:
        return False
    return min(found.low_95 * said.paper, found.high_95 * said.paper) > 0


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


SECTIONS = {
    Verdict.FAILS: "Does not come out",
    Verdict.PART: "Comes out in part",
    Verdict.NOISE: "Within noise",
    Verdict.HOLDS: "Comes out",
    Verdict.UNKNOWN: "Not measured by this command",
}
"""Failures first."""


def claims_page(
    worlds: Mapping[str, Sequence[Facts]],
    assumed: Sequence[Assumed],
    *,
    command: str,
    notes: Sequence[str],
    inputs: Mapping[str, Mapping[str, str]],
) -> str:
    """The whole page; `worlds` holds each column's facts, one of each world, `inputs` the hashes of
    what each world was made from."""
    rows = [(said, _estimates(said, worlds)) for said in CLAIMS]
    verdicts = [_verdict(*row) for row in rows]
    counts = ", ".join(
        f"{title[0].lower()}{title[1:]} {verdicts.count(each)}" for each, title in SECTIONS.items()
    )
    parts = [
        "# The paper's claims and ours",
        "",
        f"Made by `{command}`, TrimMoE {trimmoe.__version__}; do not edit. {' '.join(notes)}",
        "",
        "Each number of ours is a mean over worlds with its 95 % interval, and a claim *holds* or "
        "*fails* where the whole interval says so; *smaller* is in the paper's direction and short "
        "of its size. `migrate`, by the letter, lets tokens move without their cache and is not "
        "physical; EdgeShard's placement moves them likewise there, and runs as published where "
        f"tokens are pinned. Of {len(rows)} claims there are: {counts}.",
    ]
    for verdict, title in SECTIONS.items():
        kept = [row for row, each in zip(rows, verdicts, strict=True) if each is verdict]
        if kept:
            parts += ["", f"## {title}", "", *_table(kept)]
    parts += ["", "## Where the generator's assumption decides", "", *_assumption(assumed)]
    parts += ["", "## Inputs", "", *_inputs(inputs)]
    return "\n".join(parts) + "\n"


def _estimates(said: Said, worlds: Mapping[str, Sequence[Facts]]) -> dict[str, Estimate]:
    found = {}
    for column, facts in worlds.items():
        values = []
        for each in facts:
            try:
                values.append(said.ours(each) if said.ours is not None else np.nan)
            except (KeyError, ZeroDivisionError):
                values.append(np.nan)
        found[column] = estimate(values)
    return found


def _verdict(said: Said, found: dict[str, Estimate]) -> Verdict:
    return overall(judged(said, each) for each in found.values())


def _table(rows: Sequence[tuple[Said, dict[str, Estimate]]]) -> list[str]:
    columns = list(rows[0][1])
    lines = [
        "| figure | claim | paper | " + " | ".join(COLUMNS[name] for name in columns) + " | why |",
        "|" + "---|" * (4 + len(columns)),
    ]
    for said, found in rows:
        cells = [_cell(said, found[name]) for name in columns]
        why = "" if _verdict(said, found) is Verdict.HOLDS else said.why
        paper = said.said or shown(said, said.paper)
        lines.append(f"| {said.where} | {said.text} | {paper} | {' | '.join(cells)} | {why} |")
    return lines


def _cell(said: Said, found: Estimate) -> str:
    if not np.isfinite(found.mean):
        return "-"
    text = shown(said, found.mean)
    if not np.isfinite(found.low_95):
        return f"{text}, one world"
    if found.low_95 < found.high_95:
        text += f" ({shown(said, found.low_95)} to {shown(said, found.high_95)})"
    return f"{text}, {judged(said, found)}"


def shown(said: Said, value: float) -> str:
    """A number as its claim has it."""
    match said.kind:
        case "change":
            return f"{round(value, 3) + 0.0:+.1%}"  # No "-0.0%".
        case "share":
            return f"{round(value, 3) + 0.0:.1%}"
        case "ratio":
            return f"{value:.2f}x"
        case "plain":
            return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


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


def _inputs(inputs: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Hashes, a row of each world."""
    names = list(next(iter(inputs.values()), {}))
    lines = [f"| world | {' | '.join(names)} |", "|" + "---|" * (1 + len(names))]
    for world, hashes in inputs.items():
        lines.append(f"| {world} | {' | '.join(f'`{hashes[name][:12]}`' for name in names)} |")
    return lines
