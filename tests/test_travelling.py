"""Tokens that travel from engine to engine fare exactly as under one engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import (
    clusters,
    models_with_profiles,
    random_cluster,
    random_model_spec,
    random_profile,
)
from synthetic import random_plan
from trimmoe.core.events import (
    Attend,
    Command,
    Complete,
    Depart,
    Event,
    Execute,
    Executed,
    Routed,
    SequenceOpened,
    Settled,
    Strand,
    TokensArrived,
    TokensExported,
    TokensImported,
)
from trimmoe.core.ledger import Ledger
from trimmoe.core.profile import Profile
from trimmoe.core.wave import Wave, join_waves
from trimmoe.engine.step import Engine
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.presets import PRESETS


@dataclass
class World:
    """What a token's layers look like, a pure function of sequence, token number and layer."""

    profile: Profile
    seed: int

    def rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])

    def routed(self, wave: int, tokens: list[tuple[int, int]], layer: int) -> Routed:
        experts, masses, classes = [], [], []
        for sequence, number in tokens:
            rng = self.rng(sequence, number, layer)
            probabilities = rng.dirichlet(np.full(self.profile.expert_count, 0.5))
            chosen = np.argsort(-probabilities)[: self.profile.top_k]
            experts.append(chosen)
            masses.append(probabilities[chosen])
            classes.append(int(rng.integers(self.profile.class_count)))
        return Routed(
            wave=wave,
            experts=np.array(experts),
            masses=np.array(masses),
            importance=np.minimum(np.array(masses).sum(1), 1.0),
            steadiness=np.array(classes),
        )

    def executed(self, wave: int, tokens: list[tuple[int, int]], layer: int) -> Executed:
        rngs = [self.rng(sequence, number, layer, 1) for sequence, number in tokens]
        return Executed(
            wave=wave,
            confidence=np.array([rng.beta(2.0, 0.7) for rng in rngs]),
            exit_at=np.array([rng.integers(1, self.profile.layer_count + 1) for rng in rngs]),
        )


@dataclass
class Cluster:
    """One engine per server; tokens of unlike sequences meet and part at every layer."""

    engines: list[Engine]
    world: World
    number: dict[int, int] = field(default_factory=dict)
    wave: int = 0

    def __post_init__(self) -> None:
        self.states = [engine.start() for engine in self.engines]

    def tell(self, server: int, event: Event) -> tuple[Command, ...]:
        self.states[server], commands = self.engines[server].step(self.states[server], event)
        return commands

    def decode(self, access: dict[int, int]) -> dict[int, Ledger]:
        """One token of every sequence; `access`: where each was opened."""
        self.access = access
        done: dict[int, Ledger] = {}
        waiting: list[Wave] = []
        for sequence, server in access.items():
            self.wave += 1
            arrived = TokensArrived(wave=self.wave, sequences=(sequence,), draws=np.ones(1))
            self.tell(server, arrived)
            waiting += self.departed(server, np.array([0]))
        while waiting:
            layer = min(wave.layer for wave in waiting)
            server = next(int(wave.server[0]) for wave in waiting if wave.layer == layer)
            here = [w for w in waiting if w.layer == layer and int(w.server[0]) == server]
            waiting = [w for w in waiting if not any(w is one for one in here)]
            waiting += self.one_layer(server, layer, join_waves(here), done)
        for sequence in access:
            self.number[sequence] = self.number.get(sequence, 0) + 1
        return done

    def departed(self, server: int, rows: np.ndarray) -> list[Wave]:
        (depart,) = self.tell(server, TokensExported(wave=self.wave, rows=rows))
        assert isinstance(depart, Depart)
        tokens = depart.tokens
        return [tokens.take(np.array([row])) for row in range(len(tokens.sequences))]

    def one_layer(
        self, server: int, layer: int, tokens: Wave, done: dict[int, Ledger]
    ) -> list[Wave]:
        self.wave += 1
        names = [(sequence, self.number.get(sequence, 0)) for sequence in tokens.sequences]
        (attend,) = self.tell(
            server, TokensImported(wave=self.wave, tokens=tokens, executing=False)
        )
        assert isinstance(attend, Attend)
        (execute,) = self.tell(server, self.world.routed(self.wave, names, layer))
        assert isinstance(execute, Execute)
        travelling = self.departed(server, execute.rows)
        onward: list[Wave] = []
        for place in sorted({int(wave.server[0]) for wave in travelling}):
            arrived = join_waves([w for w in travelling if int(w.server[0]) == place])
            onward += self.gathered(place, layer, arrived, done)
        return onward

    def gathered(
        self, server: int, layer: int, tokens: Wave, done: dict[int, Ledger]
    ) -> list[Wave]:
        self.wave += 1
        names = [(sequence, self.number.get(sequence, 0)) for sequence in tokens.sequences]
        self.tell(server, TokensImported(wave=self.wave, tokens=tokens, executing=True))
        onward: list[Wave] = []
        for command in self.tell(server, self.world.executed(self.wave, names, layer)):
            if isinstance(command, Complete):
                for row, ledger in zip(command.rows.tolist(), command.ledgers, strict=True):
                    done[tokens.sequences[row]] = ledger
                for receipt in command.receipts:
                    self.tell(self.access[receipt.sequence], Settled(receipts=(receipt,)))
            elif isinstance(command, Attend):
                onward += self.departed(server, command.rows)
        return onward


