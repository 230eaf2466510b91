"""What a decision costs: value tables to full depth against the literal recursion (39).

The literal recursion with exact allowances and an empty memo is what the paper's Algorithm 2 costs
as written. Beside it the same policy with tables that see the whole remaining depth: microseconds
for one token, per token of 256 at once, and seconds to build the tables anew, as when links have
moved. Mixtral's geometry (32 layers, 8 experts, top-2) and Qwen1.5-MoE's (24, 60, top-4), ten
servers, four steadiness classes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import trimmoe
from factories import random_cluster, random_model_spec, random_profile
from synthetic import random_plan
from trimmoe.core.artifact import written_whole
from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.base import Observation
from trimmoe.policy.presets import trimmoe as default_policy
from trimmoe.policy.settings import PolicySettings
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
        route=access,
        server=policy.routes[access, layer],
        experts=experts,
        masses=chosen,
        importance=np.minimum(chosen.sum(1), 1.0),
        steadiness=rng.integers(policy.lookahead.space.class_count, size=count),
        allowance=rng.uniform(0.01, 0.06, count),
        exit_at=np.full(count, policy.routes.shape[1]),
        loss_weight=np.full(count, 0.5),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Sizes that decisions depend on."""

    name: str
    layers: int
    experts: int
    top_k: int
    patterns: int
    literal_horizons: tuple[int, ...]


GEOMETRIES = (
    Geometry(
        name="Mixtral", layers=32, experts=8, top_k=2, patterns=28, literal_horizons=(1, 2, 3, 4)
    ),
    Geometry(
        name="Qwen1.5-MoE", layers=24, experts=60, top_k=4, patterns=256, literal_horizons=(1, 2, 3)
    ),
)


def measure(geometry: Geometry, repeats: int) -> dict[str, Any]:
    """The literal recursion per horizon, and the tables, on one random world."""
    rng = np.random.default_rng(SEED)
    model = random_model_spec(
        rng, layers=geometry.layers, experts=geometry.experts, top_k=geometry.top_k, hidden=4096
    )
    profile = affordable(random_profile(rng, model, patterns=geometry.patterns, classes=4))
    plan = random_plan(rng, model, random_cluster(rng, servers=10), density=0.1)

    def policy_of(settings: PolicySettings) -> TrimPolicy:
        policy = make_engine(plan, profile, model, settings).policy
        assert isinstance(policy, TrimPolicy)
        return policy

    literal: dict[int, float] = {}
    for horizon in geometry.literal_horizons:
        policy = policy_of(replace(default_policy(), horizon=horizon, literal_lookahead=True))
        taken = []
        for row in rng.dirichlet(np.full(geometry.experts, 0.5), repeats):
            taken.append(timed(forgetful(policy), observation(policy, row[None], rng)))
            if taken[-1] > LIMIT_S:
                break
        literal[horizon] = statistics.median(taken)
    tabled = policy_of(default_policy())
    assert tabled.tables is not None
    one, many = (
        observation(tabled, rng.dirichlet(np.full(geometry.experts, 0.5), count), rng)
        for count in (1, 256)
    )
    tabled.decide(one)  # Compiles, and builds the tables.
    started = time.perf_counter()
    replace(tabled.tables, _tables={}).prepare([0.5])
    refresh_s = time.perf_counter() - started
    row = {
        "geometry": asdict(geometry),
        "literal_s_per_decision": literal,
        "tabled_us_one_token": 1e6 * median_s(tabled, one, 300),
        "tabled_us_per_token_in_256": 1e6 * median_s(tabled, many, 60) / 256,
        "refresh_s": refresh_s,
    }
    third = 1e6 * literal[3]
    row["speedup_one_token"] = third / row["tabled_us_one_token"]
    row["speedup_in_256"] = third / row["tabled_us_per_token_in_256"]
    print(
        f"{geometry.name}: literal "
        + ", ".join(f"H={h} {s * 1e3:.1f} ms" for h, s in literal.items())
        + f"; full depth by tables {row['tabled_us_one_token']:.0f} us for one token "
        f"({row['speedup_one_token']:.0f}x H=3), {row['tabled_us_per_token_in_256']:.2f} us per "
        f"token of 256 ({row['speedup_in_256']:.0f}x), tables anew in {refresh_s:.2f} s"
    )
    return row


def median_s(policy: TrimPolicy, seen: Observation, repeats: int) -> float:
    """Median seconds of a decision."""
    return statistics.median(timed(policy, seen) for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    content = {
        "benchmark": "decisions",
        "trimmoe_version": trimmoe.__version__,
        "servers": 10,
        "seed": SEED,
        "repeats": arguments.repeats,
        "rows": [measure(geometry, arguments.repeats) for geometry in GEOMETRIES],
    }
    if arguments.output:
        with written_whole(arguments.output) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
