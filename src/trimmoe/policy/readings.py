"""How the paper is read where it can be read in more than one way, or where we depart from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trimmoe.core.exit_states import ExitState

BUDGET_USE_TARGET = 0.9
"""Share of the budget that a policy aims to spend."""


class BudgetRule(StrEnum):
    """How a sequence's budget is portioned to its tokens."""

    BUCKET = "bucket"
    """Each token credits D-bar; spending never exceeds the balance, at any prefix."""
    EVEN = "even"
    """The paper's (33): each token may spend D-bar, what it leaves is lost."""


class WeightRule(StrEnum):
    """How omega_D follows what was observed."""

    STEER = "steer"
    """Toward using 90 % of the budget."""
    PAPER = "paper"
    """(43): budget utilisation against normalised delay."""
    FIXED = "fixed"


class ExitRule(StrEnum):
    """How the exit threshold follows what was observed."""

    AUDITED = "audited"
    """The false-exit rate of audited exits steers it."""
    PAPER = "paper"
    """(37): toward the mean confidence at which tokens exited."""
    FIXED = "fixed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """The readings of the paper, ours unless another is named; `letter` has the paper's own.

    Each is explained in docs/architecture.md, "Where we read the paper differently".
    """

    importance_gate: bool = False
    """Admit skips and drops only below the thresholds theta_l (24). Off, the budget and the price
    of quality decide alone, so that a dear skip can still save a dearer hop."""
    exit_risk: float | None = 0.01
    """Share of all tokens that exits may flip: p is raised to where calibration bounds it by this,
    whatever the confidence asked for, and audits steer toward it. None trusts the scores."""
    inflate: bool = True
    """Take gamma from the plan, where `trimmoe tune` has measured it."""
    exit_state: ExitState = ExitState.WHOLE
    echoes_charged: bool = True
    """Whether a skip, drop or substitute spends what it flips of later tokens besides its own
    flip. Off, only the latter counts, as in the paper."""
    exits_charged: bool = True
    """Whether an exit spends the budget: the bound of what it flips, itself and later. Off, exits
    are free, as in the paper."""
    exits_weighed: bool = True
    """Whether a token only exits where what it would still cost is worth more than the quality an
    exit is charged. Off, it exits as soon as it may, as in the paper."""
    budget_rule: BudgetRule = BudgetRule.BUCKET
    weight_rule: WeightRule = WeightRule.STEER
    exit_rule: ExitRule = ExitRule.AUDITED
    loss_weight_range: tuple[float, float] = (0.05, 0.95)
    audit_share: float = 0.02
    """Would-be exits that run to full depth to measure the false-exit rate."""
    steadiness: bool = True
    """Whether losses depend on how steady the token is; off, all tokens are alike."""
    slot_ranks: bool = True
    """Whether a substitute in the slot of largest mass is charged apart from one in the others;
    off, all slots are alike, as in the paper."""
    one_expert: bool = False
    """Run one expert per layer, the target or what stands in for it, as in the paper's (10), (11);
    what else the router activates does not run, and nothing is charged for it."""
    target_transitions: bool = False
    """Whether the look-ahead goes from target to target by P_l, as in the paper's (38); off, from
    activated set to activated set."""
    target_importance: bool = False
    """Whether a layer's importance is the gate of its target, as in Algorithm 2, line 8; off, that
    of the whole activated set (4)."""
    mean_losses: bool = False
    """Charge what calibration measured on average, as in the paper; off, its upper bounds."""
    user_references: bool = False
    """Whether delays count over the exact ones of a token's own user, the d_ref of (31), (43) by
    access server; off, over the mean of all users."""
    user_exits: bool = False
    """Whether (37) moves each user's own p_J by what that user's tokens exited at, by access
    server; off, one for all requests of an engine."""
    workload_limit: bool = False
    """Whether a server that was assigned more work in a scheduling slot than it can do in one (20,
    c.11) leaves the feasible set for the next, but for experts that no other server holds."""
    prompts_trimmed: bool = False
    """Whether tokens of a prompt are decided upon too, as all tokens of a request in the paper:
    each may spend what a generated one is credited, and what it leaves is lost. They never exit,
    since nobody waits for what they predict. Off, prompts run exactly."""
    hazards: bool = True
    """Whether the look-ahead weighs exits by their measured chance; off, a token exits exactly at
    its predicted layer, as in the paper."""
    price_start: bool = True
    """Start omega_D, of every route by itself, where the expected loss meets the budget, instead
    of at `loss_weight` for all."""

    @classmethod
    def letter(cls) -> Readings:
        """The paper's own: whole-layer thresholds, one expert per layer, prompts too, mean losses,
        even budget, (37), (43)."""
        return cls(
            importance_gate=True,
            exit_risk=None,
            inflate=False,
            exit_state=ExitState.FROZEN,
            echoes_charged=False,
            exits_charged=False,
            exits_weighed=False,
            budget_rule=BudgetRule.EVEN,
            weight_rule=WeightRule.PAPER,
            exit_rule=ExitRule.PAPER,
            loss_weight_range=(0.0, 1.0),
            audit_share=0.0,
            steadiness=False,
            slot_ranks=False,
            one_expert=True,
            target_transitions=True,
            target_importance=True,
            mean_losses=True,
            user_references=True,
            user_exits=True,
            workload_limit=True,
            prompts_trimmed=True,
            hazards=False,
            price_start=False,
        )
