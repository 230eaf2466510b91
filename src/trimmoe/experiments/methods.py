"""The methods a comparison runs: each is a plan and a policy in the same engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from trimmoe.core.choice import Choice
from trimmoe.core.errors import UserError
from trimmoe.core.profile import Profile
from trimmoe.cost.actions import ActionSpace
from trimmoe.cost.model import Accounting
from trimmoe.placement.seed_names import SeedName
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
)
from trimmoe.policy.presets import (
    auto,
    auto_within,
    exact,
    final_exits,
    guessing,
    lossless,
    paper,
    paper_substitute_only,
    relaxed,
    ring,
    speculative,
    substitute_only,
    trimming,
    trimmoe,
)
from trimmoe.policy.settings import PolicySettings


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
        return self.matched or self.settings().spends

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
    "relaxed": Method(title="speculative, relaxed", settings=relaxed),
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
    if not settings.spends:
        return settings  # Of an exact method, or of one that knows no budget.
    exit_risk = None if settings.readings.exit_risk is None else budget / 2
    return settings.but(budget=budget, confidence=confidence, exit_risk=exit_risk)


def named(choice: Choice) -> tuple[Method, PolicySettings]:
    """The method of that name and its policy. Raises `UserError` for an unknown name."""
    method = find_method(choice.method)
    return method, configured(method, budget=choice.allowed, confidence=choice.confidence)


def chosen(choice: Choice) -> tuple[Method, PolicySettings]:
    """`named`, but that `auto` spends a budget where one is given, and is lossless without."""
    method, policy = named(choice)
    if choice.method != "auto" or choice.budget is None:
        return method, policy
    method = replace(method, settings=auto_within)
    return method, configured(method, budget=choice.budget, confidence=choice.confidence)


def served(choice: Choice) -> PolicySettings:
    """The policy of a method that real servers can run; raises `UserError` for others.

    Nothing moves KV caches along with tokens.
    """
    _, settings = named(choice)
    if settings.accounting is Accounting.MIGRATE:
        raise UserError(
            f"Servers cannot run the method {choice.method}, whose tokens move without their KV "
            "cache; leave it out, or see `trimmoe simulate`."
        )
    return settings


def replayed(choice: Choice) -> PolicySettings:
    """`served`, of a method that the simulator replays from what its servers did, which says
    nothing of experts that its tokens' routers did not choose."""
    settings = served(choice)
    if find_method(choice.method).policy is not None:
        raise UserError(
            f"A replay cannot run the method {choice.method}, a policy of its own; leave it out."
        )
    return settings
