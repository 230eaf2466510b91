"""Generated traces: valid, seeded, and their parameters found again."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from factories import random_cluster, random_model_spec
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.core.profile import CHANGES, DRAFT_CONFIDENCE, Profile, load_profile
from trimmoe.core.specs import ModelSpec
from trimmoe.core.trace import Trace, load_trace
from trimmoe.experiments.method_engines import make_engine
from trimmoe.placement.make import default, make_plan
from trimmoe.policy.presets import exact, paper, trimmoe
from trimmoe.policy.settings import PolicySettings
from trimmoe.simulator.echo_law import own_flips
from trimmoe.simulator.fit import fit_parameters
from trimmoe.simulator.generate import Parameters, class_shares, generate_trace, popularity
from trimmoe.simulator.generated_profile import generate_profile
from trimmoe.simulator.geometries import GEOMETRIES, find_geometry
from trimmoe.simulator.replay import replay

PARAMETERS = (
    Parameters(),
    Parameters(
        skew=1.1,
        affinity=0.7,
        importance=(0.7, 0.3),
        importance_concentration=30.0,
        slot_evenness=1.0,
        classes=2,
        class_persistence=0.3,
        exit_hazard=(0.05, 0.01),
        exit_foresight=0.9,
        exit_error=0.6,
        skip_flip=0.1,
        drop_flip=0.4,
        flip_power=1.2,
        class_ratio=0.6,
        substitution_flip=0.05,
        bound_excess=1.1,
        change_echo=(2.0, 5.0),
        dense_exit_echo=0.1,
        frozen_exit_echo=3.0,
        home_agreement=0.8,
    ),
)


def spec(layers: int = 8, experts: int = 8, top_k: int = 2) -> ModelSpec:
    rng = np.random.default_rng(0)
    return random_model_spec(rng, layers=layers, experts=experts, top_k=top_k, hidden=8)


def generated(model: ModelSpec, parameters: Parameters, seed: int = 1) -> tuple[Profile, Trace]:
    profile = generate_profile(model, parameters, seed=5, tokens=2048)
    trace = generate_trace(
        model,
        parameters,
        sequences=64,
        length=64,
        seed=seed,
        structure_seed=5,
        profile_hash=profile.hash,
    )
    return profile, trace


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (16, 4)])
def test_parameters_are_found_again(parameters: Parameters, experts: int, top_k: int) -> None:
    profile, trace = generated(spec(experts=experts, top_k=top_k), parameters)
    found, given = asdict(fit_parameters(trace, profile)), asdict(parameters)
    loose = {"importance_concentration": 0.05, "slot_evenness": 0.05}
    # Similarities are few random directions: the least of those above the threshold is above it.
    absolute = {"feasible_similarity": 0.3, "skew": 0.08, "affinity": 0.04}
    for name, value in given.items():
        rel, allowed = loose.get(name, 0.02), absolute.get(name, 0.02)
        assert found[name] == pytest.approx(value, rel=rel, abs=allowed), name


def test_tokens_are_what_a_router_would_say() -> None:
    _, trace = generated(spec(), Parameters())
    ordered = np.sort(trace.experts, axis=2)
    assert (ordered[..., 1:] > ordered[..., :-1]).all()
    assert (trace.masses[..., 1:] <= trace.masses[..., :-1]).all()
    np.testing.assert_allclose(trace.masses.sum(axis=2), trace.importance, rtol=1e-5)
    assert trace.importance.min() >= 0
    assert trace.importance.max() <= 1
    assert trace.confidence.min() >= 0
    assert trace.confidence.max() <= 1
    assert trace.exit_at.min() >= 1
    assert trace.exit_at.max() <= trace.layer_count


def test_shares_of_experts_and_classes_are_those_asked_for() -> None:
    model, parameters = spec(), Parameters(skew=1.0)
    _, trace = generated(model, parameters)
    for layer in range(model.layer_count):
        share = np.bincount(trace.experts[:, layer, 0], minlength=8) / trace.token_count
        np.testing.assert_allclose(-np.sort(-share), popularity(1.0, 8), atol=0.04)
        classes = np.bincount(trace.steadiness[:, layer], minlength=4) / trace.token_count
        np.testing.assert_allclose(classes, class_shares(4), atol=0.05)


def test_seeds_draw_tokens_and_the_structure_stays() -> None:
    model = spec()
    (profile, one), (_, same) = generated(model, Parameters()), generated(model, Parameters())
    _, other = generated(model, Parameters(), seed=2)
    assert one.hash == same.hash
    assert one.hash != other.hash
    top = [
        [np.bincount(trace.experts[:, layer, 0]).argmax() for layer in range(8)]
        for trace in (one, other)
    ]
    assert top[0] == top[1]
    assert top[0] == profile.activated.argmax(axis=1).tolist()


def test_profile_agrees_with_itself_and_with_its_traces() -> None:
    model = spec()
    profile, trace = generated(model, Parameters())
    np.testing.assert_allclose(profile.pattern_share.sum(axis=1), 1.0)
    np.testing.assert_allclose(profile.pattern_transitions.sum(axis=2), 1.0)
    np.testing.assert_allclose(profile.expert_transitions.sum(axis=2), 1.0)
    np.testing.assert_allclose(profile.activated.sum(axis=1), model.top_k)
    np.testing.assert_allclose(profile.class_share.sum(axis=1), 1.0)
    for curves in (profile.skip, profile.drop):
        assert (np.diff(curves.upper, axis=2) >= 0).all()
        assert (curves.upper >= curves.mean).all()
        assert (curves.edges[..., -1] == 1.0).all()
    assert (profile.executed_upper >= profile.executed - 1e-12).all()
    assert (profile.exit_hazard[:, -1] == 1.0).all()
    assert profile.feasible[:, np.arange(8), np.arange(8)].all()
    seen = np.stack(
        [np.bincount(row.ravel(), minlength=8) for row in trace.experts.transpose(1, 0, 2)]
    )
    np.testing.assert_allclose(profile.activated, seen / trace.token_count, atol=0.05)
    trace.require_profile(profile)


def test_drafts_are_foreseen_where_their_own_threshold_is_passed() -> None:
    """After the first layer, where nothing is predicted yet."""
    profile, trace = generated(spec(), Parameters(exit_hazard=(0.2, 0.3)))
    assert profile.draft_hazard is not None
    sure = (trace.confidence[:, 0] >= DRAFT_CONFIDENCE).mean()
    assert sure > 0.1
    np.testing.assert_allclose(profile.draft_hazard[:, 0], sure, atol=0.05)


def test_generated_artifacts_survive_a_file(tmp_path) -> None:
    profile, trace = generated(spec(), Parameters())
    profile.save(tmp_path / "profile")
    trace.save(tmp_path / "trace")
    assert load_profile(tmp_path / "profile").hash == profile.hash
    assert load_trace(tmp_path / "trace").hash == trace.hash


def test_a_generated_world_can_be_planned_and_trimmed() -> None:
    model = spec()
    profile, trace = generated(model, Parameters(skip_flip=0.05, drop_flip=0.05))
    cluster = random_cluster(np.random.default_rng(3))
    plan = make_plan(profile, model, cluster, default(), cluster_hash="c")
    access = np.arange(64) % cluster.server_count
    delay_s = {}
    for settings in (exact(), trimmoe().but(budget=0.05, exit_risk=None)):
        engine = make_engine(plan, profile, model, settings)
        ledgers = replay(engine, trace, access, budget=settings.budget, confidence=0.9)
        delay_s[settings.name] = np.mean([one.delay_s for one in ledgers])
        assert sum(one.loss for one in ledgers) <= settings.budget * len(ledgers) + 1e-9
    assert delay_s["trimmoe"] < delay_s["exact"]


SILENT = Parameters(change_echo=(0.0, 0.0), dense_exit_echo=0.0, frozen_exit_echo=0.0)


def test_changes_echo_as_they_flip_themselves_and_less_from_layer_to_layer() -> None:
    model, parameters = spec(), Parameters(change_echo=(8.0, 0.5))
    profile = generate_profile(model, parameters, seed=5, tokens=2048)
    ratio = profile.change_echo / own_flips(profile, parameters.bound_excess)
    for change in range(len(CHANGES)):
        np.testing.assert_allclose(ratio[[0, -1], change], (8.0, 0.5))
        np.testing.assert_allclose(np.diff(np.log(ratio[:, change])), np.log(0.5 / 8.0) / 7)


def test_a_model_half_as_easily_moved_echoes_half_as_much_but_its_exits_as_before() -> None:
    steady = replace(Parameters(), skip_flip=0.15, drop_flip=0.125, substitution_flip=0.1)
    easily, hardly = (
        generate_profile(spec(), parameters, seed=5, tokens=2048)
        for parameters in (Parameters(), steady)
    )
    np.testing.assert_allclose(hardly.change_echo, easily.change_echo / 2)
    np.testing.assert_array_equal(hardly.exit_echo, easily.exit_echo)


def test_exit_echoes_are_counts_by_state() -> None:
    parameters = Parameters(dense_exit_echo=0.2, frozen_exit_echo=0.7)
    profile = generate_profile(spec(), parameters, seed=5, tokens=2048)
    for state, echo in ((ExitState.DENSE, 0.2), (ExitState.FROZEN, 0.7)):
        charged = profile.exit_bound(state) - profile.exit_error_upper
        np.testing.assert_allclose(charged, echo)


def test_echoes_are_charged_by_default_and_never_by_the_papers_preset() -> None:
    def replayed(parameters: Parameters, settings: PolicySettings) -> Ledger:
        profile, trace = generated(spec(), parameters)
        cluster = random_cluster(np.random.default_rng(3))
        plan = make_plan(profile, spec(), cluster, default(), cluster_hash="c")
        engine = make_engine(plan, profile, spec(), settings)
        access = np.arange(64) % cluster.server_count
        ledgers = replay(engine, trace, access, budget=settings.budget, confidence=0.9)
        return sum(ledgers[1:], ledgers[0])

    letter = [replayed(parameters, paper()) for parameters in (Parameters(), SILENT)]
    assert letter[0].kinds[:, Kind.EXITED].sum() > 0
    assert letter[0].loss == letter[1].loss
    assert letter[0].delay_s == letter[1].delay_s
    np.testing.assert_array_equal(letter[0].kinds, letter[1].kinds)
    generous = trimmoe().but(budget=0.1, exit_risk=None)
    ours, silent = (replayed(parameters, generous) for parameters in (Parameters(), SILENT))
    assert silent.delay_s < ours.delay_s


PUBLISHED = {
    "switch-base-8e": (6, 8, 1, 0.62e9),
    "qwen1.5-moe-a2.7b": (24, 60, 4, 14.3e9),
    "mixtral-8x7b": (32, 8, 2, 46.7e9),
}


@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_geometries_have_the_published_number_of_parameters(name: str) -> None:
    layers, experts, top_k, parameters = PUBLISHED[name]
    model = find_geometry(name)
    assert (model.layer_count, model.expert_count, model.top_k) == (layers, experts, top_k)
    total = (model.total_expert_bytes + model.dense_bytes) / 2
    if name == "switch-base-8e":
        total += model.total_expert_bytes / 2  # The encoder's experts, as many again.
    assert total == pytest.approx(parameters, rel=0.02)
