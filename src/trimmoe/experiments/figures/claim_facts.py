"""What one world says about the claims, by the letter or pinned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from trimmoe.core.ledger import Kind
from trimmoe.experiments.figures.ablation import letter_ablations, pinned_ablations
from trimmoe.experiments.figures.base import load_row
from trimmoe.experiments.figures.bench import RATE_PER_S, SLA_S, Bench, replay_row
from trimmoe.experiments.figures.claim_list import BASELINES
from trimmoe.experiments.figures.contenders import OURS, Contender, letter, pinned_best
from trimmoe.experiments.figures.depth import depth_row
from trimmoe.policy.settings import PolicySettings
from trimmoe.simulator.measure import Sample

QUIET_PER_S, BUSY_PER_S = 10.0, 80.0
"""The lowest and the highest rate of Fig. 11, requests a second."""
HORIZONS = (1, 3, 5)
"""Of those of Fig. 8 the least, the paper's and the greatest."""
BUDGETS = (0.005, 0.01, 0.02, 0.03)
"""Those of Fig. 6(b)."""
_CONCURRENCY = 64
_NAMES = (*BASELINES, OURS)
_TIMED = ("edgeshard", "moe2", OURS)
"""Those of which the paper has the times of requests at the default rate."""
_EXECUTED = ("mod", OURS)


def facts_of(bench: Bench, column: str, models: Mapping[str, Bench]) -> dict[str, float]:
    """Measurements by `method.figure`: of replays, of simulations under load and, where the bench
    has a model to execute, of what was executed; and of other models' replays by
    `geometry.method.figure`."""
    there = _there(bench, column)
    found: dict[str, float] = {}
    for one in there:
        found |= {f"{one.of}.{key}": value for key, value in _row(bench, one).items()}
    ours = next((one for one in there if one.of == OURS), None)
    if ours is None:
        return found
    found |= depth_facts(bench, ours) | _looking_ahead(bench, ours) | budgeted(bench, ours)
    variants = {"letter": letter_ablations, "pinned": pinned_ablations}[column]()
    for one in bench.there(variants)[0]:
        name = "whole" if one.of == OURS else one.of
        found |= {f"{name}.{key}": value for key, value in _row(bench, one).items()}
    found |= _under_load(bench, there)
    if bench.execute is not None:
        found |= _executed(bench, there)
    for geometry, other in models.items():
        found |= _of_model(geometry, other, column)
    return found


def ours_by_letter(bench: Bench) -> Contender:
    """The paper's own method as the paper has it."""
    return next(one for one in _there(bench, "letter") if one.of == OURS)


def _there(bench: Bench, column: str) -> list[Contender]:
    contenders = {"letter": letter, "pinned": pinned_best}[column]()
    return bench.there(tuple(one for one in contenders if one.of in _NAMES))[0]


def _looking_ahead(bench: Bench, ours: Contender) -> dict[str, float]:
    found: dict[str, float] = {}
    for horizon in HORIZONS:
        seen = replace(ours, key=f"{ours.key}/H{horizon}", change=_then(ours, horizon))
        row = replay_row(bench.replayed(seen, tokens=bench.effort.horizon_tokens))
        found |= {f"horizon-{horizon}.{key}": value for key, value in _numbers(row).items()}
    return found


def _then(ours: Contender, horizon: int) -> Callable[[PolicySettings], PolicySettings]:
    return lambda policy: replace(ours.change(policy), horizon=horizon)


def budgeted(bench: Bench, ours: Contender) -> dict[str, float]:
    """Fig. 6(b): latency by budget, and the largest share of a budget that is charged."""
    found, used = {}, []
    for budget in BUDGETS:
        row = _numbers(replay_row(bench.replayed(ours, budget)))
        found[f"budget-{budget:g}.delay_ms"] = row["delay_ms"]
        used.append(row["charged_loss_per_token"] / budget)
    return found | {"budgets.used": max(used)}


def _row(bench: Bench, contender: Contender) -> dict[str, float]:
    replayed = bench.replayed(contender)
    ledger = replayed.ledger
    shares = {"skipped": ledger.share(Kind.SKIPPED), "exited": ledger.share(Kind.EXITED)}
    return _numbers(replay_row(replayed)) | shares


