"""Figures of servers that serve: are they still those that the plan was made with?

Links are known from their messages at any time. Servers time their work when nobody waits for an
answer, since that takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trimmoe.core.machines import Machines, Work
from trimmoe.core.plan import Plan
from trimmoe.core.precision import Precision
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, FloatArray, ModelSpec
from trimmoe.cost.model import cost_model
from trimmoe.experiments.measuring import links_of
from trimmoe.placement.moving import Look, MoveRules, Standing, has_drifted
from trimmoe.placement.optimise import SearchSettings, plan_value_s
from trimmoe.runtime.launch.lookout import Glance

WORK_MAKES_SENSE, LINK_MAKES_SENSE = 100.0, 1e4
"""Figures that differ by more than so many times from those before are nonsense: a link may come to
lead around the world."""

PlanFor = Callable[[ClusterSpec], Plan]


@dataclass(kw_only=True)
class Drift:
    """What was measured of a cluster, and whether it should be planned anew. One thread."""

    profile: Profile
    model: ModelSpec
    precision: Precision
    nominal: ClusterSpec
    """Without what was measured."""
    machines: Machines
    """What the plan in force was made with."""
    search: SearchSettings = field(default_factory=SearchSettings)
    """What plans are compared by."""
    rules: MoveRules = field(default_factory=MoveRules)
    _standing: Standing = field(default_factory=Standing)
    _seen: list[Machines] = field(default_factory=list)

    @property
    def wavers(self) -> bool:
        """Whether a look has found a better plan that others have yet to confirm."""
        return self._standing.agreed > 0

    def look(
        self, plan: Plan, told: Sequence[Glance], moving_s: float, plan_for: PlanFor
    ) -> Plan | None:
        """The plan to move to from `plan`, by what servers tell; None to stay."""
        latest = self._seen[-1] if self._seen else self.machines
        seen = refreshed(latest, told)
        self._seen = [*self._seen, seen][-self.rules.looks :]
        look, _ = self._compared(plan, seen, moving_s, plan_for)
        self._standing = self._standing.after(look, self.rules)
        if look is not None and not self._standing.agreed:
            # As far as it has drifted no plan is better: from now on that is what is known.
            self.machines = seen
        if not self._standing.moves(self.rules):
            return None
        self._standing = Standing()
        middle = median_of(self._seen)
        look, made = self._compared(plan, middle, moving_s, plan_for)
        if look is None or not look.pays(self.rules):
            return None
        self.machines = middle
        return made

    def _compared(
        self, plan: Plan, seen: Machines, moving_s: float, plan_for: PlanFor
    ) -> tuple[Look | None, Plan | None]:
        """The plan in force beside one made for these figures; None if nothing has drifted."""
        before, after = (cost_model(self.model, self._with(each)) for each in (self.machines, seen))
        if not has_drifted(before, after, self.rules):
            return None, None
        made = plan_for(self._with(seen))
        now_s, other_s = (self._expected_s(each, self._with(seen)) for each in (plan, made))
        spread = _spread(seen)
        return Look(now_s=now_s, other_s=other_s, moving_s=moving_s, spread=spread), made

    def _with(self, machines: Machines) -> ClusterSpec:
        return machines.applied(self.nominal, self.model, self.precision)

    def _expected_s(self, plan: Plan, cluster: ClusterSpec) -> float:
        return plan_value_s(plan, self.profile, self.model, cluster, self.search)


def refreshed(before: Machines, told: Sequence[Glance]) -> Machines:
    """What is known with what servers tell now; whoever tells nothing, or nonsense, stays as is.

    What software costs a message and a token grows with what the interpreter takes.
    """
    links = links_of(before.server_names, [each.links for each in told])
    found = replace(
        before,
        delay_s=_sensible(links[0], before.delay_s, LINK_MAKES_SENSE),
        bandwidth_bytes_per_s=_sensible(links[1], before.bandwidth_bytes_per_s, LINK_MAKES_SENSE),
        jitter_s=np.where(np.isfinite(links[2]), links[2], before.jitter_s),
    )
    for at, each in enumerate(told):
        if each.report is not None:
            found = _timed_anew(found, at, each.report.work_s, each.report.software_s)
    return found


def _timed_anew(machines: Machines, server: int, work_s: FloatArray, software_s: float) -> Machines:
    """With one server's quantiles [3, W, B] in place of those before."""
    parts = {}
    for name, said in zip(("low_s", "work_s", "high_s"), work_s, strict=True):
        before = getattr(machines, name)
        parts[name] = before.copy()
        parts[name][server] = _sensible(said, before[server], WORK_MAKES_SENSE)
    known_s = machines.software_s[[server]]
    slower = float((_sensible(np.array([software_s]), known_s, WORK_MAKES_SENSE) / known_s)[0])
    for name in ("software_s", "hop_s", "token_s"):
        parts[name] = getattr(machines, name).copy()
        parts[name][server] *= slower
    return replace(machines, **parts)


def _sensible(said: FloatArray, before: FloatArray, factor: float) -> FloatArray:
    """What is said, where it is a positive number that what was known makes plausible."""
    with np.errstate(invalid="ignore", divide="ignore"):
        far = np.abs(np.log(said / before)) > np.log(factor)
        good = np.isfinite(said) & (said > 0) & ~(np.isfinite(before) & (before > 0) & far)
    return np.where(good, said, before)


def median_of(seen: Sequence[Machines]) -> Machines:
    """The middle of several looks, figure by figure."""
    names = (
        "work_s", "low_s", "high_s", "delay_s", "bandwidth_bytes_per_s", "jitter_s", "software_s",
        "hop_s", "token_s",
    )  # fmt: skip
    parts = {}
    for name in names:
        stacked = np.sort(np.stack([getattr(each, name) for each in seen]), axis=0)
        parts[name] = stacked[len(seen) // 2]
    return replace(seen[-1], **parts)


def _spread(machines: Machines) -> float:
    """By how much repetitions of what decides a token's time differ on a typical server."""
    kinds = [Work.DENSE, Work.EXPERT]
    middle = machines.work_s[:, kinds, 0]
    half = (machines.high_s - machines.low_s)[:, kinds, 0] / 2
    return float(np.median(half / middle))
