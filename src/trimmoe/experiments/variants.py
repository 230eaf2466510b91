"""The readings of the paper, each taken back by itself, and the paper's letter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trimmoe.core.exit_states import ExitState
from trimmoe.cost.model import Accounting
from trimmoe.policy.presets import paper, trimmoe
from trimmoe.policy.readings import BudgetRule, ExitRule, WeightRule
from trimmoe.policy.settings import PolicySettings

Change = Callable[[PolicySettings], PolicySettings]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A policy that differs from the default in one reading."""

    name: str
    what: str
    """One line for a table: what is done instead."""
    change: Change


def _levers(**changes: bool) -> Change:
    return lambda policy: replace(policy, levers=replace(policy.levers, **changes))


def _final(policy: PolicySettings, **changes: Any) -> PolicySettings:
    """With exits that nobody checks before they are answered."""
    return policy.but(draft_confidence=None, **changes)


def _letter(policy: PolicySettings) -> PolicySettings:
    """The paper's policy on pinned tokens, since where its tokens wander cannot be built."""
    return paper().but(
        accounting=Accounting.PINNED,
        budget=policy.budget,
        confidence=policy.confidence,
        audit_share=policy.readings.audit_share,
    )


VARIANTS = (
    Variant(name="default", what="every reading of the design", change=lambda policy: policy),
    Variant(
        name="even",
        what="(33): budget split evenly, what a token leaves is lost",
        change=lambda policy: policy.but(budget_rule=BudgetRule.EVEN),
    ),
    Variant(
        name="whole-layers",
        what="skip a layer or run all its slots, no single drops",
        change=_levers(drop_slots=False),
    ),
    Variant(
        name="no-substitutes", what="slots run or are dropped", change=_levers(substitute=False)
    ),
    Variant(
        name="one-class",
        what="all tokens equally steady: losses by router mass alone",
        change=lambda policy: policy.but(steadiness=False),
    ),
    Variant(
        name="one-rank",
        what="substitutes charged alike in all slots",
        change=lambda policy: policy.but(slot_ranks=False),
    ),
    Variant(
        name="theta",
        what="(24): skips and drops only below the importance thresholds",
        change=lambda policy: policy.but(importance_gate=True),
    ),
    Variant(
        name="no-gamma-gate",
        what="skips also where a local action is affordable (35)",
        change=_levers(skip_needs_transmission=False),
    ),
    Variant(
        name="horizon-3",
        what="(39) to three layers, exits at the predicted layer",
        change=lambda policy: policy.but(horizon=3, hazards=False),
    ),
    Variant(
        name="fixed-start",
        what="omega_D starts at one half and follows (43)",
        change=lambda policy: policy.but(
            price_start=False, weight_rule=WeightRule.PAPER, loss_weight=0.5
        ),
    ),
    Variant(
        name="free-exits",
        what="exits trusted at p_J and not charged, p by (37)",
        change=lambda policy: _final(
            policy, exits_charged=False, exit_risk=None, exit_rule=ExitRule.PAPER
        ),
    ),
    Variant(
        name="final-exits",
        what="an early prediction is the answer, and charged what it may flip",
        change=_final,
    ),
    Variant(
        name="dense-exits",
        what="an exited token goes on without routed experts, and its echo is charged",
        change=lambda policy: _final(policy, exit_state=ExitState.DENSE),
    ),
    Variant(
        name="frozen-exits",
        what="its state stands still in the layers left, and its echo is charged",
        change=lambda policy: _final(policy, exit_state=ExitState.FROZEN),
    ),
    Variant(
        name="no-echoes",
        what="what a change flips of later tokens is not charged",
        change=lambda policy: policy.but(echoes_charged=False),
    ),
    Variant(
        name="no-inflation",
        what="losses add up as measured alone, gamma = 1",
        change=lambda policy: policy.but(inflate=False),
    ),
    Variant(name="no-exits", what="every token runs to full depth", change=_levers(exit=False)),
    Variant(name="letter", what="the paper to the letter, tokens pinned", change=_letter),
)


def find_variants(names: list[str] | None) -> tuple[Variant, ...]:
    """The variants called so, or all; raises `KeyError` with the unknown name."""
    known = {variant.name: variant for variant in VARIANTS}
    return VARIANTS if not names else tuple(known[name] for name in names)


def base_policy(*, budget: float, confidence: float) -> PolicySettings:
    """The default policy at a user's budget, exits held to half of it."""
    return trimmoe().but(budget=budget, confidence=confidence, exit_risk=budget / 2)
