"""The methods a comparison runs: each is a plan and a policy in the same engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan, plan_header
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.cost.actions import ActionSpace
from trimmoe.cost.model import Accounting, cost_model
from trimmoe.engine.step import Engine
from trimmoe.placement.make import PlanSettings, SeedName, make_planner
from trimmoe.placement.redundancy import add_load_replicas, primary_copies
from trimmoe.placement.routes import home_routes
from trimmoe.placement.seeds import seed_plan
from trimmoe.policy.base import Policy
from trimmoe.policy.baselines import (
    LocalPrior,
    MaskedGating,
    MixtureOfDepths,
    admitted_servers,
    matched_servers,
    matched_skip_rate,
    skip_thresholds,
)
from trimmoe.policy.build import (
    Deployment,
    PolicyMaker,
    deploy,
    inflated,
    make_policy,
    starting_weights,
    user_references,
)
from trimmoe.policy.settings import (
    DEFAULT_BUDGET,
    PolicySettings,
    auto,
    auto_trimming,
    exact,
    final_exits,
    guessing,
    lossless,
    paper,
    paper_substitute_only,
    ring,
    speculative,
    substitute_only,
    trimming,
    trimmoe,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One row of a comparison: a placement and a policy in the same engine."""

    title: str
    settings: Callable[[], PolicySettings]
    seed: SeedName | None = None
    """Run on this seed plan over the same machines instead of the given plan."""
    copies: bool = False
    """Whether its seed plan gets the copies of experts that ours guesses with, in as many bytes."""
    home: bool = False
    """Run the placement expert by expert from home, not along its own routes."""
    load_replicas: bool = False
    """Keep one copy of every expert of its plan, and its routes, and replicate by load alone."""
    policy: PolicyMaker | None = None
    """Instead of the policy of `settings`, see `policy.baselines`."""
    matched: bool = False
    """Whether its own policy keeps to the user's budget, instead of to none."""
    reroutes: bool = False
    """Whether its policy routes anew over all experts, and needs the router's whole output."""

    @property
    def budgeted(self) -> bool:
        """Whether it does something else within another budget."""
        return self.matched or not self.settings().levers.lossless

    def titled(self, budget: float) -> str:
        """Its title with the budget that it has, if any."""
        return self.title + (f" {budget:.3g}" if 0 < budget < UNLIMITED else "")


def _unbudgeted() -> PolicySettings:
    """Exact settings under which a baseline of its own may approximate as it likes."""
    return replace(exact(), name="baseline", budget=UNLIMITED)


def _without(**levers: bool) -> Callable[[], PolicySettings]:
    def settings() -> PolicySettings:
        policy = trimmoe()
        return replace(policy, levers=replace(policy.levers, **levers))

    return settings


def _mixture_of_depths(
    space: ActionSpace, deployed: Deployment, profile: Profile, settings: PolicySettings
) -> Policy:
    rate = MIXTURE_SKIP_RATE
    if settings.budget < UNLIMITED:
        rate = matched_skip_rate(space, profile, settings.budget)
    below = skip_thresholds(profile.importance_quantiles, rate)
    return MixtureOfDepths(space=space, routes=deployed.routes, below=below)


def _local_prior(
    space: ActionSpace, deployed: Deployment, profile: Profile, settings: PolicySettings
) -> Policy:
    return LocalPrior(space=space, routes=deployed.routes, bias=LOCAL_BIAS)


def _masked_gating(
    space: ActionSpace, deployed: Deployment, profile: Profile, settings: PolicySettings
) -> Policy:
    if settings.budget < UNLIMITED:
        admitted = matched_servers(space, deployed.routes, profile, settings.budget)
    else:
        admitted = admitted_servers(deployed.cost, deployed.routes, deployed.plan.hosts)
    return MaskedGating(space=space, routes=deployed.routes, admitted=admitted)


UNLIMITED = 1e6
"""A budget that never binds."""
MIXTURE_SKIP_RATE = 0.125
"""Share of token-layers that Mixture-of-Depths skips. Its authors' model, trained for it, runs that
share of every second layer's tokens and skips all others; this is far milder, and still charged
more than a flip per token: see `mixture-of-depths-matched`."""
LOCAL_BIAS = 0.05
"""Router probability that a local expert is worth more."""

