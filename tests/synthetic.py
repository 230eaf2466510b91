"""A driver with a random model in place of a real one, for property tests of the engine.

It obeys the engine's commands like any driver does and records every trajectory, so that tests
can check the paper's constraints on what really happened rather than on what was decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from trimmoe.core.events import (
    Attend,
    Audited,
    Command,
    Complete,
    Event,
    Execute,
    Executed,
    Probe,
    Routed,
    SequenceOpened,
    TokensArrived,
    Trailed,
)
from trimmoe.core.ledger import Ledger
from trimmoe.core.loss_curves import Rung
from trimmoe.core.plan import Plan, plan_header
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, ModelSpec
from trimmoe.core.stand_ins import RUNGS
from trimmoe.engine.books import checked
from trimmoe.engine.step import Engine


def random_plan(
    rng: np.random.Generator,
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    density: float = 0.3,
    copied: float = 0.0,
) -> Plan:
    """A deployment that covers every expert, with random replicas and random routes; servers have
    copies in some bits of a share of `copied` of what they do not hold."""
    shape = (cluster.server_count, model.layer_count, model.expert_count)
    hosts = rng.random(shape) < density
    owner = rng.integers(cluster.server_count, size=shape[1:])
    layers, experts = np.indices(owner.shape)
    hosts[owner, layers, experts] = True
    plan = Plan(
        header=plan_header(
            cluster, settings={}, input_hashes={"model": "m", "profile": "p"}, seed=0
        ),
        cluster=cluster,
        hosts=hosts,
        routes=rng.integers(cluster.server_count, size=(cluster.server_count, model.layer_count)),
        expert_capacity_bytes=np.full(cluster.server_count, 2**50),
    )
    return with_copies(rng, plan, copied) if copied else plan


def with_copies(rng: np.random.Generator, plan: Plan, share: float) -> Plan:
    """The same with copies in some bits of such a share of what servers do not hold."""
    bits = rng.choice(RUNGS, size=plan.hosts.shape)
    has = ~plan.hosts & (rng.random(plan.hosts.shape) < share)
    return replace(plan, stand_in_bits=np.where(has, bits, 0))


@dataclass(kw_only=True)
class Visit:
    """One token in one layer, as executed."""

    layer: int
    server: int
    targets: np.ndarray
    masses: np.ndarray
    importance: float
    steadiness: int
    slot_expert: np.ndarray
    slot_server: np.ndarray
    confidence: float


@dataclass(kw_only=True)
class Trajectory:
    """One token from arrival to prediction."""

    sequence: int
    visits: list[Visit] = field(default_factory=list)
    after: list[Visit] = field(default_factory=list)
    """Layers passed after the prediction."""
    exit_layer: int = -1
    """Layers passed when the token was predicted."""
    ledger: Ledger | None = None
    was_wrong: bool = False
    """Whether its exit was a draft that full depth did not confirm."""

    @property
    def path(self) -> list[Visit]:
        """Where the next layer is noted."""
        return self.visits if self.exit_layer < 0 else self.after


@dataclass(kw_only=True)
class SyntheticDriver:
    """Feeds an engine random routings and confidences."""

    engine: Engine
    rng: np.random.Generator
    importance_scale: float = 1.0

    def __post_init__(self) -> None:
        self.state = self.engine.start()
        self.log: list[tuple[Event, tuple[Command, ...]]] = []
        self.trajectories: list[Trajectory] = []

    def open(self, sequence: int, *, access: int, budget: float, confidence: float) -> None:
        self.tell(
            SequenceOpened(sequence=sequence, access=access, budget=budget, confidence=confidence)
        )

    def tell(self, event: Event) -> list[Command]:
        self.state, commands = self.engine.step(self.state, event)
        self.log.append((event, commands))
        return list(commands)

    def decode(self, sequences: tuple[int, ...]) -> list[Trajectory]:
        wave = [Trajectory(sequence=sequence) for sequence in sequences]
        draws = self.rng.random(len(sequences))
        pending = self.tell(TokensArrived(wave=7, sequences=sequences, draws=draws))
        probed: set[int] = set()
        while pending:
            command = pending.pop(0)
            match command:
                case Attend():
                    pending += self.tell(self._route(command, wave))
                case Execute():
                    pending += self.tell(self._execute(command, wave))
                case Probe():
                    probed |= set(command.rows.tolist())
                case Complete():
                    rows = command.rows.tolist()
                    for row, ledger in zip(rows, command.ledgers, strict=True):
                        wave[row].exit_layer, wave[row].ledger = command.layer, ledger
                    if audited := [row for row in rows if row in probed]:
                        agrees = self.rng.random(len(audited)) < 0.5
                        pending += self.tell(Audited(wave=7, agrees=agrees))
                case Trailed():
                    agrees = self.rng.random(command.rows.size) < 0.5
                    told = checked(command, agrees.tolist())
                    for row, after, right in zip(command.rows.tolist(), told, agrees, strict=True):
                        before = wave[row].ledger
                        assert before is not None
                        wave[row].ledger = before + after
                        wave[row].was_wrong = bool(command.missed) and not right
                    pending += self.tell(Audited(wave=7, agrees=agrees))
        self.trajectories += wave
        return wave

    def _route(self, command: Attend, wave: list[Trajectory]) -> Routed:
        profile, rows = self.engine.profile, command.rows.tolist()
        count, experts = len(rows), profile.expert_count
        probabilities = self.rng.dirichlet(np.full(experts, 0.5), count) * self.importance_scale
        chosen = np.argsort(-probabilities, axis=1)[:, : profile.top_k]
        masses = np.take_along_axis(probabilities, chosen, axis=1)
        importance = np.minimum(masses.sum(1), 1.0)
        steadiness = self.rng.integers(profile.class_count, size=count)
        for at, row in enumerate(rows):
            wave[row].path.append(
                Visit(
                    layer=command.layer,
                    server=int(command.server[at]),
                    targets=chosen[at],
                    masses=masses[at],
                    importance=float(importance[at]),
                    steadiness=int(steadiness[at]),
                    slot_expert=np.full(profile.top_k, -1),
                    slot_server=np.zeros(profile.top_k, dtype=int),
                    confidence=-np.inf,
                )
            )
        return Routed(
            wave=7,
            experts=chosen,
            masses=masses,
            importance=importance,
            steadiness=steadiness,
        )

    def _execute(self, command: Execute, wave: list[Trajectory]) -> Executed:
        rows = command.rows.tolist()
        confidence = self.rng.beta(2.0, 0.7, len(rows))
        for at, row in enumerate(rows):
            visit = wave[row].path[-1]
            visit.slot_expert = command.slot_expert[at]
            visit.slot_server = command.slot_server[at]
            if (visit.slot_expert >= 0).any():
                visit.confidence = float(confidence[at])
        layers = self.engine.cost.layer_count
        exit_at = self.rng.integers(1, layers + 1, len(rows))
        return Executed(wave=7, confidence=confidence, exit_at=exit_at)


def _lying(rng: np.random.Generator, rung: Rung) -> Rung:
    upper = rng.random(rung.curves.upper.shape) * rng.choice([0.0, 0.01, 1.0])
    return replace(rung, curves=replace(rung.curves, upper=upper))


def hostile(rng: np.random.Generator, profile: Profile) -> Profile:
    """The same profile with calibration that lies: thresholds, losses and transitions at random."""
    layers, experts = profile.layer_count, profile.expert_count
    patterns = profile.patterns.shape[1]
    upper = rng.random(profile.skip.upper.shape) * rng.choice([0.0, 0.01, 1.0])
    lying = replace(profile.skip, upper=upper)
    return replace(
        profile,
        skip=lying,
        drop=lying,
        theta=rng.random(layers) * 2,
        rungs=tuple(_lying(rng, rung) for rung in profile.rungs),
        substitution_loss=rng.random(profile.substitution_loss.shape)
        * rng.choice([0.0, 0.01, 1.0]),
        feasible=rng.random((layers, experts, experts)) < 0.5,
        pattern_transitions=rng.dirichlet(np.ones(patterns), (max(layers - 1, 0), patterns)),
        exit_error_upper=rng.random(profile.exit_error_upper.shape),
        exit_hazard=rng.random(profile.exit_hazard.shape),
    )
