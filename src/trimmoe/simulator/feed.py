"""What recorded tokens answer to the engine's commands."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.events import Executed, Routed
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.trace import Trace
from trimmoe.cost.model import Accounting
from trimmoe.policy.settings import PolicySettings

_COLUMNS = ("experts", "masses", "importance", "steadiness", "confidence", "exit_at")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFeed:
    """Turns recorded tokens into the events a driver of a real model would send."""

    trace: Trace
    _layers: dict[str, np.ndarray] = field(init=False)
    """The trace's columns layer by layer, [N, T, ...]: tokens are asked for by layer."""

    def __post_init__(self) -> None:
        layers = {
            name: np.ascontiguousarray(np.swapaxes(getattr(self.trace, name), 0, 1))
            for name in _COLUMNS
        }
        object.__setattr__(self, "_layers", layers)

    def routed(self, wave: int, layer: int, tokens: IntArray) -> Routed:
        """Router and importance of tokens [n] (rows of the trace) at a layer."""
        whole = self.trace.probabilities
        return Routed(
            wave=wave,
            experts=self._of("experts", layer, tokens),
            masses=self._of("masses", layer, tokens).astype(np.float64),
            importance=self._of("importance", layer, tokens).astype(np.float64),
            steadiness=self._of("steadiness", layer, tokens),
            probabilities=None if whole is None else whole[tokens, layer].astype(np.float64),
        )

    def executed(self, wave: int, layer: int, tokens: IntArray) -> Executed:
        """Exit confidence and prediction of tokens [n] after a layer."""
        return Executed(
            wave=wave,
            confidence=self._of("confidence", layer, tokens).astype(np.float64),
            exit_at=self._of("exit_at", layer, tokens),
        )

    def experts(self, tokens: IntArray) -> IntArray:
        """What tokens [n] activate, [n, N, k]."""
        return self.trace.experts[tokens].astype(np.int64)

    def _of(self, name: str, layer: int, tokens: IntArray) -> np.ndarray:
        return self._layers[name][layer].take(tokens, axis=0)

    def agrees(self, tokens: IntArray, layers: IntArray, draws: FloatArray) -> BoolArray:
        """Whether full depth predicts what exits of `tokens` after so many `layers` did, [n] each.

        As it was recorded where it was; else with the chance that their heads give them, to which
        calibration has fitted these, decided by the tokens' own `draws` in [0, 1).
        """
        if self.trace.wrong is not None:
            return np.logical_not(self.trace.wrong[tokens, layers - 1])
        return draws < self.trace.confidence[tokens, layers - 1]

    def audited(
        self, tokens: IntArray, layer: int, draws: FloatArray, settings: PolicySettings
    ) -> BoolArray:
        """The same of `tokens` [n] that would have left after `layer` but go on as audits."""
        # Only draws below that share are audited.
        share = settings.readings.audit_share
        return self.agrees(tokens, np.full(tokens.size, layer + 1), draws / share)

    def guesses(
        self, tokens: IntArray, access: IntArray, least: FloatArray, settings: PolicySettings
    ) -> tuple[BoolArray, BoolArray]:
        """Of what `tokens` predict, whether the server of each one's user guesses it, and rightly;
        all [n]. The trace must say so. `least`: see `GuessRules.least_among`."""
        wrong, confidence = self.trace.home_wrong, self.trace.home_confidence
        assert wrong is not None
        assert confidence is not None
        column = access if wrong.shape[1] > 1 else 0
        guessed = (confidence[tokens, column] >= settings.guess_confidence) & np.isfinite(least)
        return guessed, guessed & ~wrong[tokens, column]

    def near(self, tokens: IntArray, access: IntArray) -> BoolArray:
        """Whether full depth nearly agrees with what is guessed of `tokens`, [n], as far as it was
        recorded."""
        near = self.trace.home_near
        if near is None:
            return np.zeros(tokens.size, dtype=bool)
        return near[tokens, access if near.shape[1] > 1 else 0]

    def chances(self, settings: PolicySettings, servers: int) -> list[float]:
        """How often guesses that are followed are right, by server, of so many."""
        wrong, confidence = self.trace.home_wrong, self.trace.home_confidence
        assert wrong is not None
        assert confidence is not None
        sure = confidence >= settings.guess_confidence
        found = (sure & ~wrong).sum(0) / np.maximum(sure.sum(0), 1)
        return np.broadcast_to(found, servers).tolist()

    @property
    def first_right(self) -> float | None:
        """How often the first draft of a head is right behind what the model answers; None where
        that was not recorded."""
        wrong = self.trace.drafted_wrong
        return None if wrong is None else 1.0 - float(wrong[self.trace.answered, 0].mean())


def require_guesses(settings: PolicySettings, server_count: int, trace: Trace) -> None:
    """Raise `UserError` if servers are to guess and what they would is not known."""
    if not settings.guesses:
        return
    if settings.accounting is Accounting.MIGRATE:
        raise UserError("`migrate` accounting has no guesses; use `pinned` or `home`.")
    trace.require_home(server_count)
