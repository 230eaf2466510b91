"""Streams whose users' servers guess ahead: how long their tokens take. Times are computed by
hand: a token takes ten seconds to full depth and back, a guess one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimmoe.core.ledger import Ledger
from trimmoe.core.specs import BATCHES, MOST_DRAFTED, straight_times
from trimmoe.cost.batching import NAMING_SHARE, TOKEN_SHARE, batch_s, shared_s
from trimmoe.cost.crowd import LEAST, WORTH, Crowd, along_times_s, crowds
from trimmoe.cost.guessing import (
    ROWS,
    guess_times_s,
    row_times_s,
    stream_share,
    token_batch_times,
    window,
)
from trimmoe.cost.head_law import right_among
from trimmoe.cost.model import Accounting, CostModel
from trimmoe.engine.guesses import GuessRules
from trimmoe.engine.lead import DRAFT_MODEL, HEAD, OWN, Chunks, Lead, Passed, Source
from trimmoe.policy.presets import PRESETS
from trimmoe.runtime.node.compute.pace import GuessPace

WHOLE_S, GUESS_S = 10.0, 1.0
SHARES = st.floats(0.0, 1.0)
TIMES = st.floats(1e-3, 1e3)
RIGHT, WRONG, NONE = (True, True), (True, False), (False, False)
TEN_APART = np.array([[0.0, 10.0], [10.0, 0.0]])
"""Two servers, seconds."""


def priced(expert_s: np.ndarray, dense_s: np.ndarray | None = None, **others) -> CostModel:
    """Servers that take so long for experts [M, N, E], and no time for what else is not said."""
    servers = expert_s.shape[0]
    nothing: dict[str, Any] = {
        "transfer_s": np.zeros((servers, servers)),
        "token_transfer_s": np.zeros((servers, servers)),
        "hidden_bytes": 8,
        "dense_s": np.zeros(expert_s.shape[:2]) if dense_s is None else dense_s,
        "waiting_s": np.zeros(servers),
        "accounting": Accounting.PINNED,
    }
    return CostModel(expert_s=expert_s, **(nothing | others))


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


@pytest.mark.parametrize(
    ("turn", "source", "guess_s"),
    [
        (OWN, OWN, GUESS_S),
        (OWN, DRAFT_MODEL, 3.0),
        (DRAFT_MODEL, OWN, GUESS_S),
        # What was copied from before is taken to take as long as whose turn it is.
        (OWN, None, GUESS_S),
        (DRAFT_MODEL, None, 3.0),
    ],
)
def test_a_guess_takes_as_long_as_whoever_made_it(
    turn: int, source: int | None, guess_s: float
) -> None:
    """A guess of the draft model takes three seconds."""
    lead = Lead(guesses=1, guess_s=GUESS_S, others_s=(3.0,), turn=turn)
    after = lead.after(WHOLE_S, guessed=True, right=True, source=source)
    assert after.interval_s == guess_s


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


def test_as_many_go_ahead_as_are_likely_to_be_right() -> None:
    """0.9 to the sixth is 0.53, to the seventh 0.48."""
    assert window(0.9, 0.5, 16) == 6
    assert window(0.9, 0.5, 4) == 4
    assert window(0.5, 0.5, 16) == 1
    assert window(0.4, 0.5, 16) == 0
    assert window(1.0, 0.5, 16) == 16
    assert window(0.1, 0.0, 16) == 16


@given(st.floats(0.01, 0.999), st.floats(0.001, 0.999), st.integers(0, 40))
def test_one_more_would_be_too_many(chance: float, least: float, most: int) -> None:
    room = window(chance, least, most)
    assert 0 <= room <= most
    assert room == 0 or chance**room >= least * (1 - 1e-6)
    assert room == most or chance ** (room + 1) < least * (1 + 1e-6)


def test_the_window_follows_what_was_right_lately() -> None:
    lead = Lead(guesses=60, guess_s=GUESS_S, least=0.15)
    rooms = [lead.window]
    for right in (True, False):
        for _ in range(60):
            lead.after(WHOLE_S, guessed=True, right=right)
        rooms.append(lead.window)
    first, sure, wrong = rooms
    assert first < sure
    assert wrong == 0


def test_a_source_that_rests_is_soon_thought_of_as_at_first() -> None:
    """0.9 less a twentieth of it is 0.855, and a hundredth of what that lacks is given back; one
    that was right, 0.9 + 0.05 (1 - 0.9), keeps what it has."""
    wrong, right = Source(guess_s=GUESS_S), Source(guess_s=GUESS_S)
    wrong.learn(False)
    right.learn(True)
    assert (wrong.chance, right.chance) == pytest.approx((0.855, 0.905))
    wrong.rest()
    right.rest()
    assert (wrong.chance, right.chance) == pytest.approx((0.855 + 0.01 * 0.045, 0.905))


def test_a_chunk_takes_the_way_its_guesses_and_their_rows_once() -> None:
    """Two guesses a chunk, of 1 + 0.5 s each: 10 + 2 x 1.5 = 13 for a token and both, if they are
    right. Where the first is wrong both were in vain, where the second is that one."""
    stream = Chunks(guesses=2, guess_s=GUESS_S, row_s=0.5)
    told = [RIGHT, RIGHT, RIGHT, WRONG, RIGHT, WRONG, NONE]
    found = [stream.after(WHOLE_S, guessed=guessed, right=right) for guessed, right in told]
    assert [one.interval_s for one in found] == [13.0, 0.0, 0.0, 13.0, 13.0, 0.0, 13.0]
    assert [one.in_vain for one in found] == [0, 0, 0, 2, 0, 1, 2]


def test_nothing_is_guessed_where_a_guess_takes_no_less_than_a_token_on_its_way() -> None:
    """Three layers of one second each. The last of user 0's is on server 1, 10 s away, so that its
    tokens take 13 s, user 1's stay at home for 3. Half of the time route 0 is busy, a quarter of
    it with the other one of two streams, which is more than a chance of 0.15."""
    cost = priced(
        np.full((2, 3, 2), 1e-3), token_transfer_s=TEN_APART, guess_s=np.array([12.0, 2.9])
    )
    rules = GuessRules(
        settings=replace(PRESETS["auto"](), guess_chance=0.15),
        cost=cost,
        routes=np.array([[0, 0, 1], [1, 1, 1]]),
        reference_s=1.0,
        busy=np.array([0.5, 0.0]),
        top_k=1,
    )
    assert rules.least_among(2).tolist() == [0.25, 0.15]
    assert rules.least_among(4).tolist() == [0.375, 0.15], "three quarters of it with others"
    for guess_s, least in (([13.0, 2.9], [np.inf, 0.15]), ([12.0, 3.0], [0.25, np.inf])):
        slow = replace(rules, cost=replace(cost, guess_s=np.array(guess_s)))
        assert slow.least_among(2).tolist() == least


@pytest.mark.parametrize("below", [0.75, None])
def test_nothing_is_guessed_where_answers_under_way_would_fill_a_machine(
    below: float | None,
) -> None:
    """Three layers, whose experts take a second each. A token of route 0 has server 0 at work for 2
    of the 13 s that it takes with its way: 3/4 of it is 3/4 x 13/2 = 4.875 answers' work. One of
    route 1 has server 1 at work all the time: that is 3/4 of an answer."""
    cost = priced(np.ones((2, 3, 2)), token_transfer_s=TEN_APART, guess_s=np.ones(2))
    rules = GuessRules(
        settings=replace(PRESETS["speculative"](), guess_chance=0.15, guess_below=below),
        cost=cost,
        routes=np.array([[0, 0, 1], [1, 1, 1]]),
        reference_s=1.0,
        busy=np.zeros(2),
        top_k=1,
    )
    if below is None:
        assert rules.streams.tolist() == [np.inf, np.inf]
        assert rules.least_among(100).tolist() == [0.15, 0.15]
        return
    assert rules.streams.tolist() == pytest.approx([4.875, 0.75])
    assert rules.least_among(4).tolist() == [0.15, np.inf]
    assert rules.least_among(5).tolist() == [np.inf, np.inf]


def test_what_a_guess_costs_is_booked_with_its_token() -> None:
    """Two tokens set out behind it in vain, and are taken to send as much as it does."""
    whole = replace(Ledger.empty(1, 2, 8), messages=np.array([[0, 3], [1, 0]]), delay_s=WHOLE_S)
    booked = Passed(interval_s=4.0, in_vain=2).booked(whole)
    assert booked.messages.tolist() == [[0, 9], [3, 0]]
    assert booked.delay_s == 4.0


def test_a_guess_takes_attention_and_the_mean_experts_of_all_layers() -> None:
    """Two layers, k = 2: (1 + 2 x 3) + (2 + 2 x 6) on server 0, half of that on server 1."""
    expert_s = np.array([[[2.0, 4.0], [5.0, 7.0]]])
    dense_s = np.array([[1.0, 2.0]])
    cost = priced(np.concatenate([expert_s, expert_s / 2]), np.concatenate([dense_s, dense_s / 2]))
    assert guess_times_s(cost, 2).tolist() == [21.0, 10.5]


def test_a_stream_takes_its_share_of_the_fullest_machine() -> None:
    """Server 0 has a machine to itself, 1 and 2 share one that can do one and a half servers' work.
    k = 2. A token is under way for 40 s: of the first machine it takes 1 + 2 x 3 = 7, of the other
    14 + 7 = 21, two thirds of which count; or all three layers at home."""
    cost = priced(
        np.array([3.0, 6.0, 3.0])[:, None, None] * np.ones((3, 3, 4)),
        np.array([1.0, 2.0, 1.0])[:, None] * np.ones((3, 3)),
        busy=np.array([0.3, 0.6, 0.9]),
        machine=np.array([0, 1, 1]),
        at_once=np.array([1.0, 1.5, 1.5]),
    )
    routes = np.array([[0, 1, 2], [0, 0, 0]])
    shares = stream_share(cost, routes, 2, np.array([40.0, 42.0]))
    assert shares.tolist() == pytest.approx([21 / 1.5 / 40, 21 / 42])
    # The first route's token comes to server 1 and to server 2, who take it in.
    told = replace(cost, apart_s=np.array([4.0, 2.0, 1.0]))
    shares = stream_share(told, routes, 2, np.array([40.0, 42.0]))
    assert shares.tolist() == pytest.approx([24 / 1.5 / 40, 21 / 42])
    assert cost.occupancy.tolist() == pytest.approx([0.3, 1.0, 1.0])


def test_tokens_of_a_batch_read_experts_of_their_own() -> None:
    """Where rows are free two tokens use three of four experts, of which each uses two."""
    cost = priced(np.ones((1, 1, 4)), batch_times=straight_times(1.0))
    assert token_batch_times(cost, 2) == pytest.approx([2.0 * (1 - 0.5**n) for n in BATCHES])
    half = replace(cost, dense_s=np.full((1, 1), 2.0))
    assert token_batch_times(half, 2)[1] == pytest.approx((1.0 + 1.5) / 2)


@given(share=SHARES, experts=st.integers(1, 64), dense_s=TIMES, data=st.data())
def test_a_batch_of_tokens_takes_no_less_than_through_the_same_weights_nor_more_than_one_by_one(
    share: float, experts: int, dense_s: float, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    given = {"dense_s": np.full((2, 3), dense_s), "batch_times": straight_times(share)}
    times = token_batch_times(priced(np.ones((2, 3, experts)), **given), top_k)
    assert times[0] == pytest.approx(1.0)
    for rows, least, taken in zip(BATCHES, straight_times(share), times, strict=True):
        assert least <= taken * (1 + 1e-9) <= rows * (1 + 2e-9)
    if top_k == experts:
        assert times == pytest.approx(straight_times(share))
    assert (
        token_batch_times(priced(np.zeros((1, 1, 2))), 1) == priced(np.zeros((1, 1, 2))).batch_times
    )


def test_one_more_row_takes_a_tenth_of_the_layers_and_its_vectors_way() -> None:
    """Three layers of 1 s; from server 0 to 1 a vector takes 12 s, of which 10 go by without it."""
    cost = priced(
        np.ones((2, 3, 2)),
        transfer_s=np.array([[0.0, 12.0], [11.0, 0.0]]),
        token_transfer_s=TEN_APART,
    )
    found = row_times_s(cost, np.array([[0, 0, 1], [1, 1, 1]]), top_k=1)
    assert found.tolist() == pytest.approx([2.0 + 0.3, 0.3])


def test_a_source_is_expected_to_take_its_chance_and_whole_passes_otherwise() -> None:
    """Four may be ahead: 10 / 5 = 2 s where it is right, 0.9 x 2 + 0.1 x 10 = 2.8."""
    source = Source(guess_s=GUESS_S)
    assert source.interval_s(WHOLE_S, least=0.0, most=4) == pytest.approx(2.8)


def test_a_source_gets_chance_back_while_another_one_guesses() -> None:
    """0.5 + 0.01 (0.9 - 0.5) of the draft model; the own pass was right once more."""
    lead = Lead(guesses=1, guess_s=GUESS_S, others_s=(3.0,))
    lead.sources[DRAFT_MODEL].chance = 0.5
    lead.after(WHOLE_S, guessed=True, right=True)
    assert [each.chance for each in lead.sources] == pytest.approx([0.905, 0.504])
    lead.after(WHOLE_S, guessed=False, right=False)
    assert [each.chance for each in lead.sources] == pytest.approx([0.905, 0.50796])


@pytest.mark.parametrize(
    ("whole_s", "guess_s", "together"),
    [
        (0.0, 1.0, 1),
        (10.0, 5.0, 1),
        (10.0, 2.5, 2),
        (100.0, 9.0, 3),
        (100.0, 1.0, 4),
        (1.0, 0.0, 1),
    ],
)
def test_guesses_wait_for_those_upon_them_for_a_quarter_of_a_tokens_way(
    whole_s: float, guess_s: float, together: int
) -> None:
    """And never for more than a compiled layer takes at once."""
    assert Lead(guesses=16, guess_s=guess_s, whole_s=whole_s).together == together


@pytest.mark.parametrize(
    ("whole_s", "guess_s", "far"), [(0.081, 0.01, True), (0.079, 0.01, False), (0.1, 0.0, False)]
)
def test_full_depth_is_far_if_a_token_takes_eight_guesses_time_there_and_back(
    whole_s: float, guess_s: float, far: bool
) -> None:
    assert Lead(guesses=16, guess_s=guess_s, whole_s=whole_s).is_far is far


CROWD = Crowd(
    whole_s=10.0, path_s=2.0, busiest_s=1.0, software_s=0.5, home_s=1.0, at_once=1.0,
    batch_times=straight_times(0.5),
)  # fmt: skip
"""Ten seconds of which two are computed; half of a row's time is a batch's."""


def test_a_draft_that_is_read_along_costs_a_row_of_those_layers() -> None:
    assert [CROWD.trip_s(rows) for rows in (1, 2, 5)] == [10.0, 11.0, 14.0]


def test_a_busy_machine_takes_as_long_as_it_has_rows_of_all_servers_users() -> None:
    """Twenty streams of two servers: batches of ten rows, and of twenty with a draft each."""
    crowd = CROWD.among(10, [10])
    assert crowd.trip_s() == 10.0 + 2.0 * 4.5
    software_s = [0.5 * (1 + further * (1.0 - TOKEN_SHARE)) for further in (9, 19)]
    assert CROWD.among(10, 19 * [10]).trip_s() == pytest.approx(20 * (software_s[0] + 5.5))
    assert CROWD.among(10, 19 * [10]).trip_s(2) == pytest.approx(20 * (software_s[1] + 10.5))


def test_a_head_takes_its_time_to_name_drafts() -> None:
    """Where the last layer is, and a batch's for ten streams; nothing where none is named."""
    crowd = replace(CROWD, naming_s=0.7, naming_there_s=0.07)
    assert crowd.trip_s() == CROWD.trip_s()
    named = (1.0, 1.0, 1.0)
    assert crowd.trip_s(2, named) == pytest.approx(CROWD.trip_s(2) + 3 * 0.7)
    full, among = CROWD.among(10, 19 * [10]), crowd.among(10, 19 * [10])
    ten = 1.0 + 9 * (1.0 - NAMING_SHARE)
    assert among.trip_s(2, named) == pytest.approx(full.trip_s(2) + 20 * ten * 3 * 0.07)
    assert crowd.along(0.8)[1] > CROWD.along(0.8)[1]
    assert replace(CROWD, naming_s=99.0).turn(0.8, np.inf) == (False, CROWD.trip_s())