METHODS = {
    "pipeline": Method(title="pipeline", settings=exact, seed="pipeline"),
    "edgeshard": Method(title="EdgeShard", settings=exact, seed="edgeshard_latency"),
    "edgeshard-throughput": Method(
        title="EdgeShard (throughput)", settings=exact, seed="edgeshard_throughput"
    ),
    "edgeshard-experts": Method(
        title="EdgeShard's placement, expert-wise",
        settings=exact,
        seed="edgeshard_latency",
        home=True,
    ),
    "activation-aware": Method(
        title="activation-aware", settings=exact, seed="activation_aware", home=True
    ),
    "slimcaching": Method(title="SlimCaching", settings=exact, seed="slim_caching", home=True),
    "load-balanced": Method(
        title="EPLB, nearest replica", settings=exact, seed="load_balanced", home=True
    ),
    "exact-home": Method(title="exact nearest, at home", settings=exact, home=True),
    "exact": Method(title="exact nearest", settings=exact),
    "mixture-of-depths": Method(
        title="Mixture-of-Depths", settings=_unbudgeted, policy=_mixture_of_depths
    ),
    "local-prior": Method(
        title="Local-Prior", settings=_unbudgeted, policy=_local_prior, reroutes=True
    ),
    "moe2": Method(
        title="MoE^2 (adapted)", settings=_unbudgeted, policy=_masked_gating, reroutes=True
    ),
    "mixture-of-depths-matched": Method(
        title="Mixture-of-Depths, within the budget",
        settings=_unbudgeted,
        policy=_mixture_of_depths,
        matched=True,
    ),
    "moe2-matched": Method(
        title="MoE^2 (adapted), within the budget",
        settings=_unbudgeted,
        policy=_masked_gating,
        reroutes=True,
        matched=True,
    ),
    "substitute-only": Method(title="substitute only", settings=substitute_only),
    "substitute-only-1": Method(
        title="substitute only, H = 1", settings=lambda: replace(substitute_only(), horizon=1)
    ),
    "substitute-only-3": Method(
        title="substitute only, H = 3", settings=lambda: replace(substitute_only(), horizon=3)
    ),
    "trimmoe": Method(title="TrimMoE", settings=trimmoe),
    "lossless": Method(title="lossless (drafts)", settings=lossless),
    "speculative": Method(title="speculative", settings=speculative),
    "ring": Method(title="ring, chunks of 4", settings=ring, seed="pipeline", copies=True),
    "ring-8": Method(
        title="ring, chunks of 8",
        settings=partial(ring, 8),
        seed="pipeline",
        copies=True,
    ),
    "ring-16": Method(
        title="ring, chunks of 16",
        settings=partial(ring, 16),
        seed="pipeline",
        copies=True,
    ),
    "ring-edgeshard-16": Method(
        title="EdgeShard ring, chunks of 16",
        settings=partial(ring, 16),
        seed="edgeshard_latency",
        copies=True,
    ),
    "auto": Method(title="auto", settings=auto),
    "trimming": Method(title="trimming", settings=trimming),
    "guessing": Method(title="guess + trim", settings=guessing),
    "final-exits": Method(title="with final exits", settings=final_exits),
    "no-skip": Method(title="without skips", settings=_without(skip=False, drop_slots=False)),
    "no-exit": Method(title="without exits", settings=_without(exit=False)),
    "no-look-ahead": Method(
        title="without look-ahead", settings=lambda: replace(trimmoe(), horizon=1)
    ),
    "no-redundancy": Method(title="replicas by load alone", settings=trimmoe, load_replicas=True),
    "paper": Method(title="paper (migrate: not physical)", settings=paper),
    "paper-substitute-only": Method(
        title="paper's predecessor (migrate: not physical)", settings=paper_substitute_only
    ),
}
DEFAULT_METHODS = ("pipeline", "exact", "substitute-only", "trimmoe")


def find_method(name: str) -> Method:
    """The method called `name`; raises `UserError` naming those there are."""
    if name not in METHODS:
        raise UserError(f"There is no method `{name}`; choose from {', '.join(METHODS)}.")
    return METHODS[name]


def configured(method: Method, *, budget: float, confidence: float) -> PolicySettings:
    """The method's policy with the user's budget and confidence, where it spends any.

    Exits are not charged to the budget but held to half of it: so many of all tokens may they
    flip, by their error measured in calibration, where a policy looks at it.
    """
    settings = method.settings()
    if method.matched:
        return replace(settings, budget=budget)
    if settings.levers.lossless:
        return settings  # Of an exact method, or of one that knows no budget.
    exit_risk = None if settings.exit_risk is None else budget / 2
    return replace(settings, budget=budget, confidence=confidence, exit_risk=exit_risk)


def chosen(name: str, *, budget: float | None, confidence: float) -> tuple[Method, PolicySettings]:
    """The method called `name` and its policy, for a user who may not have given a budget (None).

    `auto` trims within a budget and is lossless without one; other methods that trim take
    `DEFAULT_BUDGET`. Raises `UserError` for an unknown name.
    """
    method = find_method(name)
    if name == "auto" and budget is not None:
        method = replace(method, settings=auto_trimming)
    allowed = DEFAULT_BUDGET if budget is None else budget
    return method, configured(method, budget=allowed, confidence=confidence)


