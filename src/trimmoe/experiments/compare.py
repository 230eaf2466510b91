"""`trimmoe compare`: the same held-out text under several methods, really executed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import trimmoe
from trimmoe.core.artifact import written_whole
from trimmoe.core.errors import UserError
from trimmoe.core.ledger import STOOD_IN, SUBSTITUTED, Kind
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray
from trimmoe.evaluate.scoring import Scoring
from trimmoe.evaluate.teacher import Passages, Score, cut_passages, score
from trimmoe.experiments.method_engines import method_engine
from trimmoe.experiments.methods import configured, find_method
from trimmoe.models.base import MoEView
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.local import LocalDriver


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareSettings:
    """What a comparison runs."""

    methods: tuple[str, ...]
    budgets: tuple[float, ...] = (0.02,)
    """Each method that trades quality runs once with each."""
    confidence: float = 0.9
    passages: int = 16
    """Held-out passages, entering at the access servers by their share of users."""
    context: int = 64
    """Tokens of each passage executed exactly before decoding starts."""
    steps: int = 32
    """Tokens decoded per passage under the method."""
    seed: int = 0
    scoring: Scoring = Scoring.LAYERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One method's policy and score."""

    name: str
    title: str
    policy: PolicySettings
    score: Score


def compare(
    view: MoEView,
    profile: Profile,
    plan: Plan,
    token_ids: Sequence[int],
    settings: CompareSettings,
) -> tuple[Passages, list[Outcome]]:
    """Run every method on the same passages; raises `UserError` if the text is too short."""
    try:
        passages = cut_passages(
            view, token_ids, count=settings.passages, context=settings.context, steps=settings.steps
        )
    except ValueError as error:
        raise UserError(f"The held-out text is too short: {error}; give more text.") from error
    access = access_servers(plan, passages.token_ids.shape[0], settings.seed)
    outcomes = []
    for name, policy in policies_of(settings):
        method = find_method(name)
        engine = method_engine(method, plan, profile, view.spec, policy)
        driver = LocalDriver(view, profile, engine, slots=len(access), seed=settings.seed)
        measured = score(
            driver,
            passages,
            access=access.tolist(),
            budget=policy.budget,
            confidence=policy.confidence,
            label=method.title,
            scoring=settings.scoring,
        )
        title = method.titled(policy.budget)
        outcomes.append(Outcome(name=name, title=title, policy=policy, score=measured))
    return passages, outcomes


def policies_of(settings: CompareSettings) -> Iterator[tuple[str, PolicySettings]]:
    """Every method to run, once per budget if it looks at one."""
    for name in settings.methods:
        method = find_method(name)
        for budget in settings.budgets if method.budgeted else settings.budgets[:1]:
            yield name, configured(method, budget=budget, confidence=settings.confidence)


def access_servers(plan: Plan, count: int, seed: int) -> IntArray:
    """Access server of each passage: shares of users as evenly as whole passages allow."""
    share = plan.cluster.access_share
    exact = share * count
    servers = np.repeat(np.arange(share.size), np.floor(exact).astype(int))
    left = np.argsort(-(exact - np.floor(exact)), kind="stable")[: count - servers.size]
    return np.random.default_rng(seed).permutation(np.concatenate([servers, left]))


def outcome_row(outcome: Outcome, exact_perplexity: float) -> dict[str, Any]:
    """The figures of one method, in units named by their keys."""
    measured, ledger = outcome.score, outcome.score.ledger
    low, high = measured.flip_rate_interval
    layers = ledger.kinds.shape[0]
    return {
        "method": outcome.name,
        "title": outcome.title,
        "delay_per_token_ms": ledger.mean_delay_s * 1e3,
        "hops_per_token": ledger.hops / ledger.tokens,
        "traffic_mb_per_1000_tokens": ledger.total_bytes / ledger.tokens * 1e3 / 1e6,
        "remote_share": ledger.remote_share,
        "substituted_share": ledger.share(*SUBSTITUTED),
        "stood_in_share": ledger.share(*STOOD_IN),
        "skipped_share": ledger.share(Kind.SKIPPED),
        "exited_share": ledger.share(Kind.EXITED),
        "layers_per_token": layers * (1.0 - ledger.share(Kind.SKIPPED, Kind.EXITED)),
        "slots_dropped_per_token": ledger.slots_dropped / ledger.tokens,
        "budget_per_token": ledger.budget / ledger.tokens,
        "budget_spent_per_token": ledger.loss / ledger.tokens,
        "agreement": measured.agreement,
        "flip_rate": measured.flips / measured.tokens,
        "flip_rate_low_95": low,
        "flip_rate_high_95": high,
        "perplexity": measured.perplexity,
        "exact_perplexity": exact_perplexity,
        "tokens": measured.tokens,
        "audits": ledger.audits,
        "guessed_share": measured.guessed / measured.tokens,
        "guessed_right_share": measured.guessed_right / measured.tokens,
    }


