"""Bounds, monotone fits, thresholds, grids: the pure part of calibration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimmoe.calibrate import exits
from trimmoe.calibrate.curves import (
    Measured,
    clopper_pearson_lower,
    clopper_pearson_upper,
    isotonic_rates,
    loss_curves,
    monotone_upper,
    monotony,
    quantile_edges,
)
from trimmoe.calibrate.windows import Windows
from trimmoe.core.exit_states import exit_threshold
from trimmoe.core.loss_curves import LossCurves
from trimmoe.cost.thresholds import skipped_layers, theta_at, thresholds
from trimmoe.models.exit_head import confidence

Bins = st.lists(st.tuples(st.integers(0, 60), st.floats(0, 1)), min_size=1, max_size=20)


def _counts(bins: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    samples = np.array([count for count, _ in bins], dtype=np.int64)
    flips = np.array([round(count * share) for count, share in bins], dtype=np.int64)
    return flips, samples


def test_clopper_pearson_matches_known_values() -> None:
    upper = clopper_pearson_upper(np.array([0, 5, 10, 0]), np.array([100, 100, 10, 0]), 0.95)
    np.testing.assert_allclose(upper, [0.02951, 0.10225, 1.0, 1.0], atol=1e-4)
    lower = clopper_pearson_lower(np.array([0, 5]), np.array([100, 100]), 0.95)
    np.testing.assert_allclose(lower, [0.0, 0.01991], atol=1e-4)


@settings(deadline=None)
@given(Bins)
def test_curves_are_monotone_and_bounds_are_above_the_mean(bins: list[tuple[int, float]]) -> None:
    flips, samples = _counts(bins)
    mean, upper = isotonic_rates(flips, samples), monotone_upper(flips, samples, 0.95)
    assert (np.diff(mean) >= -1e-12).all()
    assert (np.diff(upper) >= 0).all()
    assert (upper >= mean).all()
    assert ((mean >= 0) & (upper <= 1)).all()


@pytest.mark.parametrize("low", [0.0, 0.02, 0.2])
def test_bounds_cover_monotone_rates_as_often_as_stated(low: float) -> None:
    rng = np.random.default_rng(1)
    rates = np.linspace(low, 0.3, 8)
    samples = np.array([200, 150, 150, 100, 100, 80, 60, 60])
    trials = 400
    covered = np.zeros(8)
    for _ in range(trials):
        covered += monotone_upper(rng.binomial(samples, rates), samples, 0.9) >= rates
    # Three standard errors below the stated 90 %.
    assert (covered / trials >= 0.9 - 3 * np.sqrt(0.09 / trials)).all()


def test_low_bins_lean_on_the_samples_above_them() -> None:
    samples = np.full(16, 100)
    upper = monotone_upper(np.zeros(16, dtype=np.int64), samples, 0.95)
    assert upper[0] < 4.2 / samples.sum()


def test_where_the_data_refute_monotony_the_own_bound_stands() -> None:
    flips, samples = np.array([60, 0, 0]), np.array([100, 5000, 5000])
    upper = monotone_upper(flips, samples, 0.95)
    assert upper[0] >= clopper_pearson_upper(flips[:1], samples[:1], 0.95)[0]


def test_quantile_edges_with_ties_leave_the_curve_well_formed() -> None:
    mass = np.concatenate([np.full(500, 0.25), np.linspace(0.3, 0.9, 500)])
    edges = np.stack([quantile_edges(mass, 8)])
    assert edges[0, -1] == 1.0
    assert (np.diff(edges[0]) >= 0).all()
    flipped = np.arange(1000) % 10 == 0
    nothing = np.zeros(1000, dtype=np.int64)
    measured = Measured(layer=nothing, steadiness=nothing, mass=mass, flipped=flipped)
    curves = loss_curves(edges, measured, classes=1, neighbours=0, confidence=0.95)
    assert curves.samples.sum() == 1000
    assert curves.upper.min() >= 0.1
    assert 0 <= monotony(edges, measured)[0]["departure"] < 0.05


def _drawn(rates: np.ndarray, each: int, seed: int) -> tuple[np.ndarray, Measured]:
    """Edges [N, G] and what-ifs of which share `rates` [N, B, G] flipped, `each` per cell."""
    layers, _, bins = rates.shape
    edges = np.tile(np.arange(1, bins + 1) / bins, (layers, 1))
    layer, steadiness, bin_index = np.indices(rates.shape).reshape(3, -1).repeat(each, axis=1)
    flipped = np.random.default_rng(seed).random(layer.size) < rates.ravel().repeat(each)
    mass = (bin_index + 0.5) / bins
    return edges, Measured(layer=layer, steadiness=steadiness, mass=mass, flipped=flipped)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), neighbours=st.integers(0, 2))
def test_curves_rise_with_mass_and_fall_with_steadiness(seed: int, neighbours: int) -> None:
    rng = np.random.default_rng(seed)
    rates = rng.random((4, 3, 5)) * rng.choice([0.02, 0.5])
    edges, measured = _drawn(rates, 20, seed)
    curves = loss_curves(edges, measured, classes=3, neighbours=neighbours, confidence=0.95)
    assert (np.diff(curves.upper, axis=2) >= 0).all()
    assert (np.diff(curves.upper, axis=1) <= 0).all()
    assert (curves.upper >= curves.mean).all()
    assert ((curves.upper >= 0) & (curves.upper <= 1)).all()


def test_class_bounds_hold_as_often_as_they_say_with_and_without_neighbours() -> None:
    # Layers that are alike, flip rates that rise with mass and fall with steadiness.
    steady, mass = np.array([0.1, 0.03, 0.005])[:, None], np.linspace(0.5, 1.5, 4)
    rates = np.broadcast_to(steady * mass, (3, 3, 4))
    for neighbours in (0, 1):
        held = np.zeros(rates.shape)
        for seed in range(100):
            edges, measured = _drawn(rates, 60, seed)
            curves = loss_curves(edges, measured, classes=3, neighbours=neighbours, confidence=0.9)
            held += curves.upper >= rates
        assert (held / 100 >= 0.9 - 3 * np.sqrt(0.09 / 100)).all()


def test_neighbours_tighten_low_bounds_but_a_layer_apart_is_judged_alone() -> None:
    rates = np.full((5, 1, 4), 0.01)
    rates[2] = 0.3
    edges, measured = _drawn(rates, 100, 0)
    alone, together = (
        loss_curves(edges, measured, classes=1, neighbours=n, confidence=0.95).upper[:, 0]
        for n in (0, 1)
    )
    assert (together[2] == alone[2]).all()
    assert (together[1] > 0.05).all()  # The price: it shares its bad neighbour's flips.
    rates[2] = 0.01
    edges, measured = _drawn(rates, 100, 0)
    alone, together = (
        loss_curves(edges, measured, classes=1, neighbours=n, confidence=0.95).upper[:, 0]
        for n in (0, 1)
    )
    assert together[2, 0] < alone[2, 0]


def test_a_class_that_was_not_seen_is_bounded_by_one_and_raises_nobody() -> None:
    edges, measured = _drawn(np.full((1, 2, 3), 0.0), 200, 0)
    curves = loss_curves(edges, measured, classes=3, neighbours=0, confidence=0.95)
    assert (curves.upper[:, 2] == 1.0).all()
    assert (curves.upper[:, :2] < 0.05).all()


@st.composite
def _skip_curves(draw: st.DrawFn) -> tuple[LossCurves, np.ndarray]:
    layers, bins = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    quantiles = np.sort(rng.random((layers, 101)), axis=1)
    edges = np.stack([quantile_edges(row, bins) for row in quantiles])
    upper = np.sort(rng.choice([0.0, 0.001, 0.01, 0.05, 0.3, 1.0], (layers, bins)), axis=1)
    samples = np.full((layers, bins), 10, dtype=np.int64)
    return _one_class(edges, upper, samples), quantiles


def _one_class(edges: np.ndarray, upper: np.ndarray, samples: np.ndarray) -> LossCurves:
    parts = (array[:, None] for array in (edges, upper, samples))
    edges, upper, samples = parts
    return LossCurves(edges=edges, mean=upper, upper=upper, samples=samples)


@settings(deadline=None, max_examples=60)
@given(_skip_curves(), st.sampled_from([0.0, 0.001, 0.02, 0.1, 1.0, 50.0]))
def test_thresholds_use_the_budget_and_no_more(
    drawn: tuple[LossCurves, np.ndarray], budget: float
) -> None:
    skip, quantiles = drawn
    theta, epsilon = thresholds(skip, quantiles, budget)
    assert epsilon * skipped_layers(skip, quantiles, epsilon) <= budget
    np.testing.assert_array_equal(theta, theta_at(skip, epsilon))
    for more in (np.nextafter(epsilon, 2.0) + 1e-12, epsilon * 1.01 + 1e-9, 1.0):
        if epsilon < more <= 1.0:
            assert more * skipped_layers(skip, quantiles, more) > budget


def test_a_larger_budget_never_lowers_a_threshold() -> None:
    rng = np.random.default_rng(3)
    quantiles = np.sort(rng.random((5, 101)), axis=1)
    edges = np.stack([quantile_edges(row, 8) for row in quantiles])
    upper = np.sort(rng.random((5, 8)) * 0.1, axis=1)
    skip = _one_class(edges, upper, np.ones((5, 8), np.int64))
    found = [thresholds(skip, quantiles, budget)[0] for budget in (0.0, 0.01, 0.05, 0.2, 9.0)]
    assert (np.diff(np.stack(found), axis=0) >= 0).all()
    assert (found[0] == 0).all()
    assert (found[-1] == 1).all()


def test_splits_are_disjoint_and_made_of_whole_windows() -> None:
    splits = exits.split_windows(Windows(ids=np.zeros((20, 16), dtype=np.int64)), seed=1)
    parts = [splits.train, splits.calibration, splits.test]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(320))
    windows = [set((part // 16).tolist()) for part in parts]
    assert not windows[0] & windows[1]
    assert not windows[0] & windows[2]
    assert not windows[1] & windows[2]


def test_exit_layers_are_the_first_that_reach_the_threshold() -> None:
    scores = np.array([[0.1, 0.95, 0.2], [0.92, 0.1, 0.3], [0.0, 0.0, 0.0]])
    assert exits.exit_layers(scores, 0.9).tolist() == [2, 1, 3]
    assert exits.exit_layers(scores, np.inf).tolist() == [3, 3, 3]


def test_learn_then_test_bounds_the_error_of_what_exits() -> None:
    rng = np.random.default_rng(0)
    scores = rng.random((4, 5000))
    agrees = rng.random((4, 5000)) < scores  # Perfectly calibrated confidences.
    agrees[-1] = True
    grid = exits.exit_grid(scores, agrees, 0.95)
    assert (np.diff(grid) > 0).all()
    upper, rate = exits.learn_then_test(scores, agrees, grid, 0.95)
    assert (np.diff(rate) <= 0).all()
    assert rate[-1] > 0
    floor = exit_threshold(grid, upper, 0.1)
    assert 0.7 < floor < 1.0
    assert exit_threshold(grid, upper, 0.0) == np.inf


@settings(deadline=None, max_examples=10)
@given(st.floats(0.02, 0.98))
def test_where_labels_say_nothing_the_head_gives_their_rate(rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2000, 3, generator=generator)
    labels = (torch.rand(2000, generator=generator) < rate).float()
    solution = exits.fit_logistic(features, labels, ridge=30.0, start=torch.zeros(4))
    assert abs(float(torch.sigmoid(solution[-1])) - float(labels.mean())) < 0.02
    assert solution[:-1].abs().max() < 0.3


def test_a_head_finds_the_direction_that_decides() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(6000, 16, generator=generator)
    agrees = torch.rand(6000, generator=generator) < torch.sigmoid(3 * hidden[:, 2] - 1)
    splits = exits.split_windows(Windows(ids=np.zeros((60, 100), dtype=np.int64)), seed=0)
    weight, bias = exits.fit_exit_head(hidden, agrees, splits)
    scores = exits.confidences(hidden, weight, bias)[splits.test]
    truth = agrees.numpy()[splits.test]
    assert truth[scores > 0.8].mean() > 0.75
    assert truth[scores < 0.2].mean() < 0.25
    scaled = exits.confidences(hidden * 7.0, weight, bias)[splits.test]
    np.testing.assert_allclose(scores, scaled, atol=1e-5)


def test_a_head_on_the_state_itself_knows_its_scale_and_one_on_the_direction_does_not() -> None:
    """(7): what decides here is how long the state is, which its direction does not say."""
    generator = torch.Generator().manual_seed(2)
    sign = torch.ones(6000, 16)
    length = 0.2 + torch.rand(6000, 1, generator=generator)
    hidden, agrees = sign * length, length[:, 0] > 0.7
    splits = exits.split_windows(Windows(ids=np.zeros((60, 100), dtype=np.int64)), seed=0)
    right = {}
    for reads in ("direction", "state"):
        weight, bias = exits.fit_exit_head(hidden, agrees, splits, reads)
        scores = exits.confidences(hidden, weight, bias, reads)[splits.test]
        right[reads] = ((scores > 0.5) == agrees.numpy()[splits.test]).mean()
    assert right["state"] > 0.9
    assert right["direction"] < 0.6
    # sigmoid(2 x 3 - 5), where the direction (1, 1) would give sigmoid(2 x 1 - 5).
    weight = torch.tensor([1.0, 1.0])
    three = torch.tensor([[3.0, 3.0]])
    assert float(confidence(three, weight, -5.0, "state")) == pytest.approx(1 / (1 + np.exp(-1)))
    assert float(confidence(three, weight, -5.0)) == pytest.approx(1 / (1 + np.exp(3)))
