"""Copies in few bits: who has which, within the memory that there is for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import random_cluster, random_model_spec, random_profile
from trimmoe.core.plan import load_plan
from trimmoe.core.stand_ins import ASCENDING, RUNGS
from trimmoe.placement.capacity import expert_capacity_bytes, used_bytes
from trimmoe.placement.make import as_published, default, make_plan, paper
from trimmoe.placement.stand_ins import (
    allowance_bytes,
    copied_bits,
    copies_bytes,
    passed_by,
    reserved_bytes,
    standing_in,
)


@given(seed=st.integers(0, 10_000), room=st.floats(0.0, 2.5))
@settings(max_examples=60, deadline=None)
def test_copies_fit_and_are_of_what_is_not_held(seed: int, room: float) -> None:
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng)
    shape = (model.layer_count, model.expert_count)
    hosts = rng.random((3, *shape)) < 0.4
    everything = copies_bytes(model, np.where(hosts, 0, 4))
    allowed = (everything * room).astype(np.int64)
    bits = copied_bits(model, hosts, rng.random(shape), allowed)
    assert not bits[hosts].any()
    assert set(np.unique(bits)) <= {0, *RUNGS}
    assert (copies_bytes(model, bits) <= allowed).all()
    if room >= 1.0:
        assert (bits[~hosts] >= 4).all()
    for server, held in enumerate(hosts):
        if allowed[server] >= copies_bytes(model, np.where(hosts, 0, 8))[server]:
            assert (bits[server][~held] == 8).all()


def test_what_is_activated_often_gets_more_bits() -> None:
    model = random_model_spec(np.random.default_rng(1))
    shape = (model.layer_count, model.expert_count)
    frequency = np.random.default_rng(2).random(shape)
    hosts = np.zeros((1, *shape), dtype=bool)
    for few, more in pairwise(ASCENDING):
        every_few, every_more = (copies_bytes(model, np.full(hosts.shape, b)) for b in (few, more))
        (bits,) = copied_bits(model, hosts, frequency, (every_few + every_more) // 2)
        assert set(np.unique(bits)) == {few, more}
        assert frequency[bits == more].min() >= frequency[bits == few].max()


@given(seed=st.integers(0, 10_000), room=st.floats(0.0, 2.5))
@settings(max_examples=40, deadline=None)
def test_what_routes_pass_by_is_copied_first_and_in_most_bits(seed: int, room: float) -> None:
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng)
    shape = (model.layer_count, model.expert_count)
    hosts = rng.random((3, *shape)) < 0.4
    passing = passed_by(rng.integers(3, size=(2, model.layer_count)), 3)
    there = passing[:, :, None] & ~hosts
    allowed = (copies_bytes(model, np.where(there, 8, 0)) * room).astype(np.int64)
    bits = copied_bits(model, hosts, rng.random(shape), allowed, passing)
    assert not bits[hosts].any()
    assert (copies_bytes(model, bits) <= allowed).all()
    for own, held, passed in zip(bits, hosts, passing, strict=True):
        if (own[~passed] == 8).any():
            assert (own[~held] >= 4).all(), "eight bits to guess with come last"
    if room >= 1.0:
        assert (bits[there] == 8).all()


def test_servers_are_taken_to_have_the_copies_of_a_quarter() -> None:
    model = random_model_spec(np.random.default_rng(1))
    of_all = {
        bits: int(copies_bytes(model, np.full((1, model.layer_count, model.expert_count), bits))[0])
        for bits in RUNGS
    }
    allowed = np.array([0, *(of_all[bits] // 4 + 1 for bits in ASCENDING)])
    assert standing_in(model, allowed).tolist() == [0, *ASCENDING]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_half_of_what_one_copy_of_all_leaves_is_kept_at_most(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng)
    capacity = rng.integers(0, 2 * model.total_expert_bytes, size=4)
    kept = reserved_bytes(capacity, model, allowance_bytes(model, 0.12))
    left = capacity.sum() - model.total_expert_bytes
    assert (kept >= 0).all()
    assert kept.sum() <= max(left, 0) / 2 + 1
    assert (kept <= capacity).all()


def test_a_plan_keeps_memory_for_copies_and_says_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    model = random_model_spec(rng)
    profile = random_profile(rng, model)
    cluster = random_cluster(rng, memory_ratio=None)
    memory = model.dense_bytes + model.total_expert_bytes
    cluster = replace(cluster, memory_bytes=np.full(cluster.server_count, memory))
    plan = make_plan(profile, model, cluster, default(), cluster_hash="")
    bits = plan.stand_in_bits
    assert bits is not None
    taken = used_bytes(plan.hosts, model) + copies_bytes(model, bits)
    assert (taken <= expert_capacity_bytes(cluster, model)).all()
    plan.save(tmp_path / "plan.trim")
    again = load_plan(tmp_path / "plan.trim").stand_in_bits
    assert again is not None
    assert np.array_equal(again, bits)


def test_profiles_that_know_fewer_rungs_have_plans_keep_to_those() -> None:
    """Copies of which nobody has measured what they lose stand in for nothing."""
    rng = np.random.default_rng(4)
    model = random_model_spec(rng)
    profile = random_profile(rng, model)
    cluster = random_cluster(rng, memory_ratio=None)
    memory = model.dense_bytes + model.total_expert_bytes * 3 // 4
    cluster = replace(cluster, memory_bytes=np.full(cluster.server_count, memory))

    def planned(*known: int) -> set[int]:
        rungs = tuple(rung for rung in profile.rungs if rung.bits in known)
        earlier = replace(profile, rungs=rungs)
        plan = make_plan(earlier, model, cluster, default(), cluster_hash="")
        assert plan.stand_in_bits is not None
        return set(np.unique(plan.stand_in_bits).tolist())

    assert planned(*RUNGS) == planned() == {0, 2, 3}
    assert planned(2, 4, 8) == {0, 2}


def test_other_placements_know_no_copies() -> None:
    for preset in (paper(), as_published("pipeline")):
        assert preset.stand_in_share == 0.0