def served(name: str, *, budget: float, confidence: float) -> PolicySettings:
    """`configured`, of a method that real servers can run; raises `UserError` for others.

    Nothing moves KV caches along with tokens.
    """
    settings = configured(find_method(name), budget=budget, confidence=confidence)
    if settings.guess_chunks:
        raise UserError(
            f"Servers cannot run the method {name}, which is there to compare with; leave it "
            "out, or see `trimmoe compare` and `trimmoe simulate`."
        )
    if settings.accounting is Accounting.MIGRATE:
        raise UserError(
            f"Servers cannot run the method {name}, whose tokens move without their KV cache; "
            "leave it out, or see `trimmoe simulate`."
        )
    return settings


def replayed(name: str, *, budget: float, confidence: float) -> PolicySettings:
    """`served`, of a method that the simulator replays from what its servers did, which says
    nothing of experts that its tokens' routers did not choose."""
    settings = served(name, budget=budget, confidence=confidence)
    if find_method(name).policy is not None:
        raise UserError(
            f"A replay cannot run the method {name}, a policy of its own; leave it out."
        )
    return settings


def possible_methods(
    plan: Plan,
    profile: Profile,
    model: ModelSpec,
    among: tuple[str, ...] = DEFAULT_METHODS,
) -> tuple[str, ...]:
    """The methods compared by default, those whose placement can serve the model."""
    return tuple(
        name
        for name in among
        if METHODS[name].seed is None or seeded_plan(METHODS[name], plan, profile, model)
    )


def plan_for(method: Method, plan: Plan, profile: Profile, model: ModelSpec) -> Plan:
    """The plan that the method runs on: the given one or its own on the same machines.

    Raises `UserError` if its own placement cannot serve the model there.
    """
    found = plan if method.seed is None else seeded_plan(method, plan, profile, model)
    if found is None:
        raise UserError(
            f"The method {method.title} cannot place {model.name} on cluster {plan.cluster.name}; "
            "leave it out or add memory."
        )
    if method.load_replicas:
        found = load_replicated(found, profile, model)
    if not method.home:
        return found
    return replace(found, routes=home_routes(plan.cluster.server_count, model.layer_count))


def seeded_plan(method: Method, plan: Plan, profile: Profile, model: ModelSpec) -> Plan | None:
    """The seed plan of a method with its own routes; None where it cannot serve the model."""
    assert method.seed is not None
    planner = make_planner(profile, model, plan.cluster, PlanSettings(), guesses=False)
    seed = seed_plan(method.seed, planner)
    if seed is None:
        return None
    header = plan_header(
        plan.cluster,
        settings={"seed_plan": method.seed},
        input_hashes=plan.header.input_hashes,
        seed=plan.header.seed,
    )
    return Plan(
        header=header,
        cluster=plan.cluster,
        hosts=seed.hosts,
        routes=seed.routes,
        expert_capacity_bytes=planner.capacity,
        stand_in_bits=planner.stand_in_bits(seed.hosts, seed.routes) if method.copies else None,
    )


def load_replicated(plan: Plan, profile: Profile, model: ModelSpec) -> Plan:
    """The plan without communication-aware replicas: its routes and one copy of each expert stay,
    and what memory is left goes to replicas by load alone."""
    cost, capacity = cost_model(model, plan.cluster), plan.expert_capacity_bytes
    bare = primary_copies(cost, plan.hosts, plan.routes, plan.cluster.access_share)
    header = plan_header(
        plan.cluster,
        settings=plan.header.settings | {"replicas": "load"},
        input_hashes=plan.header.input_hashes,
        seed=plan.header.seed,
    )
    return replace(plan, header=header, hosts=add_load_replicas(model, profile, bare, capacity))


def make_engine(
    plan: Plan,
    profile: Profile,
    model: ModelSpec,
    settings: PolicySettings,
    maker: PolicyMaker | None = None,
) -> Engine:
    """The engine of a policy on a plan; `maker` makes another policy than that of `settings`."""
    deployment = deploy(plan, profile, model, settings.accounting)
    settings = inflated(plan, settings)
    standard = make_policy(deployment, profile, settings)
    space = standard.lookahead.space
    policy: Policy = standard if maker is None else maker(space, deployment, profile, settings)
    return Engine(
        policy=policy,
        settings=settings,
        profile=profile,
        cost=deployment.cost,
        routes=deployment.routes,
        reference_s=deployment.reference_s,
        route_weights=starting_weights(space, deployment, profile, settings),
        user_reference_s=(
            user_references(deployment, profile) if settings.user_references else None
        ),
        hosts=plan.hosts,
        stand_in_bits=plan.stand_in_bits,
    )


def method_engine(
    method: Method, plan: Plan, profile: Profile, model: ModelSpec, settings: PolicySettings
) -> Engine:
    """The engine of a method, with `settings` as `configured` made them, beside a given plan."""
    own = plan_for(method, plan, profile, model)
    return make_engine(own, profile, model, settings, method.policy)


def require_fitting(profile: Profile, plan: Plan, model: ModelSpec) -> None:
    """Raise `UserError` unless profile and plan belong to the model and to each other."""
    profile.require_model(model)
    if not plan.is_of(profile):
        raise UserError(
            "The plan was made from another profile; run `trimmoe plan` with this profile."
        )
