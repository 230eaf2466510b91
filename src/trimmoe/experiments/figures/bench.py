"""Runs contenders in a world, each once however many figures ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.core.plan import Plan
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.core.trace import Trace
from trimmoe.cost.utility import utility
from trimmoe.engine.step import Engine
from trimmoe.experiments.figures.contenders import Contender
from trimmoe.experiments.figures.loads import Loaded, control_s
from trimmoe.experiments.figures.world import (
    Announce,
    Effort,
    World,
    first_tokens,
    generated_world,
)
from trimmoe.experiments.method_engines import make_engine, plan_for
from trimmoe.experiments.methods import UNLIMITED, configured
from trimmoe.policy.build import Deployment, deploy
from trimmoe.policy.settings import PolicySettings
from trimmoe.simulator.measure import Sample
from trimmoe.simulator.replay import replay
from trimmoe.simulator.settings import Load, Prefill, SimulationSettings

BUDGET = 0.02
CONFIDENCE = 0.9
SLA_S = 0.3
"""The paper's target for a request."""
RATE_PER_S = 40.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rig:
    """A contender ready to run."""

    contender: Contender
    engine: Engine
    deployment: Deployment
    settings: PolicySettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A contender's tokens without load."""

    ledger: Ledger
    delay_s: FloatArray
    """Of each token, [T]."""
    utility: float
    """U of (21) over the number of users, at equal weights of delay and quality: each access server
    is one, T_ref that of the contender's own deployment."""


Execute = Callable[[Rig], dict[str, float]]
"""Runs a contender on a real model and says what became of delay and quality."""


