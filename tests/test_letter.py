"""The letter where several experts are active, and mean losses, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byhand import BUDGET, PLAIN, UNIT, HandWorld, decided, hosting, one_bin, substitutes, world
from factories import random_model_spec, random_profile
from trimmoe.calibrate.substitution import substitution_means
from trimmoe.core.profile import Profile, load_profile
from trimmoe.cost.actions import DROPPED
from trimmoe.cost.lookahead import Place, TokenKind
from trimmoe.policy.build import action_space, deploy
from trimmoe.policy.letter import moved_by_target, of_targets, targets, weighed_by_target

PAIR_MS = [[0, 10], [10, 0]]
P_0 = [[0.5, 0.5, 0.0], [0.0, 0.25, 0.75], [1.0, 0.0, 0.0]]
"""P_0(k -> k')."""
CODEBOOK = {
    "patterns": np.array([[[0, 1], [1, 2], [0, 2]], [[0, 1], [0, 2], [1, 2]]]),
    # The targets are 0, 2, 0 in layer 0 and 1, 0, 1 in layer 1.
    "pattern_mass": np.array(
        [[[0.5, 0.2], [0.1, 0.4], [0.6, 0.1]], [[0.3, 0.4], [0.7, 0.1], [0.5, 0.3]]]
    ),
    "pattern_share": np.array([[0.25, 0.5, 0.25], [0.6, 0.2, 0.2]]),
    "pattern_importance": np.repeat(
        np.array([[0.7, 0.5, 0.7], [0.7, 0.8, 0.8]])[:, :, None], 11, axis=2
    ),
    "pattern_transitions": np.array([np.eye(3)]),
    "expert_transitions": np.array([P_0]),
}


def codebook_world() -> HandWorld:
    """Two layers of three experts, two active, all on the only server that has users."""
    hosts = hosting([[0, 1, 2], [0, 1, 2]], [[], []], experts=3)
    return world(hosts, PAIR_MS, top_k=2, **CODEBOOK)


def test_the_target_is_the_activated_expert_of_largest_mass() -> None:
    assert targets(codebook_world().profile).tolist() == [[0, 2, 0], [1, 0, 1]]


def test_p_l_leads_from_target_to_target_and_patterns_of_one_come_as_often_as_they_do() -> None:
    """(38). From target 0: target 0 in half, which is pattern 1, and target 1, of which pattern 0
    is 6 of 8 and pattern 2 the rest. From target 2 always target 0."""
    moved = moved_by_target(codebook_world().profile).pattern_transitions
    from_0, from_2 = [0.5 * 0.75, 0.5, 0.5 * 0.25], [0.0, 1.0, 0.0]
    np.testing.assert_allclose(moved, [[from_0, from_2, from_0]])


def test_with_one_active_expert_nothing_but_p_l_is_read() -> None:
    found: dict[str, Any] = {"expert_transitions": np.array([[[0.25, 0.75], [1.0, 0.0]]])}
    made = world(hosting([[0, 1], [0, 1]], [[], []]), PAIR_MS, **found)
    moved = moved_by_target(made.profile).pattern_transitions
    np.testing.assert_allclose(moved, found["expert_transitions"])


def test_of_targets_every_expert_is_a_pattern_and_p_l_the_transition() -> None:
    found = of_targets(codebook_world().profile)
    assert found.patterns.tolist() == [[[0], [1], [2]]] * 2
    np.testing.assert_allclose(found.pattern_share, [[0.5, 0.0, 0.5], [0.2, 0.8, 0.0]])
    np.testing.assert_allclose(found.pattern_transitions, [P_0])
    # In layer 1: target 1 in patterns 0 and 2, three times as often in the former.
    assert found.pattern_mass[1, 1, 0] == pytest.approx(0.75 * 0.4 + 0.25 * 0.5)
    assert found.pattern_importance[1, 1, 0] == pytest.approx(0.75 * 0.7 + 0.25 * 0.8)
    # Expert 1 is no target in layer 0: the means of all.
    assert found.pattern_mass[0, 1, 0] == pytest.approx(0.25 * 0.5 + 0.5 * 0.4 + 0.25 * 0.6)


@pytest.mark.parametrize("letter", ["target_transitions", "one_expert"])
def test_the_look_ahead_reads_p_l(letter: str) -> None:
    """In layer 1 target 1 is 10 ms away, 1/2 x 21, target 0 is here, 1/2 x 1; what is beside them
    is here too. Calibrated sets say that a token stays with what it activates."""
    hosts = hosting([[0, 1, 2], [0, 2]], [[], [1]], experts=3)
    made = world(hosts, PAIR_MS, top_k=2, **CODEBOOK)
    settings = PLAIN.but(horizon=None, budget=BUDGET, **{letter: True})
    look = made.policy(settings).lookahead
    kind = TokenKind(steadiness=0, exit_row=0)
    ahead = look.to_go(0, Place(route=(0, 0)), 0.0, 1, kind)
    if letter == "one_expert":
        # From expert 0 by (38) to 0 or 1, from 2 to 0.
        assert ahead[[0, 2]] == pytest.approx([0.5 * 0.5 + 0.5 * 10.5, 0.5])
    else:
        # Pattern 1 = {0, 2} runs here, two experts: 2 ms; the others need expert 1.
        assert ahead == pytest.approx([0.5 * 10.5 + 0.5 * 1.0, 1.0, 0.5 * 10.5 + 0.5 * 1.0])


def test_one_expert_per_layer_is_run_and_nothing_charged_for_the_others() -> None:
    """(10), (11): of the activated 1 and 0 only the target 1 runs, though 10 ms away; with both it
    would take as long. Where 2 stands in for it here at 4 units, that is all that is charged."""
    hosts = hosting([[0, 2], [0, 2]], [[1], [1]], experts=3)
    exact = world(hosts, PAIR_MS, top_k=2)
    settings = PLAIN.but(one_expert=True)
    ran = decided(exact.policy(settings), [1, 0], masses=[0.4, 0.2])
    assert ran.slot_expert.tolist() == [[1, DROPPED]]
    assert ran.slot_server[0, 0] == 1
    assert (ran.loss[0], ran.delay_s[0]) == (0.0, pytest.approx(21e-3))
    assert decided(exact.policy(PLAIN), [1, 0], masses=[0.4, 0.2]).slot_expert.tolist() == [[1, 0]]
    near = world(hosts, PAIR_MS, top_k=2, **substitutes(2, [[0, 9, 9], [9, 0, 4], [9, 9, 0]]))
    ran = decided(near.policy(settings), [1, 0], masses=[0.4, 0.2])
    assert ran.slot_expert.tolist() == [[2, DROPPED]]
    assert ran.loss[0] == 4 * UNIT
    assert ran.delay_s[0] == pytest.approx(1e-3)


def test_with_the_targets_gate_as_importance_a_layer_may_be_skipped_that_the_set_forbids() -> None:
    """Algorithm 2, line 8: masses 0.4 + 0.3 are above theta = 0.5, the target's 0.4 is not."""
    hosts = hosting([[2], [2]], [[0, 1], [0, 1]], experts=3)
    made = world(hosts, PAIR_MS, top_k=2, skip=one_bin([2.0, 2.0]))
    decisions = []
    for by_gate in (False, True):
        policy = made.policy(PLAIN.but(target_importance=by_gate))
        space = replace(policy.lookahead.space, theta=np.array([0.5, 0.5]))
        policy = replace(policy, lookahead=replace(policy.lookahead, space=space))
        policy = replace(policy, tables=None)
        decisions.append(decided(policy, [0, 1], masses=[0.4, 0.3]))
    assert decisions[0].slot_expert.tolist() == [[0, 1]]
    assert decisions[1].slot_expert.tolist() == [[DROPPED, DROPPED]]
    assert decisions[1].loss[0] == 2 * UNIT


def test_layers_to_come_are_as_important_as_their_targets_gates() -> None:
    found = weighed_by_target(codebook_world().profile).pattern_importance
    np.testing.assert_allclose(found[:, :, 0], [[0.5, 0.4, 0.6], [0.4, 0.7, 0.5]])
    np.testing.assert_allclose(found, np.repeat(found[:, :, :1], 11, axis=2))


def test_mean_losses_are_what_was_measured_and_not_its_bounds() -> None:
    made = world(hosting([[0], [0]], [[1], [1]]), PAIR_MS, **substitutes(2, [[0, 6], [6, 0]]))
    skip = replace(one_bin([5.0, 5.0]), mean=one_bin([3.0, 3.0]).upper)
    profile = replace(
        made.profile,
        skip=skip,
        substitution_mean=made.profile.substitution_loss / 2,
    )
    deployment = deploy(made.plan, profile, made.model, PLAIN.accounting)
    for mean, skips, stands_in in ((False, 5, 6), (True, 3, 3)):
        settings = PLAIN.but(mean_losses=mean)
        space = action_space(deployment, profile, settings)
        assert (space.skip.upper == skips * UNIT).all()
        assert (space.substitution_loss[..., 0, 1] == stands_in * UNIT).all()
    older = replace(profile, substitution_mean=None)
    assert (older.averaged().substitution_loss == older.substitution_loss).all()


def test_the_mean_of_a_substitution_is_the_fit_of_its_distance_or_its_own_rate() -> None:
    """Pairs 0 -> 1 and 1 -> 0 are near, the two others of expert 0 far: 2 of 20 and 6 of 20 flip. A
    pair of 10 samples is judged by its own."""
    bins = np.array([[[-1, 0, 1], [0, -1, -1], [1, -1, -1]]])
    flips = np.array([[[[0, 2, 6], [0, 0, 0], [0, 0, 0]]]])
    samples = np.array([[[[0, 10, 20], [10, 0, 0], [0, 0, 0]]]])
    upper = np.where(np.eye(3, dtype=bool), 0.0, 0.9)[None, None]
    means = substitution_means(bins, 2, (flips, samples), upper, pair_samples=15)
    assert means[0, 0, 0, 1] == means[0, 0, 1, 0] == pytest.approx(0.1)
    assert means[0, 0, 0, 2] == means[0, 0, 2, 0] == pytest.approx(0.3)
    assert means[0, 0, 1, 2] == 0.9
    assert (np.diagonal(means[0, 0]) == 0.0).all()
    own = substitution_means(bins, 2, (flips, samples), upper, pair_samples=10)
    assert own[0, 0, 0, 1] == pytest.approx(0.2)
    assert own[0, 0, 1, 0] == 0.0


@pytest.mark.parametrize("kept", [False, True])
def test_profiles_with_and_without_means_are_read(kept: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    profile: Profile = random_profile(rng, random_model_spec(rng))
    if kept:
        profile = replace(profile, substitution_mean=profile.substitution_loss / 2)
    profile.save(tmp_path / "profile")
    read = load_profile(tmp_path / "profile")
    assert (read.substitution_mean is not None) == kept
    assert read.hash == profile.hash
