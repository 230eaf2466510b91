"""How often a draft head is right, by what it says: measured in one figure, the rest by law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimmoe.core.specs import MOST_DRAFTED
from trimmoe.cost.batching import NAMING_SHARE, chains_s
from trimmoe.cost.head_law import (
    chance_right,
    named_by_step,
    right_among,
    rows_among,
    tokens_among,
)

SHARES = st.floats(0.05, 0.99)


@given(right=SHARES)
def test_of_all_first_drafts_as_many_are_right_as_were_measured(right: float) -> None:
    evenly = (np.arange(20_000) + 0.5) / 20_000
    assert chance_right(evenly, right).mean() == pytest.approx(right, abs=2e-3)
    assert right_among(0.0, right) == pytest.approx(right)


@given(right=SHARES, least=st.floats(0.0, 0.99))
def test_of_those_that_are_likely_enough_more_are(right: float, least: float) -> None:
    evenly = least + (1.0 - least) * (np.arange(20_000) + 0.5) / 20_000
    assert right_among(least, right) == pytest.approx(chance_right(evenly, right).mean(), abs=2e-3)
    assert right_among(least, right) >= right - 1e-12


def test_a_head_that_is_always_right_is_so_whatever_it_says() -> None:
    assert chance_right(np.array([0.01, 0.5, 1.0]), 1.0).tolist() == [1.0] * 3
    assert right_among(0.5, 1.0) == 1.0


@given(right=SHARES)
@settings(max_examples=15, deadline=None)
def test_rows_names_and_tokens_are_those_of_chains_that_are_drawn(right: float) -> None:
    least, draws = (0.1, 0.3, 0.6, 0.9), np.random.default_rng(0).random((2, 20_000, MOST_DRAFTED))
    likely = draws[0].cumprod(axis=1)[None] >= np.array(least)[:, None, None]
    kept = (draws[1] < chance_right(draws[0], right)).cumprod(axis=1) * likely
    rows, tokens = 1 + likely.sum(axis=2).mean(axis=1), 1 + kept.sum(axis=2).mean(axis=1)
    named = 1 + likely[:, :, :-1].sum(axis=2).mean(axis=1)
    assert [rows_among(each) for each in least] == pytest.approx(rows, abs=0.03)
    assert [sum(named_by_step(each)) for each in least] == pytest.approx(named, abs=0.03)
    assert tokens_among(least, right) == pytest.approx(tokens, abs=0.03)


def test_where_any_draft_will_do_all_are_read() -> None:
    assert rows_among(0.0) == pytest.approx(1.0 + MOST_DRAFTED)
    assert rows_among(1.0) == sum(named_by_step(1.0)) == 1.0
    assert tokens_among([0.0], 1.0) == pytest.approx([1.0 + MOST_DRAFTED], abs=0.05)


@given(least=st.sampled_from((0.1, 0.3, 0.6)), chains=st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_a_head_takes_each_step_once_for_all_chains_that_go_so_far(
    least: float, chains: int
) -> None:
    """And for each of them what a further row takes; chains go on while drafts are likely."""
    given_s = np.random.default_rng(0).random((20_000, chains, MOST_DRAFTED - 1))
    goes_on = given_s.cumprod(axis=2) >= least
    steps = 1 + goes_on.any(axis=1).sum(axis=1)
    named = chains + goes_on.sum(axis=(1, 2))
    taken_s = 0.5 * (NAMING_SHARE * steps + (1.0 - NAMING_SHARE) * named).mean()
    assert chains_s(0.5, named_by_step(least), chains) == pytest.approx(taken_s, rel=0.02)