@dataclass(kw_only=True)
class Bench:
    """One world's runs; `announce` is told which is going on."""

    world: World
    effort: Effort
    seed: int = 0
    announce: Announce = lambda _: None
    execute: Execute | None = None
    """None where no model is at hand: then nothing is said about measured quality."""
    geometries: tuple[str, ...] = ()
    """Of other models, to be run on the same cluster."""
    began_full: set[tuple[str, float | None]] = field(default_factory=set)
    """Contenders and rates whose simulations did not fill from rest, see `loads`."""
    _executed: dict[tuple[str, float], dict[str, float]] = field(default_factory=dict)
    _rigs: dict[tuple[str, float], Rig] = field(default_factory=dict)
    _plans: dict[tuple[str, bool, bool, str], Plan] = field(default_factory=dict)
    _replays: dict[tuple[str, float, int], Replayed] = field(default_factory=dict)
    _samples: dict[tuple[str, float | None], list[Sample]] = field(default_factory=dict)

    @property
    def access(self) -> IntArray:
        """Where each sequence of the trace enters, [S]."""
        return self.world.access(self.world.trace.sequence_count, self.seed)

    def on(self, geometry: str) -> Bench:
        """The bench of another model on the same cluster, with generated tokens."""
        cluster, announce = self.world.plan.cluster, self.announce
        world = generated_world(geometry, cluster, self.effort, seed=self.seed, announce=announce)
        return Bench(world=world, effort=self.effort, seed=self.seed, announce=announce)

    def there(self, contenders: tuple[Contender, ...]) -> tuple[list[Contender], dict[str, str]]:
        """Those that can run in this world, and why the others cannot, by key."""
        kept, left_out = [], {}
        for contender in contenders:
            reason = self._impossible(contender)
            if reason is None:
                kept.append(contender)
            else:
                left_out[contender.key] = f"{contender.title}: {reason}"
        return kept, left_out

    def _impossible(self, contender: Contender) -> str | None:
        try:
            if contender.method.reroutes:
                self.world.trace.require_probabilities()
            plan = self.plan(contender)
            if contender.method.settings().guesses:
                self.world.trace.require_home(plan.cluster.server_count)
        except UserError as error:
            return str(error)
        return None

    def plan(self, contender: Contender) -> Plan:
        """The plan a contender runs on; raises `UserError` if its placement cannot serve."""
        method, world = contender.method, self.world
        own = (method.seed or "", method.home, method.load_replicas)
        key = (*own, "" if method.seed else contender.on)
        if key not in self._plans:
            given = world.plan if contender.on == "ours" else world.paper_plan
            self._plans[key] = plan_for(method, given, world.profile, world.model)
        return self._plans[key]

    def rig(self, contender: Contender, budget: float = BUDGET) -> Rig:
        """A contender's engine, made once."""
        key = (contender.key, budget)
        if key not in self._rigs:
            plan, world = self.plan(contender), self.world
            method = contender.method
            policy = configured(method, budget=budget, confidence=CONFIDENCE)
            policy = contender.change(policy)
            self._rigs[key] = Rig(
                contender=contender,
                engine=make_engine(plan, world.profile, world.model, policy, method.policy),
                deployment=deploy(plan, world.profile, world.model, policy.accounting),
                settings=policy,
            )
        return self._rigs[key]

    def replayed(
        self, contender: Contender, budget: float = BUDGET, tokens: int | None = None
    ) -> Replayed:
        """Expected delays and traffic without load, of about `tokens` tokens or all."""
        if tokens is None:
            tokens = self.world.trace.token_count
        key = (contender.key, budget, tokens)
        if key not in self._replays:
            self.announce(f"{contender.title}: replay")
            trace = first_tokens(self.world.trace, tokens)
            self._replays[key] = self._replay(self.rig(contender, budget), trace)
        return self._replays[key]

    def _replay(self, rig: Rig, trace: Trace) -> Replayed:
        ledgers = replay(
            rig.engine,
            trace,
            self.access[: trace.sequence_count],
            budget=rig.settings.budget,
            confidence=rig.settings.confidence,
            seed=self.seed,
        )
        return Replayed(
            ledger=sum(ledgers[1:], ledgers[0]),
            delay_s=np.array([ledger.delay_s for ledger in ledgers]),
            utility=self._utility(rig, trace, ledgers),
        )

    def _utility(self, rig: Rig, trace: Trace, ledgers: Sequence[Ledger]) -> float:
        user = np.repeat(self.access[: trace.sequence_count], trace.length)
        columns = [(one.delay_s, one.loss, one.budget) for one in ledgers]
        tokens = np.bincount(user)
        there = tokens > 0
        each = np.array(columns, dtype=np.float64).T
        sums: list[FloatArray] = [np.bincount(user, one)[there].astype(float) for one in each]
        delay_s, loss, budget = sums
        own_s = rig.engine.user_reference_s
        reference_s = rig.deployment.reference_s if own_s is None else own_s[: there.size][there]
        whole_s = reference_s * trace.experts.shape[1] * tokens[there]
        total = utility(delay_s, whole_s, loss, budget, loss_weight=0.5)
        return total / int(there.sum())

    def simulated(self, contender: Contender, rate_per_s: float = RATE_PER_S) -> list[Sample]:
        """Under an open load, one sample per seed; away from the default rate of one seed only.

        The warm-up lasts longer than one answer, and answers are of equal length: as many are
        under way at its end as ever will be.
        """
        key = (contender.key, rate_per_s)
        if key not in self._samples:
            output = self.effort.output_tokens
            alone_s = self.replayed(contender).ledger.mean_delay_s
            self._samples[key] = self._simulate(
                contender,
                Load(
                    rate_per_s=rate_per_s,
                    prompt_tokens=1,
                    output_tokens=output,
                    fixed_lengths=True,
                    prefill=Prefill.EXCLUDED,
                ),
                warm_up_s=1.2 * output * alone_s,
                duration_s=self.effort.load_tokens / (rate_per_s * output),
                label=f"{rate_per_s:g} requests/s",
                seeds=self.effort.seeds if rate_per_s == RATE_PER_S else self.effort.seeds[:1],
            )
        return self._samples[key]

    def saturated(self, contender: Contender, concurrency: int) -> list[Sample]:
        """As many requests at a time as given, for throughput; of the first seed only."""
        key = (contender.key, None)
        if key not in self._samples:
            alone_s = self.replayed(contender).ledger.mean_delay_s
            load = Load(
                concurrency=concurrency,
                prompt_tokens=1,
                output_tokens=self.effort.output_tokens,
                prefill=Prefill.EXCLUDED,
            )
            rounds = max(1.0, self.effort.load_tokens / concurrency)
            self._samples[key] = self._simulate(
                contender,
                load,
                warm_up_s=2.0 * alone_s,
                duration_s=rounds * alone_s,
                label=f"{concurrency} at a time",
                seeds=self.effort.seeds[:1],
            )
        return self._samples[key]

    def _simulate(
        self,
        contender: Contender,
        load: Load,
        *,
        warm_up_s: float,
        duration_s: float,
        label: str,
        seeds: tuple[int, ...],
    ) -> list[Sample]:
        self.announce(f"{contender.title}: {label}")
        rig = self.rig(contender)
        settings = SimulationSettings(
            load=load,
            budget=rig.settings.budget,
            confidence=rig.settings.confidence,
            warm_up_s=warm_up_s,
            duration_s=duration_s,
            control_s=control_s(duration_s),
            seeds=tuple(self.seed + seed for seed in seeds),
            sla_s=SLA_S,
        )
        loaded = Loaded(
            engine=rig.engine,
            deployment=rig.deployment,
            trace=self.world.trace,
            alone_s=self.alone_s(contender),
            tokens=self.effort.load_tokens,
            budgeted=0 < rig.settings.budget < UNLIMITED,
        )
        try:
            samples, full = loaded.simulated(settings)
        except UserError as error:
            raise UserError(f"{contender.title}, {label}: {error}") from error
        if full:
            self.began_full.add((contender.key, load.rate_per_s))
        return samples

    def alone_s(self, contender: Contender) -> FloatArray:
        """Mean time per token without load by where its answer enters, [M]; that of all where none
        did."""
        replayed, trace = self.replayed(contender), self.world.trace
        access = np.repeat(self.access, trace.length)
        servers = self.world.plan.cluster.server_count
        count = np.bincount(access, minlength=servers)
        total_s = np.bincount(access, replayed.delay_s, servers)
        return np.where(count, total_s / np.maximum(count, 1), replayed.ledger.mean_delay_s)

    def executed(self, contender: Contender, budget: float = BUDGET) -> dict[str, float]:
        """What executing the model under a contender measured; only where `execute` is given."""
        assert self.execute is not None
        key = (contender.key, budget)
        if key not in self._executed:
            self.announce(f"{contender.title}: executing")
            self._executed[key] = self.execute(self.rig(contender, budget))
        return self._executed[key]


def replay_row(replayed: Replayed) -> dict[str, Any]:
    """Figures of a replay, in units named by their keys."""
    ledger, tokens = replayed.ledger, replayed.ledger.tokens
    return {
        "tokens": tokens,
        "delay_ms": ledger.mean_delay_s * 1e3,
        "delay_p99_ms": float(np.quantile(replayed.delay_s, 0.99)) * 1e3,
        "utility": replayed.utility,
        **ledger_row(ledger),
    }


def ledger_row(ledger: Ledger) -> dict[str, Any]:
    """What was executed, sent and charged per token."""
    tokens = max(ledger.tokens, 1)
    return {
        "hops_per_token": ledger.hops / tokens,
        "mb_per_1000_tokens": ledger.total_bytes / tokens / 1e3,
        "remote_share": ledger.remote_share,
        "charged_loss_per_token": ledger.loss / tokens,
        "kinds": {kind.name.lower(): ledger.share(kind) for kind in Kind},
    }
