"""From a profile, a model and a cluster to a plan: seed, routes, replicas, and again.

Replicas are worth what they save on the routes, and routes follow the replicas, so the two
alternate a few times from several starting routes; the placement of least expected exact delay
per token, weighted by where users enter, is kept. Each seed itself is among the candidates, so
the plan is never worse than any of them. Nothing here draws random numbers: the seed is only
recorded, and the same inputs give the same plan.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan, plan_header
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, IntArray, ModelSpec
from trimmoe.cost.model import cost_model
from trimmoe.placement.capacity import expert_capacity_bytes
from trimmoe.placement.guessed import GuessedObjective
from trimmoe.placement.planner import Placement, Planner, PlanSettings
from trimmoe.placement.seed_names import SeedName
from trimmoe.placement.seeds import seed_placement
from trimmoe.placement.stand_ins import allowance_bytes, reserved_bytes

PLANNER = 6
"""How plans are made: raised where the same is planned otherwise, so that those kept from before
are made again."""
SEED_NAMES: tuple[SeedName, ...] = ("dispersed", "pipeline", "compact_pipeline")
"""What `best` tries; `optimise` starts from all seeds there are."""
_AT_HOME: tuple[SeedName, ...] = (
    "dispersed", "activation_aware", "load_balanced", "slim_caching",
)  # fmt: skip
"""Seeds without stages."""


def default() -> PlanSettings:
    """Every seed plan, marginal benefit, best routes."""
    return PlanSettings()


def paper() -> PlanSettings:
    """The paper to the letter: dispersed groups, replicas by (28), tokens at home."""
    return PlanSettings(seed_plan="dispersed", benefit="paper", routes="home", stand_in_share=0.0)


def as_published(seed: SeedName) -> PlanSettings:
    """Another system's placement with its own routes, without routes and replicas of ours."""
    return PlanSettings(seed_plan=seed, routes="own", redundancy=False, stand_in_share=0.0)


def make_plan(
    profile: Profile,
    model: ModelSpec,
    cluster: ClusterSpec,
    settings: PlanSettings | None = None,
    *,
    cluster_hash: str,
) -> Plan:
    """Plan the deployment and the routes (Algorithm 1, lines 9-14, and the routes of the design).

    The header's settings say which seed won (`seed_won`) and, per seed, the expected exact delay
    per token in seconds of the seed itself and of what became of it (`seeds`).

    Raises `UserError` if the profile is of another model, the cluster cannot hold the experts or
    the settings contradict each other.
    """
    settings = settings or default()
    profile.require_model(model)
    # What is as others place it keeps no room for what only we put there.
    planner = make_planner(profile, model, cluster, settings, guesses=settings.routes != "own")
    made = [_made(each) for each in _by_memory(planner)]
    there = [each for each in made if each is not None]
    if not there:
        raise _cannot_serve(model, cluster, settings)
    planner, placement, found = min(there, key=lambda each: _guessed_s(*each[:2]))
    return as_plan(planner, placement, cluster_hash, found)


def _made(planner: Planner) -> tuple[Planner, Placement, dict[str, Any]] | None:
    """The placement of least exact delay, and how it was found; None where no seed serves."""
    settings = planner.settings
    names = SEED_NAMES if settings.seed_plan == "best" else (settings.seed_plan,)
    seeds = {name: seed_placement(name, planner) for name in names if _allowed(name, settings)}
    there = {name: seed for name, seed in seeds.items() if seed is not None}
    if not there:
        return None
    starts = distinct_routes([seed.routes for seed in there.values()])
    finished = {name: planner.finished(seed, starts) for name, seed in there.items()}
    won = min(finished, key=lambda name: finished[name].expected_s)
    record = {name: _record(seed, finished.get(name)) for name, seed in seeds.items()}
    return planner, finished[won], {"seed_won": won, "seeds": record}