@given(right=SHARES, here=st.integers(1, 40), groups=st.integers(1, 10), path_s=TIMES)
def test_nobody_waits_longer_for_drafts_than_without_any(
    right: float, here: int, groups: int, path_s: float
) -> None:
    """And the more often drafts are right the sooner the next token comes."""
    crowd = replace(CROWD, path_s=path_s, whole_s=path_s + 3.0).among(here, (groups - 1) * [here])
    least, along_s = crowd.along(right)
    assert least in LEAST
    along, best_s = crowd.turn(right, np.inf)
    assert along == (along_s < WORTH * crowd.trip_s())
    assert best_s == (along_s if along else crowd.trip_s())
    assert best_s <= crowd.trip_s()
    assert crowd.along(min(right + 0.1, 1.0))[1] <= along_s
    assert crowd.turn(0.0, np.inf) == (False, crowd.trip_s())


def test_the_more_streams_the_surer_a_draft_has_to_be() -> None:
    found = [CROWD.among(here, [here]).along(0.8)[0] for here in (1, 4, 16, 64)]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_where_every_row_is_as_dear_as_the_first_drafts_are_worth_nothing_or_nearly() -> None:
    rows_are_dear = replace(CROWD, batch_times=straight_times(0.0), software_s=0.0).among(
        10, 19 * [10]
    )
    assert rows_are_dear.along(0.8)[0] == max(LEAST)
    assert not rows_are_dear.turn(0.5, np.inf)[0]


