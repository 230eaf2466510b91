"""Worlds whose costs can be worked out by hand.

An expert takes 1 ms on every server, a message what its link's delay says whatever its size, dense
layers and messages within a server nothing. Losses are multiples of `UNIT`, a power of two, so that
sums of them are exact. One expert is activated (k = 1) unless said otherwise, all tokens are
equally steady, every activated set is as likely as any other, and an exact layer is said to take
`REFERENCE_S` = 1 ms. With omega_D = 1/2 and a budget of 8 units a step (31) thus costs half its
milliseconds plus a sixteenth of its units of loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from factories import random_model_spec, random_profile
from trimmoe.core.events import (
    Attend,
    Command,
    Complete,
    Event,
    Execute,
    Executed,
    Routed,
    SequenceOpened,
    TokensArrived,
)
from trimmoe.core.loss_curves import LossCurves
from trimmoe.core.plan import Plan, plan_header
from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, ClusterSpec, FloatArray, ModelSpec
from trimmoe.core.wave import Wave
from trimmoe.engine.step import Engine
from trimmoe.policy.base import Decision, Observation
from trimmoe.policy.build import deploy, make_policy
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.readings import BudgetRule, ExitRule, WeightRule
from trimmoe.policy.settings import PolicySettings
from trimmoe.policy.trim import TrimPolicy

UNIT = 2.0**-7
BUDGET = 8 * UNIT
MS = REFERENCE_S = 1e-3

PLAIN: PolicySettings = PRESETS["final-exits"]().but(
    horizon=1,
    budget=BUDGET,
    confidence=0.9,
    exit_risk=None,
    exits_charged=False,
    exits_weighed=False,
    budget_rule=BudgetRule.BUCKET,
    weight_rule=WeightRule.FIXED,
    exit_rule=ExitRule.FIXED,
    audit_share=0.0,
    hazards=False,
)
"""Myopic, and exits as soon as it may, for free."""


def curves(edges: Sequence[float], units: Sequence[Sequence[float]]) -> LossCurves:
    """One loss curve per layer, of one class: `units` [N, G] up to masses `edges` [G]."""
    upper = np.array(units)[:, None, :] * UNIT
    return LossCurves(
        edges=np.broadcast_to(np.array(edges), upper.shape).copy(),
        mean=upper,
        upper=upper,
        samples=np.ones(upper.shape, dtype=np.int64),
    )


def one_bin(units: Sequence[float]) -> LossCurves:
    """Curves that say the same of every mass, a loss per layer."""
    return curves([1.0], [[unit] for unit in units])


def hosting(*servers: Sequence[Sequence[int]], experts: int = 2) -> BoolArray:
    """Who holds what, [M, N, E]: for each server the experts it has of every layer."""
    hosts = np.zeros((len(servers), len(servers[0]), experts), dtype=bool)
    for server, layers in enumerate(servers):
        for layer, held in enumerate(layers):
            hosts[server, layer, list(held)] = True
    return hosts


@dataclass(frozen=True, kw_only=True)
class HandWorld:
    """A model, what calibration is said to have found, and a plan."""

    model: ModelSpec
    profile: Profile
    plan: Plan

    def engine(self, settings: PolicySettings) -> Engine:
        """The engine of a policy, with d_ref = `REFERENCE_S`."""
        deployment = deploy(self.plan, self.profile, self.model, settings.accounting)
        deployment = replace(deployment, reference_s=REFERENCE_S)
        return Engine(
            policy=make_policy(deployment, self.profile, settings),
            settings=settings,
            profile=self.profile,
            cost=deployment.cost,
            routes=deployment.routes,
            reference_s=REFERENCE_S,
        )

    def policy(self, settings: PolicySettings) -> TrimPolicy:
        policy = self.engine(settings).policy
        assert isinstance(policy, TrimPolicy)
        return policy


def world(
    hosts: BoolArray,
    link_ms: Sequence[Sequence[float]],
    *,
    routes: Sequence[Sequence[int]] | None = None,
    top_k: int = 1,
    **found: Any,
) -> HandWorld:
    """A world of these hosts [M, N, E] and links [M, M]; tokens stay at home unless `routes` say
    otherwise; `found` are fields of the profile."""
    servers, layers, experts = hosts.shape
    shape = (layers, experts)
    model = replace(
        random_model_spec(np.random.default_rng(0), layers=layers, experts=experts, top_k=top_k),
        expert_flops=np.full(shape, 1e9),
        layer_dense_flops=np.zeros(layers),
    )
    cluster = _cluster(np.array(link_ms) * MS)
    home = np.repeat(np.arange(servers)[:, None], layers, axis=1)
    plan = Plan(
        header=plan_header(
            cluster, settings={}, input_hashes={"model": "m", "profile": "p"}, seed=0
        ),
        cluster=cluster,
        hosts=hosts,
        routes=home if routes is None else np.array(routes),
        expert_capacity_bytes=np.full(servers, 2**50),
    )
    return HandWorld(model=model, profile=replace(_profile(model), **found), plan=plan)


def _cluster(delay_s: FloatArray) -> ClusterSpec:
    servers = delay_s.shape[0]
    return ClusterSpec(
        name="by hand",
        server_names=tuple(f"s{server}" for server in range(servers)),
        memory_bytes=np.full(servers, 10**12),
        memory_ratio=None,
        flops_per_s=np.full(servers, 1e12),
        access_share=np.full(servers, 1.0 / servers),
        bandwidth_bytes_per_s=np.full(delay_s.shape, np.inf),
        delay_s=delay_s,
    )


def _profile(model: ModelSpec) -> Profile:
    """Nothing may be skipped or substituted; patterns are the single experts, or with k > 1 the
    first k experts alone."""
    layers, experts, top_k = model.layer_count, model.expert_count, model.top_k
    patterns = np.arange(experts)[:, None] if top_k == 1 else np.arange(top_k)[None]
    count = patterns.shape[0]
    return replace(
        random_profile(np.random.default_rng(0), model, classes=1),
        skip=one_bin([128.0] * layers),
        drop=one_bin([128.0] * layers),
        change_echo=np.zeros((layers, 3)),
        importance_quantiles=np.tile(np.linspace(0.0, 1.0, 101), (layers, 1)),
        class_share=np.ones((layers, 1)),
        substitution_loss=np.zeros((layers, 1, 1, experts, experts)),
        feasible=np.tile(np.eye(experts, dtype=bool), (layers, 1, 1)),
        patterns=np.tile(patterns, (layers, 1, 1)),
        pattern_share=np.full((layers, count), 1.0 / count),
        pattern_transitions=np.full((layers - 1, count, count), 1.0 / count),
        pattern_mass=np.full((layers, count, top_k), 0.5 / top_k),
        pattern_importance=np.full((layers, count, 11), 0.5),
    )


def substitutes(layers: int, loss_units: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Every expert stands in for every other, in all layers at the same losses [E, E]."""
    loss = np.array(loss_units) * UNIT
    return {
        "substitution_loss": np.tile(loss, (layers, 1, 1, 1, 1)),
        "feasible": np.ones((layers, *loss.shape), dtype=bool),
    }


