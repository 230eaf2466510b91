"""What a draft head names in simulations: chains that are as likely as they have to be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimmoe.core.specs import MOST_DRAFTED
from trimmoe.core.trace import Trace
from trimmoe.cost.head_law import right_among
from trimmoe.engine.guesses import DraftsAlong
from trimmoe.simulator.feed import TraceFeed
from trimmoe.simulator.head_drafts import DrawnDrafts, HeadDrafts, RecordedDrafts, head_drafts
from trimmoe.simulator.world import RIGHT, UNSURE, WRONG
from worlds import small_world

REQUESTS = np.arange(400)
HERE = np.zeros(REQUESTS.size, dtype=np.int64)


@pytest.fixture
def tiny_trace() -> Trace:
    return small_world(0).trace


def drafts(*, right: float = 0.7, most: int = MOST_DRAFTED, likely: float = 0.25) -> HeadDrafts:
    along = DraftsAlong(most=np.array([most]), likely=np.array([likely]), idle=np.zeros(1, bool))
    made = DrawnDrafts(seed=0, first_right=right, along=along)
    for request in REQUESTS.tolist():
        made.open(request)
    return made


def drafted(head: HeadDrafts, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Fates and counts of so many tokens of every request, [n, tokens] each."""
    each = [
        head.drafted(REQUESTS, np.full(REQUESTS.size, at), HERE, REQUESTS) for at in range(tokens)
    ]
    fates, counts = zip(*each, strict=True)
    return np.stack(fates, axis=1), np.stack(counts, axis=1)


@given(likely=st.floats(0.05, 0.9))
def test_the_first_draft_is_read_along_as_often_as_it_is_likely_enough(likely: float) -> None:
    fates, counts = drafted(drafts(likely=likely), 1)
    assert (fates != UNSURE).mean() == pytest.approx(1.0 - likely, abs=0.1)
    assert ((counts > 0) == (fates != UNSURE)).all()


def test_it_is_right_as_often_as_the_law_says() -> None:
    fates, _ = drafted(drafts(likely=0.4), 1)
    right = (fates == RIGHT).sum() / (fates != UNSURE).sum()
    assert right == pytest.approx(right_among(0.4, 0.7), abs=0.07)


@given(most=st.integers(1, MOST_DRAFTED))
def test_no_chain_is_longer_than_it_may_be(most: int) -> None:
    fates, counts = drafted(drafts(right=0.95, most=most, likely=0.01), 40)
    assert counts.max() <= most
    longest = 0
    for row in (fates == RIGHT).tolist():
        run = 0
        for hit in row:
            run = run + 1 if hit else 0
            longest = max(longest, run)
    assert longest == most


def test_the_rows_behind_a_wrong_draft_are_those_that_were_named_with_it() -> None:
    fates, counts = drafted(drafts(), 1)
    wrong = counts[fates == WRONG]
    assert wrong.min() == 1
    assert wrong.max() > 1


def test_what_is_asked_again_is_told_again() -> None:
    head = drafts()
    first = drafted(head, 6)
    again = head.drafted(REQUESTS, np.full(REQUESTS.size, 4), HERE, REQUESTS)
    np.testing.assert_array_equal(first[0][:, 4], again[0])
    np.testing.assert_array_equal(first[1][:, 4], again[1])
    right = head.is_right(REQUESTS, np.full(REQUESTS.size, 4))
    np.testing.assert_array_equal(right, first[0][:, 4] == RIGHT)


def test_where_none_may_be_read_along_none_is_named() -> None:
    fates, counts = drafted(drafts(most=0), 5)
    assert (fates == UNSURE).all()
    assert not counts.any()


@given(most=st.integers(0, MOST_DRAFTED), likely=st.sampled_from([0.05, 0.3, 0.6]))
def test_what_was_recorded_is_named(most: int, likely: float) -> None:
    """Chains begin behind tokens that no draft was right about, and are those of these tokens."""
    rng = np.random.default_rng(5)
    chances = np.cumprod(rng.uniform(0.3, 1.0, (40, MOST_DRAFTED)), axis=1).astype(np.float64)
    wrong = np.logical_or.accumulate(rng.random((40, MOST_DRAFTED)) < 0.3, axis=1)
    along = DraftsAlong(most=np.array([most]), likely=np.array([likely]), idle=np.zeros(1, bool))
    head = RecordedDrafts(along=along, chances=chances, wrong=wrong)
    head.open(0)
    one, here = np.array([0]), np.array([0])
    begun, ahead = 0, 0
    for at in range(40):
        if not ahead:
            begun = at
        (fate,), (count,) = head.drafted(one, np.array([at]), here, np.array([at]))
        named = min(int((chances[begun] >= likely).sum()), most)
        assert count == max(named, ahead)
        if named <= ahead:
            assert fate == UNSURE
        else:
            assert fate == (WRONG if wrong[begun, ahead] else RIGHT)
        ahead = ahead + 1 if fate == RIGHT else 0


def test_a_trace_without_drafts_is_played_by_the_law(tiny_trace: Trace) -> None:
    along = DraftsAlong.none(1)
    assert tiny_trace.drafted_wrong is None
    found = head_drafts(tiny_trace, along, seed=3, first_right=0.7)
    assert found == DrawnDrafts(along=along, seed=3, first_right=0.7)
    chances = np.full((tiny_trace.token_count, MOST_DRAFTED), 0.5, dtype=np.float16)
    known = replace(tiny_trace, drafted_chance=chances, drafted_wrong=chances > 1)
    assert isinstance(head_drafts(known, along, seed=3, first_right=0.7), RecordedDrafts)
    assert TraceFeed(trace=known).first_right == 1.0
    assert TraceFeed(trace=tiny_trace).first_right is None