def test_prompts_that_are_read_meanwhile_take_their_time_whatever_is_drafted() -> None:
    """Two hundred streams: for each token two rows of prompts, in chunks of four, of which one
    takes (1 + 4) / 2 / 4 of what a row takes by itself. Drafts save less of a token's time then."""
    crowd = CROWD.among(10, 19 * [10])
    reads = crowd.reading(2.0, 4.0)
    read_s = 199 * 2 * 2.5 / 4
    assert reads.trip_s() == pytest.approx(crowd.trip_s() + read_s)
    assert reads.trip_s(2.0, (), 1.5) == pytest.approx(crowd.trip_s(2.0) + 1.5 * read_s)
    few = CROWD.among(20, [20])
    assert few.turn(0.9, np.inf)[0]
    assert not few.reading(60.0, 4.0).turn(0.9, np.inf)[0]
    alone, two = CROWD.reading(20.0, 4.0), CROWD.among(1, [1]).reading(20.0, 4.0)
    assert alone.trip_s() == CROWD.trip_s(), "a stream by itself has read its prompt"
    own_s = [each.own_s(1.0, 0.25, 0.15, 16) for each in (CROWD, alone, two)]
    assert own_s == pytest.approx([1.5, 1.5, 2 * 1.5 + 20 * 2.5 / 4])


