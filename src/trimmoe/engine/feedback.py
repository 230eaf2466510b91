"""The two feedback rules: the loss weight (43) and the exit threshold (37)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.policy.readings import BUDGET_USE_TARGET, ExitRule, WeightRule
from trimmoe.policy.settings import PolicySettings

_STEER_STEP = 4.0
"""Step of omega_D's log odds per window and unit of budget use, where it is steered."""
_DRAFT_STEP = 0.5
"""By how much the confidence of drafts follows the share of them that was wrong, per window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Sums over the tokens since the last update."""

    tokens: int = 0
    budget_use: float = 0.0
    """Loss over budget, summed over tokens."""
    by_route: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    """Tokens and budget use of every route that had any."""
    relative_delay: float = 0.0
    """Delay over that of exact execution, summed over tokens."""
    exits: int = 0
    exit_confidence: float = 0.0
    """Confidence at exit, summed over exits."""
    exits_by_user: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    """The two above of every user, by access server, that had any."""
    audits: int = 0
    false_exits: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """What the rules have learnt so far."""

    loss_weight: float
    """omega_D of (43), where all routes share one."""
    route_weights: tuple[float, ...] = ()
    """omega_D by route where each is steered by itself; empty where they share one."""
    exit_raise: float = 0.0
    """Added to every request's own exit threshold, up to 1."""
    user_raises: Mapping[int, float] = field(default_factory=dict)
    """The same where (37) goes by user: by access server, of those that had exits."""
    window: Window = Window()
    audits: int = 0
    false_exits: int = 0
    """Audited exits whose prediction was not that of full depth, since the start."""

    def weights_of(self, route: IntArray) -> FloatArray:
        """omega_D in force for tokens on these routes, [n]."""
        if not self.route_weights:
            return np.full(route.size, self.loss_weight)
        return np.array(self.route_weights)[route]

    def raises_of(self, access: IntArray) -> FloatArray:
        """What is added to the exit thresholds of users at these servers, [n]."""
        if not self.user_raises:
            return np.full(access.size, self.exit_raise)
        raises = [self.user_raises.get(user, self.exit_raise) for user in access.tolist()]
        return np.array(raises, dtype=np.float64)


def observe(
    feedback: Feedback,
    settings: PolicySettings,
    *,
    route: np.ndarray,
    budget_use: np.ndarray,
    relative_delay: np.ndarray,
    exit_confidence: np.ndarray,
    exit_user: np.ndarray,
) -> Feedback:
    """Count finished tokens ([n] each; confidences and users only of those that exited) and, when
    the window is full, apply both rules."""
    window = feedback.window
    by_route = dict(window.by_route)
    for one, use in zip(route.tolist(), budget_use.tolist(), strict=True):
        tokens, total = by_route.get(one, (0, 0.0))
        by_route[one] = (tokens + 1, total + use)
    by_user = dict(window.exits_by_user)
    for user, sure in zip(exit_user.tolist(), exit_confidence.tolist(), strict=True):
        exits, total = by_user.get(user, (0, 0.0))
        by_user[user] = (exits + 1, total + sure)
    window = replace(
        window,
        by_route=by_route,
        exits_by_user=by_user,
        tokens=window.tokens + budget_use.size,
        budget_use=window.budget_use + float(budget_use.sum()),
        relative_delay=window.relative_delay + float(relative_delay.sum()),
        exits=window.exits + exit_confidence.size,
        exit_confidence=window.exit_confidence + float(exit_confidence.sum()),
    )
    feedback = replace(feedback, window=window)
    return _updated(feedback, settings) if window.tokens >= settings.window_tokens else feedback


def observe_audits(feedback: Feedback, agrees: np.ndarray) -> Feedback:
    """Count audited exits."""
    audits, false_exits = agrees.size, int(agrees.size - agrees.sum())
    window = feedback.window
    return replace(
        feedback,
        window=replace(
            window, audits=window.audits + audits, false_exits=window.false_exits + false_exits
        ),
        audits=feedback.audits + audits,
        false_exits=feedback.false_exits + false_exits,
    )


