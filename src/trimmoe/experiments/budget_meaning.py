"""`trimmoe experiment budget-meaning`: what a budget promises, and what happens at it.

The engine bounds the degradation it *charges*, a sum of losses measured one approximation at a
time. This experiment decodes held-out text jointly and shows beside the charge how many tokens
really flipped, what became of perplexity, how that carries over to texts unlike the calibration's,
and how far audited exits pulled the exit threshold p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

import trimmoe
from trimmoe.core.errors import UserError
from trimmoe.core.ledger import Kind
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.evaluate.scoring import Scoring
from trimmoe.evaluate.teacher import Passages, Score, cut_passages, score
from trimmoe.experiments.compare import access_servers
from trimmoe.experiments.method_engines import make_engine
from trimmoe.experiments.variants import base_policy, find_variants
from trimmoe.models.base import MoEView
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.local import LocalDriver

POLICIES = ("default", "letter")
"""Ours and the paper's to the letter, both with pinned tokens (see `variants`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeaningSettings:
    """What is run."""

    budgets: tuple[float, ...] = (0.005, 0.01, 0.02, 0.03)
    confidence: float = 0.9
    passages: int = 32
    context: int = 64
    steps: int = 32
    seed: int = 0
    scoring: Scoring = Scoring.LAYERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """One policy at one budget on one text."""

    domain: str
    policy: PolicySettings
    score: Score
    exact_perplexity: float
    start_confidence: float
    """p with the floor that calibration gives it, before anything was decoded."""
    end_confidence: float
    """p after the last token."""
    audits: int
    false_exits: int
    """Audited exits whose prediction was not full depth's."""


def measure_meaning(
    view: MoEView,
    profile: Profile,
    plan: Plan,
    domains: Mapping[str, Sequence[int]],
    settings: MeaningSettings,
) -> list[Meaning]:
    """Every text (token ids by name) under every policy at every budget.

    Raises `UserError` if a text is too short.
    """
    measured = []
    for domain, token_ids in domains.items():
        passages = _cut(view, domain, token_ids, settings)
        for variant in find_variants(list(POLICIES)):
            for budget in settings.budgets:
                policy = variant.change(base_policy(budget=budget, confidence=settings.confidence))
                measured.append(
                    measure_policy(
                        view,
                        profile,
                        plan,
                        domain,
                        passages,
                        policy,
                        seed=settings.seed,
                        scoring=settings.scoring,
                    )
                )
    return measured


def _cut(
    view: MoEView, domain: str, token_ids: Sequence[int], settings: MeaningSettings
) -> Passages:
    try:
        return cut_passages(
            view, token_ids, count=settings.passages, context=settings.context, steps=settings.steps
        )
    except ValueError as error:
        raise UserError(f"The text {domain} is too short: {error}; give more of it.") from error


def measure_policy(
    view: MoEView,
    profile: Profile,
    plan: Plan,
    domain: str,
    passages: Passages,
    policy: PolicySettings,
    *,
    seed: int,
    scoring: Scoring = Scoring.LAYERS,
) -> Meaning:
    """One policy, at its own budget, on the passages of one text."""
    engine = make_engine(plan, profile, view.spec, policy)
    access = access_servers(plan, passages.token_ids.shape[0], seed)
    driver = LocalDriver(view, profile, engine, slots=access.size, seed=seed)
    measured = score(
        driver,
        passages,
        access=access.tolist(),
        budget=policy.budget,
        confidence=policy.confidence,
        label=f"{domain}: {policy.name} {policy.budget:g}",
        scoring=scoring,
    )
    start, _ = engine.exit_terms(policy.confidence)
    feedback = driver.state.feedback
    return Meaning(
        domain=domain,
        policy=policy,
        score=measured,
        exact_perplexity=float(np.exp(passages.exact_nll.mean())),
        start_confidence=start,
        end_confidence=max(start, min(start + feedback.exit_raise, 1.0)),
        audits=feedback.audits,
        false_exits=feedback.false_exits,
    )


def meaning_json(
    settings: MeaningSettings, measured: Sequence[Meaning], inputs: Mapping[str, str]
) -> dict[str, Any]:
    """Everything measured, with what made it."""
    return {
        "experiment": "budget-meaning",
        "trimmoe_version": trimmoe.__version__,
        "settings": asdict(settings),
        "input_hashes": dict(inputs),
        "points": [_row(one) for one in measured],
    }


def _row(one: Meaning) -> dict[str, Any]:
    ledger, tokens = one.score.ledger, one.score.tokens
    low, high = one.score.flip_rate_interval
    return {
        "domain": one.domain,
        "policy": one.policy.name,
        "budget": one.policy.budget,
        "charged_per_token": ledger.loss / tokens,
        "worst_prefix_share": one.score.worst_prefix,
        "flips": one.score.flips,
        "tokens": tokens,
        "flip_rate": one.score.flips / tokens,
        "flip_rate_low_95": low,
        "flip_rate_high_95": high,
        "perplexity": one.score.perplexity,
        "exact_perplexity": one.exact_perplexity,
        "exited_share": ledger.share(Kind.EXITED),
        "skipped_share": ledger.share(Kind.SKIPPED),
        "confidence_asked": one.policy.confidence,
        "confidence_calibrated": one.start_confidence,
        "confidence_at_end": one.end_confidence,
        "audits": one.audits,
        "false_exits": one.false_exits,
        "delay_per_token_ms": ledger.mean_delay_s * 1e3,
    }


def meaning_table(content: dict[str, Any]) -> Table:
    """One line per text, policy and budget."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        caption="charged: proxy degradation per token, most: of its credit at any prefix; ppl: "
        "against the exact model; p: asked, calibrated, after audits (false/audited)",
    )
    table.add_column("text", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for name in ("budget", "charged", "most", "flips (95 %)", "ppl", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    lines: dict[str, int] = {}
    last = None
    for row in content["points"]:
        domain, key = row["domain"], (row["domain"], row["policy"])
        line = lines[domain] = lines.get(domain, -1) + 1
        p = [row["confidence_asked"], row["confidence_calibrated"], row["confidence_at_end"]]
        table.add_row(
            {0: escape(domain), 1: f"[dim]ppl {row['exact_perplexity']:.1f}[/]"}.get(line, ""),
            row["policy"] if key != last else "",
            f"{row['budget']:.1%}",
            f"{row['charged_per_token']:.2%}",
            f"{row['worst_prefix_share']:.0%}",
            f"{row['flip_rate']:.1%} ({100 * row['flip_rate_low_95']:.1f}-"
            f"{100 * row['flip_rate_high_95']:.1f})",
            f"{row['perplexity'] / row['exact_perplexity'] - 1:+.1%}",
            f"{_path(p)} {row['false_exits']}/{row['audits']}",
        )
        last = key
    return table


def _path(steps: Sequence[float]) -> str:
    """Values from first to last, repeated ones once."""
    shown = [f"{step:.2f}" for step in steps]
    kept = [one for index, one in enumerate(shown) if index == 0 or one != shown[index - 1]]
    return "→".join(kept)
