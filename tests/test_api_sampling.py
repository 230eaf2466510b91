"""Drawing tokens: greedy at temperature 0, the nucleus's mass, and numbers that come again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trimmoe.runtime.processors import shaped
from trimmoe.runtime.sampling import Sampling, choose, draw, uniform
from trimmoe.runtime.seen import UNKNOWN, Seen

_LOGITS = arrays(np.float32, st.integers(1, 40), elements=st.floats(-20, 20, width=32))
_SEEDS = st.integers(-(2**63), 2**63 - 1)
_NUMBERS = st.floats(0, 1, exclude_max=True)


def _probabilities(logits: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.from_numpy(logits).double(), dim=-1).numpy()


def _drawn(probabilities: np.ndarray, sampling: Sampling, count: int) -> list[int]:
    """What numbers spread evenly over [0, 1) draw."""
    return [choose(probabilities, sampling, (i + 0.5) / count) for i in range(count)]


@given(
    st.lists(st.integers(-60, 60), min_size=1, max_size=30, unique=True),
    st.integers(0, 40),
    st.floats(0.05, 1),
    st.floats(0, 1),
)
def test_what_may_be_drawn_is_what_transformers_lets_through(
    scores: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    """Most probable, nucleus, share of the best, in this order."""
    logits = torch.tensor([scores], dtype=torch.float64) / 10
    ours = Sampling(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    theirs = LogitsProcessorList([TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)])
    if top_k:
        theirs.insert(0, TopKLogitsWarper(top_k))
    nothing: Any = torch.zeros(1, 1, dtype=torch.long)
    through: Any = theirs(nothing, cast(Any, logits))
    allowed = torch.isfinite(through)[0].numpy()
    probabilities = torch.softmax(logits[0], dim=-1).numpy()
    within = probabilities * allowed / (probabilities * allowed).sum()
    share = np.bincount(_drawn(probabilities, ours, 499), minlength=within.size) / 499
    # A token on the very edge of the nucleus may fall to either side by rounding.
    edge = np.abs(np.cumsum(np.sort(probabilities)[::-1]) - top_p).min() < 1e-9
    assert edge or np.abs(share - within).max() <= 2 / 499


@given(_LOGITS, _SEEDS, st.integers(0, 10_000))
def test_temperature_0_takes_the_most_probable_token(
    logits: np.ndarray, seed: int, position: int
) -> None:
    token = draw(torch.from_numpy(logits), Sampling(temperature=0, seed=seed), position).token
    assert logits[token] == logits.max()


@given(_LOGITS, st.floats(0.01, 1), _NUMBERS)
def test_what_is_drawn_lies_in_the_smallest_set_that_holds_top_p(
    logits: np.ndarray, top_p: float, number: float
) -> None:
    probabilities = _probabilities(logits)
    token = choose(probabilities, Sampling(top_p=top_p), number)
    more_probable = probabilities[probabilities > probabilities[token]].sum()
    assert more_probable < top_p + 1e-9
    assert probabilities[token] > 0


@given(_LOGITS, st.floats(0.01, 1))
@example(np.zeros(20, dtype=np.float32), 0.5)
def test_a_token_of_the_nucleus_is_drawn_in_proportion_to_its_probability(
    logits: np.ndarray, top_p: float
) -> None:
    """Numbers spread evenly over [0, 1) meet each token as often as it is probable."""
    probabilities = _probabilities(logits)
    count = 997
    drawn = _drawn(probabilities, Sampling(top_p=top_p), count)
    share = np.bincount(drawn, minlength=probabilities.size) / count
    kept = np.where(share > 0, probabilities, 0)
    assert kept.sum() >= top_p - probabilities.size / count - 1e-9
    # Where top_p is met to the last digit, rounding decides whether one token more belongs to it.
    masses = np.cumsum(np.sort(probabilities)[::-1])
    possible = masses[np.searchsorted(masses, [top_p - 1e-6, min(top_p + 1e-6, masses[-1])])]
    assert min(np.abs(share - kept / mass).max() for mass in possible) <= 2 / count + 1e-6


@given(_SEEDS, st.integers(0, 100_000))
def test_a_number_depends_on_seed_stream_and_position_only(seed: int, position: int) -> None:
    sampling = Sampling(temperature=1.0, seed=seed)
    number = uniform(sampling, position)
    assert 0 <= number < 1
    assert uniform(replace(sampling, temperature=0.5, top_p=0.3), position) == number
    assert uniform(sampling, position + 1) != number
    assert uniform(replace(sampling, stream=1), position) != number


def test_numbers_of_one_seed_are_spread_evenly() -> None:
    numbers = [uniform(Sampling(seed=7), position) for position in range(4000)]
    share, _ = np.histogram(numbers, bins=10, range=(0, 1))
    # Five standard deviations of a binomial share.
    assert np.abs(share - 400).max() < 5 * np.sqrt(4000 * 0.1 * 0.9)


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])

    def share_of_best(temperature: float) -> float:
        sampling = Sampling(temperature=temperature, seed=1)
        return float(np.mean([draw(logits, sampling, at).token == 0 for at in range(600)]))

    cold, plain, hot = share_of_best(0.3), share_of_best(1.0), share_of_best(3.0)
    assert cold > plain > hot > 1 / 3 - 0.05
    assert plain == pytest.approx(float(torch.softmax(logits, 0)[0]), abs=0.07)


@given(_LOGITS, _SEEDS, st.floats(0, 1e-9, exclude_min=True), st.floats(0, 1))
@example(np.array([3, 2], np.float32), 0, 5e-324, 0.8)
def test_any_temperature_there_is_draws_a_token(
    logits: np.ndarray, seed: int, temperature: float, min_p: float
) -> None:
    """The least ones as 0 does, where no two tokens are next to equally probable."""
    plain = Sampling(seed=seed)
    drawn = draw(torch.from_numpy(logits), replace(plain, temperature=temperature, min_p=min_p), 7)
    assert logits[drawn.token] == pytest.approx(logits.max(), abs=1e-6)


def test_logprobs_are_reported_only_if_asked_for() -> None:
    logits = torch.tensor([0.5, 2.0, 1.0, -1.0])
    assert draw(logits, Sampling(), 0).logprob is None
    none = draw(logits, Sampling(logprobs=0), 0)
    assert none.top == ()
    two = draw(logits, Sampling(logprobs=2, temperature=0.7, seed=3), 0)
    expected = torch.log_softmax(logits, 0)
    assert two.logprob == pytest.approx(float(expected[two.token]))
    assert [token for token, _ in two.top] == [1, 2]
    assert [p for _, p in two.top] == pytest.approx(expected[[1, 2]].tolist())


_PROMPT, _ANSWER, _SIZE = [3, 1, 4], [1, 5, 5, 2], 8


@given(
    st.lists(st.integers(-60, 60), min_size=_SIZE, max_size=_SIZE, unique=True),
    st.floats(0.2, 3),
    st.dictionaries(st.integers(0, _SIZE - 1), st.floats(-100, 100), max_size=3),
    st.integers(0, 8),
)
def test_logits_change_as_transformers_changes_them(
    scores: list[int], penalty: float, bias: dict[int, float], least: int
) -> None:
    """Bias, repetition, least length, in this order, of the float32 logits."""
    logits = torch.tensor([scores], dtype=torch.float32) / 10
    stop = [2, 6]
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(penalty),
            MinNewTokensLengthLogitsProcessor(len(_PROMPT), least, stop),
        ]
    )
    if bias:
        each = [[[token], value] for token, value in bias.items()]
        theirs.insert(0, SequenceBiasLogitsProcessor(cast(Any, each)))
    ids: Any = torch.tensor([_PROMPT + _ANSWER])
    expected: Any = theirs(ids, cast(Any, logits.clone()))
    ours = Sampling(
        repetition_penalty=penalty,
        logit_bias=tuple(bias.items()),
        min_tokens=least,
        stop_ids=tuple(stop),
    )
    # What comes after the position, as when a guess is withdrawn, does not matter.
    seen = Seen(prompt=len(_PROMPT), tokens=[*_PROMPT, *_ANSWER, 7, 0])
    position = len(_PROMPT + _ANSWER)
    assert torch.equal(shaped(logits[0], ours, position, seen), expected[0])


def test_what_the_answer_has_loses_by_its_count_and_once() -> None:
    sampling = Sampling(frequency_penalty=0.5, presence_penalty=0.25)
    seen = Seen(prompt=len(_PROMPT), tokens=_PROMPT + _ANSWER)
    changed = shaped(torch.zeros(_SIZE), sampling, len(seen.tokens), seen)
    assert changed.tolist() == [0, -0.75, -0.75, 0, 0, -1.25, 0, 0]
    first = shaped(torch.zeros(_SIZE), sampling, len(_PROMPT), seen)
    assert not first.any()


def test_a_withdrawn_token_is_put_anew_and_gaps_are_filled_later() -> None:
    seen = Seen(prompt=2, tokens=[7, 8])
    seen.put(3, 1)
    assert (seen.at(2), seen.at(3), seen.at(9)) == (UNKNOWN, 1, UNKNOWN)
    seen.put(2, 5)
    seen.put(3, 6)
    assert (seen.before(3), seen.answer(4)) == ([7, 8, 5], [5, 6])


@given(
    _LOGITS,
    st.floats(0, 100, exclude_min=True) | st.just(5e-324) | st.just(1e308),
    st.sampled_from([0.0, 5e-324, 1.0]),
    st.sampled_from([0.0, 1e-9, 1.0]),
)
@example(np.zeros(3, dtype=np.float32), 5e-324, 1.0, 1e-9)
@example(np.array([-20.0, 20.0], dtype=np.float32), 5e-324, 1.0, 0.0)
def test_no_penalty_is_too_strong_for_a_draw(
    logits: np.ndarray, penalty: float, temperature: float, min_p: float
) -> None:
    """Whatever is asked for, there is a token, and servers go on."""
    asked = Sampling(temperature=temperature, min_p=min_p, repetition_penalty=penalty)
    seen = Seen(prompt=1, tokens=[0])
    scores = torch.from_numpy(logits)
    assert torch.isfinite(shaped(scores, asked, 1, seen)).all()
    assert draw(scores, asked, 1, seen).token in range(logits.size)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("min_p", [0.0, 0.5])
def test_logits_that_are_no_numbers_give_a_token_all_the_same(
    wrong: float, count: int, min_p: float
) -> None:
    logits = torch.tensor([0.5, 0.1, 0.2])
    logits[:count] = wrong
    asked = Sampling(temperature=1.0, min_p=min_p, top_p=0.9)
    assert draw(logits, asked, 1).token in range(3)
