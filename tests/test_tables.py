"""Value tables are made where they are needed and forgotten where they are not any more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from factories import random_cluster, random_model_spec, random_profile
from synthetic import random_plan
from trimmoe.engine.step import Engine
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy import tables as tables_module
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.tables import TableBank
from trimmoe.policy.trim import WEIGHT_GRID, TrimPolicy, rounded_weight
from trimmoe.runtime.node.watch.deployments import prepared

WEIGHTS = [round(step * WEIGHT_GRID, 6) for step in range(4, 12)]


def engine_and_bank() -> tuple[Engine, TableBank]:
    rng = np.random.default_rng(3)
    model = random_model_spec(rng, layers=3, experts=4, top_k=2)
    plan = random_plan(rng, model, random_cluster(rng, servers=3))
    engine = make_engine(plan, random_profile(rng, model), model, PRESETS["trimmoe"]())
    assert isinstance(engine.policy, TrimPolicy)
    assert engine.policy.tables is not None
    return engine, engine.policy.tables


def test_what_is_looked_up_again_and_again_is_made_once() -> None:
    _, bank = engine_and_bank()
    first = bank.of(0.5)
    for weight in WEIGHTS:
        bank.of(weight)
    assert bank.of(0.5) is first


def test_what_nobody_looks_up_is_forgotten_and_made_again_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables_module, "KEPT_FOR", 3)
    _, bank = engine_and_bank()
    first, kept = bank.of(0.5), bank.of(WEIGHTS[0])
    for weight in WEIGHTS:
        bank.of(weight)
        assert bank.of(WEIGHTS[0]) is kept, "what is in force stays"
    assert not bank.has(0.5)
    again = bank.of(0.5)
    assert again is not first
    for one, other in zip(first.after, again.after, strict=True):
        np.testing.assert_array_equal(one, other)


def has(engine: Engine, weight: float) -> bool:
    assert isinstance(engine.policy, TrimPolicy)
    assert engine.policy.tables is not None
    return engine.policy.tables.has(rounded_weight(weight))


def test_servers_keep_the_tables_of_weights_in_force_and_near_them() -> None:
    engine, bank = engine_and_bank()
    feedback = replace(engine.start().feedback, loss_weight=0.5, route_weights=())
    engine = replace(engine, route_weights=())

    first = prepared(engine, feedback)
    assert has(first, 0.5)
    one_step = prepared(first, replace(feedback, loss_weight=0.525))
    assert has(one_step, 0.55)
    assert has(one_step, 0.475), "it may come back"
    assert prepared(one_step, feedback) is one_step
    far = prepared(one_step, replace(feedback, loss_weight=0.8))
    assert has(far, 0.8)
    assert not has(far, 0.5)
    assert has(one_step, 0.5), "who still decides with it has it"
    assert not bank.has(0.8)


def test_servers_have_the_tables_of_what_others_tokens_come_with() -> None:
    engine, _ = engine_and_bank()
    feedback = replace(engine.start().feedback, loss_weight=0.5, route_weights=())
    engine = replace(engine, route_weights=())
    first = prepared(engine, feedback, [0.2, 0.8])
    assert has(first, 0.5)
    assert has(first, 0.2)
    assert has(first, 0.8)
    assert has(prepared(first, feedback, [0.2]), 0.8), "until there is another to be made"
    assert not has(prepared(first, feedback, [0.2, 0.35]), 0.8)
