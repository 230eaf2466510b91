"""Layers that leave nothing to decide pass in one go, and the books are those of one by one."""

from __future__ import annotations

from dataclasses import replace

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
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.counters import ExpertCounter
from trimmoe.runtime.node.compute.segments import Segments

DECIDES_NOTHING = ["auto", "exact", "speculative", "relaxed"]
SETTLES = [*DECIDES_NOTHING, "trimming", "guessing"]
"""Leave those layers settled whose activated experts all run where the token is."""


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
        self.masses = np.random.default_rng(seed).uniform(
            0.0, 0.3, (self.profile.layer_count, 1, self.profile.top_k)
        )
        self.steadiness = seed % self.profile.class_share.shape[1]
        self.counter = ExpertCounter(self.profile.layer_count, self.profile.expert_count)
        self.state = engine.start()
        self.ran: list[tuple[np.ndarray, np.ndarray]] = []
        """Experts and servers of the slots of all layers that were not passed."""
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

    def routed(self, wave: int, layer: int) -> Routed:
        masses = self.masses[layer]
        return Routed(
            wave=wave,
            experts=self.experts(layer),
            masses=masses,
            importance=np.minimum(masses.sum(1), 1.0),
            steadiness=np.array([self.steadiness]),
        )

    def run(self, access: int, budget: float = 0.0) -> Complete:
        self.tell(SequenceOpened(sequence=0, access=access, budget=budget, confidence=2.0))
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
        settled, routed = len(ran), None
        if layer < len(route) and (layer == until or self.rng.random() < 0.5):
            ran.append(self.experts(layer))
            routed = self.routed(1, layer) if self.engine.decides else None
        if not ran:
            return self.one(attend)
        (depart,) = self.step(TokensExported(wave=0, rows=attend.rows))
        assert isinstance(depart, Depart)
        passed = np.stack(ran, axis=1)
        ran_so_far = SegmentRan(
            wave=1, tokens=depart.tokens, experts=passed, settled=settled, routed=routed
        )
        commands = self.step(ran_so_far)
        for execute in (each for each in commands if isinstance(each, Execute)):
            self.ran.append((execute.slot_expert, execute.slot_server))
        last = commands[-1]
        if isinstance(last, Complete):
            return last
        if isinstance(last, Execute):
            nothing = np.full(1, -np.inf)
            executed = Executed(wave=1, confidence=nothing, exit_at=np.ones(1, dtype=np.int64))
            return self.tell(executed)
        assert isinstance(last, Depart)
        return self.tell(TokensImported(wave=0, tokens=last.tokens, executing=False))

    def one(self, attend: Attend):  # type: ignore[no-untyped-def]
        execute = self.tell(self.routed(0, attend.layer))
        assert isinstance(execute, Execute)
        self.ran.append((execute.slot_expert, execute.slot_server))
        return self.tell(
            Executed(wave=0, confidence=np.full(1, -np.inf), exit_at=np.ones(1, dtype=np.int64))
        )


@given(
    world=st.data(),
    seed=st.integers(0, 10_000),
    name=st.sampled_from(SETTLES),
    budget=st.sampled_from([0.0, 0.02, 0.5, 3.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_books_are_those_of_layers_one_by_one(
    world: st.DataObject, seed: int, name: str, budget: float
) -> None:
    cluster = world.draw(clusters())
    model, profile = world.draw(models_with_profiles())
    engine = _engine(cluster, model, profile, PRESETS[name](), seed)
    access = seed % cluster.server_count
    slow, quick = (Walk(engine, seed, segments=one) for one in (False, True))
    expected, found = slow.run(access, budget), quick.run(access, budget)
    (ours,), (theirs,) = found.ledgers, expected.ledgers
    assert ours.delay_s == theirs.delay_s
    assert (ours.kinds == theirs.kinds).all()
    assert (ours.messages == theirs.messages).all()
    assert (ours.slots_run, ours.slots_dropped) == (theirs.slots_run, theirs.slots_dropped)
    assert ours.loss == theirs.loss <= budget
    assert (quick.counter.counts == slow.counter.counts).all()
    assert found.layer == expected.layer


@given(world=st.data(), seed=st.integers(0, 10_000), name=st.sampled_from(SETTLES))
@settings(max_examples=40, deadline=None)
def test_what_is_settled_is_executed_as_it_is_whatever_may_be_spent(
    world: st.DataObject, seed: int, name: str
) -> None:
    """The same where every layer is asked for: no driver decides otherwise."""
    cluster = world.draw(clusters())
    model, profile = world.draw(models_with_profiles())
    engine = _engine(cluster, model, profile, PRESETS[name](), seed)
    assert engine.settled is not None
    walk, access = Walk(engine, seed, segments=False), seed % cluster.server_count
    walk.run(access, budget=50.0)
    at, route = access, engine.routes[access].tolist()
    for layer, (expert, server) in enumerate(walk.ran):
        at, to = route[layer], route[min(layer + 1, len(route) - 1)]
        activated = walk.experts(layer)
        if to == at and engine.settled[at, layer][activated].all():
            assert (expert == activated).all()
            assert (server == at).all()


@given(world=st.data(), seed=st.integers(0, 10_000), name=st.sampled_from(DECIDES_NOTHING))
@settings(max_examples=60, deadline=None)
def test_a_layer_runs_whole_before_tokens_leave_if_and_only_if_all_its_slots_run_there(
    world: st.DataObject, seed: int, name: str
) -> None:
    cluster = world.draw(clusters())
    model, profile = world.draw(models_with_profiles())
    engine = _engine(cluster, model, profile, PRESETS[name](), seed)
    walk, access = Walk(engine, seed, segments=False), seed % cluster.server_count
    walk.run(access)
    route = tuple(engine.routes[access].tolist())
    for layer, (_, server) in enumerate(walk.ran):
        at, to = route[layer], route[min(layer + 1, len(route) - 1)]
        segments = Segments.of(engine, at)
        assert segments.leaves_for(route, layer) == (None if layer == len(route) - 1 else to)
        if to != at:
            whole = segments.settled(layer, to)[layer][walk.experts(layer)].all()
            assert whole == (server == at).all()


def test_what_is_decided_upon_never_leaves_whole() -> None:
    rng = np.random.default_rng(3)
    cluster, model = random_cluster(rng, servers=3), random_model_spec(rng)
    engine = _engine(cluster, model, random_profile(rng, model), PRESETS["guessing"](), 0)
    at = Segments.of(engine, 0)
    assert at.in_force
    assert at.leaves_for((0, 1) * model.layer_count, 0) is None


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {*SETTLES, "paper"}))
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
    weighing = PRESETS["lossless"]().but(draft_confidence=None, confidence=2.0, exit_risk=None)
    other = _engine(cluster, model, profile, weighing, seed)
    access = seed % cluster.server_count
    ours, theirs = (Walk(one, seed, segments=False).run(access) for one in (engine, other))
    assert ours.ledgers[0].delay_s == theirs.ledgers[0].delay_s
    assert (ours.ledgers[0].messages == theirs.ledgers[0].messages).all()