def decided(
    policy: TrimPolicy,
    experts: Sequence[int],
    *,
    layer: int = 0,
    server: int = 0,
    masses: Sequence[float] = (0.5,),
    units: float = 8.0,
    exit_at: int | None = None,
) -> Decision:
    """What becomes of a token of the user at `server` that activates `experts` and may lose
    `units`."""
    return policy.decide(
        Observation(
            layer=layer,
            route=np.array([server]),
            server=np.array([server]),
            experts=np.array([experts]),
            masses=np.array([masses]),
            importance=np.array([sum(masses)]),
            steadiness=np.array([0]),
            allowance=np.array([units * UNIT]),
            exit_at=np.array([policy.routes.shape[1] if exit_at is None else exit_at]),
            loss_weight=np.array([0.5]),
        )
    )


@dataclass(kw_only=True)
class Walk:
    """Tokens of one sequence on their way through an engine, one layer at a time."""

    engine: Engine
    access: int = 0
    visited: list[int] = field(default_factory=list)
    """Where the token entered each layer."""
    told: tuple[Command, ...] = ()
    """What followed from the last event."""

    def __post_init__(self) -> None:
        self.state = self.engine.start()
        self.tell(
            SequenceOpened(
                sequence=0,
                access=self.access,
                budget=self.engine.settings.budget,
                confidence=self.engine.settings.confidence,
            )
        )

    @property
    def wave(self) -> Wave:
        return self.state.waves[1]

    @property
    def balance_units(self) -> float:
        return self.state.accounts[0].balance / UNIT

    def tell(self, event: Event) -> tuple[Command, ...]:
        self.state, commands = self.engine.step(self.state, event)
        self.told = commands
        self.visited += [int(one.server[0]) for one in commands if isinstance(one, Attend)]
        return commands

    def arrive(self) -> None:
        """The next token sets out."""
        self.visited.clear()
        self.tell(TokensArrived(wave=1, sequences=(0,), draws=np.zeros(1)))

    def layer(
        self, *, expert: int = 0, confidence: float = 0.0, exit_at: int | None = None
    ) -> tuple[Execute, Complete | None]:
        """One layer, whose router asks for `expert`, whose exit head says `confidence` and after
        which the token is predicted to exit after layer `exit_at`, counted from 1, by default the
        last: how it ran, and the token's end if this was it."""
        (execute,) = self.tell(
            Routed(
                wave=1,
                experts=np.array([[expert]]),
                masses=np.array([[0.5]]),
                importance=np.array([0.5]),
                steadiness=np.array([0]),
            )
        )
        assert isinstance(execute, Execute)
        predicted = np.array([self.engine.cost.layer_count if exit_at is None else exit_at])
        after = self.tell(Executed(wave=1, confidence=np.array([confidence]), exit_at=predicted))
        ends = [command for command in after if isinstance(command, Complete)]
        return execute, ends[0] if ends else None


def skips(ran: Execute | Decision) -> bool:
    """Whether the only token of it runs no expert."""
    return bool((ran.slot_expert[0] < 0).all())
