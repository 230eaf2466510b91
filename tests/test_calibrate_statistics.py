"""Routing statistics, similarities, sampling and text: the rest of calibration without a model."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimmoe.calibrate import sampling, substitution
from trimmoe.calibrate.hazard import exit_hazard, exit_layers
from trimmoe.calibrate.routing_stats import (
    codebook,
    execution_statistics,
    expert_transitions,
    nearest_pattern,
    pattern_statistics,
    transition_rows,
)
from trimmoe.calibrate.settings import CalibrationSettings
from trimmoe.calibrate.text import read_texts, text_hash, token_windows
from trimmoe.core.errors import UserError


def _sets(seed: int, layers: int, tokens: int, experts: int, top_k: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((layers, tokens, experts)).argsort(axis=2)[:, :, :top_k]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 99), st.integers(1, 3), st.sampled_from([4, 256]))
def test_pattern_statistics_are_distributions(seed: int, top_k: int, limit: int) -> None:
    activated = _sets(seed, 3, 200, 6, top_k)
    masses = np.random.default_rng(seed).random(activated.shape) / top_k
    found = pattern_statistics(activated, masses, masses.sum(axis=2), 6, limit)
    count = found.patterns.shape[1]
    assert count <= limit
    assert found.pattern_transitions.shape == (2, count, count)
    np.testing.assert_allclose(found.pattern_share.sum(axis=1), 1.0)
    np.testing.assert_allclose(found.pattern_transitions.sum(axis=2), 1.0)
    assert (np.diff(found.patterns, axis=2) > 0).all()
    assert (np.diff(found.pattern_importance, axis=2) >= 0).all()
    if limit == 256:
        assert (found.pattern_coverage == 1.0).all()
    else:
        assert (found.pattern_coverage <= 1.0).all()
    first = expert_transitions(activated[:, :, 0], 6)
    np.testing.assert_allclose(first.sum(axis=2), 1.0)


def test_an_unseen_row_of_transitions_is_the_marginal() -> None:
    rows = transition_rows(np.array([0, 0, 0, 0]), np.array([1, 1, 2, 1]), (3, 3))
    np.testing.assert_allclose(rows[2], [0.0, 0.75, 0.25])
    np.testing.assert_allclose(rows[0], [0.0, 0.75, 0.25])


def test_the_codebook_keeps_the_frequent_sets_and_maps_the_rest_to_the_nearest() -> None:
    sets = np.array([[0, 1]] * 5 + [[2, 3]] * 4 + [[1, 2]] * 1)
    book = codebook(sets, 4, limit=2)
    assert book.tolist() == [[0, 1], [2, 3]]
    nearest, exact = nearest_pattern(sets, book, 4)
    assert nearest.tolist() == [0] * 5 + [1] * 4 + [0]
    assert exact.tolist() == [True] * 9 + [False]
    assert codebook(sets, 4, limit=6).shape == (6, 2)


def test_execution_statistics_count_what_is_reached_and_not_skipped() -> None:
    activated = np.array([[[0], [0], [1], [1]], [[0], [1], [1], [1]]])
    importance = np.array([[0.1, 0.9, 0.9, 0.9], [0.2, 0.2, 0.9, 0.9]])
    found = execution_statistics(
        activated, importance, np.array([0.5, 0.2]), np.array([1, 2, 2, 2]), 3, 0.95
    )
    assert found.active.tolist() == [1.0, 0.75]
    assert found.executed.tolist() == [[0.5, 1.0, 1.0], [0.0, 2 / 3, 1.0]]
    assert found.activated.tolist() == [[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]]
    for name in ("active", "executed", "activated"):
        assert (getattr(found, f"{name}_upper") >= getattr(found, name)).all()


def test_similarity_is_the_cosine_of_centred_columns() -> None:
    logits = np.random.default_rng(0).normal(size=(300, 4))
    logits[:, 1] = logits[:, 0]
    centred = logits - logits.mean(axis=1, keepdims=True)
    similarity = substitution.similarities((centred.T @ centred)[None])[0]
    assert similarity[0, 1] == pytest.approx(1.0)
    expected = centred[:, 0] @ centred[:, 2]
    expected /= np.linalg.norm(centred[:, 0]) * np.linalg.norm(centred[:, 2])
    assert similarity[0, 2] == pytest.approx(expected)
    assert (np.diag(similarity) == 1.0).all()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 999), st.integers(2, 9), st.integers(1, 4), st.floats(0, 1))
def test_every_expert_has_a_substitute_and_none_too_many(
    seed: int, experts: int, most: int, quantile: float
) -> None:
    columns = np.random.default_rng(seed).normal(size=(2, 30, experts))
    similarity = substitution.similarities(np.einsum("nta,ntb->nab", columns, columns))
    feasible = substitution.feasible_sets(similarity, quantile, most)
    others = feasible.sum(axis=2) - 1
    assert feasible[:, np.arange(experts), np.arange(experts)].all()
    assert (others >= 1).all()
    assert (others <= most).all()


def test_substitution_losses_rise_with_distance_and_yield_to_measured_pairs() -> None:
    similarity = np.eye(3)[None] + np.array([[[0, 0.9, 0.1], [0.9, 0, 0.2], [0.1, 0.2, 0]]])
    feasible = substitution.feasible_sets(similarity, 0.0, 1)
    bins = substitution.pair_bins(similarity, feasible, 4)
    samples = np.where(feasible, 1000, 0) * (1 - np.eye(3, dtype=np.int64))[None]
    flips = np.where(bins == bins.max(), 300, 10) * (samples > 0)
    losses = substitution.substitution_losses(
        bins, 4, (flips[:, None], samples[:, None]), pair_samples=200, neighbours=0, confidence=0.95
    )
    assert losses.shape == (1, 1, 3, 3)
    losses = losses[:, 0]
    assert (losses[0][~feasible[0]] == 1.0).all()
    assert (np.diag(losses[0]) == 0.0).all()
    assert losses[0, 0, 1] < 0.03
    assert 0.25 < losses[0, 2, 1] < 0.35


def _pair_bins(layers: int, experts: int) -> np.ndarray:
    similarity = np.random.default_rng(0).random((layers, experts, experts))
    feasible = substitution.feasible_sets(similarity, 0.0, experts)
    return substitution.pair_bins(similarity, feasible, 1)


def test_a_layer_with_few_substitutions_is_judged_with_its_nearest_neighbours() -> None:
    bins = _pair_bins(7, 3)
    samples = np.where(bins >= 0, 100, 0)[:, None]  # 600 a layer, enough.
    samples[3] //= 10
    flips = np.zeros_like(samples)
    flips[[0, 6]] = samples[[0, 6]]  # Far layers must not touch layer 3,
    near = substitution.substitution_losses(
        bins, 1, (flips, samples), pair_samples=10**6, neighbours=0, confidence=0.95
    )
    assert near[3, 0, 0, 1] < 0.01
    flips[[0, 6]], flips[2] = 0, samples[2] // 2  # but a near one does.
    far = substitution.substitution_losses(
        bins, 1, (flips, samples), pair_samples=10**6, neighbours=0, confidence=0.95
    )
    assert 0.2 < far[3, 0, 0, 1] < 0.35
    assert far[1, 0, 0, 1] < 0.01


def test_slots_are_judged_by_rank() -> None:
    """A substitute that flips in the first slot and never in the others."""
    bins = _pair_bins(1, 3)
    samples = np.where(bins >= 0, 400, 0)[:, None, None].repeat(2, axis=2)
    flips = samples * np.array([0.2, 0.0])[None, None, :, None, None]
    of_rank = partial(
        substitution.substitution_losses,
        bins,
        1,
        pair_samples=10**6,
        neighbours=0,
        confidence=0.95,
    )
    losses = substitution.by_rank(of_rank, (flips.astype(np.int64), samples))
    assert losses.shape == (1, 1, 2, 3, 3)
    apart = bins[0] >= 0
    assert (losses[0, 0, 0][apart] > 0.2).all()
    assert (losses[0, 0, 1][apart] < 0.01).all()


def test_substitution_losses_do_not_rise_with_steadiness() -> None:
    bins = _pair_bins(1, 3)
    samples = np.where(bins >= 0, 400, 0)[:, None].repeat(3, axis=1)
    flips = samples * np.array([0.1, 0.01, 0.05])[None, :, None, None]
    losses = substitution.substitution_losses(
        bins,
        1,
        (flips.astype(np.int64), samples),
        pair_samples=10**6,
        neighbours=0,
        confidence=0.95,
    )
    assert (np.diff(losses, axis=1) <= 0).all()
    assert (losses[:, 1] == losses[:, 2]).all()


def test_more_samples_come_from_steadier_classes_and_none_from_outside() -> None:
    rng = np.random.default_rng(0)
    class_of = rng.integers(-1, 3, size=(6, 9000))
    classes = sampling.Classes(class_of=class_of, count=3, apart=3)
    bins = rng.integers(-1, 5, size=9000)
    taken = [classes.draw(layer, bins, 5, 600, rng) for layer in range(6)]
    for layer, tokens in enumerate(taken):
        assert np.unique(tokens).size == tokens.size
        assert (bins[tokens] >= 0).all()
        found = np.bincount(class_of[layer, tokens], minlength=3)
        assert np.abs(found - [100, 200, 300]).max() <= 5
    for layer in range(4):
        assert np.unique(np.concatenate(taken[layer : layer + 3])).size == sum(
            tokens.size for tokens in taken[layer : layer + 3]
        )


def test_what_a_small_class_cannot_give_the_others_do() -> None:
    class_of = np.array([[0] * 500 + [1] * 20])
    classes = sampling.Classes(class_of=class_of, count=2)
    drawn = classes.draw(0, np.zeros(520, dtype=np.int64), 1, 300, np.random.default_rng(0))
    assert np.bincount(class_of[0, drawn]).tolist() == [280, 20]


def test_a_lower_threshold_is_reached_no_later() -> None:
    scores = np.array([[0.65, 0.1, 0.2], [0.95, 0.7, 0.5], [0.0, 0.0, 0.0]])
    assert exit_layers(scores, 0.6).tolist() == [1, 2, 3]
    assert exit_layers(scores, 0.9).tolist() == [2, 3, 3]


@given(seed=st.integers(0, 10_000), layers=st.integers(2, 6))
def test_exit_hazards_are_the_shares_that_leave(seed: int, layers: int) -> None:
    rng = np.random.default_rng(seed)
    exits = rng.integers(1, layers + 1, size=4000)
    # Told rightly before every layer, tokens leave where they are said to.
    predicted = np.tile(exits, (layers, 1))
    hazard = exit_hazard(exits, predicted)
    assert hazard.shape == (layers + 1, layers)
    assert (hazard[:, -1] == 1.0).all()
    assert ((hazard >= 0) & (hazard <= 1)).all()
    np.testing.assert_allclose(hazard[:, 0], (exits == 1).mean() if layers > 1 else 1.0)
    for layer in range(1, layers - 1):
        assert hazard[layer + 1, layer] > 0.9
        assert (hazard[layer + 2 :, layer] < 0.1).all()
    # Told nothing, all rows are the layer's own rate.
    blind = exit_hazard(exits, np.ones_like(predicted))
    for layer in range(layers - 1):
        alive = exits > layer
        np.testing.assert_allclose(blind[1:, layer], (exits[alive] == layer + 1).mean())


def test_nothing_exits_no_hazard() -> None:
    hazard = exit_hazard(np.full(50, 4), np.full((4, 50), 4))
    assert (hazard[:, :-1] == 0).all()


def test_samples_come_from_low_bins_first_and_are_never_repeated() -> None:
    rng = np.random.default_rng(0)
    bins = rng.integers(-1, 5, size=4000)
    taken = sampling.stratified(bins, 5, 1000, rng)
    assert np.unique(taken).size == taken.size
    counts = np.bincount(bins[taken], minlength=5)
    assert (np.diff(counts) < 0).all()
    assert abs(taken.size - 1000) <= 5
    assert sampling.stratified(bins, 5, 10_000, rng).size == (bins >= 0).sum()


def test_substitution_changes_are_feasible_and_outside_the_activated_set() -> None:
    activated = _sets(5, 2, 500, 6, 2)
    similarity = np.random.default_rng(0).random((2, 6, 6))
    feasible = substitution.feasible_sets(similarity, 0.3, 3)
    bins = substitution.pair_bins(similarity, feasible, 4)
    classes = sampling.Classes(class_of=np.zeros((2, 500), dtype=np.int64), count=1)
    changes = sampling.substitution_changes(
        activated, feasible, bins, 4, classes, samples=200, seed=0
    )
    slot = changes.slots.argmax(axis=1)
    row = np.arange(changes.count)
    substitute = changes.slots[row, slot]
    target = activated[changes.layer, changes.token, slot]
    assert ((changes.slots >= 0).sum(axis=1) == 1).all()
    assert feasible[changes.layer, target, substitute].all()
    assert not (activated[changes.layer, changes.token] == substitute[:, None]).any()
    flips, samples = substitution.pair_counts(activated, changes, row % 2 == 0, 6, classes)
    assert samples.sum() == changes.count
    assert flips.sum() == (changes.count + 1) // 2


def test_random_subsets_are_proper_and_not_empty() -> None:
    subsets = sampling.random_subsets(2000, 4, np.random.default_rng(0))
    sizes = subsets.sum(axis=1)
    assert set(sizes.tolist()) == {1, 2, 3}


def test_read_texts_of_every_form(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain", encoding="utf-8")
    lines = "\n".join(json.dumps({"text": text}) for text in ("one", "two")) + "\n\n"
    (tmp_path / "b.jsonl").write_text(lines, encoding="utf-8")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt", encoding="utf-8") as opened:
        opened.write(lines)
    texts = read_texts([tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.jsonl.gz"])
    assert texts == ["plain", "one", "two", "one", "two"]
    assert text_hash(texts) != text_hash(["plainone", "two", "one", "two"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "no text file"),
        ("empty.txt", b" \n", "holds no text"),
        ("latin.txt", b"caf\xe9", "not UTF-8"),
        ("bad.jsonl", b"{}\n", "line 1"),
        ("number.jsonl", b'{"text": 3}\n', "not a string"),
        ("broken.jsonl.gz", b"not gzip", "Cannot read"),
    ],
)
def test_unreadable_texts_are_refused_in_one_sentence(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_texts([path])


class _Words:
    """A tokenizer of one token per word."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def test_windows_are_whole_drawn_by_seed_and_refused_when_too_few() -> None:
    texts = [f"{'a' * (n % 9 + 1)} " * 300 for n in range(20)]
    windows = token_windows(texts, _Words(), tokens=640, window=64, seed=0)
    assert windows.shape == (10, 64)
    again = token_windows(texts, _Words(), tokens=640, window=64, seed=0)
    assert np.array_equal(windows, again)
    other = token_windows(texts, _Words(), tokens=640, window=64, seed=1)
    assert not np.array_equal(windows, other)
    assert token_windows(["a b c " * 10] * 12, _Words(), tokens=9999, window=64, seed=0).size == 320
    with pytest.raises(UserError, match="256 are the least"):
        token_windows(["a b c"], _Words(), tokens=640, window=64, seed=0)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match="confidence"):
        CalibrationSettings(confidence=1.0)
    with pytest.raises(UserError, match="bins"):
        CalibrationSettings(bins=0)