def comparison_json(
    settings: CompareSettings,
    profile: Profile,
    plan: Plan,
    text_hash: str,
    passages: Passages,
    outcomes: list[Outcome],
) -> dict[str, Any]:
    """The whole comparison, with all that is needed to repeat it."""
    exact_perplexity = float(np.exp(passages.exact_nll.mean()))
    return {
        "trimmoe_version": trimmoe.__version__,
        "settings": asdict(settings),
        "input_hashes": {
            "model": profile.model_hash,
            "profile": profile.hash,
            "plan": plan.hash,
            "text": text_hash,
        },
        "cluster": plan.cluster.name,
        "methods": [
            outcome_row(outcome, exact_perplexity)
            | {
                "policy": outcome.policy.described(),
                "kinds_by_layer": outcome.score.ledger.kinds.tolist(),
                "kind_names": [kind.name.lower() for kind in Kind],
                "messages_by_link": outcome.score.ledger.messages.tolist(),
                "hidden_bytes": outcome.score.ledger.hidden_bytes,
            }
            for outcome in outcomes
        ],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`, atomically."""
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, default=str) + "\n")


_EARLY = ("lossless", "speculative")
"""Methods of ours that approximate nothing and do not wait for every token in turn."""


def comparison_table(content: dict[str, Any]) -> Table:
    """The one table that a comparison prints."""
    rows = content["methods"]
    table = Table(
        title=f"{rows[0]['tokens']} held-out tokens on {content['cluster']}",
        caption="ms, hops: per token; MB: per 1000 tokens; agrees: with the exact model",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("method", no_wrap=True)
    headings = ("ms", "hops", "MB", "remote", "subst", "skip", "exit", "budget", "agrees", "ppl")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        budget = row["budget_per_token"]
        table.add_row(
            row["title"],
            f"{row['delay_per_token_ms']:.1f}",
            f"{row['hops_per_token']:.1f}",
            f"{row['traffic_mb_per_1000_tokens']:.1f}",
            f"{row['remote_share']:.0%}",
            f"{row['substituted_share']:.0%}",
            f"{row['skipped_share']:.0%}",
            f"{row['exited_share']:.0%}",
            f"{row['budget_spent_per_token'] / budget:.0%}" if budget else "-",
            f"{row['agreement']:.1%}",
            f"{row['perplexity']:.2f}",
        )
    return table


def print_comparison(console: Console, content: dict[str, Any]) -> None:
    """The table and what ours mean against the fastest that waits for every token in turn."""
    console.print(comparison_table(content))
    rows = content["methods"]
    early = (*_EARLY, *(row["method"] for row in rows if row["policy"]["guesses"]))
    plain = [row for row in rows if not row["budget_per_token"] and row["method"] not in early]
    if not plain:
        return
    best = min(plain, key=lambda row: row["delay_per_token_ms"])
    for ours in (row for row in rows if row["method"] in (*_EARLY, "trimmoe", "guessing")):
        said = (
            f"{ours['title']} against {best['title']}: "
            f"delay {change(ours, best, 'delay_per_token_ms')}, "
            f"hops {change(ours, best, 'hops_per_token')}, "
            f"flips {ours['flip_rate']:.2%} "
            f"(95 % interval {ours['flip_rate_low_95']:.2%} to {ours['flip_rate_high_95']:.2%})"
        )
        if ours["budget_per_token"]:
            spent, credited = ours["budget_spent_per_token"], ours["budget_per_token"]
            said += f", proxy budget {spent:.4f} of {credited:.4f}"
        console.print(f"{said}.")


def change(ours: dict[str, Any], theirs: dict[str, Any], key: str) -> str:
    """`ours` against `theirs` as a signed percentage."""
    return f"{ours[key] / theirs[key] - 1.0:+.0%}" if theirs[key] else "n/a"
