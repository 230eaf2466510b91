from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan, load_plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, ModelSpec
from trimmoe.placement.capacity import expert_capacity_bytes, used_bytes
from trimmoe.placement.make import SEED_NAMES, PlanSettings, default, make_plan, make_planner, paper
from trimmoe.placement.routes import home_routes
from trimmoe.placement.seeds import seed_placement

EVERY_SETTING = [
    default(),
    paper(),
    *(PlanSettings(seed_plan=name) for name in SEED_NAMES),
    PlanSettings(seed_plan="dispersed", routes="home"),
    PlanSettings(seed_plan="dispersed", redundancy=False),
    PlanSettings(seed_plan="compact_pipeline", routes="staircase"),
    PlanSettings(routes="staircase", redundancy=False),
    PlanSettings(benefit="paper"),
]


def small(seed: int = 0, *, ratio: float = 2.0) -> tuple[Profile, ModelSpec, ClusterSpec]:
    rng = np.random.default_rng(seed)
    model = random_model_spec(rng, layers=6, experts=6, top_k=2)
    cluster = random_cluster(rng, servers=4, memory_ratio=ratio)
    return random_profile(rng, model), model, cluster


def assert_property_1(plan: Plan, model: ModelSpec) -> None:
    """(c.1) memory, (c.2) coverage, (c.3) binary, and routes that exist."""
    assert (used_bytes(plan.hosts, model) <= plan.expert_capacity_bytes).all()
    assert plan.hosts.any(axis=0).all()
    assert plan.hosts.dtype == bool
    assert plan.routes.shape == (plan.cluster.server_count, model.layer_count)
    assert plan.routes.min() >= 0
    assert plan.routes.max() < plan.cluster.server_count


def attempt(
    profile: Profile, model: ModelSpec, cluster: ClusterSpec, chosen: PlanSettings
) -> tuple[Plan | None, str]:
    """The plan, or None and why it was refused."""
    try:
        return make_plan(profile, model, cluster, chosen, cluster_hash="c"), ""
    except UserError as refused:
        return None, str(refused)


@settings(max_examples=60)
@given(
    known=models_with_profiles(),
    cluster=clusters(min_ratio=1.0, max_ratio=4.0),
    chosen=st.sampled_from(EVERY_SETTING),
)
def test_property_1_or_an_honest_refusal(
    known: tuple[ModelSpec, Profile], cluster: ClusterSpec, chosen: PlanSettings
) -> None:
    model, profile = known
    plan, refusal = attempt(profile, model, cluster, chosen)
    if plan is None:
        words = ("are short", "no server can hold", "no packing was found", "Whole layers")
        assert any(word in refusal for word in words)
        return
    assert_property_1(plan, model)
    assert plan.hash == make_plan(profile, model, cluster, chosen, cluster_hash="c").hash


@settings(max_examples=40)
@given(known=models_with_profiles(), cluster=clusters())
def test_default_is_never_worse_than_any_seed(
    known: tuple[ModelSpec, Profile], cluster: ClusterSpec
) -> None:
    model, profile = known
    try:
        plan = make_plan(profile, model, cluster, cluster_hash="c")
    except UserError:
        return
    planner = make_planner(profile, model, cluster, default())
    expected = planner.placement(plan.hosts, plan.routes).expected_s
    assert expected == pytest.approx(plan.header.settings["expected_s"])
    for name in SEED_NAMES:
        seed = seed_placement(name, planner)
        if seed is None:
            assert plan.header.settings["seeds"][name] is None
            continue
        assert expected <= seed.expected_s * (1 + 1e-12)
        with_home = planner.placement(seed.hosts, home_routes(*plan.routes.shape))
        assert expected <= with_home.expected_s * (1 + 1e-12)


def test_never_worse_than_the_best_single_server() -> None:
    profile, model, cluster = small()
    cluster = replace(cluster, memory_ratio=None, memory_bytes=np.full(4, 10**13))
    plan = make_plan(profile, model, cluster, cluster_hash="c")
    planner = make_planner(profile, model, cluster, default())
    for m in range(4):
        hosts = np.zeros_like(plan.hosts)
        hosts[m] = True
        alone = planner.placement(hosts, np.full_like(plan.routes, m))
        assert plan.header.settings["expected_s"] <= alone.expected_s * (1 + 1e-12)


def test_the_record_says_which_seed_won() -> None:
    profile, model, cluster = small()
    plan = make_plan(profile, model, cluster, cluster_hash="abc")
    record = plan.header.settings
    won = record["seeds"][record["seed_won"]]
    assert (
        won["plan_s"] == record["expected_s"] == min(s["plan_s"] for s in record["seeds"].values())
    )
    assert set(record["seeds"]) == set(SEED_NAMES)
    assert plan.header.input_hashes == {
        "model": model.model_hash,
        "profile": profile.hash,
        "cluster": "abc",
    }


