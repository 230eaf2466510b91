"""Whether a cluster that serves should move to another plan, by what was measured meanwhile.

A move costs time, and figures are noisy. So another plan has to save more than noise and moving
could, on several looks in a row; and what was moved to is then the plan that others have to beat.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.cost.model import CostModel


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveRules:
    """When another plan is worth moving to."""

    least: float = 0.1
    """Share of a token's time that it has to save."""
    looks: int = 3
    """In a row on which it has to."""
    horizon_s: float = 1800.0
    """For how long machines are taken to stay as they are."""
    drift: float = 0.2
    """By what share a figure has to differ for plans to be searched anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """The plan in force and the best other one, both by the same new figures."""

    now_s: float
    """Expected time of a token by the plan in force."""
    other_s: float
    """By the other one."""
    moving_s: float
    """How long servers load while others serve: taken to cost as much as serving nobody."""
    spread: float = 0.0
    """Share by which repeated measurements of the same differ."""

    def pays(self, rules: MoveRules) -> bool:
        """Whether the other plan saves more than noise and moving cost."""
        if not (0.0 < self.other_s < self.now_s < np.inf):
            return False
        saved = 1.0 - self.other_s / self.now_s
        worth_it = saved * rules.horizon_s > self.moving_s
        return saved > max(rules.least, self.spread) and worth_it


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How many looks in a row have said that another plan pays."""

    agreed: int = 0

    def after(self, look: Look | None, rules: MoveRules) -> Standing:
        """With one more look; None: nothing has drifted."""
        pays = look is not None and look.pays(rules)
        return Standing(agreed=self.agreed + 1 if pays else 0)

    def moves(self, rules: MoveRules) -> bool:
        """Whether to move now."""
        return self.agreed >= rules.looks


def too_large_beside(needed: IntArray, free: IntArray, machine: IntArray) -> IntArray:
    """The machines that cannot hold what their servers would load beside what they hold already.

    `needed`, `free`: bytes by server [M], of which servers of one machine all say the same free
    ones, 0 where nobody said; `machine` [M] numbers the machines.
    """
    numbers = np.unique(machine)
    total = np.array([needed[machine == number].sum() for number in numbers])
    there = np.array([free[machine == number].max() for number in numbers])
    return numbers[(there > 0) & (total > there)]


def has_drifted(planned: CostModel, seen: CostModel, rules: MoveRules) -> bool:
    """Whether any step costs so much more or less than it was planned with that another plan may
    be better."""
    pairs = (
        (planned.transfer_s, seen.transfer_s),
        (planned.enter_s, seen.enter_s),
        (planned.dense_s, seen.dense_s),
        (planned.expert_s, seen.expert_s),
    )
    return any(_apart(before, after) > rules.drift for before, after in pairs)


def _apart(before: FloatArray, after: FloatArray) -> float:
    """The largest relative difference; of what costs nothing either way there is none."""
    larger = np.maximum(before, after)
    smaller = np.minimum(before, after)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.nan_to_num(larger / smaller - 1.0, nan=0.0).max(initial=0.0))
