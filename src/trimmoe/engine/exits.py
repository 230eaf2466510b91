"""When a token may leave early, what that is charged, and whether it is worth it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.wave import NOT_PROBED, Wave
from trimmoe.cost.deciding import step_costs
from trimmoe.cost.model import Accounting, CostModel
from trimmoe.policy.settings import PolicySettings


@dataclass(frozen=True, kw_only=True)
class ExitRules:
    """The exit gate of one engine; fields as there."""

    settings: PolicySettings
    profile: Profile
    cost: CostModel
    routes: IntArray
    """[R, N]."""
    reference_s: float
    late_s: FloatArray | None = None
    """`Policy.exact_to_go_s`."""

    def needed(self, confidence: float) -> float:
        """p_J, raised to where calibration bounds what exits flip by what is tolerated; of drafts,
        which flip nothing, the one they have by themselves, unless p_J rules all exits out."""
        readings = self.settings.readings
        if self.settings.draft_confidence is not None:
            return max(self.settings.draft_confidence, confidence if confidence > 1.0 else 0.0)
        if readings.exit_risk is None:
            return confidence
        tolerated = readings.exit_risk, readings.exit_state
        return max(confidence, self.profile.exit_threshold_at_risk(*tolerated))

    @cached_property
    def busy(self) -> FloatArray:
        """Share of the time that servers along each route are busy, as measured or as far as
        waiting tells, [R].

        Where s is the time of service and rho that share, one waits rho / (1 - rho) s (M/M/1), and
        so long does work in vain make others wait for each second it takes. Of a draft that is
        right with chance c that is (1 - c) of what is saved with chance c: it pays where c >= rho.
        """
        if self.cost.busy is not None:
            return self.cost.busy[self.routes].mean(1)
        waiting_s = self.cost.waiting_s
        in_all_s = waiting_s + self.cost.expert_s.mean(axis=(1, 2))
        shares = np.divide(waiting_s, in_all_s, where=in_all_s > 0, out=np.zeros_like(waiting_s))
        return shares[self.routes].mean(1)

    def charge(self, needed: FloatArray) -> FloatArray:
        """What an exit at these thresholds is charged: the bound of all that it flips."""
        readings = self.settings.readings
        if self.settings.drafts or not readings.exits_charged:
            return np.zeros_like(needed)
        grid, bound = self.profile.exit_grid, self.profile.exit_bound(readings.exit_state)
        # Rounded to the laxer threshold of the grid, and below the grid nothing is known.
        index = np.searchsorted(grid, needed, side="right") - 1
        unknown = max(1.0, float(bound.max()))
        known = np.where(index >= 0, bound[np.maximum(index, 0)], unknown)
        return known * self.settings.inflation

    def due(self, wave: Wave, rows: IntArray) -> BoolArray:
        """Which of `rows` leave, or would but for an audit, after the layer they have just run."""
        due = wave.confidence[rows] >= wave.confidence_needed[rows]
        due &= self.settings.levers.exit & (wave.probed[rows] == NOT_PROBED)
        due &= ~wave.answered[rows]
        due &= wave.exit_loss[rows] <= wave.allowance[rows]
        return due & self._worth_leaving(wave, rows)

    @cached_property
    def _left_s(self) -> list[FloatArray]:
        """Attention of the layers from each on, by layer, along every route [R]."""
        layers = np.arange(self.cost.layer_count)
        seconds = self.cost.dense_s[self.routes, layers]
        return [np.ascontiguousarray(seconds[:, layer:]).sum(1) for layer in layers.tolist()]

    def _waits_s(self, wave: Wave, rows: IntArray, back_s: FloatArray) -> FloatArray:
        """What drafts are expected to take longer than to here, since full depth confirms them, see
        `books.afterwards`. It runs no copies of experts, so that where those save the token's way
        it may take longer than going on."""
        if not self.settings.drafts or self.late_s is None:
            return np.zeros(rows.size)
        answered_s = wave.delay_s[rows] + back_s
        late_s = self.late_s[wave.route[rows], wave.layer]
        return np.maximum((late_s - answered_s) / 2, 0.0)

    def _worth_leaving(self, wave: Wave, rows: IntArray) -> BoolArray:
        """Whether an exit costs less than going on: its charge and the way back from here, against
        what is expected still to come, the attention of the layers left and the way back from the
        last. Both as step costs (31)."""
        if not self.settings.readings.exits_weighed:
            return np.ones(rows.size, dtype=bool)
        weight, access, server = wave.loss_weight[rows], wave.access[rows], wave.server[rows]
        last, back_s = server, self.cost.token_transfer_s
        left_s = np.zeros(rows.size)
        if self.cost.accounting is not Accounting.MIGRATE:
            route = wave.route[rows]
            last, left_s = self.routes[route, -1], self._left_s[wave.layer][route]
        saved_s = left_s + back_s[last, access] - back_s[server, access]
        terms = weight, self.reference_s, self.settings.budget
        waits_s = self._waits_s(wave, rows, back_s[server, access])
        charge = step_costs(waits_s, wave.exit_loss[rows], *terms)
        return charge < wave.ahead[rows] + step_costs(saved_s, np.zeros(rows.size), *terms)
