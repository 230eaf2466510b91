"""`trimmoe experiment readings`: what each reading of the paper contributes, by real execution.

Every variant runs the same held-out passages at several budgets, so that variants are compared at
equal measured quality and not at equal promises: beside the points, the delay each reaches at the
flip rate asked for, interpolated between its own budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from scipy.stats import beta

import trimmoe
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray
from trimmoe.evaluate.scoring import Scoring
from trimmoe.evaluate.teacher import Passages, Score, score
from trimmoe.experiments.method_engines import make_engine
from trimmoe.experiments.variants import Variant, base_policy
from trimmoe.models.base import MoEView
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.local import LocalDriver


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingsSettings:
    """What is run."""

    variants: tuple[str, ...]
    budgets: tuple[float, ...] = (0.01, 0.02, 0.04)
    at_flips: float = 0.02
    """Measured flip rate at which delays are compared."""
    confidence: float = 0.9
    passages: int = 32
    context: int = 64
    steps: int = 32
    seed: int = 0
    scoring: Scoring = Scoring.LAYERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One variant at one budget, executed."""

    variant: str
    budget: float
    score: Score

    @property
    def flip_rate(self) -> float:
        return self.score.flips / self.score.tokens

    @property
    def delay_ms(self) -> float:
        return self.score.ledger.mean_delay_s * 1e3


def run_policy(
    view: MoEView,
    profile: Profile,
    plan: Plan,
    passages: Passages,
    access: IntArray,
    policy: PolicySettings,
    *,
    label: str,
    seed: int,
    scoring: Scoring = Scoring.LAYERS,
) -> Score:
    """Execute one policy on all passages together."""
    engine = make_engine(plan, profile, view.spec, policy)
    driver = LocalDriver(view, profile, engine, slots=access.size, seed=seed)
    return score(
        driver,
        passages,
        access=access.tolist(),
        budget=policy.budget,
        confidence=policy.confidence,
        label=label,
        scoring=scoring,
    )


def measure_readings(
    view: MoEView,
    profile: Profile,
    plan: Plan,
    passages: Passages,
    access: IntArray,
    variants: Sequence[Variant],
    settings: ReadingsSettings,
) -> list[Point]:
    """Every variant at every budget."""
    return [
        Point(
            variant=variant.name,
            budget=budget,
            score=run_policy(
                view,
                profile,
                plan,
                passages,
                access,
                variant.change(base_policy(budget=budget, confidence=settings.confidence)),
                label=f"{variant.name} {budget:g}",
                seed=settings.seed,
                scoring=settings.scoring,
            ),
        )
        for variant in variants
        for budget in settings.budgets
    ]


def joint_inflation(measured: Score, confidence: float = 0.95) -> float:
    """gamma: how much more the tokens flipped, at most, than the proxy that was spent, >= 1.

    The upper confidence bound of the measured joint flip rate over the loss charged per token;
    1 where nothing was spent.
    """
    charged = measured.ledger.loss / max(measured.tokens, 1)
    if charged <= 0:
        return 1.0
    flips, tokens = measured.flips, measured.tokens
    upper = 1.0 if flips >= tokens else float(beta.ppf(confidence, flips + 1, tokens - flips))
    return max(1.0, upper / charged)


def delay_at(points: Sequence[Point], flip_rate: float, exact_ms: float) -> float | None:
    """Least delay of a variant at a measured flip rate, interpolated between its points.

    Exact execution, no flips at `exact_ms`, is a point of every variant; None where even its
    smallest budget flips more and nothing lies between, which cannot happen with that point.
    """
    known = sorted([(0.0, exact_ms), *((point.flip_rate, point.delay_ms) for point in points)])
    best = np.minimum.accumulate([delay for _, delay in known])
    rates = np.array([rate for rate, _ in known])
    return float(np.interp(flip_rate, rates, best))


def readings_json(
    settings: ReadingsSettings, points: Sequence[Point], exact: Score, inputs: dict[str, str]
) -> dict[str, Any]:
    """Everything measured, with what made it."""
    exact_ms = exact.ledger.mean_delay_s * 1e3
    names = list(dict.fromkeys(point.variant for point in points))
    return {
        "experiment": "readings",
        "trimmoe_version": trimmoe.__version__,
        "settings": asdict(settings),
        "inputs": inputs,
        "exact": _row(exact),
        "points": [
            {"variant": point.variant, "budget": point.budget} | _row(point.score)
            for point in points
        ],
        "delay_ms_at_equal_flips": {
            name: delay_at([p for p in points if p.variant == name], settings.at_flips, exact_ms)
            for name in names
        },
    }


def _row(measured: Score) -> dict[str, float]:
    ledger, tokens = measured.ledger, measured.tokens
    low, high = measured.flip_rate_interval
    return {
        "delay_ms": ledger.mean_delay_s * 1e3,
        "hops_per_token": ledger.hops / tokens,
        "mb_per_1000_tokens": ledger.total_bytes / tokens / 1e3,
        "flip_rate": measured.flips / tokens,
        "flip_rate_low_95": low,
        "flip_rate_high_95": high,
        "spent_per_token": ledger.loss / tokens,
        "gamma": joint_inflation(measured),
        "perplexity": float(np.exp(measured.nll)),
    }


def readings_table(content: dict[str, Any], variants: Sequence[Variant]) -> Table:
    """One line per variant and budget; what the variants are stands below."""
    at = content["settings"]["at_flips"]
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"reading taken back; exact: {content['exact']['delay_ms']:.2f} ms",
        caption="\n".join(f"{variant.name}: {variant.what}" for variant in variants),
        caption_justify="left",
    )
    table.add_column("reading", no_wrap=True)
    for name in ("budget", "ms", "hops", "MB", "flips (95 %)", "spent", f"ms at {at:.0%}"):
        table.add_column(name, justify="right", no_wrap=True)
    seen: set[str] = set()
    for row in content["points"]:
        name, first = row["variant"], row["variant"] not in seen
        seen.add(name)
        interval = f"{100 * row['flip_rate_low_95']:.1f}-{100 * row['flip_rate_high_95']:.1f}"
        table.add_row(
            name if first else "",
            f"{row['budget']:g}",
            f"{row['delay_ms']:.2f}",
            f"{row['hops_per_token']:.1f}",
            f"{row['mb_per_1000_tokens']:.0f}",
            f"{row['flip_rate']:.1%} ({interval})",
            f"{row['spent_per_token']:.2%}",
            f"{content['delay_ms_at_equal_flips'][name]:.2f}" if first else "",
        )
    return table
