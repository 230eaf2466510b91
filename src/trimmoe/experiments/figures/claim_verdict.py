"""Whether a number of ours, with its interval, says what the paper's says."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import numpy as np

from trimmoe.experiments.figures.claim_list import Said
from trimmoe.simulator.measure import Estimate

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