def test_the_paper_fills_memory_and_stays_at_home() -> None:
    profile, model, cluster = small()
    plan = make_plan(profile, model, cluster, paper(), cluster_hash="c")
    np.testing.assert_array_equal(plan.routes, home_routes(4, 6))
    free = plan.expert_capacity_bytes - used_bytes(plan.hosts, model)
    for m in range(4):
        assert plan.hosts[m].all() or free[m] < model.expert_bytes.min()


def test_save_and_load(tmp_path: Path) -> None:
    profile, model, cluster = small()
    plan = make_plan(profile, model, cluster, cluster_hash="c")
    plan.save(tmp_path / "plan.safetensors")
    loaded = load_plan(tmp_path / "plan.safetensors")
    assert loaded.hash == plan.hash
    assert loaded.header == plan.header
    np.testing.assert_array_equal(loaded.routes, plan.routes)
    np.testing.assert_array_equal(loaded.hosts, plan.hosts)


def test_impossible_clusters_are_refused() -> None:
    profile, model, cluster = small(ratio=0.5)
    with pytest.raises(UserError, match="are short"):
        make_plan(profile, model, cluster, cluster_hash="c")


def test_settings_that_contradict_each_other_are_refused() -> None:
    profile, model, cluster = small()
    with pytest.raises(UserError, match="no stages"):
        make_plan(
            profile,
            model,
            cluster,
            PlanSettings(seed_plan="dispersed", routes="staircase"),
            cluster_hash="c",
        )


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (PlanSettings(groups=0), "groups"),
        (PlanSettings(kv_reserve_bytes=-1), "kv_reserve_bytes"),
        (PlanSettings(rounds=0), "rounds"),
    ],
)
def test_senseless_settings_are_refused(wrong: PlanSettings, name: str) -> None:
    profile, model, cluster = small()
    with pytest.raises(UserError, match=name):
        make_plan(profile, model, cluster, wrong, cluster_hash="c")


def test_a_lone_server_holds_everything() -> None:
    rng = np.random.default_rng(0)
    model = random_model_spec(rng, layers=1, experts=2, top_k=1)
    cluster = random_cluster(rng, servers=1, memory_ratio=1.0)
    for chosen in EVERY_SETTING:
        plan = make_plan(random_profile(rng, model), model, cluster, chosen, cluster_hash="c")
        assert plan.hosts.all()
        assert plan.routes.tolist() == [[0]]


def test_a_pipeline_that_does_not_fit_is_refused_when_asked_for_only() -> None:
    rng = np.random.default_rng(0)
    model = random_model_spec(rng, layers=2, experts=4, top_k=1)
    profile = random_profile(rng, model)
    size = int(model.expert_bytes[0, 0])
    cluster = random_cluster(rng, servers=4, memory_ratio=None)
    cluster = replace(cluster, memory_bytes=np.full(4, model.dense_bytes + 3 * size))
    with pytest.raises(UserError, match="Whole layers"):
        make_plan(profile, model, cluster, PlanSettings(seed_plan="pipeline"), cluster_hash="c")
    plan = make_plan(profile, model, cluster, cluster_hash="c")
    assert plan.header.settings["seeds"]["pipeline"] is None
    assert plan.header.settings["seed_won"] == "dispersed"


def test_a_profile_of_another_model_is_refused() -> None:
    profile, model, cluster = small()
    with pytest.raises(UserError, match="trimmoe calibrate"):
        make_plan(profile, replace(model, model_hash="f" * 64), cluster, cluster_hash="c")


def test_kv_reserve_reaches_the_capacity() -> None:
    profile, model, cluster = small()
    cluster = replace(cluster, memory_ratio=None)
    plan = make_plan(
        profile,
        model,
        cluster,
        PlanSettings(kv_reserve_bytes=10**9, stand_in_share=0.0),
        cluster_hash="c",
    )
    np.testing.assert_array_equal(
        plan.expert_capacity_bytes, expert_capacity_bytes(cluster, model) - 10**9
    )


def test_what_stands_in_for_experts_has_its_place_beside_the_dense_part() -> None:
    """On our servers, not on those of systems that do not guess, and but for a server that has room
    for all experts."""
    profile, model, cluster = small()
    all_but_one = model.total_expert_bytes - 1
    memory = model.dense_bytes + np.full(4, all_but_one)
    memory[0] += 1
    cluster = replace(cluster, memory_ratio=None, memory_bytes=memory)
    shape = (model.layer_count, model.expert_count, 2, model.hidden_size)
    gives = np.zeros(shape, dtype=np.float16)
    reads = np.zeros((shape[0], shape[3], shape[1], shape[2]), dtype=np.float16)
    guessing = replace(profile, stand_in_read=reads, stand_in_give=gives)
    whole = expert_capacity_bytes(cluster, model)
    settings = PlanSettings(stand_in_share=0.0)
    planned = make_plan(guessing, model, cluster, settings, cluster_hash="c").expert_capacity_bytes
    maps_bytes = np.array([0, 1, 1, 1]) * 2 * (gives.size + reads.size)
    np.testing.assert_array_equal(planned, whole - maps_bytes)
    others = make_planner(guessing, model, cluster, settings, guesses=False)
    np.testing.assert_array_equal(others.capacity, whole)