def test_there_are_no_more_batches_under_way_than_servers() -> None:
    """Of whoever has one stream of forty, too, tokens pass with those of others."""
    few, many = CROWD.among(1, 3 * [13]), CROWD.among(10, 3 * [10])
    assert 3.0 < few.batches < many.batches == 4.0
    assert CROWD.among(1, 39 * [1]).trip_s() > many.trip_s() > few.trip_s()
    assert CROWD.among(1).batches == CROWD.among(1, [0, 0]).batches == 1.0


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_all_servers_users_see_the_same_batches_under_way(streams: list[int]) -> None:
    each = [CROWD.among(here, streams[:at] + streams[at + 1 :]) for at, here in enumerate(streams)]
    assert [one.batches for one in each] == pytest.approx([each[0].batches] * len(streams))
    assert 1.0 - 1e-9 <= each[0].batches <= len(streams) + 1e-9


@pytest.mark.parametrize("streams", [1, 2, 4, 8, 9, 32, 1000])
def test_at_home_drafts_are_read_along_where_they_are_worth_it_or_few_streams_are_under_way(
    streams: int,
) -> None:
    few = max(min(ROWS // streams - 1, MOST_DRAFTED), 0)
    cheap = replace(CROWD, batch_times=straight_times(1.0), software_s=0.0).among(streams)
    assert cheap.along(1.0)[1] < WORTH * cheap.trip_s()
    assert cheap.drafts_at_home(1.0) == MOST_DRAFTED
    # Rows that cost what they bring, but for one part in a hundred.
    hardly = replace(
        cheap, whole_s=1.0, path_s=0.99, busiest_s=0.5, batch_times=straight_times(0.0)
    )
    assert hardly.along(1.0)[1] > WORTH * hardly.trip_s()
    assert hardly.drafts_at_home(1.0) == few


def test_of_many_streams_at_home_none_has_drafts_read_along_that_cost_more() -> None:
    lead = headed(crowd=replace(CROWD, naming_s=99.0).among(32))
    lead.sources[OWN].able = False
    lead.choose()
    assert (lead.turn, lead.along) == (OWN, 0)


def test_drafts_are_read_along_unless_own_guesses_bring_the_next_token_sooner() -> None:
    along_s = CROWD.along(0.8)[1]
    assert CROWD.turn(0.8, 2.0 * along_s) == CROWD.turn(0.8, np.inf) == (True, along_s)
    assert CROWD.turn(0.8, 0.5 * along_s) == (False, 0.5 * along_s)
    hardly_s = (1 + WORTH) / 2 * along_s
    assert CROWD.turn(0.8, hardly_s) == (True, along_s), "that is not worth its machine's time"


def test_guesses_on_a_machine_that_computes_all_the_rest_too_take_it_their_time() -> None:
    """Forty streams of four servers: four batches of ten, and a second for their guesses each."""
    apart = CROWD.among(10, 3 * [10])
    shared = replace(apart, guesses_there=True)
    assert shared.own_s(1.0, 1.0, 0.15, 16) == pytest.approx(apart.own_s(1.0, 1.0, 0.15, 16) + 4.0)


def test_own_guesses_take_their_server_its_time_and_are_none_where_none_is_allowed() -> None:
    assert CROWD.own_s(1.0, 0.25, 0.15, 16) == 1.5, "the machine computes a second, software half"
    assert CROWD.own_s(1.0, 5.0, 0.15, 16) == 6.0, "a guess after what the token takes there"
    assert CROWD.own_s(0.5, 1.0, 0.15, 16) == 0.5 * 10.0 / 3 + 5.0
    assert np.isinf(CROWD.own_s(1.0, 0.1, np.inf, 16))


@given(
    path_s=TIMES, others_s=TIMES, share=SHARES, right=SHARES, messages_s=st.floats(0.0, 1.0),
)  # fmt: skip
def test_plans_expect_of_a_stream_by_itself_what_servers_do(
    path_s: float, others_s: float, share: float, right: float, messages_s: float
) -> None:
    layers_s = np.full((1, 2, 1), path_s / 2)
    token_s = np.array([messages_s])
    dense_s = np.array([[messages_s, 0.0]])
    cost = priced(
        layers_s,
        dense_s=dense_s,
        token_s=token_s,
        batch_times=straight_times(share),
        head_right=right,
    )
    routes, whole_s = np.zeros((1, 2), dtype=np.int64), np.array([path_s + messages_s + others_s])
    (crowd,) = crowds(cost, routes, whole_s, 1)
    planned_s = along_times_s(cost, routes, whole_s, 1)
    rows = 1 + MOST_DRAFTED
    software_s = shared_s(crowd.software_s, rows, TOKEN_SHARE)
    machine_s = software_s + batch_s(crowd.busiest_s, rows, straight_times(share))
    expected_s = crowd.turn(right, np.inf)[1]
    assert planned_s[0] == pytest.approx(expected_s) or machine_s > whole_s[0]
    assert planned_s[0] <= whole_s[0]


def headed(**changes: Any) -> Lead:
    """A stream with a draft head, whose own guesses take a second."""
    given: dict[str, Any] = {"guess_s": GUESS_S, "least": 0.15, "head": True, "crowd": CROWD}
    return Lead(guesses=16, **(given | changes))


def test_a_stream_takes_the_source_that_is_expected_to_be_sooner() -> None:
    lead = headed()
    assert lead.choose() == OWN, "three seconds, and some four of a head's"
    lead.pace_s = 9.0
    assert lead.choose() == HEAD
    assert lead.window == lead.along > 0
    assert headed(pace_s=9.0, least=np.inf).choose() == HEAD


def test_a_stream_guesses_nothing_where_nothing_ahead_brings_its_next_token_sooner() -> None:
    crowd = replace(CROWD, naming_s=99.0, guesses_there=True).among(10, 19 * [10])
    lead = headed(crowd=crowd)
    assert lead.choose() == OWN
    assert (lead.along, lead.least) == (0, np.inf)
    assert headed(crowd=replace(crowd, whole_s=1e6)).choose() == OWN


def test_a_head_is_judged_by_what_it_was_sure_of() -> None:
    """Of drafts that it says are right nine times in ten as many as the law says change nothing."""
    lead = headed(pace_s=99.0)
    lead.choose()
    lead.likely, before = 0.9, lead.drafts.chance
    for at in range(400):
        right = at % 100 < 100 * right_among(0.9, before)
        lead.after(WHOLE_S, guessed=True, right=right, source=HEAD)
    assert lead.drafts.chance == pytest.approx(before, abs=0.1)


def test_without_a_head_or_anything_known_of_others_it_is_its_own() -> None:
    for lead in (replace(headed(), head=False, pace_s=99.0), replace(headed(), crowd=None)):
        assert lead.choose() == OWN
        assert not lead.along


def test_whoever_has_the_turn_keeps_it_where_it_makes_hardly_a_difference() -> None:
    lead = headed()
    along_s = CROWD.along(lead.drafts.chance)[1]
    lead.pace_s = 0.98 * (along_s - CROWD.home_s)
    for before, kept in ((OWN, OWN), (HEAD, HEAD)):
        lead.turn = before
        assert lead.choose() == kept


@pytest.mark.parametrize(("unread", "left", "turn"), [(40, 20, HEAD), (40, 400, OWN), (1, 20, OWN)])
def test_own_guesses_take_over_from_a_head_where_they_make_up_for_what_is_to_be_read(
    unread: int, left: int, turn: int
) -> None:
    """They would have brought tokens sooner from the start."""
    lead = headed(turn=HEAD, pace_s=0.1, unread=(unread, 0), left=left)
    assert CROWD.reading_s(GUESS_S, 40) > 10.0
    assert lead.choose() == turn
    assert headed(pace_s=0.1, unread=(unread, 0), left=left).choose() == OWN, "at its beginning"


def test_streams_that_pass_in_one_batch_have_one_source_by_what_is_right_of_all_of_them() -> None:
    """One whose last drafts were wrong goes on with the others, and the other way round."""
    lead, good, bad = (headed(pace_s=9.0) for _ in range(3))
    bad.drafts.chance = 0.0
    assert bad.choose() == OWN
    assert bad.choose([good, bad, *(headed() for _ in range(9))]) == HEAD
    others = [headed() for _ in range(9)]
    for other in others:
        other.drafts.chance = 0.0
    assert lead.choose() == HEAD
    assert lead.choose([lead, *others]) == OWN


def test_what_is_guessed_for_several_streams_says_what_one_takes_by_itself() -> None:
    """Four streams' guesses take a batch half as long again as one stream's."""
    alone, together = (
        GuessPace(batch_times=straight_times(5 / 6)),
        GuessPace(batch_times=straight_times(5 / 6)),
    )
    for _ in range(100):
        alone.took(1.0, 1, 1)
        together.took(1.5, 4, 4)
    assert alone.token_s == together.token_s == pytest.approx(1.0)


def test_drafts_that_are_right_follow_one_another_at_once() -> None:
    """Two are read along: three tokens in ten seconds, then one that is not drafted."""
    lead = headed(pace_s=99.0)
    lead.choose()
    lead.along = 2
    found = [
        lead.after(WHOLE_S, guessed=guessed, right=right, source=HEAD if guessed else None)
        for guessed, right in (RIGHT, RIGHT, NONE, NONE)
    ]
    assert [one.interval_s for one in found] == [0.0, 0.0, 10.0, 10.0]
    wrong = lead.after(WHOLE_S, guessed=True, right=False, source=HEAD)
    assert (wrong.interval_s, wrong.in_vain) == (10.0, 2)


def rules(**changes: Any) -> GuessRules:
    """Users of server 0 have everything at home, those of 1 an expert elsewhere, those of 2 a
    layer; servers have a draft head."""
    hosts = np.ones((3, 3, 2), dtype=bool)
    hosts[1, 2, 1] = False
    cost = priced(np.ones((3, 3, 2)), guess_s=np.full(3, 9.0), head_right=0.8)
    given = {
        "settings": replace(PRESETS["auto"](), guess_chance=0.15),
        "cost": cost,
        "routes": np.array([[0, 0, 0], [1, 1, 1], [2, 2, 0]]),
        "reference_s": 1.0,
        "busy": np.zeros(3),
        "top_k": 1,
        "hosts": hosts,
    }
    return GuessRules(**(given | changes))


def test_a_head_drafts_where_own_guesses_would_be_late() -> None:
    """Under auto, whose servers take longer for a guess than tokens take to full depth."""
    one, few, many = np.ones(3, dtype=np.int64), [0.9] * 3, np.full(3, 50)
    assert rules().home.tolist() == [True, False, False]
    assert not rules(hosts=None).home.any()
    assert np.isinf(rules().least_among(1)).all()
    assert (rules().drafts_along(1, one, few).most > 0).all()
    headless = rules(cost=replace(rules().cost, head_right=0.0))
    assert not headless.drafts_along(1, one, few).most.any()
    ring = replace(PRESETS["speculative"](), guess_chunks=True)
    assert not rules(settings=ring).drafts_along(1, one, few).most.any()
    exact = PRESETS["exact"]()
    assert not rules(settings=exact).drafts_along(1, one, few).most.any()
    alone, among = rules().drafts_along(1, one, few), rules().drafts_along(150, many, few)
    assert (among.most <= alone.most).all()
    assert (among.likely >= alone.likely).all()


def test_at_home_a_head_drafts_however_quick_an_own_guess_is() -> None:
    cost = priced(np.ones((3, 3, 2)), guess_s=np.full(3, 1e-6), head_right=0.8)
    speculative = replace(PRESETS["speculative"](), guess_chance=0.15)
    found = rules(cost=cost, settings=speculative).drafts_along(1, np.ones(3, dtype=int), [1.0] * 3)
    assert found.most[0] > 0
