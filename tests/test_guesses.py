"""Streams whose users' servers guess ahead: how long their tokens take. Times are computed by
hand: a token takes ten seconds to full depth and back, a guess one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimmoe.engine.guesses import Lead, Passed

WHOLE_S, GUESS_S = 10.0, 1.0
RIGHT, WRONG, NONE = (True, True), (True, False), (False, False)


def passed(tokens: list[tuple[bool, bool]], guesses: int) -> list[Passed]:
    """What comes of tokens of which the guess of what they predict was made, and right."""
    lead = Lead(guesses=guesses, guess_s=GUESS_S)
    return [lead.after(WHOLE_S, guessed=guessed, right=right) for guessed, right in tokens]


def intervals(tokens: list[tuple[bool, bool]], guesses: int) -> list[float]:
    return [one.interval_s for one in passed(tokens, guesses)]


def test_a_right_guess_saves_all_but_its_own_time() -> None:
    """The second is through at 11, a second after the first."""
    assert intervals([RIGHT, NONE, NONE], 1) == [1.0, 10.0, 10.0]


def test_no_more_go_ahead_than_may() -> None:
    """The third might set out at 2; the first is through at 10. The fourth waits for the second."""
    assert intervals([RIGHT, RIGHT, RIGHT, NONE], 1) == [1.0, 9.0, 1.0, 10.0]
    assert intervals([RIGHT, RIGHT, RIGHT, NONE], 2) == [1.0, 1.0, 8.0, 10.0]


def test_a_wrong_guess_saves_nothing_and_others_follow_it_in_vain() -> None:
    found = passed([RIGHT, WRONG, NONE], 3)
    assert [one.interval_s for one in found] == [1.0, 10.0, 10.0]
    assert [one.in_vain for one in found] == [0, 3, 0]


def test_no_more_are_in_vain_than_there_is_time_to_guess() -> None:
    lead = Lead(guesses=5, guess_s=4.0)
    assert lead.after(WHOLE_S, guessed=True, right=False).in_vain == 2


def test_a_guess_that_takes_longer_than_the_way_is_of_no_use() -> None:
    lead = Lead(guesses=5, guess_s=40.0)
    assert lead.after(WHOLE_S, guessed=True, right=True).interval_s == WHOLE_S


TOKENS = st.lists(
    st.tuples(st.floats(0.5, 20.0), st.sampled_from([RIGHT, WRONG, NONE])), max_size=20
)


@given(TOKENS, st.integers(1, 5), st.floats(0.0, 3.0))
def test_a_stream_takes_what_its_schedule_takes(
    tokens: list[tuple[float, tuple[bool, bool]]], guesses: int, guess_s: float
) -> None:
    """Against the schedule written down: when each sets out and is through."""
    lead = Lead(guesses=guesses, guess_s=guess_s)
    taken = [
        lead.after(whole_s, guessed=guessed, right=right).interval_s
        for whole_s, (guessed, right) in tokens
    ]
    out_s, through_s = [0.0], []
    for at, (whole_s, (guessed, right)) in enumerate(tokens):
        through_s.append(max([out_s[at] + whole_s, *through_s[-1:]]))
        following_s = through_s[at]
        if guessed and right:
            confirmed_s = through_s[at - guesses] if at >= guesses else 0.0
            following_s = min(following_s, max(out_s[at] + guess_s, confirmed_s))
        out_s.append(following_s)
    assert sum(taken) == pytest.approx(out_s[-1])
    assert all(one >= -1e-9 for one in taken)
    without_s = sum(whole_s for whole_s, _ in tokens)
    assert sum(taken) <= without_s + 1e-6 or not tokens
