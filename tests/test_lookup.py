"""Guesses that are copied: known where the same words came before, trusted while they are right."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimmoe.engine.lead import Lead
from trimmoe.runtime.node.front.lookup import MOST, SHORTEST, Lookup

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def lead(whole_s: float = 0.0, guess_s: float = 1.0) -> Lead:
    """Where tokens take nothing, copies pay whatever they are right."""
    return Lead(guesses=16, guess_s=guess_s, whole_s=whole_s)


@given(TOKENS)
def test_a_guess_is_what_followed_the_same_tokens_last(ids: list[int]) -> None:
    lookup = Lookup()
    lookup.learn(ids)
    last = ids[-SHORTEST:]
    found = [ids[end] for end in range(SHORTEST, len(ids)) if ids[end - SHORTEST : end] == last]
    assert lookup.guess(ids, lead()) == (found[-1] if found else None)


@given(TOKENS, st.lists(st.integers(1, 5)))
def test_it_is_all_the_same_how_often_it_learns(ids: list[int], steps: list[int]) -> None:
    at_once, bit_by_bit, end = Lookup(), Lookup(), 0
    for step in steps:
        end += step
        bit_by_bit.learn(ids[:end])
    for each in (at_once, bit_by_bit):
        each.learn(ids)
    assert at_once.guess(ids, lead()) == bit_by_bit.guess(ids, lead())


def copying(lookup: Lookup, ids: list[int]) -> list[int]:
    """Positions that are guessed now, one after another."""
    made = []
    while (token := lookup.guess(ids, lead())) is not None:
        lookup.pending.add(len(ids))
        made.append(len(ids))
        ids = [*ids, token]
    return made


def test_more_is_guessed_while_it_is_right_and_less_where_it_was_wrong() -> None:
    ids = [1, 2, 3, 4, 5] * 4
    lookup = Lookup()
    lookup.learn(ids)
    made = copying(lookup, ids)
    assert made == [20]
    for _ in range(20):
        for position in made:
            lookup.checked(position, right=True)
        made = copying(lookup, ids)
    assert len(made) == MOST
    lookup.checked(made[0], right=False)
    assert 0 < len(copying(lookup, ids)) < MOST


def test_what_was_wrong_again_and_again_needs_more_of_the_same() -> None:
    lookup = Lookup()
    short = [9, 8, 1, 2, 3, 4, 7, 6, 5, 1, 2, 3]
    lookup.learn(short)
    for position in range(100, 103):
        lookup.pending.add(position)
        lookup.checked(position, right=False)
    assert lookup.guess(short, lead()) is None
    long = [*range(20, 32), 40, *range(20, 32)]
    lookup = Lookup(trust=0)
    lookup.learn(long)
    assert lookup.guess(long, lead()) == 40


def test_nothing_is_copied_where_own_guesses_are_expected_sooner() -> None:
    """A wrong guess costs a second, and the own pass is right nine times of ten. It takes 10 ms for
    a token, or half a second, when there is more to gain by what takes no time."""
    ids = [9, 8, 1, 2, 3, 4, 7, 6, 5, 1, 2, 3]
    lookup = Lookup()
    lookup.learn(ids)
    assert lookup.guess(ids, lead(1.0, 0.01)) is None
    assert lookup.guess(ids, lead(1.0, 0.5)) == 4


def test_a_text_tells_how_often_it_goes_on_as_before() -> None:
    """Of a prompt that repeats itself all was right, without one guess; of one that never goes on
    as before nothing, and then of one that does."""
    repeats, differs = Lookup(), Lookup()
    repeats.learn([1, 2, 3, 4, 5] * 12)
    assert repeats.long.chance > 0.98
    changing = [token for at in range(40) for token in (1, 2, 3, 10 + at)]
    differs.learn(changing)
    assert differs.short.chance < 0.05
    assert differs.guess([*changing, 1, 2, 3], lead(1.0, 0.1)) is None
    same = [token for _ in range(40) for token in (1, 2, 3, 4)]
    differs.learn(changing + same)
    assert differs.guess([*changing, *same, 1, 2, 3], lead(1.0, 0.1)) == 4
