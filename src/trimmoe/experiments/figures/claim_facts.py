"""What one world says about the claims, by the letter or pinned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from trimmoe.core.ledger import Kind
from trimmoe.experiments.figures.ablation import letter_ablations, pinned_ablations
from trimmoe.experiments.figures.bench import Bench, replay_row
from trimmoe.experiments.figures.contenders import (
    OURS,
    Contender,
    letter,
    pinned_best,
)
from trimmoe.experiments.figures.depth import depth_row
from trimmoe.policy.settings import PolicySettings
from trimmoe.simulator.measure import figures

SLA_S = 0.3
_BUSY = 80.0
_CONCURRENCY = 64
_NAMES = ("edgeshard", "slimcaching", "moe2", "mod", "substitute-only", OURS)


def facts_of(
    bench: Bench, column: str, *, load: bool, depth_only: bool = False
) -> dict[str, float]:
    """Measurements by `method.figure`; with `load`, those of simulations under load too."""
    contenders = {"letter": letter, "pinned": pinned_best}[column]()
    there = [one for one in bench.there(contenders)[0] if one.of in _NAMES]
    found: dict[str, float] = {}
    if depth_only:
        return _depth(bench, next(one for one in there if one.of == OURS))
    for one in there:
        found |= {f"{one.of}.{key}": value for key, value in _row(bench, one).items()}
    ours = next((one for one in there if one.of == OURS), None)
    if ours is None:
        return found
    found |= _depth(bench, ours)
    for horizon in (1, 3):
        seen = replace(ours, key=f"{ours.key}/H{horizon}", change=_then(ours, horizon))
        tokens = bench.effort.horizon_tokens
        row = replay_row(bench.replayed(seen, tokens=tokens))
        found |= {f"horizon-{horizon}.{key}": value for key, value in _numbers(row).items()}
    variants = {"letter": letter_ablations, "pinned": pinned_ablations}[column]()
    for one in bench.there(variants)[0]:
        name = "whole" if one.of == OURS else one.of
        found |= {f"{name}.{key}": value for key, value in _row(bench, one).items()}
    if load:
        found |= _under_load(bench, there)
    return found


def _then(ours: Contender, horizon: int) -> Callable[[PolicySettings], PolicySettings]:
    return lambda policy: replace(ours.change(policy), horizon=horizon)


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


def _depth(bench: Bench, ours: Contender) -> dict[str, float]:
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
    found: dict[str, float] = {}
    served = {}
    for one in there:
        rows = [figures(sample, SLA_S) for sample in bench.simulated(one, _BUSY)]
        served[one.of] = float(np.mean([row["sla_share"] for row in rows]))
        found[f"{one.of}.sla_share_at_80"] = served[one.of]
        if one.of in ("edgeshard", OURS):
            rows = [figures(sample, SLA_S) for sample in bench.saturated(one, _CONCURRENCY)]
            rate = float(np.mean([row["tokens_per_s"] for row in rows]))
            found[f"{one.of}.saturated_tokens_per_s"] = rate
    others = [share for name, share in served.items() if name != OURS]
    return found | {"baselines.sla_share_at_80": max(others)}
