"""Layers that leave nothing to decide pass in one go, and the books are those of one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import clusters, models_with_profiles
from synthetic import random_plan
from trimmoe.core.events import (
    Attend,
    Complete,
    Depart,
    Execute,
    Executed,
    Routed,
    SegmentRan,
    SequenceOpened,
    TokensArrived,
    TokensExported,
    TokensImported,
)
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, ModelSpec
from trimmoe.engine.step import Engine
from trimmoe.experiments.methods import make_engine
from trimmoe.policy.settings import PRESETS, PolicySettings
from trimmoe.runtime.counters import ExpertCounter
from trimmoe.runtime.node.compute.segments import Segments

DECIDES_NOTHING = ["exact", "speculative"]


def _engine(
    cluster: ClusterSpec, model: ModelSpec, profile: Profile, policy: PolicySettings, seed: int
) -> Engine:
    rng = np.random.default_rng(seed)
    # Densely, so that there are layers that leave nothing to decide.
    plan = random_plan(rng, model, cluster, density=0.7)
    routes = np.repeat(plan.routes[:, ::3], 3, axis=1)[:, : model.layer_count]
    return make_engine(replace(plan, routes=routes), profile, model, policy)


class Walk:
    """One token through the engine; `choose` [N, E] are its routers' logits."""

    def __init__(self, engine: Engine, seed: int, *, segments: bool) -> None:
        self.engine, self.segments = engine, segments
        self.profile = engine.profile
        self.logits = np.random.default_rng(seed).standard_normal(
            (self.profile.layer_count, self.profile.expert_count)
        )
        self.counter = ExpertCounter(self.profile.layer_count, self.profile.expert_count)
        self.state = engine.start()
        self.passed = 0
        self.rng = np.random.default_rng(seed)

    def experts(self, layer: int) -> np.ndarray:
        return np.argsort(-self.logits[layer])[: self.profile.top_k][None]

    def step(self, event):  # type: ignore[no-untyped-def]
        self.state, commands = self.engine.step(self.state, event)
        self.counter.absorb([(event, commands)])
        return commands

    def tell(self, event):  # type: ignore[no-untyped-def]
        commands = self.step(event)
        return commands[0] if commands else None

    def run(self, access: int) -> Complete:
        self.tell(SequenceOpened(sequence=0, access=access, budget=0.0, confidence=2.0))
        command = self.tell(TokensArrived(wave=0, sequences=(0,), draws=np.zeros(1)))
        while not isinstance(command, Complete):
            assert isinstance(command, Attend)
            command = self.segment(command) if self.segments else self.one(command)
        return command

    def segment(self, attend: Attend):  # type: ignore[no-untyped-def]
        """As a server does it."""
        route = tuple(self.engine.routes[self.state.waves[0].route[0]].tolist())
        at = Segments.of(self.engine, int(attend.server[0]))
        until = at.end(route, attend.layer)
        layer, ran = attend.layer, []
        while layer < min(until + 1, len(route)):
            experts = self.experts(layer)
            if not at.settled(until)[layer][experts].all():
                break
            ran.append(experts)
            layer += 1
        self.passed += len(ran)
        settled = len(ran)
        if layer < len(route) and (layer == until or self.rng.random() < 0.5):
            ran.append(self.experts(layer))
        if not ran:
            return self.one(attend)
        (depart,) = self.step(TokensExported(wave=0, rows=attend.rows))
        assert isinstance(depart, Depart)
        passed = np.stack(ran, axis=1)
        ran_so_far = SegmentRan(wave=1, tokens=depart.tokens, experts=passed, settled=settled)
        *_, last = self.step(ran_so_far)
        if isinstance(last, Complete):
            return last
        if isinstance(last, Execute):
            nothing = np.full(1, -np.inf)
            executed = Executed(wave=1, confidence=nothing, exit_at=np.ones(1, dtype=np.int64))
            return self.tell(executed)
        assert isinstance(last, Depart)
        return self.tell(TokensImported(wave=0, tokens=last.tokens, executing=False))

    def one(self, attend: Attend):  # type: ignore[no-untyped-def]
        experts = self.experts(attend.layer)
        execute = self.tell(
            Routed(
                wave=0,
                experts=experts,
                masses=np.full(experts.shape, 0.1),
                importance=np.ones(1),
                steadiness=np.zeros(1, dtype=np.int64),
            )
        )
        assert isinstance(execute, Execute)
        assert (execute.slot_expert == experts).all()
        return self.tell(
            Executed(wave=0, confidence=np.full(1, -np.inf), exit_at=np.ones(1, dtype=np.int64))
        )


@given(world=st.data(), seed=st.integers(0, 10_000), name=st.sampled_from(DECIDES_NOTHING))
@settings(max_examples=60, deadline=None)
def test_the_books_are_those_of_layers_one_by_one(
    world: st.DataObject, seed: int, name: str
) -> None:
    cluster = world.draw(clusters())
    model, profile = world.draw(models_with_profiles())
    engine = _engine(cluster, model, profile, PRESETS[name](), seed)
    access = seed % cluster.server_count
    slow, quick = (Walk(engine, seed, segments=one) for one in (False, True))
    expected, found = slow.run(access), quick.run(access)
    (ours,), (theirs,) = found.ledgers, expected.ledgers
    assert ours.delay_s == theirs.delay_s
    assert (ours.kinds == theirs.kinds).all()
    assert (ours.messages == theirs.messages).all()
    assert (ours.slots_run, ours.loss) == (theirs.slots_run, theirs.loss)
    assert (quick.counter.counts == slow.counter.counts).all()
    assert found.layer == expected.layer


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {*DECIDES_NOTHING, "paper"}))
@given(world=st.data())
@settings(max_examples=2, deadline=None)
def test_what_decides_has_no_segments(world: st.DataObject, name: str) -> None:
    model, profile = world.draw(models_with_profiles())
    engine = _engine(world.draw(clusters()), model, profile, PRESETS[name](), 0)
    assert engine.settled is None
    at = Segments.of(engine, 0)
    assert not at.in_force
    assert at.end((0,) * profile.layer_count, 1) == 1
    assert not at.settled(profile.layer_count).any()


@given(world=st.data(), seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_exact_execution_is_what_the_search_among_all_actions_finds(
    world: st.DataObject, seed: int
) -> None:
    """`exact` looks nothing up; the literal recursion of one step is what it must equal."""
    cluster = world.draw(clusters())
    model, profile = world.draw(models_with_profiles())
    engine = _engine(cluster, model, profile, PRESETS["exact"](), seed)
    # With an exit that never comes the policy weighs all actions.
    weighing = replace(PRESETS["lossless"](), draft_confidence=None, confidence=2.0, exit_risk=None)
    other = _engine(cluster, model, profile, weighing, seed)
    access = seed % cluster.server_count
    ours, theirs = (Walk(one, seed, segments=False).run(access) for one in (engine, other))
    assert ours.ledgers[0].delay_s == theirs.ledgers[0].delay_s
    assert (ours.ledgers[0].messages == theirs.ledgers[0].messages).all()
