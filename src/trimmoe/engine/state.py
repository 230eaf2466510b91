"""The engine's memory: accounts of open sequences and the waves in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from trimmoe.core.changed import changed
from trimmoe.core.ledger import Kind
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.core.wave import NOT_PROBED, Wave
from trimmoe.engine.feedback import Feedback


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """The quality budget of one open sequence."""

    access: int
    route: int
    """Row of the engine's routes."""
    budget: float
    """D-bar, credited per token."""
    confidence: float
    """p_J with the calibrated floor."""
    balance: float = 0.0
    """Credit left by earlier tokens; always 0 under the even split."""

    def settled(self, credited: float, spent: float) -> Account:
        """The same account after a token; every one asks for it."""
        return Account(
            access=self.access,
            route=self.route,
            budget=self.budget,
            confidence=self.confidence,
            # A token may spend all there is, and rounding must not leave less than nothing.
            balance=max(self.balance + credited - spent, 0.0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """Everything `step` remembers; immutable."""

    feedback: Feedback
    accounts: Mapping[int, Account] = field(default_factory=dict)
    waves: Mapping[int, Wave] = field(default_factory=dict)

    def with_wave(self, identity: int, wave: Wave | None) -> EngineState:
        """A copy with one wave replaced, or removed if None."""
        waves = {key: kept for key, kept in self.waves.items() if key != identity}
        if wave is not None:
            waves[identity] = wave
        return changed(self, waves=waves)

    def with_accounts(self, accounts: Mapping[int, Account]) -> EngineState:
        """A copy with some accounts replaced."""
        return changed(self, accounts={**self.accounts, **accounts})


def new_wave(
    sequences: tuple[int, ...],
    accounts: list[Account],
    *,
    draws: FloatArray,
    server: IntArray,
    allowance: FloatArray,
    confidence_needed: FloatArray,
    loss_weight: FloatArray,
    exit_loss: FloatArray,
    start_s: FloatArray,
    layer_count: int,
    server_count: int,
) -> Wave:
    """A wave that is about to enter layer 0."""
    return Wave.of(
        layer=0,
        sequences=sequences,
        layer_count=layer_count,
        server_count=server_count,
        draws=draws,
        access=[account.access for account in accounts],
        route=[account.route for account in accounts],
        server=server,
        loss_weight=loss_weight,
        exit_loss=exit_loss,
        ahead=np.inf,
        confidence_needed=confidence_needed,
        budget=[account.budget for account in accounts],
        allowance=allowance,
        confidence=-np.inf,
        exit_at=layer_count,
        probed=NOT_PROBED,
        answered_s=np.inf,
        kinds=int(Kind.EXITED),
        slots_run=0,
        slots_dropped=0,
        messages=0,
        delay_s=start_s,
        loss=0.0,
    )
