"""Seconds per decision of the literal recursion (39), Mixtral's geometry on ten servers.

Exact allowances, an empty memo for every decision: what the paper's Algorithm 2 costs as written.
The same decision with allowances rounded to the policy's grid and a warm memo, as the runtime
takes it, stands beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import trimmoe
from factories import random_cluster, random_model_spec, random_profile
from synthetic import random_plan
from trimmoe.core.artifact import written_whole
from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray
from trimmoe.experiments.methods import make_engine
from trimmoe.policy.base import Observation
from trimmoe.policy.settings import trimmoe as default_policy
from trimmoe.policy.trim import TrimPolicy

SEED = 0
LIMIT_S = 60.0
"""A horizon whose first decision takes longer is measured once and ends the series."""


def observation(policy: TrimPolicy, masses: FloatArray, rng: np.random.Generator) -> Observation:
    """One token per row of `masses` [n, E] halfway through the model, with some budget."""
    count, top_k = masses.shape[0], policy.lookahead.profile.top_k
    experts = np.argsort(-masses, axis=1)[:, :top_k]
    chosen = np.take_along_axis(masses, experts, axis=1)
    layer = policy.routes.shape[1] // 2
    access = rng.integers(policy.routes.shape[0], size=count)
    return Observation(
        layer=layer,
        access=access,
        server=policy.routes[access, layer],
        experts=experts,
        masses=chosen,
        importance=np.minimum(chosen.sum(1), 1.0),
        allowance=rng.uniform(0.01, 0.06, count),
        exit_at=np.full(count, policy.routes.shape[1]),
        loss_weight=0.5,
    )


def timed(policy: TrimPolicy, seen: Observation) -> float:
    """Seconds of one call of `decide`."""
    started = time.perf_counter()
    policy.decide(seen)
    return time.perf_counter() - started


def forgetful(policy: TrimPolicy) -> TrimPolicy:
    """The same policy with exact allowances and nothing remembered."""
    lookahead = replace(policy.lookahead, allowance_step=None, _values={}, _menus={})
    return replace(policy, lookahead=lookahead, _by_weight={})


def affordable(profile: Profile) -> Profile:
    """Losses of a few per mille: a budget of 2 % buys several and the recursion branches."""
    skip = replace(profile.skip, upper=profile.skip.upper * 0.03)
    drop = replace(profile.drop, upper=profile.drop.upper * 0.02)
    return replace(
        profile, skip=skip, drop=drop, substitution_loss=profile.substitution_loss * 0.03
    )


def measure(repeats: int) -> list[dict[str, Any]]:
    """One row per horizon."""
    rng = np.random.default_rng(SEED)
    model = random_model_spec(rng, layers=32, experts=8, top_k=2, hidden=4096)
    profile = affordable(random_profile(rng, model, patterns=28))
    plan = random_plan(rng, model, random_cluster(rng, servers=10), density=0.1)
    rows = []
    for horizon in (1, 2, 3, 4):
        settings = replace(default_policy(), horizon=horizon)
        policy = make_engine(plan, profile, model, settings).policy
        assert isinstance(policy, TrimPolicy)
        tokens = rng.dirichlet(np.full(8, 0.5), repeats)
        literal = []
        for row in tokens:
            literal.append(timed(forgetful(policy), observation(policy, row[None], rng)))
            if literal[-1] > LIMIT_S:
                break
        warm = observation(policy, rng.dirichlet(np.full(8, 0.5), 256), rng)
        policy.decide(warm)
        batch_s = statistics.median(timed(policy, warm) for _ in range(5))
        rows.append(
            {
                "horizon": horizon,
                "literal_s_per_decision": statistics.median(literal),
                "literal_decisions": len(literal),
                "memoised_us_per_token_in_256": batch_s / 256 * 1e6,
            }
        )
        print(
            f"H = {horizon}: literal {rows[-1]['literal_s_per_decision'] * 1e3:.1f} ms per decision"
            f" ({len(literal)} measured), rounded and warm "
            f"{rows[-1]['memoised_us_per_token_in_256']:.0f} us per token of 256"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    content = {
        "benchmark": "decisions",
        "trimmoe_version": trimmoe.__version__,
        "geometry": "32 layers, 8 experts, top-2, 10 servers",
        "seed": SEED,
        "repeats": arguments.repeats,
        "rows": measure(arguments.repeats),
    }
    if arguments.output:
        with written_whole(arguments.output) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
