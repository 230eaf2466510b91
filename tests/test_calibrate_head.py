"""The referee answers as the whole output head does, with and without its bfloat16 screen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trimmoe.calibrate.head import Referee, _Duel, _Screen, greedy


class _Head:
    """As much of a view as an output head without a norm needs."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.spec = SimpleNamespace(hidden_size=rows.shape[1])
        self.asked = 0

    def head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, self.rows

    def logits(self, hidden: Tensor) -> Tensor:
        self.asked += hidden.shape[0]
        return hidden @ self.rows.T


def _drawn(seed: int, *, vocabulary: int = 3000, width: int = 24) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(vocabulary, width, generator=generator)
    rows *= torch.rand(vocabulary, 1, generator=generator) * 3
    return _Head(rows), torch.randn(200, width, generator=generator) * 5


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), nearness=st.sampled_from([0.0, 1e-6, 1e-3, 0.1]))
def test_the_screen_never_changes_an_answer(seed: int, nearness: float) -> None:
    view, hidden = _drawn(seed)
    # Twins of every row of the head, so that the runner-up is as near as the test wants.
    noise = torch.randn(view.rows.shape, generator=torch.Generator().manual_seed(seed + 1))
    view.rows = torch.cat([view.rows, view.rows + nearness * noise])
    logits = (hidden.double() @ view.rows.double().T).topk(2, dim=1)
    best_two = logits.indices.numpy()
    # Nearer than this, float32 answers by how its sums happen to be ordered in one batch.
    clear = (logits.values[:, 0] - logits.values[:, 1] > 1e-3).numpy()
    for tokens in (greedy(view, hidden), best_two[:, 1], np.roll(best_two[:, 0], 1)):
        plain = Referee(view, screen=False).agrees(hidden, tokens)
        assert np.array_equal(plain, greedy(view, hidden) == tokens)
        screened = Referee(view, screen=True).agrees(hidden, tokens)
        assert np.array_equal(screened[clear], plain[clear])


@given(seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_what_the_screen_is_certain_of_is_so_in_double_precision(seed: int) -> None:
    view, hidden = _drawn(seed)
    logits = hidden.double() @ view.rows.double().T
    for rank in (0, 1, 5):
        tokens = logits.topk(6, dim=1).indices[:, rank]
        duel = _Duel(view)
        sure, rivals = _Screen(duel).search(hidden, tokens)
        assert not (sure & (rank > 0)).any()
        ahead = logits.gather(1, rivals[:, None]) > logits.gather(1, tokens[:, None])
        assert ahead[:, 0][duel.won(hidden, rivals, tokens)].all()
        won, lost = _Screen(duel).settle(hidden, tokens)
        assert not (won & (rank > 0)).any()
        assert not (lost & (rank == 0)).any()
        assert (won | lost).double().mean() > 0.95


@given(seed=st.integers(0, 2**31), screen=st.booleans())
@settings(max_examples=20, deadline=None)
def test_rivals_only_save_work(seed: int, screen: bool) -> None:
    view, hidden = _drawn(seed)
    best = greedy(view, hidden)
    tokens = np.where(np.arange(best.size) % 2 == 0, best, np.roll(best, 1))
    referee = Referee(view, screen=screen)
    rivals = np.random.default_rng(seed).integers(0, 3000, best.size)
    first = referee.agrees(hidden, tokens, rivals)
    assert np.array_equal(first, best == tokens)
    # What was found to win settles every "no" the next time, without the head.
    refuted = ~first
    view.asked = 0
    assert not referee.agrees(
        hidden[torch.from_numpy(refuted)], tokens[refuted], rivals[refuted]
    ).any()
    assert view.asked <= 0.05 * refuted.sum()


def test_clear_cases_do_not_meet_the_whole_head() -> None:
    view, hidden = _drawn(0)
    best = greedy(view, hidden)
    view.asked = 0
    assert Referee(view, screen=True).agrees(hidden, best).all()
    assert not Referee(view, screen=True).agrees(hidden, (best + 1) % 3000).any()
    assert view.asked < 0.1 * 2 * len(hidden)


@pytest.mark.parametrize("screen", [False, True])
def test_nothing_asked_nothing_answered(screen: bool) -> None:
    view, hidden = _drawn(0)
    found = Referee(view, screen=screen).agrees(hidden[:0], np.zeros(0, dtype=np.int64))
    assert found.shape == (0,)
    assert found.dtype == bool
