"""Where tokens like this one exit (36): calibrated, carried to the engine, and counted from 1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from factories import random_model_spec, random_profile
from trimmoe.calibrate.centroids import fit_centroids
from trimmoe.calibrate.exits import Exits
from trimmoe.calibrate.hazard import exit_hazard
from trimmoe.calibrate.routing_stats import expert_transitions, pattern_statistics
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.runtime.observe import Observer

EAST, NORTH = [1.0, 0.1, 0.0], [0.1, 1.0, 0.0]


def test_a_centroid_predicts_the_mean_exit_of_the_tokens_nearest_to_it() -> None:
    """Three tokens to the east exit after layers 1, 2 and 3 of 4, two to the north after 4 and 3;
    how long their states are does not matter."""
    hidden = torch.tensor([EAST, NORTH, EAST, NORTH, EAST]) * torch.tensor(
        [[1], [9], [2], [1], [5]]
    )
    exits = np.array([1, 4, 2, 3, 3])
    centroids, mean, nearest = fit_centroids(hidden, exits, 2, layers=4, seed=0)
    assert mean[nearest].tolist() == [2.0, 3.5, 2.0, 3.5, 2.0]
    east = np.array(EAST) / np.linalg.norm(EAST)
    assert centroids[nearest[0]] == pytest.approx(east, abs=1e-6)


def test_a_centroid_that_no_token_is_nearest_to_predicts_full_depth() -> None:
    """Two tokens make two centroids; the third repeats the first and has no token."""
    hidden = torch.tensor([EAST, NORTH])
    centroids, mean, nearest = fit_centroids(hidden, np.array([1, 2]), 3, layers=7, seed=0)
    assert mean[nearest].tolist() == [1.0, 2.0]
    assert mean[2] == 7.0
    np.testing.assert_array_equal(centroids[2], centroids[0])


def test_the_engine_is_told_the_mean_rounded() -> None:
    """Layer 0 has centroids to the east and north that say 1.4 and 2.6 layers, layer 1 such to the
    north and east that say 3.6 and 3.4."""
    model = random_model_spec(np.random.default_rng(0), layers=3, hidden=3)
    directions = np.array([[1, 0, 0], [0, 1, 0]], dtype=np.float32)
    profile = replace(
        random_profile(np.random.default_rng(0), model),
        centroids=np.stack([directions, directions[::-1], directions]),
        centroid_exit_layer=np.array([[1.4, 2.6], [3.6, 3.4], [3.0, 3.0]]),
    )
    observer = Observer(profile, torch.device("cpu"))
    outputs = torch.tensor([NORTH, EAST, EAST])
    told = [observer.executed(1, layer, outputs).exit_at.tolist() for layer in (0, 1)]
    assert told == [[3, 1, 1], [4, 3, 3]]


def test_the_engine_is_told_what_the_profiles_kind_of_head_says() -> None:
    """(7): weight (1, 0, 0) and bias 0; the state (3, 4, 0) has the direction 3 / sqrt(25 / 3)."""
    model = random_model_spec(np.random.default_rng(0), layers=1, hidden=3)
    profile = replace(
        random_profile(np.random.default_rng(0), model),
        exit_weight=np.array([[1.0, 0.0, 0.0]], dtype=np.float32),
        exit_bias=np.zeros(1, dtype=np.float32),
    )
    header = profile.header
    of_state = replace(header, settings=header.settings | {"exit_heads": "state"})
    state = torch.tensor([[3.0, 4.0, 0.0]])
    for one, logit in ((header, 3 / np.sqrt(25 / 3)), (of_state, 3.0)):
        observer = Observer(replace(profile, header=one), torch.device("cpu"))
        (told,) = observer.executed(1, 0, state).confidence.tolist()
        assert told == pytest.approx(1 / (1 + np.exp(-logit)))


def test_hazards_go_by_what_was_foretold_after_the_layer_before() -> None:
    """Eight tokens of three layers. After layer 0 two exit: there is no prediction yet, and all
    rows are 2/8. Of the six left three exit after layer 1, a rate of 1/2.

    After layer 0 three of those six were said to exit after layer 2, and did; three after layer 3,
    and did. With eight pseudo-tokens at the rate: (3 + 4) / (3 + 8) and (0 + 4) / (3 + 8). What was
    said after layer 1, the opposite, comes too late for it.
    """
    exits = np.array([1, 1, 2, 2, 2, 3, 3, 3])
    after_first = np.array([2, 2, 2, 2, 2, 3, 3, 3])
    after_second = np.array([3, 3, 3, 3, 3, 2, 2, 2])
    hazard = exit_hazard(exits, np.stack([after_first, after_second, after_second]))
    assert hazard[1:, 0].tolist() == [0.25] * 3
    assert hazard[1:, 1].tolist() == pytest.approx([0.5, 7 / 11, 4 / 11])
    assert hazard[1:, 2].tolist() == [1.0] * 3


def test_exits_and_drafts_are_each_measured_at_the_confidence_at_which_they_leave() -> None:
    """Three layers; exits need 0.9, or 0.96 where less flips more than is tolerated, and 0.9 by the
    letter, which tolerates all; drafts 0.6 whatever they flip."""
    score = np.array([[0.7, 0.95, 0.1, 0.59], [0.92, 0.1, 0.61, 0.59], [0.9, 0.9, 0.9, 0.9]])
    early, late = [2, 1, 3, 3], [3, 3, 3, 3]
    for risk, error, threshold, exits in (
        (0.01, 0.0, 0.9, early),
        (0.01, 0.5, 0.96, late),
        (1.0, 0.5, 0.9, early),
        (1.0, 1.0, 0.9, early),
    ):
        found = Exits(
            settings=CalibrationSettings(confidence=0.9, exit_risk=risk),
            weight=np.zeros((3, 2)),
            bias=np.zeros(3),
            grid=np.array([0.5, 0.96]),
            error_upper=np.array([error, 0.0]),
            rate=np.ones(2),
            score=score,
        )
        assert found.threshold == threshold
        assert found.layer.tolist() == exits
        assert found.draft_layer.tolist() == [1, 1, 2, 3]


def test_transitions_lead_from_the_expert_of_a_layer_to_that_of_the_next() -> None:
    """(38): in layer 0 three tokens activate expert 0 and one expert 1; of the three, two activate
    expert 1 next, the fourth expert 0. Each row has one token more that is spread like all: 1/2."""
    first = np.array([[0, 0, 0, 1], [1, 1, 0, 0]])
    expected = [[(1 + 0.5) / 4, (2 + 0.5) / 4], [(1 + 0.5) / 2, 0.5 / 2]]
    np.testing.assert_allclose(expert_transitions(first, 2), [expected])
    found = pattern_statistics(first[:, :, None], np.ones((2, 4, 1)), np.ones((2, 4)), 2, 8)
    assert found.patterns.tolist() == [[[0], [1]]] * 2
    np.testing.assert_allclose(found.pattern_transitions, [expected])
