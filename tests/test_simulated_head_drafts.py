"""What a draft head names in simulations: chains that are as likely as they have to be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimmoe.core.specs import MOST_DRAFTED
from trimmoe.cost.head_law import right_among
from trimmoe.engine.guesses import DraftsAlong
from trimmoe.simulator.head_drafts import HeadDrafts
from trimmoe.simulator.world import RIGHT, UNSURE, WRONG

REQUESTS = np.arange(400)
HERE = np.zeros(REQUESTS.size, dtype=np.int64)


def drafts(*, right: float = 0.7, most: int = MOST_DRAFTED, likely: float = 0.25) -> HeadDrafts:
    along = DraftsAlong(most=np.array([most]), likely=np.array([likely]), idle=np.zeros(1, bool))
    made = HeadDrafts(seed=0, right=right, along=along)
    for request in REQUESTS.tolist():
        made.open(request)
    return made


def drafted(head: HeadDrafts, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Fates and counts of so many tokens of every request, [n, tokens] each."""
    each = [head.drafted(REQUESTS, np.full(REQUESTS.size, at), HERE) for at in range(tokens)]
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
    again = head.drafted(REQUESTS, np.full(REQUESTS.size, 4), HERE)
    np.testing.assert_array_equal(first[0][:, 4], again[0])
    np.testing.assert_array_equal(first[1][:, 4], again[1])
    right = head.is_right(REQUESTS, np.full(REQUESTS.size, 4))
    np.testing.assert_array_equal(right, first[0][:, 4] == RIGHT)


def test_where_none_may_be_read_along_none_is_named() -> None:
    fates, counts = drafted(drafts(most=0), 5)
    assert (fates == UNSURE).all()
    assert not counts.any()