def _updated(feedback: Feedback, settings: PolicySettings) -> Feedback:
    return replace(
        feedback,
        loss_weight=_loss_weight(feedback, settings),
        route_weights=_route_weights(feedback, settings),
        exit_raise=_exit_raise(feedback, settings),
        user_raises=_user_raises(feedback, settings),
        window=Window(),
    )


def _loss_weight(feedback: Feedback, settings: PolicySettings) -> float:
    """omega_D after a window (43)."""
    window = feedback.window
    budget_use = window.budget_use / window.tokens
    match settings.readings.weight_rule:
        case WeightRule.FIXED:
            return feedback.loss_weight
        case WeightRule.PAPER:
            error = budget_use - window.relative_delay / window.tokens
        case WeightRule.STEER:
            if feedback.route_weights:
                return feedback.loss_weight
            error = budget_use - BUDGET_USE_TARGET
    low, high = settings.readings.loss_weight_range
    return float(np.clip(feedback.loss_weight + settings.weight_step * error, low, high))


def _route_weights(feedback: Feedback, settings: PolicySettings) -> tuple[float, ...]:
    """Every route's omega_D after a window, steered toward the use of the budget aimed at.

    Links differ by route, and with them what a unit of loss buys. The steps are of the weight's
    log odds, the logarithm of the price of quality, in proportion to a route's share of the window.
    """
    weights = list(feedback.route_weights)
    if not weights or settings.readings.weight_rule is not WeightRule.STEER:
        return feedback.route_weights
    low, high = settings.readings.loss_weight_range
    for route, (tokens, use) in feedback.window.by_route.items():
        error = (use - tokens * BUDGET_USE_TARGET) / feedback.window.tokens
        odds = np.log(weights[route] / (1.0 - weights[route])) + _STEER_STEP * error
        weights[route] = float(np.clip(1.0 / (1.0 + np.exp(-odds)), low, high))
    return tuple(weights)


def _exit_raise(feedback: Feedback, settings: PolicySettings) -> float:
    """p - p_J after a window: by (37), or by the false-exit rate of audited exits.

    Property 3 needs every request's requirement as a floor, so the rules only ever add to it. A
    wrong draft flips nothing but is work in vain: no more of them may be wrong than their
    confidence promises, as on texts that the heads do not know.
    """
    window, above, readings = feedback.window, feedback.exit_raise, settings.readings
    if settings.draft_confidence is not None:
        wrong = window.false_exits / max(window.audits, 1)
        promised = 1.0 - settings.draft_confidence
        return float(np.clip(above + _DRAFT_STEP * (wrong - promised), 0.0, 1.0))
    match readings.exit_rule:
        case ExitRule.FIXED:
            return above
        case ExitRule.PAPER:
            if readings.user_exits or not window.exits:
                return above
            error = window.exit_confidence / window.exits - (settings.confidence + above)
        case ExitRule.AUDITED:
            if readings.exit_risk is None or (window.exits and not window.audits):
                return above
            # Where nothing was due to exit nothing flipped: too high a threshold comes down again.
            due = (window.exits + window.audits) / window.tokens
            error = due * window.false_exits / max(window.audits, 1) - readings.exit_risk
    return float(np.clip(above + settings.exit_step * error, 0.0, 1.0))


def _user_raises(feedback: Feedback, settings: PolicySettings) -> Mapping[int, float]:
    """p - p_J of every user after a window, by (37) over that user's exits alone."""
    readings = settings.readings
    if not readings.user_exits or readings.exit_rule is not ExitRule.PAPER:
        return feedback.user_raises
    raises = dict(feedback.user_raises)
    for user, (exits, total) in feedback.window.exits_by_user.items():
        above = raises.get(user, feedback.exit_raise)
        error = total / exits - (settings.confidence + above)
        raises[user] = float(np.clip(above + settings.exit_step * error, 0.0, 1.0))
    return raises