def _numbers(row: dict) -> dict[str, float]:
    """The plain numbers of a row."""
    return {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def depth_facts(bench: Bench, ours: Contender) -> dict[str, float]:
    """Fig. 7 in two numbers: the commonest exit as a share of depth, and whether deeper layers
    are skipped more than shallower ones."""
    row = depth_row(bench.replayed(ours).ledger)
    exits, skips = np.array(row["exit_share"]), np.array(row["skip_ratio"])
    half, found = skips.size // 2, {}
    if exits[:-1].any():
        found[f"{OURS}.exit_peak"] = (int(exits[:-1].argmax()) + 1) / exits.size
    if skips[:half].any():
        found[f"{OURS}.deeper_skips"] = float(skips[half:].mean() / skips[:half].mean() - 1.0)
    return found


def _under_load(bench: Bench, there: list[Contender]) -> dict[str, float]:
    """Times and service levels of whole requests, as in the paper, and of tokens; throughput."""
    found: dict[str, float] = {}
    for one in there:
        found |= _served(bench, one, QUIET_PER_S, "_at_10")
        found |= _served(bench, one, BUSY_PER_S, "_at_80")
        more = found[f"{one.of}.request_ms_at_80"] / found[f"{one.of}.request_ms_at_10"] - 1.0
        found[f"{one.of}.growth"] = more
        if one.of in _TIMED:
            found |= _served(bench, one, RATE_PER_S, "")
        if one.of in ("edgeshard", OURS):
            rows = bench.saturated(one, _CONCURRENCY)
            rate = load_row(rows, SLA_S, bench.effort.output_tokens)["tokens_per_s"]
            found[f"{one.of}.saturated_tokens_per_s"] = rate
    others = [one.of for one in there if one.of != OURS]
    for key in ("sla_share_at_80", "token_sla_share_at_80"):
        found[f"baselines.{key}"] = max(found[f"{name}.{key}"] for name in others)
    return found | {"baselines.growth": min(found[f"{name}.growth"] for name in others)}


def _served(bench: Bench, one: Contender, rate: float, suffix: str) -> dict[str, float]:
    found = service(bench.simulated(one, rate), bench.effort.output_tokens)
    return {f"{one.of}.{key}{suffix}": value for key, value in found.items()}


def service(samples: Sequence[Sample], answer_tokens: int) -> dict[str, float]:
    """Times of requests, which are answers of so many tokens, in ms, and the shares of them and of
    tokens within the paper's target."""
    row = load_row(samples, SLA_S, answer_tokens)
    found = {key: row[key] for key in ("request_ms", "request_p99_ms", "sla_share")}
    token_s = np.concatenate([each.token_s for each in samples])
    return found | {"token_sla_share": float((token_s <= SLA_S).mean())}


def _executed(bench: Bench, there: list[Contender]) -> dict[str, float]:
    """What executing the model on held-out text measured; where ours runs one expert per layer,
    also with all that are activated."""
    chosen = [one for one in there if one.of in _EXECUTED]
    for one in [one for one in chosen if bench.rig(one).settings.readings.one_expert]:
        title = f"{one.title}, all experts"
        key, change = f"{one.key}/all-experts", _all_experts(one)
        chosen.append(replace(one, key=key, title=title, of="all-experts", change=change))
    found: dict[str, float] = {}
    for one in chosen:
        row = bench.executed(one)
        found[f"{one.of}.flip_rate"] = row["flip_rate"]
        found[f"{one.of}.perplexity_rise"] = row["perplexity"] - row["exact_perplexity"]
    return found


def _all_experts(one: Contender) -> Callable[[PolicySettings], PolicySettings]:
    return lambda policy: one.change(policy).but(one_expert=False)


def _of_model(geometry: str, bench: Bench, column: str) -> dict[str, float]:
    """Fig. 9: ours and MoE^2 on one model."""
    return {
        f"{geometry}.{one.of}.{key}": value
        for one in _there(bench, column)
        if one.of in ("moe2", OURS)
        for key, value in _row(bench, one).items()
    }