def _by_memory(planner: Planner) -> list[Planner]:
    """The planner as it is, and with no memory kept for copies where that is another one."""
    bare = planner.unreserved
    return [planner] if np.array_equal(bare.capacity, planner.capacity) else [planner, bare]


def _guessed_s(planner: Planner, placement: Placement) -> float:
    """What a placement is worth where servers guess, seconds per token."""
    return GuessedObjective.of(planner).value_s(placement.hosts, placement.routes)


def make_planner(
    profile: Profile,
    model: ModelSpec,
    cluster: ClusterSpec,
    settings: PlanSettings,
    *,
    guesses: bool = True,
) -> Planner:
    """A planner without load under pinned accounting; raises `UserError` like `make_plan`.

    If servers are to have what stands in for experts in `guesses`, that has its place beside the
    dense part, but where a server has room for all experts."""
    least_of = {"groups": 1, "kv_reserve_bytes": 0, "rounds": 1, "stand_in_share": 0}
    for name, least in least_of.items():
        value = getattr(settings, name)
        if value is not None and value < least:
            raise UserError(f"The plan setting {name} is {value}; give at least {least}.")
    if settings.seed_plan in _AT_HOME and settings.routes == "staircase":
        raise UserError(
            f"The {settings.seed_plan} seed has no stages to route along; choose routes `best` or "
            "`home`, or a pipeline seed."
        )
    room = cluster.memory_bytes - model.dense_bytes - settings.kv_reserve_bytes
    maps = profile.stand_in_bytes * (guesses & (room < model.total_expert_bytes))
    kept = settings.kv_reserve_bytes + maps
    capacity = expert_capacity_bytes(cluster, model, kv_reserve_bytes=kept)
    copies = np.full(len(capacity), allowance_bytes(model, settings.stand_in_share))
    if cluster.memory_ratio is None:
        copies = reserved_bytes(capacity, model, int(copies[0]))
        capacity = capacity - copies
    return Planner(
        profile=profile,
        model=model,
        cluster=cluster,
        settings=settings,
        cost=cost_model(model, cluster),
        capacity=capacity,
        copies=copies,
    )


def _cannot_serve(model: ModelSpec, cluster: ClusterSpec, settings: PlanSettings) -> UserError:
    remedy = "plan with the `dispersed` seed or add memory."
    if settings.seed_plan == "single_server":
        return UserError(f"No server of cluster {cluster.name} holds all of {model.name}; {remedy}")
    return UserError(
        f"Whole layers of {model.name} do not fit on cluster {cluster.name} one after another; "
        f"{remedy}"
    )


def _allowed(name: SeedName, settings: PlanSettings) -> bool:
    return name not in _AT_HOME or settings.routes != "staircase"


def distinct_routes(routes: list[IntArray]) -> list[IntArray]:
    """`routes` [M, N] each, without repetitions, in order."""
    return [
        route
        for index, route in enumerate(routes)
        if not any(np.array_equal(route, earlier) for earlier in routes[:index])
    ]


def _record(seed: Placement | None, finished: Placement | None) -> dict[str, float] | None:
    if seed is None or finished is None:
        return None
    return {"seed_s": seed.expected_s, "plan_s": finished.expected_s}


def as_plan(
    planner: Planner, placement: Placement, cluster_hash: str, found: dict[str, Any]
) -> Plan:
    header = plan_header(
        planner.cluster,
        settings=asdict(planner.settings) | found | {"expected_s": placement.expected_s},
        input_hashes={
            "model": planner.model.model_hash,
            "profile": planner.profile.hash,
            "cluster": cluster_hash,
        },
        seed=planner.settings.seed,
    )
    return Plan(
        header=header,
        cluster=planner.cluster,
        hosts=placement.hosts,
        routes=placement.routes,
        expert_capacity_bytes=planner.capacity,
        stand_in_bits=planner.stand_in_bits(placement.hosts, placement.routes),
    )
