"""Measured quality: contenders run on the real model, on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.profile import Profile
from trimmoe.evaluate.teacher import cut_passages, score
from trimmoe.experiments.compare import access_servers
from trimmoe.experiments.figures.bench import Rig
from trimmoe.models.base import MoEView
from trimmoe.runtime.local import LocalDriver


@dataclass(frozen=True, kw_only=True, slots=True)
class PassageSettings:
    """How much text is executed."""

    count: int = 16
    context: int = 48
    """Tokens executed exactly before decoding starts."""
    steps: int = 24
    """Tokens decoded per passage."""


def executor(
    view: MoEView,
    profile: Profile,
    token_ids: Sequence[int],
    settings: PassageSettings,
    *,
    seed: int,
) -> Callable[[Rig], dict[str, float]]:
    """What runs a contender on the passages cut from `token_ids` and says what came of it.

    Raises `UserError` if the text is too short.
    """
    try:
        passages = cut_passages(
            view, token_ids, count=settings.count, context=settings.context, steps=settings.steps
        )
    except ValueError as error:
        raise UserError(f"The held-out text is too short: {error}; give more text.") from error
    count = passages.token_ids.shape[0]

    def execute(rig: Rig) -> dict[str, float]:
        access = access_servers(rig.deployment.plan, count, seed)
        driver = LocalDriver(view, profile, rig.engine, slots=count, seed=seed)
        measured = score(
            driver,
            passages,
            access=access.tolist(),
            budget=rig.settings.budget,
            confidence=rig.settings.confidence,
            label=rig.contender.title,
        )
        low, high = measured.flip_rate_interval
        ledger = measured.ledger
        return {
            "tokens": measured.tokens,
            "delay_ms": ledger.mean_delay_s * 1e3,
            "mb_per_1000_tokens": ledger.total_bytes / ledger.tokens / 1e3,
            "charged_loss_per_token": ledger.loss / ledger.tokens,
            "flip_rate": measured.flips / measured.tokens,
            "flip_rate_low_95": low,
            "flip_rate_high_95": high,
            "perplexity": measured.perplexity,
            "exact_perplexity": float(np.exp(passages.exact_nll.mean())),
        }

    return execute