def alone(engine: Engine, world: World, sequence: int, access: int, tokens: int, **opened):
    """The ledgers of one sequence under one engine."""
    cluster = Cluster(engines=[engine], world=world)
    event = SequenceOpened(sequence=sequence, access=access, **opened)
    cluster.tell(0, event)
    ledgers = []
    for number in range(tokens):
        state, step = cluster.states[0], engine.step
        arrived = TokensArrived(wave=0, sequences=(sequence,), draws=np.ones(1))
        state, pending = step(state, arrived)
        pending = list(pending)
        while pending:
            command = pending.pop(0)
            if isinstance(command, Attend):
                state, more = step(state, world.routed(0, [(sequence, number)], command.layer))
                pending += more
            elif isinstance(command, Execute):
                state, more = step(state, world.executed(0, [(sequence, number)], command.layer))
                pending += more
            elif isinstance(command, Complete):
                ledgers += command.ledgers
        cluster.states[0] = state
    return ledgers, cluster.states[0].accounts[sequence].balance


@settings(max_examples=40)
@given(
    models_with_profiles(max_layers=4, max_experts=5),
    clusters(max_servers=4),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.sampled_from([0.3, 0.9, 1.1]),
    st.integers(0, 2**32 - 1),
)
def test_travelling_changes_nothing(modelled, cluster, budget, confidence, seed) -> None:
    model, profile = modelled
    rng = np.random.default_rng(seed)
    policy = PRESETS["trimmoe"]().but(
        budget=budget, exit_risk=None, audit_share=0.0, window_tokens=10**9
    )
    engine = make_engine(random_plan(rng, model, cluster), profile, model, policy)
    world = World(profile=profile, seed=seed)
    travelling = Cluster(engines=[engine] * cluster.server_count, world=world)
    access = {sequence: int(rng.integers(cluster.server_count)) for sequence in range(4)}
    for sequence, server in access.items():
        event = SequenceOpened(
            sequence=sequence, access=server, budget=budget, confidence=confidence
        )
        travelling.tell(server, event)
    steps = [travelling.decode(access) for _ in range(3)]
    for sequence, server in access.items():
        ledgers, balance = alone(
            engine, world, sequence, server, 3, budget=budget, confidence=confidence
        )
        account = travelling.states[server].accounts[sequence]
        assert account.balance == pytest.approx(balance, abs=1e-12)
        for step, ledger in zip(steps, ledgers, strict=True):
            same_books(step[sequence], ledger)


def same_books(one: Ledger, other: Ledger) -> None:
    np.testing.assert_array_equal(one.kinds, other.kinds)
    np.testing.assert_array_equal(one.messages, other.messages)
    assert one.loss == pytest.approx(other.loss, abs=1e-12)
    assert one.delay_s == pytest.approx(other.delay_s)


def test_a_token_whose_expert_died_is_stranded_unless_a_substitute_is_within_budget() -> None:
    rng = np.random.default_rng(1)
    model = random_model_spec(rng, layers=3, experts=4, top_k=1)
    profile = random_profile(rng, model, classes=1)
    everywhere = np.ones_like(profile.feasible)
    loss = np.full_like(profile.substitution_loss, 0.05)
    loss[..., np.arange(4), np.arange(4)] = 0.0
    profile = replace(profile, feasible=everywhere, substitution_loss=loss)
    plan = random_plan(rng, model, random_cluster(rng, servers=2), density=1.0)
    hosts = plan.hosts.copy()
    hosts[:, 1, 2] = False  # Nobody holds expert 2 of layer 1 any more.
    plan = replace(plan, hosts=hosts)
    settled = replace(PRESETS["substitute-only"](), budget=0.1)
    engine = make_engine(plan, profile, model, settled)
    for budget, kept in ((0.01, False), (0.1, True)):
        state = engine.start()
        opened = SequenceOpened(sequence=1, access=0, budget=budget, confidence=2.0)
        state, _ = engine.step(state, opened)
        arrived = TokensArrived(wave=0, sequences=(1,), draws=np.ones(1))
        state, _ = engine.step(state, arrived)
        routed = Routed(
            wave=0,
            experts=np.array([[2]]),
            masses=np.array([[0.5]]),
            importance=np.array([0.5]),
            steadiness=np.array([0]),
        )
        state, _ = engine.step(state, routed)
        done = Executed(wave=0, confidence=np.zeros(1), exit_at=np.array([3]))
        state, _ = engine.step(state, done)
        state, (command,) = engine.step(state, routed)
        assert isinstance(command, Execute if kept else Strand)
        assert bool(state.waves) is kept
